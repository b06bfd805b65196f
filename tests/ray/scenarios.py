"""Every scenario, in its order: those of the shared fleet end with a killed node, and so they are the last."""

from __future__ import annotations

from collections.abc import Callable

from tests.ray import actor_scenarios, fleet_scenarios, start_scenarios
from tests.ray.stage import Stage

SCENARIOS: dict[str, Callable[[Stage], None]] = {
    scenario.__name__: scenario
    for scenario in (
        actor_scenarios.an_actor_has_the_methods_of_the_handle_and_none_waits_for_another,
        actor_scenarios.a_request_can_be_followed_to_its_result,
        actor_scenarios.an_error_of_the_worker_reaches_the_caller_with_its_fields,
        actor_scenarios.a_port_that_somebody_takes_is_given_up_for_another,
        actor_scenarios.a_killed_actor_takes_its_server_along,
        start_scenarios.a_fleet_that_cannot_start_says_what_its_server_said,
        start_scenarios.a_fleet_for_which_there_is_no_room_has_no_live_replica,
        start_scenarios.two_real_servers_answer_side_by_side,
        fleet_scenarios.a_fleet_starts_one_replica_on_each_node,
        fleet_scenarios.requests_go_to_free_slots_and_are_refused_when_there_is_none,
        fleet_scenarios.a_fleet_answers_as_a_worker_does,
        fleet_scenarios.a_worker_that_failed_for_good_is_replaced_and_its_request_keeps_the_workers_own_reason,
        fleet_scenarios.a_replica_whose_actor_is_killed_comes_back,
        fleet_scenarios.a_killed_node_takes_nothing_along_that_was_received,
        fleet_scenarios.close_ends_requests_servers_and_actors,
    )
}
