"""Small stories in every order: what happens at one instant is delivered in each possible sequence.

A story is played again and again, each time with another list of choices, until there is none left.
An actor is a function of the messages that it has had, and of the time: where every actor, and the
world, has had the same as in an order played before, the rest is the same, and is not played again.

`python -m tests.simulation.systematic [--limit N]` plays all stories and prints how many orders
there were.
"""

from __future__ import annotations

import argparse
import sys
from collections import defaultdict
from collections.abc import Callable
from dataclasses import dataclass
from typing import NamedTuple

from llama_worker.server.blame import Verdict
from llama_worker.server.messages import GivenUp, Stalled
from llama_worker.types.request import RequestFailReason
from llama_worker.types.worker import WorkerState
from tests.simulation.dice import Dice
from tests.simulation.faults import KINDS
from tests.simulation.scheduler import Choices, Scheduler
from tests.simulation.trace import Trace
from tests.simulation.world import Failure, Setting, World


class _NoDice(Dice):
    """Nothing is left to chance: the first of every choice, the middle of every range, and nothing
    unlikely."""

    def __init__(self) -> None:
        super().__init__(0)
        self.random = lambda: 0.0

    def chance(self, probability: float) -> bool:
        return probability > 0.5

    def fork(self) -> Dice:
        return self


class _PlayedBeforeError(Exception):
    """The rest of this order is known."""


class _Histories(Trace):
    """A hash of all that every actor, and the world, has had."""

    def __init__(self) -> None:
        super().__init__()
        self.by_name: defaultdict[str, int] = defaultdict(int)

    def message(self, now: float, actor: str, message: object) -> None:
        super().message(now, actor, message)
        self.by_name[actor] = hash((self.by_name[actor], now, _name(message)))

    def event(self, now: float, what: str) -> None:
        super().event(now, what)
        self.by_name["world"] = hash((self.by_name["world"], now, what))


class _Orders(Choices):
    """Choices taken from a list, then the first of each; remembers what there was to choose."""

    def __init__(self, prefix: list[int], seen: set[int]) -> None:
        super().__init__(_NoDice().random, preempts=0.0, sleeps=0.0, late=0.0)
        self.taken: list[tuple[int, int]] = []  # (chosen, of how many)
        self.histories = _Histories()
        self._prefix = prefix
        self._seen = seen
        # None: everything is delivered in the order in which it came
        self.scheduler: Scheduler | None = None

    def pick(self, count: int) -> int:
        if self.scheduler is None:
            return 0
        index = len(self.taken)
        if index < len(self._prefix):
            chosen = self._prefix[index]
        else:
            chosen = 0
            waiting = tuple(
                (actor.name, *(_name(envelope.message) for envelope in actor.inbox))
                for actor in self.scheduler.actors
            )
            state = hash(
                (
                    tuple(sorted(self.histories.by_name.items())),
                    tuple(sorted(waiting)),
                    self.scheduler.now,
                )
            )
            if state in self._seen:
                raise _PlayedBeforeError
            self._seen.add(state)
        self.taken.append((chosen, count))
        return chosen


def _name(message: object) -> str:
    about = getattr(message, "record", message)
    ids = [str(getattr(about, name, "")) for name in ("epoch", "request_id", "turn_id")]
    return " ".join([type(message).__name__, *ids])


@dataclass(frozen=True, slots=True)
class Story:
    """`acts` do, at one instant, what is to be tried in every order; the worker is READY then, or
    never started."""

    name: str
    acts: tuple[Callable[[World], object], ...]
    started: bool = True
    busy: bool = False  # a request is in flight, one step before its end


def _submit(world: World) -> None:
    world.host.submit("a job")


def _crash(world: World) -> None:
    server = world.server
    world.invariants.fault(KINDS["crash"], epoch=server.epoch)
    world.scheduler.at(world.scheduler.now, lambda: server.die(-11), "crash", of_host=False)


def _break(world: World, role: str) -> None:
    world.invariants.fault(KINDS["actor's exception"])
    world.scheduler.break_actor(
        next(each for each in world.scheduler.actors if each.actor.role == role)
    )


def _lack_threads(world: World) -> None:
    """For longer than the backoff: there is no new actor, nor a new server, meanwhile."""
    machine, scheduler = world.machine, world.scheduler
    world.invariants.fault(KINDS["host lacks threads"])
    machine.lacks_threads = True
    over_at = scheduler.now + 20.0
    scheduler.at(
        over_at, lambda: setattr(machine, "lacks_threads", False), "threads", of_host=False
    )


def _stop_later(world: World) -> None:
    """When the backoff is over, and the lack is not."""
    world.scheduler.at(world.scheduler.now + 12.0, world.host.stop, "stop later", of_host=False)


def _cancel(world: World) -> None:
    (request_id,) = world.invariants.active
    world.invariants.requests[request_id].canceled = True
    world.host.quick(world.worker.cancel(request_id), "cancel()")


def _stall(world: World) -> None:
    (request_id,) = world.invariants.active
    epoch = world.invariants.lifecycle.epoch
    world.invariants.fault(KINDS["livelock"], epoch=epoch)
    verdict = Verdict(reason=RequestFailReason.STALL_TIMEOUT, detail="as if")
    given_up = GivenUp(request_id=request_id, verdict=verdict, restarts_server=True)
    world.actor.actor_ref.tell(Stalled(epoch=epoch, given_up=(given_up,)))


def _result(world: World) -> None:
    (request_id,) = world.invariants.active
    world.host.result(request_id)
    world.host.quick(world.worker.get_result(request_id), "get_result()")


def _finish(world: World) -> None:
    """The request's last batch is done at this instant."""
    world.server.finish_now()


def _start(world: World) -> None:
    world.host.start()


def _stop(world: World) -> None:
    world.host.stop()


STORIES: tuple[Story, ...] = (
    Story("start against stop", (_start, _stop), started=False),
    Story("two stops", (_stop, _stop)),
    Story("stop, then start at once", (_stop, _start)),
    Story("submit against death", (_submit, _crash)),
    Story("submit against stop", (_submit, _stop)),
    Story("stop against death", (_stop, _crash)),
    Story("cancel against finish", (_cancel, _finish), busy=True),
    Story("cancel against death", (_cancel, _crash), busy=True),
    Story("verdict against completion", (_stall, _finish), busy=True),
    Story("finish against death", (_finish, _crash), busy=True),
    Story("finish against stop", (_finish, _stop), busy=True),
    Story("result against finish", (_result, _finish), busy=True),
    Story(
        "the request's actor dies while it finishes",
        (lambda w: _break(w, "request"), _finish),
        busy=True,
    ),
    Story("the process's actor dies in a restart", (_crash, lambda w: _break(w, "process"))),
    Story(
        "the process's actor dies and there are no threads",
        (_lack_threads, lambda w: _break(w, "process"), _submit),
    ),
    Story(
        "the process's actor dies, there are no threads, stop",
        (_lack_threads, lambda w: _break(w, "process"), _stop_later),
    ),
    Story(
        "a request's actor dies and there are no threads",
        (_lack_threads, lambda w: _break(w, "request"), _submit),
        busy=True,
    ),
    Story(
        "the watchdog dies while a request is submitted", (lambda w: _break(w, "watchdog"), _submit)
    ),
    Story("the transport dies at a stop", (lambda w: _break(w, "transport"), _stop), busy=True),
)


def _speaks(world: World) -> bool:
    """The request's answer has begun."""
    return any(
        each.decoded for truth in world.invariants.requests.values() for each in truth.exchanges
    )


def play(story: Story, prefix: list[int], seen: set[int]) -> tuple[list[tuple[int, int]], bool]:
    """One order of the story; what there was to choose, and whether it was played to its end."""
    orders = _Orders(prefix, seen)
    world = World(Setting(seed=0, faults_per_hour=0.0), orders, _NoDice(), orders.histories)
    world.machine.slowness = 0.0

    def act() -> None:
        scheduler = world.scheduler
        if story.started:
            world.host.start()
            scheduler.run_until(
                lambda: world.invariants.state is WorkerState.READY, scheduler.now + 600.0
            )
            scheduler.run_for(1.0)  # the look at /slots is over
        if story.busy:
            _submit(world)
            scheduler.run_until(lambda: _speaks(world), scheduler.now + 600.0)
        orders.histories.by_name.clear()
        orders.scheduler = scheduler
        for each in story.acts:
            each(world)
        scheduler.run_for(60.0)
        orders.scheduler = None

    try:
        world.do(act, world.come_to_rest, world.leave)
    except Failure as failure:
        if not isinstance(failure.broken, _PlayedBeforeError):
            raise
        return orders.taken, False
    return orders.taken, True


class Explored(NamedTuple):
    """How far a story was played."""

    played: int
    known: int  # orders that were left when they came to a known state
    complete: bool


def explore(story: Story, limit: int) -> Explored:
    """Every order, up to `limit` of them; raises Failure."""
    prefix: list[int] = []
    seen: set[int] = set()
    played = known = 0
    while played + known < limit:
        taken, is_new = play(story, prefix, seen)
        played, known = played + is_new, known + (not is_new)
        while taken and taken[-1][0] + 1 >= taken[-1][1]:
            taken.pop()
        if not taken:
            return Explored(played, known, True)
        prefix = [chosen for chosen, _ in taken[:-1]] + [taken[-1][0] + 1]
    return Explored(played, known, False)


def main() -> None:
    """Play all stories, up to the first that fails."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--limit", type=int, default=20_000, help="orders of one story")
    limit = parser.parse_args().limit
    print(f"{'story':50}{'orders':>10}{'known':>10}")
    for story in STORIES:
        try:
            found = explore(story, limit)
        except Failure as failure:
            sys.exit("\n".join([*failure.story, "", f"{story.name}: {failure}"]))
        print(
            f"{story.name:50}{found.played:10,}{found.known:10,}"
            f"{'' if found.complete else '   (limit)'}",
            flush=True,
        )


if __name__ == "__main__":
    main()
