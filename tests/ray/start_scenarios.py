"""How fleets start, or do not."""

from __future__ import annotations

import pytest

from llama_worker import WorkerConfig, WorkerStartError, llama_server_cmd
from llama_worker.ray import Fleet, FleetClosed, NoLiveReplica, ReplicaLost
from tests.actors.conftest import HOST
from tests.fake_script import Exit, Script
from tests.ray.stage import WAIT_S, Stage, ended
from tests.server.conftest import forced, no_bios
from tests.server.pace import SERVER_ARGS


def a_fleet_that_cannot_start_says_what_its_server_said(stage: Stage) -> None:
    script = Script(exits=[Exit(3, "before_bind", log=["no such model"])])
    with pytest.raises(WorkerStartError) as caught, Fleet(stage.config_for(script), replicas=1):
        raise AssertionError("it did not start")
    assert "no such model" in caught.value.log_tail
    broken = Fleet(lambda port: WorkerConfig("w", HOST, port + 1, ["x"]), replicas=1)
    try:
        with pytest.raises(ReplicaLost, match=r"replica 0.*ConfigError: config_for\(\d+\) returned a config with port"):
            broken.start().get(timeout=WAIT_S)
        with pytest.raises(NoLiveReplica, match=r"replica 0: lost; last error: .*ConfigError"):
            broken.submit("job", "", "Hello?").get(timeout=WAIT_S)
        with pytest.raises(ReplicaLost):
            broken.get_worker_status(0).get(timeout=WAIT_S)
    finally:
        broken.close()


def a_fleet_for_which_there_is_no_room_has_no_live_replica(stage: Stage) -> None:
    with_room = Fleet(stage.config_for(), replicas=2, options={"resources": {"unobtainium": 1}}, name="dreamers")
    starting = with_room.start()
    with pytest.raises(NoLiveReplica) as caught:
        with_room.submit("job", "", "Hello?").get(timeout=WAIT_S)
    assert caught.value.replicas == ("replica 0: starting", "replica 1: starting")
    with_room.close()
    with pytest.raises(FleetClosed):
        starting.get(timeout=WAIT_S)


def two_real_servers_answer_side_by_side(stage: Stage) -> None:
    server, model = stage.server, stage.model

    def config_for(port: int) -> WorkerConfig:
        args = ("--ctx-size", "1024", *SERVER_ARGS)
        command = llama_server_cmd(model, host=HOST, port=port, slots=1, executable=server, extra_args=args)
        return WorkerConfig("real", HOST, port, command, bios_provider=no_bios)

    with Fleet(config_for, replicas=2, options={"scheduling_strategy": "SPREAD"}) as fleet:
        said = {}
        for word in ("Served.", "Likewise."):
            answer = fleet.submit(word, "", "Say it.", params=forced(word)).get(timeout=WAIT_S)
            assert answer["ok"], answer
            said[answer["request_id"]] = word
        assert {request_id: ended(fleet, request_id)["text"] for request_id in said} == said
