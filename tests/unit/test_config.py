"""What a worker may be configured with, and what it says of anything else."""

from __future__ import annotations

import copy
import dataclasses
import math
import pickle
import re
from collections import UserDict
from collections.abc import Callable
from types import MappingProxyType
from typing import Any

import pytest

from llama_worker import Canary, ConfigError, LoopDetector, Recycle, RestartPolicy, TimeoutProfile, WorkerConfig
from llama_worker.bios import default_bios
from llama_worker.errors import MASK
from llama_worker.request.submission import validate_submit
from llama_worker.server.command import llama_server_cmd, masked_server_cmd
from llama_worker.types import BiosContext, LivenessEvidence, ToolDef
from llama_worker.validation import shown

CMD = ("llama-server", "--model", "m.gguf", "--host", "127.0.0.1", "--port", "9001", "--parallel", "1")


class Runner:
    def run_tool(self, *, name: str, arguments: dict[str, Any], request_id: int, job_name: str) -> Any:
        return None


class AsyncRunner:
    async def run_tool(self, *, name: str, arguments: dict[str, Any], request_id: int, job_name: str) -> Any:
        return None


async def async_bios(context: BiosContext) -> str:
    return ""


class Probe:
    def probe(self, root_pid: int, now: float) -> LivenessEvidence | None:
        return None

    def reset(self) -> None:
        pass


def tool(name: str, **function: Any) -> ToolDef:
    return {"type": "function", "function": {"name": name, **function}}  # type: ignore[typeddict-item]


def config(**changed: Any) -> WorkerConfig:
    given: dict[str, Any] = {"name": "w", "host": "127.0.0.1", "port": 9001, "server_cmd": CMD}
    return WorkerConfig(**(given | changed))


# ---------------------------------------------------------------- the shape of it


def test_name_host_port_and_command_are_positional_and_the_rest_is_by_keyword() -> None:
    assert WorkerConfig("w", "127.0.0.1", 9001, CMD, slots=1) == config()
    with pytest.raises(TypeError):
        WorkerConfig("w", "127.0.0.1", 9001, CMD, {})  # type: ignore[call-arg]


def test_the_defaults_are_those_of_the_contract() -> None:
    got = config()
    assert {f.name: getattr(got, f.name) for f in dataclasses.fields(got)} == {
        "name": "w",
        "host": "127.0.0.1",
        "port": 9001,
        "server_cmd": CMD,
        "env": {},
        "slots": 1,
        "timeouts": TimeoutProfile(),
        "restart": RestartPolicy(),
        "normal_tools": (),
        "tool_runner": None,
        "max_tool_iterations": 8,
        "tool_timeout_s": 10.0,
        "tool_call_mode": "auto",
        "exit_tools": (),
        "on_signal": None,
        "bios_provider": default_bios,
        "system_prompt_mode": "merged",
        "timezone_name": "UTC",
        "max_tokens": 4096,
        "default_params": {},
        "loop_detector": LoopDetector(),
        "liveness_probes": None,  # process, and NVIDIA where its extra is installed
        "canary": None,
        "api_key": None,
        "log_lines": 500,
        "result_ttl_s": None,
    }


SLOW = {
    "connect_timeout_s": 3.0,
    "headers_timeout_s": 30.0,
    "ttft_timeout_s": None,
    "prefill_liveness_timeout_s": 3600.0,
    "idle_stream_timeout_s": 300.0,
    "absolute_timeout_s": None,
    "silent_work_timeout_s": 3600.0,
    "liveness_probe_interval_s": 5.0,
    "startup_timeout_s": 120.0,
    "load_timeout_s": None,
    "suspect_after_s": 60.0,
    "bios_timeout_s": 5.0,
    "stop_grace_s": 10.0,
    "kill_timeout_s": 10.0,
    "health_probe_interval_s": 30.0,
    "health_failures_before_restart": 3,
}
CAN_BE_OFF = (
    "ttft_timeout_s",
    "prefill_liveness_timeout_s",
    "idle_stream_timeout_s",
    "absolute_timeout_s",
    "silent_work_timeout_s",
    "load_timeout_s",
    "suspect_after_s",
    "health_probe_interval_s",
)
FAST = {
    "headers_timeout_s": 10.0,
    "prefill_liveness_timeout_s": 60.0,
    "idle_stream_timeout_s": 30.0,
    "silent_work_timeout_s": 300.0,
    "startup_timeout_s": 60.0,
}
NEVER_S = 10 * 365 * 86400.0
NORMAL = {"prefill_liveness_timeout_s": 600.0, "idle_stream_timeout_s": 120.0, "silent_work_timeout_s": 1200.0}


@pytest.mark.parametrize(
    ("preset", "differs"),
    [
        (TimeoutProfile, {}),
        (TimeoutProfile.slow_prefill, {}),
        (TimeoutProfile.normal, NORMAL),
        (TimeoutProfile.fast, FAST),
        (TimeoutProfile.debug, {**dict.fromkeys(CAN_BE_OFF), "headers_timeout_s": NEVER_S}),
    ],
)
def test_timeout_presets(preset: Callable[[], TimeoutProfile], differs: dict[str, Any]) -> None:
    assert dataclasses.asdict(preset()) == SLOW | differs


def test_restart_policy_defaults() -> None:
    defaults = {
        "restart_backoff_s": 5.0,
        "backoff_factor": 2.0,
        "backoff_max_s": 60.0,
        "restart_window_s": 120.0,
        "max_restarts_per_window": 5,
        "stable_after_s": 600.0,
        "restart_on_stall": True,
        "transport_failures_before_restart": 2,
        "server_errors_before_restart": 5,
        "degenerate_outputs_before_restart": None,
        "recycle": None,
    }
    assert dataclasses.asdict(RestartPolicy()) == defaults
    assert dataclasses.asdict(RestartPolicy.never()) == defaults | {"max_restarts_per_window": 0}


def test_loop_detector_defaults() -> None:
    assert dataclasses.asdict(LoopDetector()) == {
        "min_line_chars": 32,
        "long_line_chars": 64,
        "short_line_repeats": 12,
        "long_line_repeats": 8,
        "min_output_chars": 256,
        "max_period": 8,
        "max_period_chars": 8192,
        "min_repeated_chars": 8192,
        "min_text_repeats": 4,
    }


@pytest.mark.parametrize("kind", [TimeoutProfile, RestartPolicy, LoopDetector, config])
def test_a_config_is_frozen(kind: Callable[[], Any]) -> None:
    made = kind()
    name = dataclasses.fields(made)[0].name
    with pytest.raises(dataclasses.FrozenInstanceError):
        setattr(made, name, 1)


@pytest.mark.parametrize("name", CAN_BE_OFF)
def test_none_turns_off_what_may_be_turned_off(name: str) -> None:
    off: dict[str, Any] = {name: None}
    assert getattr(TimeoutProfile(**off), name) is None


# ---------------------------------------------------------------- bad input

NAN, INF, HUGE = math.nan, math.inf, 10**5000  # of more digits than Python shows
SURROGATE = "a\ud800b"
HOLDS_ITSELF: dict[str, Any] = {}
HOLDS_ITSELF["self"] = [HOLDS_ITSELF]


def bad(field: str, value: Any, error: type[Exception], *says: str) -> Any:
    """`says`: what is in the message beside the field's name."""
    name = re.sub(r" at 0x[0-9a-f]*", "", shown(value))  # every process that runs tests must name them alike
    return pytest.param(field, value, error, says, id=f"{field}={name[:40]}")


BAD_TIMEOUTS = [
    *(bad(name, "3", TypeError, "number", "str", "'3'") for name in SLOW if name.endswith("_s")),
    *(bad(name, True, TypeError, "number", "bool") for name in SLOW if name.endswith("_s")),
    *(bad(name, NAN, ConfigError, "finite", "nan") for name in SLOW if name.endswith("_s")),
    *(bad(name, INF, ConfigError, "finite", "inf") for name in SLOW if name.endswith("_s")),
    *(bad(name, -1, ConfigError, "-1") for name in SLOW),
    *(bad(name, 0, ConfigError, "above 0", "0") for name in SLOW if name.endswith("_s") and name != "stop_grace_s"),
    *(
        bad(name, None, TypeError, "number", "NoneType")
        for name in SLOW
        if name.endswith("_s") and name not in CAN_BE_OFF
    ),
    *(bad(name, 0, ConfigError, "None is allowed") for name in CAN_BE_OFF),
    bad("connect_timeout_s", HUGE, ConfigError, "double"),
    bad("idle_stream_timeout_s", 1e10, ConfigError, "1e+09", "10000000000.0", "None"),
    bad("health_failures_before_restart", 0, ConfigError, "1 or more", "0"),
    bad("health_failures_before_restart", 3.0, TypeError, "int", "3.0"),
    bad("health_failures_before_restart", None, TypeError, "int", "None"),
]


@pytest.mark.parametrize(("field", "value", "error", "says"), BAD_TIMEOUTS)
def test_a_timeout_profile_refuses(field: str, value: Any, error: type[Exception], says: tuple[str, ...]) -> None:
    refuses(lambda: TimeoutProfile(**{field: value}), field, error, says)


@pytest.mark.parametrize(
    ("field", "value", "error", "says"),
    [
        bad("restart_backoff_s", -0.1, ConfigError, "0 or more", "-0.1"),
        bad("restart_backoff_s", NAN, ConfigError, "finite"),
        bad("backoff_max_s", "60", TypeError, "number", "'60'"),
        bad("backoff_factor", 0.5, ConfigError, "1 or more", "0.5"),
        bad("backoff_factor", INF, ConfigError, "finite"),
        bad("restart_window_s", 0, ConfigError, "above 0"),
        bad("restart_window_s", 1e12, ConfigError, "1e+09"),
        bad("stable_after_s", -1, ConfigError, "0 or more"),
        bad("max_restarts_per_window", -1, ConfigError, "0 or more", "-1"),
        bad("max_restarts_per_window", 2.5, TypeError, "int", "2.5"),
        bad("restart_on_stall", 1, TypeError, "bool", "1"),
        bad("restart_on_stall", "no", TypeError, "bool", "'no'"),
        bad("transport_failures_before_restart", 0, ConfigError, "1 or more"),
        bad("server_errors_before_restart", True, TypeError, "int", "True"),
        bad("degenerate_outputs_before_restart", 0, ConfigError, "1 or more", "None is allowed"),
        bad("recycle", 600, TypeError, "Recycle", "int"),
    ],
)
def test_a_restart_policy_refuses(field: str, value: Any, error: type[Exception], says: tuple[str, ...]) -> None:
    refuses(lambda: RestartPolicy(**{field: value}), field, error, says)


@pytest.mark.parametrize(
    ("field", "value", "error", "says"),
    [
        bad("min_line_chars", 0, ConfigError, "1 or more", "0"),
        bad("long_line_chars", 31, ConfigError, "min_line_chars", "31", "32"),
        bad("short_line_repeats", 1, ConfigError, "2 or more", "1"),
        bad("long_line_repeats", "8", TypeError, "int", "'8'"),
        bad("min_output_chars", -1, ConfigError, "0 or more"),
        bad("max_period", 0, ConfigError, "from 1 to 1000"),
        bad("max_period", NAN, TypeError, "int", "nan"),
        bad("max_period", 1001, ConfigError, "from 1 to 1000", "1001"),
    ],
)
def test_a_loop_detector_refuses(field: str, value: Any, error: type[Exception], says: tuple[str, ...]) -> None:
    refuses(lambda: LoopDetector(**{field: value}), field, error, says)


BAD_CONFIGS = [
    bad("name", "", ConfigError, "empty"),
    bad("name", 7, TypeError, "str", "7"),
    bad("name", SURROGATE, ConfigError, "Unicode"),
    bad("host", "", ConfigError, "address", "''"),
    bad("host", None, TypeError, "str", "None"),
    bad("host", "http://localhost", ConfigError, "address or a name", "'http://localhost'"),
    bad("host", "127.0.0.1:8080", ConfigError, "without port", "'127.0.0.1:8080'"),
    bad("host", "a b", ConfigError, "'a b'"),
    bad("port", 0, ConfigError, "from 1 to 65535", "0"),
    bad("port", 65536, ConfigError, "from 1 to 65535", "65536"),
    bad("port", "8080", TypeError, "int", "'8080'"),
    bad("port", True, TypeError, "int", "True"),
    bad("port", 8080.0, TypeError, "int", "8080.0"),
    bad("port", HUGE, ConfigError, "bits"),
    bad("server_cmd", (), ConfigError, "executable", "()"),
    bad("server_cmd", [""], ConfigError, "executable", "['']"),
    bad("server_cmd", "llama-server -m m", TypeError, "sequence of words", "llama-server -m m"),
    bad("server_cmd", b"llama-server", TypeError, "sequence of str", "bytes"),
    bad("server_cmd", {"llama-server"}, TypeError, "sequence of str", "set"),
    bad("server_cmd", ("llama-server", "--ctx-size", 512), TypeError, "server_cmd[2]", "str", "512"),
    bad("server_cmd", ("llama-server", "-m", "a\0b"), ConfigError, "server_cmd[2]", "NUL"),
    bad("server_cmd", ("llama-server", "-m", SURROGATE), ConfigError, "server_cmd[2]", "Unicode"),
    bad("env", ["A=b"], TypeError, "mapping", "list"),
    bad("env", {"A": 1}, TypeError, "env['A']", "str", "int"),
    bad("env", {1: "a"}, TypeError, "env key", "str", "1"),
    bad("env", {"": "a"}, ConfigError, "env key", "empty"),
    bad("env", {"A=B": "a"}, ConfigError, "'A=B'", "'='"),
    bad("env", {"A": "a\0b"}, ConfigError, "env['A']", "NUL"),
    bad("slots", 0, ConfigError, "from 1 to 1024", "0"),
    bad("slots", "2", TypeError, "int", "'2'"),
    bad("slots", None, TypeError, "int", "None"),
    bad("slots", 1025, ConfigError, "from 1 to 1024", "1025"),
    bad("timeouts", {"connect_timeout_s": 3}, TypeError, "TimeoutProfile", "dict"),
    bad("timeouts", None, TypeError, "TimeoutProfile", "None"),
    bad("restart", False, TypeError, "RestartPolicy", "bool"),
    bad("loop_detector", True, TypeError, "LoopDetector", "bool"),
    bad("max_tool_iterations", -1, ConfigError, "0 or more", "-1"),
    bad("max_tool_iterations", 8.0, TypeError, "int", "8.0"),
    bad("tool_timeout_s", 0, ConfigError, "above 0"),
    bad("tool_timeout_s", NAN, ConfigError, "finite", "nan"),
    bad("tool_timeout_s", None, TypeError, "number", "None"),
    bad("tool_timeout_s", 1e300, ConfigError, "1e+09"),
    bad("tool_call_mode", "xml", ConfigError, "'auto', 'native', 'prompted'", "'xml'"),
    bad("tool_call_mode", None, TypeError, "str", "None"),
    bad("system_prompt_mode", "both", ConfigError, "'merged', 'separate'", "'both'"),
    bad("bios_provider", "text", TypeError, "callable", "'text'"),
    bad("timezone_name", "Mars/Olympus", ConfigError, "'Mars/Olympus'", "IANA", "Europe/Vienna"),
    bad("timezone_name", "", ConfigError, "empty"),
    bad("timezone_name", "../etc/passwd", ConfigError, "IANA"),
    bad("timezone_name", "Europe", ConfigError, "IANA"),
    bad("timezone_name", 2, TypeError, "str", "2"),
    bad("max_tokens", 0, ConfigError, "1 or more", "None"),
    bad("max_tokens", -1, ConfigError, "1 or more", "None"),
    bad("max_tokens", "many", TypeError, "int", "'many'"),
    bad("default_params", [("a", 1)], TypeError, "mapping", "list"),
    bad("default_params", {"temperature": NAN}, ConfigError, "['temperature']", "finite", "nan"),
    bad("default_params", {"stop": {"a"}}, TypeError, "['stop']", "JSON cannot hold", "{'a'}"),
    bad("default_params", {1: "a"}, TypeError, "key 1", "str"),
    bad("default_params", {"a": [{"b": b"c"}]}, TypeError, "['a'][0]['b']", "bytes"),
    bad("default_params", {"a": SURROGATE}, ConfigError, "['a']", "surrogate"),
    bad("default_params", {SURROGATE: 1}, ConfigError, "key", "surrogate"),
    bad("default_params", {"a": HUGE}, ConfigError, "['a']", "double"),
    bad("default_params", HOLDS_ITSELF, ConfigError, "hold itself"),
    bad("liveness_probes", Probe(), TypeError, "sequence", "None"),
    bad("liveness_probes", [object()], TypeError, "[0]", "probe and reset"),
    bad("liveness_probes", "process", TypeError, "sequence", "'process'"),
    bad("api_key", "", ConfigError, "empty"),
    bad("api_key", 5, TypeError, "str", "int"),
    bad("api_key", "k\u00e9y", ConfigError, "printable ASCII"),
    bad("api_key", "k\r\ny", ConfigError, "printable ASCII"),
    bad("log_lines", 0, ConfigError, "from 1 to 1000000"),
    bad("log_lines", 1e3, TypeError, "int", "1000.0"),
    bad("log_lines", 1 << 70, ConfigError, "from 1 to 1000000"),
    bad("result_ttl_s", 0, ConfigError, "above 0", "None"),
    bad("result_ttl_s", "day", TypeError, "number", "'day'"),
    bad("tool_runner", object(), TypeError, "run_tool", "object"),
    bad("tool_runner", len, TypeError, "run_tool"),
    bad("canary", "2 + 2?", TypeError, "Canary", "'2 + 2?'"),
    bad("tool_runner", AsyncRunner(), TypeError, "AsyncRunner.run_tool", "must not be async", "asyncio.run("),
    bad("on_signal", "ring", TypeError, "callable", "'ring'"),
    bad("on_signal", async_bios, TypeError, "must not be async", "run_coroutine_threadsafe"),
    bad("bios_provider", async_bios, TypeError, "must not be async", "def"),
]


@pytest.mark.parametrize(("field", "value", "error", "says"), BAD_CONFIGS)
def test_a_worker_config_refuses(field: str, value: Any, error: type[Exception], says: tuple[str, ...]) -> None:
    refuses(lambda: config(**{field: value}), field, error, says)


@pytest.mark.parametrize("field", ["normal_tools", "exit_tools"])
@pytest.mark.parametrize(
    ("value", "error", "says"),
    [
        (tool("a"), TypeError, ("sequence of tool definitions",)),
        ("a", TypeError, ("sequence", "'a'")),
        ([None], TypeError, ("[0]", "mapping", "None")),
        (["a"], TypeError, ("[0]", "mapping", "'a'")),
        ([tool("a"), tool("a")], ConfigError, ("two tools named 'a'",)),
        ([{"function": {"name": "a"}}], ConfigError, ("[0]", "'function'", "None")),
        ([{"type": "tool", "function": {"name": "a"}}], ConfigError, ("[0]", "'function'", "'tool'")),
        ([{"type": "function"}], TypeError, ("[0]", "'function'", "None")),
        ([{"type": "function", "name": "a", "parameters": {}}], TypeError, ("[0]", "'function'")),
        ([tool("")], ConfigError, ("[0]", "name", "empty")),
        ([tool(7)], TypeError, ("[0]", "name", "str", "7")),  # type: ignore[arg-type]
        ([tool("a", parameters=[])], TypeError, ("[0]", "parameters", "JSON schema object", "[]")),
        ([tool("a"), tool("b", parameters={"x": {1, 2}})], TypeError, ("[1]", "['x']", "JSON cannot hold")),
        ([tool("a", description=NAN)], ConfigError, ("[0]", "finite")),
    ],
)
def test_tool_definitions_are_refused(field: str, value: Any, error: type[Exception], says: tuple[str, ...]) -> None:
    refuses(lambda: config(tool_runner=Runner(), **{field: value}), field, error, says)


def test_normal_tools_need_a_runner() -> None:
    refuses(lambda: config(normal_tools=[tool("add")]), "normal_tools", ConfigError, ("'add'", "tool_runner", "None"))


def test_exit_tools_need_none() -> None:
    assert config(exit_tools=[tool("signal")]).tool_runner is None


def test_a_name_is_of_a_normal_tool_or_of_an_exit_tool() -> None:
    both = {"normal_tools": [tool("a"), tool("b")], "exit_tools": [tool("b"), tool("c")], "tool_runner": Runner()}
    refuses(lambda: config(**both), "normal_tools", ConfigError, ("exit_tools", "'b'"))


def refuses(make: Callable[[], object], field: str, error: type[Exception], says: tuple[str, ...]) -> None:
    with pytest.raises(error) as caught:
        make()
    text = str(caught.value)
    assert all(part in text for part in (field, *says)), text
    assert len(text) < 400


def test_an_odd_repr_does_not_hide_the_error() -> None:
    class Odd:
        def __repr__(self) -> str:
            raise RuntimeError

    refuses(lambda: config(slots=Odd()), "slots", TypeError, ("int", "Odd"))


# ---------------------------------------------------------------- the command


@pytest.mark.parametrize(
    ("command", "says"),
    [
        (("s", "--host", "0.0.0.0"), ("--host 0.0.0.0", "host", "'127.0.0.1'")),
        (("s", "--host=10.0.0.1"), ("--host 10.0.0.1", "host", "'127.0.0.1'")),
        (("s", "--port", "9002"), ("--port 9002", "port", "9001")),
        (("s", "--port=9002"), ("--port 9002", "port", "9001")),
        (("s", "--port"), ("--port", "port", "9001")),
        (("s", "-np", "4"), ("-np 4", "slots", "1")),
        (("s", "-np=4"), ("-np 4", "slots", "1")),
        (("s", "--parallel", "4"), ("--parallel 4", "slots", "1")),
        (("s", "--parallel=4"), ("--parallel 4", "slots", "1")),
        (("s", "--n-parallel", "4"), ("--n-parallel 4", "slots", "1")),
        (("s", "--parallel", "one"), ("--parallel one", "slots", "1")),
        (("s", "--port", "9001", "--port", "9002"), ("--port 9002", "port", "9001")),
    ],
)
def test_a_command_that_contradicts_the_config_is_refused(command: tuple[str, ...], says: tuple[str, ...]) -> None:
    refuses(lambda: config(server_cmd=command), "server_cmd", ConfigError, says)


@pytest.mark.parametrize(
    ("host", "command"),
    [
        ("127.0.0.1", ("s",)),
        ("127.0.0.1", ("s", "--host", "localhost")),
        ("localhost", ("s", "--host=127.0.0.1", "--port=9001", "-np", "1")),
        ("::1", ("s", "--host", "0:0:0:0:0:0:0:1")),
        ("[::1]", ("s", "--host", "::1")),
        ("GPU7.local", ("s", "--host", "gpu7.local")),
    ],
)
def test_a_command_that_says_the_same_otherwise_is_taken(host: str, command: tuple[str, ...]) -> None:
    assert config(host=host, server_cmd=command).server_cmd == command


@pytest.mark.parametrize(
    ("host", "reached_at"),
    [("0.0.0.0", "127.0.0.1"), ("::", "::1"), ("[::1]", "::1"), ("10.0.0.7", "10.0.0.7"), ("gpu7", "gpu7")],
)
def test_a_server_that_listens_everywhere_is_reached_at_the_loopback(host: str, reached_at: str) -> None:
    assert config(host=host, server_cmd=("s",)).connect_host == reached_at


def test_llama_server_cmd_agrees_with_the_config() -> None:
    command = llama_server_cmd(
        "m.gguf", host="127.0.0.1", port=9001, slots=3, executable="/opt/llama-server", extra_args=["-c", "4096"]
    )
    parallel = ("--parallel", "3", "-c", "4096")
    assert command == (
        "/opt/llama-server", "--model", "m.gguf", "--host", "127.0.0.1", "--port", "9001", *parallel,
    )  # fmt: skip
    assert config(server_cmd=command, slots=3).slots == 3
    assert llama_server_cmd("m", host="h", port=1, slots=1)[0] == "llama-server"


@pytest.mark.parametrize(
    ("command", "api_key", "shown"),
    [
        (("s", "--api-key", "sesame", "-c", "9"), None, ("s", "--api-key", MASK, "-c", "9")),
        (("s", "--api-key=sesame"), None, ("s", f"--api-key={MASK}")),
        (("s", "--hf-token", "sesame"), None, ("s", "--hf-token", MASK)),
        (("s", "-hft", "sesame"), None, ("s", "-hft", MASK)),
        (("s", "--header", "Bearer sesame"), "sesame", ("s", "--header", f"Bearer {MASK}")),
        (("s", "-c", "9"), None, ("s", "-c", "9")),
    ],
)
def test_keys_are_masked_in_the_command(command: tuple[str, ...], api_key: str | None, shown: tuple[str, ...]) -> None:
    assert masked_server_cmd(command, api_key) == shown


# ---------------------------------------------------------------- secrets


def test_secrets_show_in_no_repr() -> None:
    made = config(
        api_key="sesame", env={"HF_TOKEN": "sesame"}, server_cmd=(*CMD, "--api-key", "sesame", "--hf-token=sesame")
    )
    assert "sesame" not in repr(made)
    assert MASK in repr(made)
    assert repr(made).startswith("WorkerConfig(name='w', host='127.0.0.1', port=9001, server_cmd=[")


@pytest.mark.parametrize(
    "changed",
    [
        {"api_key": b"sesame"},
        {"api_key": "sesame\n"},
        {"api_key": "sesam\u00e9 sesame"},
        {"api_key": "sesame\ud800"},
        {"env": {"HF_TOKEN": b"sesame"}},
        {"env": {"HF_TOKEN": "sesame\0"}},
        {"server_cmd": "llama-server --api-key sesame"},
        {"server_cmd": "llama-server --api-key=sesame"},
        {"server_cmd": ("llama-server", "--api-key", b"sesame")},
        {"server_cmd": ("llama-server", "--api-key", "sesame\0")},
        {"server_cmd": (*CMD, "--api-key", "sesame", "--parallel", "7")},
    ],
)
def test_secrets_show_in_no_error(changed: dict[str, Any]) -> None:
    with pytest.raises((TypeError, ValueError)) as caught:
        config(**changed)
    assert "sesame" not in str(caught.value)


# ---------------------------------------------------------------- copies


def test_what_the_caller_changes_later_changes_no_config() -> None:
    command, env = list(CMD), {"A": "1"}
    params: dict[str, Any] = {"stop": ["x"], "a": {"b": 1}}
    normal, exits, probes = [tool("a", parameters={"type": "object"})], [tool("b")], [Probe()]
    made = config(
        server_cmd=command,
        env=env,
        default_params=params,
        normal_tools=normal,
        exit_tools=exits,
        tool_runner=Runner(),
        liveness_probes=probes,
    )
    before, hash_before = copy.deepcopy(made.__dict__), made.config_hash
    command.append("--more")
    env["B"] = "2"
    params["stop"].append("y")
    params["a"]["b"] = 2
    normal[0]["function"]["parameters"]["type"] = "array"  # type: ignore[index]
    normal.append(tool("c"))
    exits.clear()
    probes.clear()
    for name in ("server_cmd", "env", "default_params", "normal_tools", "exit_tools"):
        assert getattr(made, name) == before[name]
    assert len(made.liveness_probes or ()) == 1
    assert made.config_hash == hash_before


def test_any_mapping_and_any_sequence_will_do() -> None:
    made = config(
        env=UserDict({"A": "1"}),
        default_params=MappingProxyType({"stop": ("x", "y"), "n": None}),
        exit_tools=(MappingProxyType({"type": "function", "function": UserDict({"name": "a"})}),),
    )
    assert made.env == {"A": "1"}
    assert made.default_params == {"stop": ["x", "y"], "n": None}
    assert made.exit_tools == ({"type": "function", "function": {"name": "a"}},)


# ---------------------------------------------------------------- replace, pickle, hash


def test_replace_makes_a_checked_config() -> None:
    made = config(env={"A": "1"}, exit_tools=[tool("a")])
    other = dataclasses.replace(made, max_tokens=None)
    assert (other.max_tokens, other.env, other.exit_tools) == (None, made.env, made.exit_tools)
    assert dataclasses.replace(TimeoutProfile.fast(), headers_timeout_s=1.0).idle_stream_timeout_s == 30.0
    with pytest.raises(ConfigError, match="port"):
        dataclasses.replace(made, port=9002)


def test_a_config_of_plain_parts_can_be_pickled_and_copied() -> None:
    made = config(
        env={"A": "1"},
        timeouts=TimeoutProfile.fast(),
        restart=RestartPolicy.never(),
        exit_tools=[tool("a")],
        default_params={"stop": ["x"]},
        api_key="sesame",
    )
    for other in (pickle.loads(pickle.dumps(made)), copy.deepcopy(made), copy.copy(made)):
        assert other == made
        assert other.config_hash == made.config_hash


def other_bios(ctx: BiosContext) -> str:
    return "other"


def test_the_hash_is_the_same_for_the_same_config() -> None:
    one = config(env={"A": "1", "B": "2"}, tool_timeout_s=10, default_params={"a": 1.0, "b": [2]})
    other = config(env={"B": "2", "A": "1"}, tool_timeout_s=10.0, default_params={"b": (2.0,), "a": 1})
    assert one.config_hash == other.config_hash
    assert re.fullmatch("[0-9a-f]{64}", one.config_hash)


@pytest.mark.parametrize(
    ("base", "changed"),
    [
        ({}, {"api_key": "sesame"}),
        ({"api_key": "one"}, {"api_key": "two"}),
        ({"env": {"HF_TOKEN": "one"}}, {"env": {"HF_TOKEN": "two"}}),
        ({"env": {"LLAMA_API_KEY": "one"}}, {"env": {"LLAMA_API_KEY": "two"}}),
        ({"server_cmd": (*CMD, "--api-key", "one")}, {"server_cmd": (*CMD, "--api-key", "two")}),
        ({}, {"tool_runner": Runner()}),
        ({}, {"bios_provider": other_bios}),
        ({}, {"liveness_probes": [Probe()]}),
    ],
)
def test_secrets_and_callables_do_not_enter_the_hash(base: dict[str, Any], changed: dict[str, Any]) -> None:
    assert config(**base).config_hash == config(**(base | changed)).config_hash


DATA_CHANGES: dict[str, Any] = {
    "name": "v",
    "host": "localhost",
    "port": 9002,
    "server_cmd": ("llama-server",),
    "env": {"CUDA_VISIBLE_DEVICES": "1"},
    "slots": 2,
    "timeouts": TimeoutProfile(load_timeout_s=900),
    "restart": RestartPolicy(restart_on_stall=False),
    "normal_tools": [tool("a")],
    "max_tool_iterations": 9,
    "tool_timeout_s": 10.5,
    "tool_call_mode": "native",
    "exit_tools": [tool("a")],
    "system_prompt_mode": "separate",
    "timezone_name": "Europe/Vienna",
    "max_tokens": None,
    "default_params": {"temperature": 0},
    "loop_detector": None,
    "canary": Canary(prompt="2 + 2?", check=bool),
    "log_lines": 501,
    "result_ttl_s": 60,
}


@pytest.mark.parametrize("field", DATA_CHANGES)
def test_every_field_of_data_changes_the_hash(field: str) -> None:
    base = config(server_cmd=("s",), tool_runner=Runner())
    assert dataclasses.replace(base, **{field: DATA_CHANGES[field]}).config_hash != base.config_hash


def test_no_field_was_forgotten_in_these_tests() -> None:
    not_data = {"api_key", "tool_runner", "bios_provider", "on_signal", "liveness_probes"}
    assert {f.name for f in dataclasses.fields(WorkerConfig)} == DATA_CHANGES.keys() | not_data


@pytest.mark.parametrize("kind", [TimeoutProfile, RestartPolicy, LoopDetector])
def test_every_field_of_the_parts_changes_the_hash(kind: type[Any]) -> None:
    holder = {TimeoutProfile: "timeouts", RestartPolicy: "restart", LoopDetector: "loop_detector"}[kind]
    hashes = {config().config_hash}
    parts = dataclasses.fields(kind)
    for part in parts:
        value = getattr(kind(), part.name)
        changed = (not value) if isinstance(value, bool) else (value or 0) + 1
        if part.name == "recycle":
            changed = Recycle(max_requests=1)
        hashes.add(config(**{holder: kind(**{part.name: changed})}).config_hash)
    assert len(hashes) == len(parts) + 1


# ---------------------------------------------------------------- a submission

GOOD: dict[str, Any] = {"job_name": "j", "system_prompt": "s", "user_prompt": "u", "params": None, "messages": None}


def test_a_submission_is_copied() -> None:
    params: dict[str, Any] = {"stop": ["x"]}
    message: dict[str, Any] = {"role": "user", "content": [{"type": "text", "text": "a"}]}
    got = validate_submit(**(GOOD | {"params": params, "messages": [message]}))
    params["stop"].append("y")
    message["content"].append({})
    assert got.params == {"stop": ["x"]}
    assert got.messages == ({"role": "user", "content": [{"type": "text", "text": "a"}]},)


def test_a_submission_may_leave_out_params_and_messages_and_have_empty_texts() -> None:
    got = validate_submit("", "", "", None, None)
    assert (got.params, got.messages) == ({}, ())


PARTS: list[dict[str, Any]] = [
    {"type": "text", "text": "What is this?"},
    {"type": "image_url", "image_url": {"url": "data:image/png;base64,AA==", "detail": "low"}},
    {"type": "input_audio", "input_audio": {"data": "AA==", "format": "wav"}},
    {"type": "of_tomorrow", "of_tomorrow": 1},
]


def test_content_parts_go_through_as_they_are_and_are_copied() -> None:
    given = copy.deepcopy(PARTS)
    message = {"role": "user", "content": given}
    got = validate_submit(**(GOOD | {"user_prompt": tuple(given), "messages": [message]}))
    given[1]["image_url"]["url"] = "changed"
    assert got.user_prompt == PARTS
    assert got.messages[0]["content"] == PARTS


@pytest.mark.parametrize(
    ("part", "error", "says"),
    [
        ("u", TypeError, ("[0] must be a mapping", "'u'")),
        ({"text": "u"}, ConfigError, ("[0] needs a 'type', such as 'text', 'image_url', 'input_audio'", "None")),
        ({"type": "text"}, ConfigError, ("[0] of type 'text' needs 'text', a str", "None")),
        ({"type": "image_url", "image_url": "u.png"}, ConfigError, ("needs 'image_url': {'url': a str}", "'u.png'")),
        ({"type": "input_audio", "input_audio": {"data": "AA=="}}, ConfigError, ("{'format': a str}",)),
        ({"type": "text", "text": SURROGATE}, ConfigError, ("[0]['text']", "surrogate")),
    ],
)
def test_a_part_of_no_use_is_refused(part: Any, error: type[Exception], says: tuple[str, ...]) -> None:
    refuses(lambda: validate_submit(**(GOOD | {"user_prompt": [part]})), "user_prompt", error, says)
    message = {"role": "user", "content": [part]}
    refuses(lambda: validate_submit(**(GOOD | {"messages": [message]})), "messages[0]['content']", error, says)


def test_messages_may_come_from_a_generator_and_have_keys_of_their_own() -> None:
    given = ({"role": "assistant", "content": None, "extra": {"a": 1}} for _ in range(2))
    assert len(validate_submit(**(GOOD | {"messages": given})).messages) == 2


@pytest.mark.parametrize(
    ("field", "value", "error", "says"),
    [
        bad("job_name", None, TypeError, "str", "None"),
        bad("job_name", 7, TypeError, "str", "7"),
        bad("system_prompt", b"s", TypeError, "str", "b's'"),
        bad("user_prompt", None, TypeError, "str or a list of content parts", "None"),
        bad("user_prompt", {"type": "text", "text": "u"}, TypeError, "a list of content parts", "dict"),
        bad("user_prompt", [], ConfigError, "at least one content part"),
        bad("user_prompt", SURROGATE, ConfigError, "surrogate"),
        bad("params", [1], TypeError, "mapping", "[1]"),
        bad("params", "x", TypeError, "mapping", "'x'"),
        bad("params", {"temperature": INF}, ConfigError, "['temperature']", "finite", "inf"),
        bad("params", {"grammar": object()}, TypeError, "['grammar']", "JSON cannot hold", "object"),
        bad("params", {None: 1}, TypeError, "key None", "str"),
        bad("params", HOLDS_ITSELF, ConfigError, "hold itself"),
        bad("params", {"seed": HUGE}, ConfigError, "['seed']", "double"),
        bad("messages", "hello", TypeError, "sequence", "'hello'"),
        bad("messages", {"role": "user"}, TypeError, "sequence", "dict"),
        bad("messages", 5, TypeError, "sequence", "5"),
        bad("messages", 0, TypeError, "sequence", "0"),
        bad("messages", ["hello"], TypeError, "messages[0]", "mapping", "'hello'"),
        bad("messages", [{"content": "x"}], ConfigError, "messages[0]", "role", "None"),
        bad("messages", [{"role": "user"}, {"role": ""}], ConfigError, "messages[1]", "role", "''"),
        bad("messages", [{"role": "user", "content": {1}}], TypeError, "messages[0]['content']", "JSON"),
    ],
)
def test_a_submission_is_refused(field: str, value: Any, error: type[Exception], says: tuple[str, ...]) -> None:
    refuses(lambda: validate_submit(**(GOOD | {field: value})), field, error, says)


def test_a_prompt_is_not_repeated_at_length_in_an_error() -> None:
    with pytest.raises(ValueError) as caught:
        validate_submit("j", "", "x" * 100_000 + SURROGATE, None, None)
    assert len(str(caught.value)) < 300
