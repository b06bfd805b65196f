"""What the library raises: one root, data as attributes, text for a person."""

from __future__ import annotations

import copy
import pickle

import pytest

from llama_worker import ConfigError, LlamaWorkerError, StartFailReason, WorkerClosed, WorkerStartError, WorkerStopError


def test_every_error_has_the_one_root() -> None:
    assert {ConfigError, WorkerStartError, WorkerStopError, WorkerClosed} <= set(LlamaWorkerError.__subclasses__())
    assert issubclass(ConfigError, ValueError)


def test_a_start_error_tells_why_and_what_the_server_said_last() -> None:
    lines = tuple(f"line {number}" for number in range(40))
    error = WorkerStartError("exited", "the server ended before it was ready", 1, lines)
    assert (error.reason, error.returncode) == (StartFailReason.EXITED, 1)
    assert error.log_tail == lines
    text = str(error)
    assert text.startswith("exited: the server ended before it was ready (return code 1)")
    assert [line.strip() for line in text.splitlines()[1:]] == list(lines[-20:])


def test_a_start_error_without_a_process_says_just_why() -> None:
    error = WorkerStartError(StartFailReason.PORT_IN_USE, "127.0.0.1:9001 is taken")
    assert str(error) == "port_in_use: 127.0.0.1:9001 is taken"
    assert (error.returncode, error.log_tail) == (None, ())
    with pytest.raises(ValueError):
        WorkerStartError("bored", "")  # no such reason


def test_a_closed_worker_is_named() -> None:
    assert "'w'" in str(WorkerClosed("w"))
    assert WorkerClosed("w").worker_name == "w"


@pytest.mark.parametrize(
    "error",
    [
        WorkerStartError("exited", "it ended", -9, ("a", "b")),
        WorkerStopError("unkillable", "pid 5"),
        WorkerClosed("w"),
        ConfigError("slots must be 1 or more"),
    ],
)
def test_an_error_survives_pickling_and_copying(error: LlamaWorkerError) -> None:
    for other in (pickle.loads(pickle.dumps(error)), copy.copy(error)):
        assert type(other) is type(error)
        assert (str(other), other.__dict__) == (str(error), error.__dict__)
