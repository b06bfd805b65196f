"""What a worker may be configured with, and what it says of anything else."""

import copy
import dataclasses
import math
import pickle
import re
from collections import UserDict
from collections.abc import Callable
from functools import partial
from types import MappingProxyType, SimpleNamespace
from typing import Any

import pytest

from llama_worker import (
    BiosContext,
    Canary,
    ConfigError,
    LoopDetector,
    Recycle,
    RestartPolicy,
    TimeoutProfile,
    WorkerConfig,
)
from llama_worker.config.command import llama_server_cmd
from llama_worker.errors import MASK
from llama_worker.runtime.probes.liveness_probes import ProcessProbe
from llama_worker.worker import LlamaWorker
from tests.conftest import OwnText
from tests.unit.config.cases import CMD, SURROGATE, bad, config, refuses, tool


async def async_call(*_: Any, **__: Any) -> str:
    return ""


class AsyncObject:
    __call__ = async_call


class Odd:
    """It cannot be shown."""

    __repr__ = None  # type: ignore[assignment]


PROBE = SimpleNamespace(probe=print, reset=print)
OLD_PROBE = SimpleNamespace(probe=lambda pid: None, reset=print)
ASYNC_PROBE = SimpleNamespace(probe=async_call, reset=print)
RUNNER = SimpleNamespace(run_tool=lambda **call: call)
OLD_RUNNER = SimpleNamespace(run_tool=lambda name, args: None)


# ---------------------------------------------------------------- the shape of it


def test_only_name_host_port_and_command_are_positional() -> None:
    assert WorkerConfig("w", "127.0.0.1", 9001, CMD, slots=1) == config()
    with pytest.raises(TypeError):
        WorkerConfig("w", "127.0.0.1", 9001, CMD, {})  # type: ignore[call-arg]


def test_the_presets_are_what_their_names_say() -> None:
    # tests/docs compares their numbers with the documentation's
    assert TimeoutProfile() == TimeoutProfile.slow_prefill()
    assert RestartPolicy.never() == RestartPolicy(max_restarts_per_window=0)


@pytest.mark.parametrize("kind", [TimeoutProfile, RestartPolicy, LoopDetector, config])
def test_a_config_is_frozen(kind: Callable[[], Any]) -> None:
    made = kind()
    with pytest.raises(dataclasses.FrozenInstanceError):
        setattr(made, dataclasses.fields(made)[0].name, 1)


# ---------------------------------------------------------------- bad input

NAN, INF, HUGE = math.nan, math.inf, 10**5000  # of more digits than Python shows
HOLDS_ITSELF: dict[str, Any] = {}
HOLDS_ITSELF["self"] = [HOLDS_ITSELF]


TIMEOUTS = [field.name for field in dataclasses.fields(TimeoutProfile) if field.name.endswith("_s")]
CAN_BE_OFF = [
    name for name, limit in dataclasses.asdict(TimeoutProfile.debug()).items() if limit is None
]  # there, all
BAD_TIMEOUTS = [
    *(bad(name, "3", TypeError, "number", "str", "'3'") for name in TIMEOUTS),
    *(bad(name, NAN, ConfigError, "finite", "nan") for name in TIMEOUTS),
    *(bad(name, -1, ConfigError, "-1") for name in TIMEOUTS),
    *(bad(name, 0, ConfigError, "above 0", "0") for name in TIMEOUTS if name != "stop_grace_s"),
    *(
        bad(name, None, TypeError, "number", "NoneType")
        for name in sorted({*TIMEOUTS} - {*CAN_BE_OFF})
    ),
    *(bad(name, 0, ConfigError, "None is allowed") for name in CAN_BE_OFF),
    bad("connect_timeout_s", True, TypeError, "number", "bool"),
    bad("idle_stream_timeout_s", 1e10, ConfigError, "1e+09", "10000000000.0", "None"),
]
BAD_POLICIES = [
    bad("restart_backoff_s", -0.1, ConfigError, "0 or more", "-0.1"),
    bad("backoff_max_s", "60", TypeError, "number", "'60'"),
    bad("backoff_factor", 0.5, ConfigError, "1 or more", "0.5"),
    bad("restart_window_s", 0, ConfigError, "above 0"),
    bad("restart_window_s", 1e12, ConfigError, "1e+09"),
    bad("stable_after_s", -1, ConfigError, "0 or more"),
    bad("restart_on_stall", 1, TypeError, "bool", "1"),
    bad("recycle", 600, TypeError, "Recycle", "int"),
]
BAD_CONFIGS = [
    bad("name", "", ConfigError, "empty"),
    bad("name", 7, TypeError, "str", "7"),
    bad("name", SURROGATE, ConfigError, "Unicode"),
    bad("host", "", ConfigError, "address", "''"),
    bad("host", None, TypeError, "str", "None"),
    bad("host", "http://localhost", ConfigError, "address or a name", "'http://localhost'"),
    bad("host", "127.0.0.1:8080", ConfigError, "without port", "'127.0.0.1:8080'"),
    bad("port", HUGE, ConfigError, "bits"),
    bad("server_cmd", (), ConfigError, "executable", "()"),
    bad("server_cmd", [""], ConfigError, "executable", "['']"),
    bad("server_cmd", "llama-server -m m", TypeError, "sequence of words", "llama-server -m m"),
    bad("server_cmd", b"llama-server", TypeError, "sequence of str", "bytes"),
    bad("server_cmd", {"llama-server"}, TypeError, "sequence of str", "set"),
    bad("server_cmd", ("s", "--ctx-size", 512), TypeError, "server_cmd[2]", "str", "512"),
    bad("server_cmd", ("s", "-m", "a\0b"), ConfigError, "server_cmd[2]", "NUL"),
    bad("env", ["A=b"], TypeError, "mapping", "list"),
    bad("env", {"A": 1}, TypeError, "env['A']", "str", "int"),
    bad("env", {1: "a"}, TypeError, "env key", "str", "1"),
    bad("env", {"": "a"}, ConfigError, "env key", "empty"),
    bad("env", {"A=B": "a"}, ConfigError, "'A=B'", "'='"),
    bad("env", {"A": "a\0b"}, ConfigError, "env['A']", "NUL"),
    bad("timeouts", HUGE, TypeError, "TimeoutProfile", "a int"),
    bad("timeouts", "fast", TypeError, "TimeoutProfile", "'fast'"),
    bad("server_cmd", ("s", "--ctx-size 4096"), ConfigError, "[1]", "'--ctx-size', '4096'"),
    bad("server_cmd", ("s", "-c\t4096"), ConfigError, "split it into two words", "'-c', '4096'"),
    bad("timeouts", Odd(), TypeError, "TimeoutProfile", "a Odd"),
    bad("restart", False, TypeError, "RestartPolicy", "bool"),
    bad("loop_detector", True, TypeError, "LoopDetector", "bool"),
    bad("canary", "2 + 2?", TypeError, "Canary", "'2 + 2?'"),
    bad("tool_timeout_s", 0, ConfigError, "above 0"),
    bad("tool_timeout_s", None, TypeError, "number", "None"),
    bad("tool_timeout_s", 1e300, ConfigError, "1e+09"),
    bad("result_ttl_s", 0, ConfigError, "above 0", "None"),
    bad("tool_call_mode", "xml", ConfigError, "'auto', 'native', 'prompted'", "'xml'"),
    bad("tool_call_mode", None, TypeError, "str", "None"),
    bad("system_prompt_mode", "both", ConfigError, "'merged', 'separate'", "'both'"),
    bad("bios_provider", "text", TypeError, "callable", "'text'"),
    bad("bios_provider", async_call, TypeError, "must not be async", "def"),
    *(
        bad(field, AsyncObject(), TypeError, f"{field} must not be async")
        for field in ("bios_provider", "on_event", "on_signal")
    ),
    bad("bios_provider", lambda: "", TypeError, "(ctx)", "signature is ()", "too many"),
    bad("on_signal", "ring", TypeError, "callable", "'ring'"),
    bad("on_event", "ring", TypeError, "callable", "'ring'"),
    bad("on_event", async_call, TypeError, "must not be async", "run_coroutine_threadsafe"),
    bad("on_signal", async_call, TypeError, "must not be async", "run_coroutine_threadsafe"),
    bad("on_signal", lambda signal: None, TypeError, "request_id=..., job_name=...", "(signal)"),
    bad("tool_runner", object(), TypeError, "run_tool", "object"),
    bad("tool_runner", OLD_RUNNER, TypeError, "run_tool is called as", "(name, args)", "arguments"),
    bad("tool_errors", "ignore", ConfigError, "'fail', 'tell'", "'ignore'"),
    bad("tool_errors", None, TypeError, "str", "None"),
    bad("timezone_name", "", ConfigError, "empty"),
    *(
        bad("timezone_name", name, ConfigError, repr(name), "IANA", "Europe/Vienna")
        for name in ("Mars/Olympus", "../etc/passwd", "Europe")
    ),
    bad("default_params", [("a", 1)], TypeError, "mapping", "list"),
    bad("default_params", {"temperature": NAN}, ConfigError, "['temperature']", "finite", "nan"),
    bad("default_params", {"stop": {"a"}}, TypeError, "['stop']", "JSON-serializable", "{'a'}"),
    bad("default_params", {1: "a"}, TypeError, "key 1", "str"),
    bad("default_params", {Odd(): "a"}, TypeError, "key a Odd", "str"),
    bad("default_params", {"a": [{"b": b"c"}]}, TypeError, "['a'][0]['b']", "bytes"),
    bad("default_params", {SURROGATE: 1}, ConfigError, "key", "surrogate"),
    bad("default_params", {"a": HUGE}, ConfigError, "['a']", "double"),
    bad("default_params", HOLDS_ITSELF, ConfigError, "without cycles"),
    bad("liveness_probes", [object()], TypeError, "[0]", "probe and reset"),
    bad("liveness_probes", [PROBE, ProcessProbe], TypeError, "[1].probe", "(self, root_pid"),
    bad("liveness_probes", [OLD_PROBE], TypeError, "(root_pid, now)", "signature is (pid)"),
    bad("liveness_probes", [ASYNC_PROBE], TypeError, "[0]", "must not be async"),
    *(bad("liveness_probes", value, TypeError, "sequence", "None") for value in (PROBE, "process")),
    bad("api_key", "", ConfigError, "empty"),
    bad("api_key", "k\n", ConfigError, "white space"),
    *(bad("api_key", key, ConfigError, "printable ASCII") for key in ("k\u00e9y", "k\r\ny")),
]
BAD_AGES = [(0, "above 0"), (INF, "finite")]
BAD = [
    (TimeoutProfile, BAD_TIMEOUTS),
    (RestartPolicy, BAD_POLICIES),
    (LoopDetector, [bad("long_line_chars", 31, ConfigError, "min_line_chars", "31", "32")]),
    (Recycle, [bad("max_age_s", value, ConfigError, says) for value, says in BAD_AGES]),
    (config, BAD_CONFIGS),
]


@pytest.mark.parametrize(
    ("make", "field", "value", "error", "says"),
    [pytest.param(make, *case.values, id=case.id) for make, cases in BAD for case in cases],
)
def test_bad_input_is_refused(
    make: Any, field: str, value: Any, error: type[Exception], says: tuple[str, ...]
) -> None:
    refuses(lambda: make(**{field: value}), field, error, *says)


@pytest.mark.parametrize("field", ["normal_tools", "exit_tools"])
def test_tool_definitions_are_checked(field: str) -> None:
    make = partial(config, tool_runner=RUNNER, **{field: [tool("a"), tool("a")]})
    refuses(make, field, ConfigError, "two tools named 'a'")


def test_normal_tools_need_a_runner_and_own_names() -> None:
    normal, exits = [tool("a"), tool("b")], [tool("b"), tool("c")]
    alone = {"normal_tools": normal}
    refuses(
        partial(config, **alone), "normal_tools", ConfigError, "'a'", "'b'", "tool_runner", "None"
    )
    both = {"normal_tools": normal, "exit_tools": exits, "tool_runner": RUNNER}
    refuses(partial(config, **both), "normal_tools", ConfigError, "exit_tools", "'b'")


BEFORE_RESTART = ["transport_failures", "server_errors", "degenerate_outputs"]
COMMAND = partial(llama_server_cmd, "m.gguf", host="h", port=1, slots=1)


@pytest.mark.parametrize(
    ("make", "fields", "least", "greatest"),
    [
        (TimeoutProfile, ["health_failures_before_restart"], 1, None),
        (RestartPolicy, ["max_restarts_per_window"], 0, None),
        (RestartPolicy, [f"{what}_before_restart" for what in BEFORE_RESTART], 1, None),
        (Recycle, ["max_requests", "max_anon_mib"], 1, None),
        (COMMAND, ["cache_ram_mib"], -1, None),
        (COMMAND, ["batch_size"], 1, None),
        (LoopDetector, ["min_output_chars"], 0, None),
        (LoopDetector, ["min_line_chars", "long_line_chars"], 1, None),
        (LoopDetector, ["short_line_repeats", "long_line_repeats", "min_text_repeats"], 2, None),
        (LoopDetector, ["max_period"], 1, 1000),
        (config, ["port"], 1, 65535),
        (config, ["slots"], 1, 256),
        (config, ["max_tool_iterations"], 0, None),
        (config, ["max_tokens"], 1, None),
        (config, ["log_lines"], 1, 1_000_000),
    ],
)
def test_a_count_is_an_int_within_its_bounds(
    make: Any, fields: list[str], least: int, greatest: int | None
) -> None:
    says = f"{least} or more" if greatest is None else f"from {least} to {greatest}"
    for field in fields:
        for beyond in (least - 1, *([] if greatest is None else [greatest + 1])):
            refuses(partial(make, **{field: beyond}), field, ConfigError, says, str(beyond))
        for value in ("8", True, 8.0):
            refuses(partial(make, **{field: value}), field, TypeError, "int", repr(value))


@pytest.mark.parametrize(
    ("make", "given", "says"),
    [
        (config, "slot", "WorkerConfig has no field 'slot'; did you mean 'slots'?"),
        (partial(WorkerConfig.for_model, "m", port=1), "slot", "did you mean 'slots'?"),
        (partial(LlamaWorker.from_model, "m", executable="/bin/true"), "slot", "mean 'slots'?"),
        (TimeoutProfile, "startup_s", "did you mean 'startup_timeout_s'?"),
        (RestartPolicy, "xyz", "RestartPolicy has no field 'xyz'; known: restart_"),
    ],
)
def test_a_misspelt_field_says_what_was_meant(
    make: Callable[..., object], given: str, says: str
) -> None:
    with pytest.raises(TypeError, match=re.escape(says)):
        make(**{given: 2})


# ---------------------------------------------------------------- secrets


def test_secrets_show_in_no_repr() -> None:
    made = config(
        api_key="sesame",
        env={"HF_TOKEN": "sesame"},
        server_cmd=(*CMD, "sesame", "--hf-token=sesame"),
    )
    assert "sesame" not in repr(made)
    assert MASK in repr(made)
    assert repr(made).startswith("WorkerConfig(name='w', host='127.0.0.1', port=9001, server_cmd=[")


@pytest.mark.parametrize(
    "changed",
    [
        {"api_key": b"sesame"},
        {"api_key": "sesame\n"},
        {"api_key": "sesame\ud800"},
        {"env": {"HF_TOKEN": "sesame\0"}},
        {"server_cmd": "llama-server --api-key sesame"},
        {"server_cmd": ("llama-server", "--api-key sesame")},
        {"server_cmd": ("llama-server", "--api_key sesame")},
        {"server_cmd": ("llama-server", "--api-key", b"sesame")},
        {"server_cmd": ("llama-server", "--api_key", "sesame\0")},
        {"server_cmd": (*CMD, "--api-key", "sesame", "--parallel", "7")},
    ],
)
def test_secrets_show_in_no_error(changed: dict[str, Any]) -> None:
    with pytest.raises((TypeError, ValueError)) as caught:
        config(**changed)
    assert "sesame" not in str(caught.value)


# ---------------------------------------------------------------- copies


def test_later_changes_of_what_was_given_change_nothing() -> None:
    given: dict[str, Any] = {
        "server_cmd": list(CMD),
        "env": {"A": "1"},
        "default_params": {"stop": ["x"], "a": {"b": 1}},
        "normal_tools": [tool("a", parameters={"type": "object"})],
        "exit_tools": [tool("b")],
        "liveness_probes": [PROBE],
    }
    made = config(tool_runner=RUNNER, **given)
    hash_before = made.config_hash
    given["server_cmd"].append("--more")
    given["env"]["B"] = "2"
    given["default_params"]["stop"].append("y")
    given["normal_tools"][0]["function"]["parameters"]["type"] = "array"
    given["exit_tools"].clear()
    given["liveness_probes"].clear()
    assert made.config_hash == hash_before
    assert made.liveness_probes


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
    with pytest.raises(ConfigError, match="port"):
        dataclasses.replace(made, port=9002)


def test_a_plain_config_can_be_pickled_and_copied() -> None:
    made = config(
        env={"A": "1"}, restart=RestartPolicy.never(), exit_tools=[tool("a")], api_key="sesame"
    )
    for other in (pickle.loads(pickle.dumps(made)), copy.deepcopy(made), copy.copy(made)):
        assert other == made
        assert other.config_hash == made.config_hash


def test_a_runner_may_be_async_or_get_calls() -> None:
    async def run_tool(**call: Any) -> int:
        return 1

    def cancellable(*, name: str, arguments: Any, request_id: int, job_name: str, call: Any) -> int:
        return 1

    for runner in (run_tool, cancellable):
        config(normal_tools=[tool("add")], tool_runner=SimpleNamespace(run_tool=runner))


@pytest.mark.parametrize(
    ("one", "other"),
    [
        ({"env": {"A": "1", "B": "2"}}, {"env": {"B": "2", "A": "1"}}),
        ({"tool_timeout_s": 10}, {"tool_timeout_s": 10.0}),
        ({"default_params": {"a": 1.0, "b": [2]}}, {"default_params": {"b": (2.0,), "a": 1}}),
        ({"api_key": "one"}, {"api_key": "two"}),
        ({"env": {"HF_TOKEN": "one"}}, {"env": {"HF_TOKEN": "two"}}),
        ({"env": {"LLAMA_API_KEY": "one"}}, {"env": {"LLAMA_API_KEY": "two"}}),
        ({"server_cmd": (*CMD, "--api-key", "one")}, {"server_cmd": (*CMD, "--api-key", "two")}),
        ({}, {"tool_runner": RUNNER, "liveness_probes": [PROBE]}),
        ({}, {"bios_provider": str, "on_event": print, "on_signal": lambda signal, **about: None}),
    ],
)
def test_the_hash_is_of_data_without_secrets(one: Any, other: Any) -> None:
    assert config(**one).config_hash == config(**other).config_hash
    assert re.fullmatch("[0-9a-f]{64}", config(**one).config_hash)


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
    "tool_errors": "tell",
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


def test_name_and_host_are_plain_text() -> None:
    made = config(name=OwnText("w"), host=OwnText("127.0.0.1"))
    assert {type(made.name), type(made.host)} == {str}


class Incomparable:
    """A provider like an array: to compare it is an error."""

    __hash__ = None  # type: ignore[assignment]

    def __call__(self, ctx: BiosContext) -> str:
        return ""

    def __eq__(self, other: object) -> bool:
        raise ValueError("the truth value is ambiguous")


def test_a_provider_is_not_compared() -> None:
    assert not config(bios_provider=Incomparable()).has_builtin_bios
    assert config().has_builtin_bios
    assert config(bios_provider=None).has_builtin_bios


NOT_DATA = {"api_key", "tool_runner", "bios_provider", "on_signal", "on_event", "liveness_probes"}


def test_every_field_of_data_changes_the_hash() -> None:
    base = config(server_cmd=("s",), tool_runner=RUNNER)
    changes = ({name: value} for name, value in DATA_CHANGES.items())
    hashes = {dataclasses.replace(base, **change).config_hash for change in changes}
    assert len(hashes | {base.config_hash}) == len(DATA_CHANGES) + 1
    names = {field.name for field in dataclasses.fields(WorkerConfig)}
    assert names == DATA_CHANGES.keys() | NOT_DATA


@pytest.mark.parametrize(
    ("holder", "kind"),
    [("timeouts", TimeoutProfile), ("restart", RestartPolicy), ("loop_detector", LoopDetector)],
)
def test_every_field_of_the_parts_changes_the_hash(holder: str, kind: type[Any]) -> None:
    hashes = {config().config_hash}
    for name, value in dataclasses.asdict(kind()).items():
        changed = (not value) if isinstance(value, bool) else (value or 0) + 1
        part = kind(**{name: Recycle(max_requests=1) if name == "recycle" else changed})
        hashes.add(config(**{holder: part}).config_hash)
    assert len(hashes) == len(dataclasses.fields(kind)) + 1
