"""python -m tests.ray.scenarios FOLDER: a cluster, and every scenario on it, one after the other.

Writes a line of JSON for each to FOLDER/told: `{"scenario", "error"}`, where `error` is None or a
traceback. Standard output is Ray's, too.
"""

import json
import sys
import traceback
from collections.abc import Callable
from inspect import isfunction, signature
from pathlib import Path

from tests.ray import actor_scenarios, fleet_scenarios
from tests.ray.cluster import two_nodes
from tests.ray.stage import Stage

TOLD = "told"
# Those of the shared fleet end with a killed node, and so they are the last.
SCENARIOS: dict[str, Callable[[Stage], None]] = {
    name: scenario
    for module in (actor_scenarios, fleet_scenarios)
    for name, scenario in vars(module).items()
    if isfunction(scenario)
    and scenario.__module__ == module.__name__
    and "stage" in signature(scenario).parameters
}


def main(folder: str) -> None:
    with two_nodes() as nodes, (Path(folder) / TOLD).open("w") as told:
        stage = Stage(nodes, Path(folder))
        for name, scenario in SCENARIOS.items():
            error = None
            try:
                scenario(stage)
            except BaseException:
                error = traceback.format_exc()
            print(json.dumps({"scenario": name, "error": error}), file=told, flush=True)


if __name__ == "__main__":
    main(sys.argv[1])
