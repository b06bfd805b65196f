"""python -m tests.ray FOLDER SERVER MODEL: a cluster, and every scenario on it, one after the other.

Prints a line of JSON for each: `{"scenario", "seconds", "error"}`, where `error` is None or a traceback.
"""

from __future__ import annotations

import json
import sys
import time
import traceback
from pathlib import Path

from tests.ray.cluster import two_nodes
from tests.ray.scenarios import SCENARIOS
from tests.ray.stage import Stage


def main(folder: str, server: str, model: str) -> None:
    with two_nodes() as nodes:
        stage = Stage(nodes, Path(folder), server, model)
        for name, scenario in SCENARIOS.items():
            began_at, error = time.monotonic(), None
            try:
                scenario(stage)
            except BaseException:
                error = traceback.format_exc()
            seconds = round(time.monotonic() - began_at, 2)
            print(json.dumps({"scenario": name, "seconds": seconds, "error": error}), flush=True)


if __name__ == "__main__":
    main(*sys.argv[1:])
