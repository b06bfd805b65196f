"""Every scenario, in its order: those of the shared fleet end with a killed node, and so they are the last."""

from __future__ import annotations

from collections.abc import Callable
from inspect import isfunction, signature

from tests.ray import actor_scenarios, fleet_scenarios, start_scenarios
from tests.ray.stage import Stage

SCENARIOS: dict[str, Callable[[Stage], None]] = {
    name: scenario
    for module in (actor_scenarios, start_scenarios, fleet_scenarios)
    for name, scenario in vars(module).items()
    if isfunction(scenario)
    and scenario.__module__ == module.__name__
    and [*signature(scenario).parameters] == ["stage"]
}
