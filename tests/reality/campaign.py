"""Random shapes on the real llama-server, through a LlamaWorker with tight limits: who works is
never given up, who hangs is found.

The plan of an episode is a function of its seed, its times are the machine's. Episode after episode
takes the next seed, so that one alone is repeated with `make reality SEED=... MINUTES=0`.
"""

import argparse
import contextlib
import json
import os
import queue
import signal
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Iterator, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

import msgspec
import psutil

from tests.reality.matrix import Fact, Matrix
from tests.reality.plan import LAYERS, Disturbance, Episode, planned
from tests.server.thin_model import write_thin_model
from tools.found import find_model, find_server

EPISODE_S = 1500.0  # the host is killed then: every bound of its own comes first
_BURN = (sys.executable, "-S", "-c", "while True: pass")


@contextlib.contextmanager
def models() -> Iterator[dict[int, str]]:
    """The small model cut to each number of layers."""
    whole = Path(find_model())
    with tempfile.TemporaryDirectory(prefix="llama_worker-reality-") as folder:
        paths = {layers: Path(folder) / f"{layers}.gguf" for layers in LAYERS}
        for layers, path in paths.items():
            write_thin_model(whole, path, layers=layers)
        yield {layers: str(path) for layers, path in paths.items()}


class Machine:
    """Does to the machine and to the host what the episode says. Everything is undone at the
    end."""

    def __init__(self, host_pid: int) -> None:
        self._host_pid = host_pid
        self._ends: list[tuple[float, contextlib.ExitStack]] = []

    def begin(self, disturbance: Disturbance, server_pid: int, now: float) -> None:
        undo = contextlib.ExitStack()
        match disturbance.kind:
            case "burners":
                for _ in range(disturbance.count):
                    undo.enter_context(burner())
            case "one core":
                cores = os.sched_getaffinity(0)
                undo.callback(_pin, server_pid, cores)
                _pin(server_pid, {min(cores)})
            case "host stopped":
                undo.callback(os.kill, self._host_pid, signal.SIGCONT)
                os.kill(self._host_pid, signal.SIGSTOP)
        self._ends.append((now + disturbance.for_s, undo))

    def next_end(self) -> float | None:
        return min((at for at, _ in self._ends), default=None)

    def end(self, until: float) -> None:
        """Undo what is over by then."""
        for at, undo in list(self._ends):
            if at <= until:
                self._ends.remove((at, undo))
                undo.close()


@contextlib.contextmanager
def burner() -> Iterator[None]:
    """A process that keeps a core busy."""
    process = subprocess.Popen(_BURN)
    try:
        yield
    finally:
        process.kill()
        process.wait()


def _pin(pid: int, cores: set[int]) -> None:
    """All threads of that process to these cores; one that ends meanwhile needs none."""
    with contextlib.suppress(psutil.NoSuchProcess):
        for thread in psutil.Process(pid).threads():
            with contextlib.suppress(ProcessLookupError):
                os.sched_setaffinity(thread.id, cores)


def play(
    episode: Episode, *, burners: int, server: str, model: str
) -> tuple[list[Fact], list[str]]:
    """(what the host said, what it wrote to its standard error)."""
    told = msgspec.json.encode(episode).decode()
    command = (sys.executable, "-m", "tests.reality.host", told, str(burners))
    with (
        tempfile.TemporaryFile("w+") as errors,
        subprocess.Popen(
            (*command, server, model), stdout=subprocess.PIPE, stderr=errors, text=True
        ) as host,
    ):
        try:
            facts = list(_facts(host, episode))
        finally:
            host.kill()
        errors.seek(0)
        return facts, errors.read().splitlines()


def _facts(host: subprocess.Popen[str], episode: Episode) -> Iterator[Fact]:
    """What the host says, as it comes; meanwhile the machine is disturbed, from READY to the end
    of the jobs."""
    said: queue.SimpleQueue[Fact | None] = queue.SimpleQueue()
    threading.Thread(target=_read, args=(host, said), daemon=True).start()
    machine, server_pid = Machine(host.pid), 0
    due: list[tuple[float, Disturbance]] = []
    give_up_at = time.monotonic() + EPISODE_S
    try:
        while True:
            wake_at = min(
                [give_up_at, *(at for at, _ in due[:1]), *filter(None, [machine.next_end()])]
            )
            try:
                fact = said.get(timeout=max(0.0, wake_at - time.monotonic()))
            except queue.Empty:
                now = time.monotonic()
                if now >= give_up_at:
                    return
                machine.end(now)
                while due and due[0][0] <= now:
                    machine.begin(due.pop(0)[1], server_pid, now)
                continue
            if fact is None:
                return
            yield {**fact, "at": time.monotonic()}
            if fact["fact"] == "ready":
                began_at, server_pid = time.monotonic(), fact["pid"]
                due = [(began_at + each.at_s, each) for each in episode.disturbances]
            if fact["fact"] == "jobs over":
                due.clear()
                machine.end(float("inf"))
    finally:
        machine.end(float("inf"))


def _read(host: subprocess.Popen[str], said: queue.SimpleQueue[Fact | None]) -> None:
    assert host.stdout is not None
    for line in host.stdout:
        said.put(json.loads(line))
    said.put(None)


def story(episode: Episode, facts: Sequence[Fact], errors: Sequence[str]) -> Iterator[str]:
    """What a person needs to understand a mistake."""
    yield f"  shape: {asdict(episode.shape)}"
    yield from (f"  job {number}: {asdict(job)}" for number, job in enumerate(episode.jobs))
    yield from (f"  disturbance: {asdict(each)}" for each in episode.disturbances)
    yield f"  hang: {episode.hang and asdict(episode.hang)}"
    began_at = facts[0]["at"] if facts else 0.0
    for fact in facts:
        details: dict[str, Any] = {key: fact[key] for key in fact if key not in ("fact", "at")}
        yield f"  {fact['at'] - began_at:8.2f} s  {fact['fact']}"
        for key, value in details.items():
            values = value if isinstance(value, list) else [value]
            yield from (f"      {key}: {each}" for each in values)
    yield from (f"  stderr: {line}" for line in errors[-40:])


def run_campaign(matrix: Matrix, seed: int, *, minutes: float, burners: int, server: str) -> None:
    """At least one episode; prints how each went, and the stories of mistakes."""
    until = time.monotonic() + 60.0 * minutes
    with models() as model_of, contextlib.ExitStack() as burning:
        for _ in range(burners):
            burning.enter_context(burner())
        while True:
            episode, began_at = planned(seed), time.monotonic()
            shape = episode.shape
            facts, errors = play(
                episode, burners=burners, server=server, model=model_of[shape.layers]
            )
            mistakes = matrix.add(episode, facts)
            print(
                f"seed {seed}: {shape.slots} slots, -b {shape.batch_tokens}, "
                f"{shape.layers} layers, {len(episode.jobs)} requests"
                f"{', a hang' if episode.hang else ''}: "
                f"{'; '.join(mistakes) or 'held'}, in {time.monotonic() - began_at:.0f} s",
                flush=True,
            )
            if mistakes:
                print("\n".join(story(episode, facts, errors)), flush=True)
            seed += 1
            if time.monotonic() >= until:
                return


def main() -> int:
    """Prints the matrix, also of what was played before Ctrl-C or SIGTERM; 1 if anything in it is a
    mistake."""
    parser = argparse.ArgumentParser(prog="python -m tests.reality", description=__doc__)
    parser.add_argument("--seed", type=int, default=None, help="default: a new one, printed")
    parser.add_argument("--minutes", type=float, default=5.0)
    parser.add_argument("--burners", type=int, default=0, help="cores kept busy all the time")
    options = parser.parse_args()
    seed = time.time_ns() % (1 << 32) if options.seed is None else options.seed
    signal.signal(signal.SIGTERM, lambda number, _: sys.exit(128 + number))
    matrix = Matrix()
    try:
        run_campaign(
            matrix, seed, minutes=options.minutes, burners=options.burners, server=find_server()
        )
    finally:
        print(matrix)
    return 1 if matrix.mistakes_count else 0
