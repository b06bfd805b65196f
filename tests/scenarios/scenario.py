"""What a scenario is: a server's behaviour, what the host does, and the verdict that is due. Data
only."""

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from enum import Enum
from signal import Signals
from typing import Any, TypeAlias

from llama_worker import RequestFailReason, RestartPolicy, TimeoutProfile
from llama_worker.testing.scripts import Note, Script, Step

INTERVAL_S = 0.25
# Scaled down from the defaults; what a scenario is not about is long or off.
TIMEOUTS = TimeoutProfile(
    connect_timeout_s=1.0,
    headers_timeout_s=0.8,
    prefill_liveness_timeout_s=1.5,
    idle_stream_timeout_s=1.2,
    silent_work_timeout_s=60.0,
    liveness_probe_interval_s=INTERVAL_S,
    startup_timeout_s=20.0,
    stop_grace_s=2.0,
    health_probe_interval_s=None,
)
RESTART = RestartPolicy(restart_backoff_s=0.2, backoff_max_s=1.0)

# In front of the server's command: an idle parent; a child that takes what CPU time is left over.
IDLE_PARENT = ("sh", "-c", '"$@"; exit', "sh")
SIDECAR = ("sh", "-c", 'nice -n 19 sh -c "while :; do :; done" & exec "$@"', "sh")


def sent(steps: Iterable[Step], *, reasoning: bool = False) -> str:
    """All the text, or reasoning, of these steps, up to a silence."""
    said = ""
    for step in steps:
        match step["do"]:
            case "Text" | "Reasoning" as kind if (kind == "Reasoning") is reasoning:
                said += step["text"]
            case "Tokens" if step.get("reasoning", False) is reasoning:
                first, text = step.get("start", 0), step.get("text", "tok{i} ")
                numbers = range(first, first + step["n"])
                said += "".join(text.replace("{i}", str(i)) for i in numbers)
            case "Repeat":
                said += step["n"] * sent(step["steps"], reasoning=reasoning)
            case "Turns":
                said += "".join(sent(turn, reasoning=reasoning) for turn in step["turns"])
            case "Note" if step["name"].startswith("silent "):
                break
    return said


class Truth(Enum):
    """What is really the matter, and so what is due: SLOW is to be spared, the others are not."""

    HUNG = "hung"  # or over a limit that the host set
    SLOW = "slow"
    DEAD = "dead"  # the process, or its connections


@dataclass(frozen=True, slots=True)
class Ask:
    """One request, how the server replies, and what must become of it."""

    name: str  # the job's
    reply: Sequence[Step]
    # None: it completes; CANCELED: it is endless, and the host cancels it behind all others
    fails: RequestFailReason | None = None

    @property
    def is_endless(self) -> bool:
        return self.fails is RequestFailReason.CANCELED

    @property
    def output(self) -> tuple[str, str] | None:
        """All the text and the reasoning, whatever the ending; None: any."""
        if self.is_endless or self.fails is RequestFailReason.REPEATED_TEXT_LOOP:
            return None
        return sent(self.reply), sent(self.reply, reasoning=True).rstrip()


# What the host does: submits, waits for a `Note` of the server's script or so many seconds, sends
# the server a signal.
Move: TypeAlias = Ask | str | float | Signals


@dataclass(frozen=True, slots=True, kw_only=True)
class Scenario:
    """The end of request "a", or of a start that fails, follows the mark `since` by `limit_s`: not
    earlier, and not later but for the watchdog's rhythm.

    A mark is a `Note` of the server's script, "start", or the name of a signal that was sent.
    """

    name: str
    truth: Truth
    moves: Sequence[Move] = ()
    script: Script = field(default_factory=Script)
    timeouts: Mapping[str, Any] = field(default_factory=dict)
    front: Sequence[str] = ()  # of the server's command
    limit_s: float | None = None
    since: str = "silent a"  # "start": the start fails
    # the server worked until `since`: the CPU rate falls only as its window of 3 s moves on
    after_work: bool = False
    restart_reason: str = ""  # "": no restart is due


def silent(name: str) -> Step:
    """Marks the beginning of the silence."""
    return Note(f"silent {name}")
