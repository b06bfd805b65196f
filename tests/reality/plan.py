"""What one episode of the campaign asks of a real server, drawn from its seed. Pure."""

from dataclasses import dataclass
from typing import Literal

from tests.simulation.dice import Dice

# The model has 30. Fewer read faster, and a queue of long prompts takes seconds, not minutes.
LAYERS = (1, 4, 8, 30)
SLOT_TOKENS = 8192
MAX_PROMPT_TOKENS = 7000

ReplyKind = Literal["exact", "free", "tool"]
DisturbanceKind = Literal["burners", "one core", "host stopped"]


@dataclass(frozen=True, slots=True, kw_only=True)
class Shape:
    """The server, and how much of the model it runs."""

    slots: int
    batch_tokens: int
    threads: int
    layers: int
    shows_slots: bool
    has_tools: bool


@dataclass(frozen=True, slots=True, kw_only=True)
class Job:
    """A request. `cancel_after_s` counts from its admission; None: it is left to complete."""

    at_s: float
    prompt_tokens: int
    reply: ReplyKind
    reply_tokens: int
    cancel_after_s: float | None


@dataclass(frozen=True, slots=True, kw_only=True)
class Disturbance:
    """What happens to the machine or to the host; `count` is that of burners."""

    at_s: float
    kind: DisturbanceKind
    for_s: float
    count: int = 0


@dataclass(frozen=True, slots=True, kw_only=True)
class Hang:
    """The server is stopped for good, so long after requests with prompts of these lengths were
    sent; without any it is idle."""

    after_s: float
    prompts_tokens: tuple[int, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class Episode:
    """One worker on one server. The hang, if there is one, comes when all jobs have ended."""

    seed: int
    shape: Shape
    jobs: tuple[Job, ...]
    disturbances: tuple[Disturbance, ...]
    hang: Hang | None


def planned(seed: int) -> Episode:
    """The episode of this seed, the same on every machine."""
    dice = Dice(seed)
    shape = _shape(dice)
    jobs = _jobs(dice, shape)
    return Episode(
        seed=seed,
        shape=shape,
        jobs=jobs,
        disturbances=_disturbances(dice, until_s=max(job.at_s for job in jobs) + 10.0),
        hang=_hang(dice, shape) if dice.chance(0.4) else None,
    )


def _shape(dice: Dice) -> Shape:
    layers = dice.weighted(dict(zip(LAYERS, (3.0, 4.0, 2.0, 0.5), strict=True)))
    return Shape(
        slots=dice.choice((1, 2, 2, 3, 4)) if layers < 30 else dice.choice((1, 2)),
        # A batch of the whole model may take a minute: its limits would have to be as long.
        batch_tokens=dice.choice((64, 128, 256, 512, 2048) if layers < 30 else (64, 128, 256)),
        threads=dice.choice((1, 1, 2)),
        layers=layers,
        shows_slots=dice.chance(0.85),
        has_tools=dice.chance(0.3),
    )


def _jobs(dice: Dice, shape: Shape) -> tuple[Job, ...]:
    """Either all at once, so that prompts are read side by side, or spread over some seconds."""
    together = dice.chance(0.5)
    count = shape.slots + dice.below(4)
    kinds: tuple[ReplyKind, ...] = (
        ("exact", "free", "tool") if shape.has_tools else ("exact", "free")
    )
    return tuple(
        Job(
            at_s=dice.between(0.0, 0.2 if together else 8.0),
            prompt_tokens=_prompt_tokens(dice),
            reply=dice.choice(kinds),
            reply_tokens=int(dice.log_between(1, 300)),
            cancel_after_s=dice.log_between(0.01, 20.0) if dice.chance(0.25) else None,
        )
        for _ in range(count)
    )


def _prompt_tokens(dice: Dice) -> int:
    """Half are long: those are what a neighbour waits for."""
    if dice.chance(0.5):
        return int(dice.between(3000, MAX_PROMPT_TOKENS))
    return int(dice.log_between(10, MAX_PROMPT_TOKENS))


def _disturbances(dice: Dice, *, until_s: float) -> tuple[Disturbance, ...]:
    kinds: tuple[DisturbanceKind, ...] = ("burners", "one core", "host stopped")
    drawn = []
    for _ in range(dice.below(4)):
        kind = dice.choice(kinds)
        for_s = dice.between(1.5, 8.0) if kind == "host stopped" else dice.between(1.0, 15.0)
        drawn.append(
            Disturbance(
                at_s=dice.between(0.0, until_s),
                kind=kind,
                for_s=for_s,
                count=1 + dice.below(4) if kind == "burners" else 0,
            )
        )
    return tuple(sorted(drawn, key=lambda each: each.at_s))


def _hang(dice: Dice, shape: Shape) -> Hang:
    prompts = tuple(_prompt_tokens(dice) for _ in range(dice.below(shape.slots + 1)))
    return Hang(after_s=dice.log_between(0.02, 5.0), prompts_tokens=prompts)
