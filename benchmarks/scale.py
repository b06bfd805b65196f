"""16 workers x 4 slots and 1 x 64, all streaming: CPU per event against one stream.

python -m benchmarks.scale [--json FILE]
"""

from __future__ import annotations

import contextlib
import threading

from benchmarks.common import complete, config, report, script, table
from benchmarks.stream import cpu_us
from llama_worker import LlamaWorker
from tests.fake_script import Tokens, plain_reply

EACH, ROUNDS = 2_000, 4  # events of each stream


def measure(workers: int, slots: int) -> float:
    """The least CPU per event, in us."""
    served = script(*plain_reply(Tokens(EACH)))
    with contextlib.ExitStack() as stack:
        fleet = [
            stack.enter_context(LlamaWorker(config(served, slots=slots, name=f"w{number}")))
            for number in range(workers)
        ]

        def run() -> None:
            threads = [threading.Thread(target=complete, args=(worker, slots)) for worker in fleet]
            for thread in threads:
                thread.start()
            for thread in threads:
                thread.join()

        run()
        return min(cpu_us(EACH * workers * slots, run) for _ in range(ROUNDS))


def main() -> None:
    """Measure and print."""
    found = {(workers, slots): measure(workers, slots) for workers, slots in ((1, 1), (1, 64), (16, 4))}
    one = found[1, 1]
    rows = [[f"{workers} x {slots}", us, us / one] for (workers, slots), us in found.items()]
    data = {f"{workers}x{slots}": us for (workers, slots), us in found.items()}
    report("scale", table(["workers x slots", "us per event", "x 1"], rows), data)


if __name__ == "__main__":
    main()
