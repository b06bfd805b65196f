"""A fleet from a TOML file: what it may hold, how defaults are merged in, and what is said where it
is wrong."""

import dataclasses
import json
import tomllib
import warnings
from pathlib import Path
from typing import Any
from unittest.mock import Mock

import pytest

from llama_worker import (
    ConfigError,
    LoopDetector,
    Recycle,
    RestartPolicy,
    TimeoutProfile,
    WorkerConfig,
    load_config,
)
from llama_worker.config import file

FULL = """\
# Two models, two GPUs.
[defaults]
host = "127.0.0.1"
slots = 2
timeouts = "normal"
executable = "/opt/llama-server"
extra_args = ["--n-gpu-layers", "99"]
env = { GGML_NO_BACKTRACE = "1" }
default_params = { temperature = 0.2, seed = 7 }

[defaults.restart]
max_restarts_per_window = 3

[workers.planner]
port = 8081
model = "planner.gguf"
batch_size = 256
env.CUDA_VISIBLE_DEVICES = "0"
default_params.temperature = 0.9

[workers.planner.timeouts]
preset = "slow_prefill"
absolute_timeout_s = 7200
idle_stream_timeout_s = "off"

[workers.coder]
port = 8082
model = "coder.gguf"
batch_size = "off"
slots = 1
max_tokens = "off"
loop_detector = { max_period = 4 }
extra_args = ["--ctx-size", "4096"]
env = { CUDA_VISIBLE_DEVICES = "1" }
restart.restart_backoff_s = 1
"""
ONE = """\
[workers.a]
host = "127.0.0.1"
port = 8081
model = "m.gguf"
"""


def load(tmp_path: Path, text: str) -> dict[str, WorkerConfig]:
    path = tmp_path / "fleet.toml"
    path.write_bytes(text.encode(errors="surrogateescape"))
    return load_config(path)


def one(tmp_path: Path, more: str = "", before: str = "") -> WorkerConfig:
    return load(tmp_path, before + ONE + more)["a"]


def refusal(tmp_path: Path, text: str) -> str:
    """The error's text, without the folder."""
    with pytest.raises(ConfigError) as caught:
        load(tmp_path, text)
    told = str(caught.value)
    assert told.startswith(str(tmp_path / "fleet.toml"))
    return told.removeprefix(f"{tmp_path}/")


# ---------------------------------------------------------------- what it gives


def test_a_whole_file(tmp_path: Path) -> None:
    workers = load(tmp_path, FULL)
    assert list(workers) == ["planner", "coder"]
    command = "/opt/llama-server --model {}.gguf --host 127.0.0.1 --port {} --parallel {}"
    batches = ("--batch-size",)
    assert workers["planner"] == WorkerConfig(
        *("planner", "127.0.0.1", 8081),
        (*command.format("planner", 8081, 2).split(), *batches, "256", "--n-gpu-layers", "99"),
        slots=2,
        env={"GGML_NO_BACKTRACE": "1", "CUDA_VISIBLE_DEVICES": "0"},
        timeouts=TimeoutProfile(absolute_timeout_s=7200, idle_stream_timeout_s=None),
        restart=RestartPolicy(max_restarts_per_window=3),
        default_params={"temperature": 0.9, "seed": 7},
    )
    assert workers["coder"] == WorkerConfig(
        *("coder", "127.0.0.1", 8082),
        (*command.format("coder", 8082, 1).split(), "--ctx-size", "4096"),
        env={"GGML_NO_BACKTRACE": "1", "CUDA_VISIBLE_DEVICES": "1"},
        timeouts=TimeoutProfile.normal(),
        restart=RestartPolicy(max_restarts_per_window=3, restart_backoff_s=1),
        default_params={"temperature": 0.2, "seed": 7},
        max_tokens=None,
        loop_detector=LoopDetector(max_period=4),
    )


def test_a_byte_order_mark_changes_nothing(tmp_path: Path) -> None:
    assert load(tmp_path, f"\ufeff{FULL}") == load(tmp_path, FULL)


def test_defaults_are_those_of_a_program(tmp_path: Path) -> None:
    (tmp_path / "f.toml").write_text(ONE)
    command = "llama-server --model m.gguf --host 127.0.0.1 --port 8081 --parallel 1"
    command += " --batch-size 512"
    assert load_config(str(tmp_path / "f.toml")) == {
        "a": WorkerConfig("a", "127.0.0.1", 8081, command.split())
    }


@pytest.mark.parametrize("preset", ["slow_prefill", "normal", "fast", "debug"])
def test_a_preset_of_timeouts_by_its_name(tmp_path: Path, preset: str) -> None:
    wanted = getattr(TimeoutProfile, preset)()
    assert one(tmp_path, f'timeouts = "{preset}"').timeouts == wanted
    assert one(tmp_path, f'timeouts.preset = "{preset}"').timeouts == wanted
    assert one(tmp_path, before=f'defaults.timeouts = "{preset}"\n').timeouts == wanted


def test_fields_and_presets_are_merged_across_levels(tmp_path: Path) -> None:
    fast = dataclasses.replace(TimeoutProfile.fast(), stop_grace_s=3)
    preset, field = 'timeouts = "fast"', "timeouts.stop_grace_s = 3"
    assert one(tmp_path, field, before=f"defaults.{preset}\n").timeouts == fast
    assert one(tmp_path, preset, before=f"defaults.{field}\n").timeouts == fast


@pytest.mark.parametrize(
    ("line", "value"),
    [
        ("max_tokens = 5", 5),
        ("result_ttl_s = 5", 5),
        ("loop_detector.max_period = 2", LoopDetector(max_period=2)),
    ],
)
def test_off_is_none_and_can_be_taken_back(tmp_path: Path, line: str, value: object) -> None:
    key = line.partition(" ")[0].partition(".")[0]
    off = f'{key} = "off"'
    assert getattr(one(tmp_path, off), key) is None
    assert getattr(one(tmp_path, before=f"defaults.{off}\n"), key) is None
    assert getattr(one(tmp_path, off, before=f"defaults.{line}\n"), key) is None
    assert getattr(one(tmp_path, line, before=f"defaults.{off}\n"), key) == value


def test_a_whole_command_ignores_the_defaults_model(tmp_path: Path) -> None:
    defaults = 'defaults = { model = "n.gguf", extra_args = ["-v"] }\n'
    whole = (
        'workers.b = { host = "127.0.0.1", port = 8082, server_cmd = ["my-server", "--port", '
        '"8082"] }\n'
    )
    workers = load(tmp_path, defaults + whole + ONE)
    assert workers["b"].server_cmd == ("my-server", "--port", "8082")
    assert workers["a"].server_cmd[-1] == "-v"


def test_every_key_of_a_file_reaches_the_config(tmp_path: Path) -> None:
    given: dict[str, Any] = {
        "max_tool_iterations": 3,
        "tool_timeout_s": 2.5,
        "tool_errors": "tell",
        "tool_call_mode": "prompted",
        "system_prompt_mode": "separate",
        "timezone_name": "UTC",
        "api_key": "k",
        "log_lines": 9,
        "result_ttl_s": 60,
    }
    made = one(tmp_path, "\n".join(f"{key} = {json.dumps(value)}" for key, value in given.items()))
    assert {key: getattr(made, key) for key in given} == given
    elsewhere = "env timeouts restart loop_detector default_params max_tokens slots"
    in_code = "normal_tools exit_tools tool_runner bios_provider on_signal on_event canary"
    known = {"name", "host", "port", "server_cmd", "liveness_probes", *given}
    known |= {*elsewhere.split(), *in_code.split()}
    assert known == {field.name for field in dataclasses.fields(WorkerConfig)}


def test_a_restart_policy_may_be_never_or_recycle(tmp_path: Path) -> None:
    never, thrice = 'restart = "never"', "restart.max_restarts_per_window = 3"
    assert one(tmp_path, never).restart == RestartPolicy.never()
    for default in (thrice, "restart.recycle.max_requests = 9", "restart.restart_on_stall = false"):
        worker = one(tmp_path, never, before=f"defaults.{default}\n")
        assert worker.restart == RestartPolicy.never()
    usual = RestartPolicy(max_restarts_per_window=3)
    assert one(tmp_path, thrice, before=f"defaults.{never}\n").restart == usual
    table = (
        "restart = { restart_backoff_s = 1, recycle = { max_requests = 100, max_age_s = 3600 } }"
    )
    recycle = Recycle(max_requests=100, max_age_s=3600)
    assert one(tmp_path, table).restart == RestartPolicy(restart_backoff_s=1, recycle=recycle)


# ---------------------------------------------------------------- what it refuses


@pytest.mark.parametrize(
    ("line", "key", "says"),
    [
        ('slots = "2"', "slots", "slots must be an int, not str: '2'"),
        ("slot = 2", "slot", "unknown key; did you mean 'slots'?\n"),
        (
            "ctx_size = 4096",
            "ctx_size",
            "unknown key; did you mean 'batch_size'? (options of llama-server go into extra_ar",
        ),
        ("xyzzy = 2", "xyzzy", "unknown key; known: api_key, batch_size, cache_ram_mib, default_"),
        ('name = "b"', "name", "cannot be set: the name of the table is the worker's name"),
        ("env.A = 1", "env", "env['A'] must be a str"),
        ("env = 1", "env", "must be a table, not int"),
        (
            'timeouts = "fat"',
            "timeouts",
            "must be a table or one of 'slow_prefill', 'normal', 'fast', 'debug', not 'fat'",
        ),
        ("timeouts = 3", "timeouts", "must be a table or one of 'slow_prefill', 'normal', 'fast"),
        ('timeouts.preset = "off"', "timeouts.preset", "must be one of 'slow_prefill', 'normal',"),
        (
            "max_tokens = 0",
            "max_tokens",
            "max_tokens must be 1 or more, not 0 ('off' is allowed, too)\n",
        ),
        (
            'batch_size = "auto"',
            "batch_size",
            "batch_size must be an int, not str: 'auto' ('off' is",
        ),
        ('api_key = ""', "api_key", "api_key must not be empty\n"),
        (
            'cache_ram_mib = "off"',
            "cache_ram_mib",
            "cache_ram_mib must be an int, not str: 'off'\n",
        ),
        (
            "timeouts.load_timeout_s = 0",
            "timeouts.load_timeout_s",
            "load_timeout_s must be above 0, not 0 ('off' is allowed, too)\n",
        ),
        (
            "restart.recycle.max_requests = -1",
            "restart.recycle.max_requests",
            "max_requests must be 1 or more, not -1 ('off' is allowed, too)\n",
        ),
        ("timeouts.stop_grace = 3", "timeouts.stop_grace", "unknown key; did you mean 'stop_gra"),
        ("timeouts.stop_grace_s = -1", "timeouts.stop_grace_s", "stop_grace_s must be 0 or"),
        ('timeouts.stop_grace_s = "off"', "timeouts.stop_grace_s", "stop_grace_s must be a num"),
        ('restart = "always"', "restart", "must be a table or 'never', not 'always'"),
        ("restart = false", "restart", "must be a table or 'never', not bool"),
        ('restart.preset = "off"', "restart.preset", "must be 'never', not 'off'"),
        ("loop_detector = false", "loop_detector", "must be a table or 'off', not bool"),
        ("loop_detector.min_line_chars = 99", "loop_detector.min_line_chars", "long_line_chars 6"),
        ('loop_detector.preset = "x"', "loop_detector.preset", "unknown key"),
        ('executable = ""', "executable", "executable must not be empty"),
        ('extra_args = "-v"', "extra_args", "extra_args must be a sequence of words"),
        ('extra_args = ["--port", "1"]', "port", "server_cmd says --port 1, but port is 8081"),
        (
            'server_cmd = ["s"]',
            "model",
            "has no effect together with server_cmd: remove one of them",
        ),
        (
            "default_params.at = 2026-01-01",
            "default_params",
            "default_params['at'] must be JSON-serializable",
        ),
        ("normal_tools = []", "normal_tools", "cannot be set in a file; set it in the"),
        ("restart.recycle = { max_request = 1 }", "restart.recycle.max_request", "unknown key"),
        ("restart.recycle.max_requests = 0", "restart.recycle.max_requests", "max_requests must b"),
        ("restart.recycle = {}", "restart.recycle", "recycle needs one of"),
        ("restart.recycle = 7", "restart.recycle", "recycle must be a Recycle, not int: 7"),
    ],
)
def test_errors_name_file_line_and_key(tmp_path: Path, line: str, key: str, says: str) -> None:
    number = {"port": 3, "model": 4}.get(key, 5)  # of the key that has to go, mostly the last
    told = f"fleet.toml:{number}: workers.a.{key}: {says}"
    assert (refusal(tmp_path, f"{ONE}{line}\n") + "\n").startswith(told)


@pytest.mark.parametrize(
    ("text", "told"),
    [
        ("", "fleet.toml: no workers; each needs a table [workers.NAME]"),
        ("workers = 3\n", "fleet.toml:1: workers: must be a table, not int"),
        ("workers.a = 3\n", "fleet.toml:1: workers.a: must be a table, not int"),
        ("[worker.a]\n", "fleet.toml:1: worker: unknown key; did you mean 'workers'?"),
        ("defaults = 1\n", "fleet.toml:1: defaults: must be a table, not int"),
        ("slots = 1\n", "fleet.toml:1: slots: belongs into [defaults] or [workers.NAME]"),
        ("[defaults]\n\nport = 1\n", "fleet.toml:3: defaults.port: cannot be set in [defaults]"),
        ('\n[workers."a b"]\nport = 1\n', "fleet.toml:2: workers.'a b': host is missing"),
        ('[workers.a]\nhost = "x"\n', "fleet.toml:1: workers.a: port is missing"),
        (
            '[workers.a]\nhost = "x"\nport = 1\n',
            "fleet.toml:1: workers.a: either model (a GGUF file) or",
        ),
        (
            '[workers.a]\nserver_cmd = ["s"]\nhost = "x"\nport = 1\nexecutable = "e"\n',
            "workers.a.executable: has no",
        ),
        ('[workers.a]\nhost = "\udcff"\n', "utf-8"),
        (f"a = {'[' * 5000}", "fleet.toml: "),  # nested too deeply
        ("[workers.a]\nport = = 1\n", "fleet.toml: Invalid value (at line 2, column 8)"),
        (
            ONE + ONE.replace("workers.a", "workers.b"),
            "fleet.toml:7: workers.b.port: port 8081 is already used",
        ),
        (
            ONE + ONE.replace("workers.a", "workers.b").replace("127.0.0.1", "LocalHost"),
            "fleet.toml:7: workers.b.port: port 8081 is already used",
        ),
    ],
)
def test_a_file_that_makes_no_fleet(tmp_path: Path, text: str, told: str) -> None:
    assert told in refusal(tmp_path, text)


def test_a_wrong_default_is_named_where_it_stands(tmp_path: Path) -> None:
    text = f"[defaults]\nslots = 0\n\n[defaults.timeouts]\n# too long\nstop_grace_s = 1e12\n\n{ONE}"
    assert refusal(tmp_path, text).startswith(
        "fleet.toml:6: defaults.timeouts.stop_grace_s: stop_grace_s must be"
    )
    text = text.replace("1e12", "1")
    assert refusal(tmp_path, text).startswith("fleet.toml:2: defaults.slots: slots must be from 1")
    own = f"{text}slots = -1\n"
    assert refusal(tmp_path, own).startswith("fleet.toml:12: workers.a.slots: slots must be from 1")


@pytest.mark.parametrize(
    "line", ['api_key = "hunter2\\u0007"', 'env.HF_TOKEN = "hunter2\\u0000"', 'env = "hunter2"']
)
def test_a_secret_is_in_no_error(tmp_path: Path, line: str) -> None:
    assert "hunter2" not in refusal(tmp_path, f"{ONE}{line}\n")


def test_a_missing_file_is_an_os_error(tmp_path: Path) -> None:
    with pytest.raises(FileNotFoundError, match=r"nowhere\.toml"):
        load_config(tmp_path / "nowhere.toml")


# ---------------------------------------------------------------- lines

AWKWARD = '''\
# port = 1
a = """
port = 2
"""
[t]  # port = 3
list = [
    "port = 4",  # ]

    { port = 5 },
]
"quo.ted" = { x = 1, y = { z = 2 } }

# before it
d.e.f = 1
s = "preset"
[[many]]
port = 6
'''


@pytest.mark.parametrize(
    ("path", "line"),
    [
        (("a",), 2),
        (("t",), 5),
        (("t", "list"), 6),
        (("t", "quo.ted", "y", "z"), 11),
        (("t", "d", "e"), 14),
        (("t", "s", "as far as it goes"), 15),
        (("many",), 16),
        (("t", "port"), None),
        (("nowhere",), None),
        ((), None),
    ],
)
@pytest.mark.parametrize("newline", ["\n", "\r\n"])
def test_the_line_of_a_key(path: tuple[str, ...], line: int | None, newline: str) -> None:
    assert file._line_of(AWKWARD.replace("\n", newline), path) == line


def test_finding_a_line_asks_the_parser_seldom(monkeypatch: pytest.MonkeyPatch) -> None:
    text = "".join(f"[workers.w{number}]\nport = {number}\n" for number in range(1000))
    parse = Mock(wraps=tomllib.loads)
    monkeypatch.setattr(tomllib, "loads", parse)
    assert file._line_of(text, ("workers", "w700", "port")) == 1402
    assert parse.call_count < 20


# ---------------------------------------------------------------- memory


def test_caches_larger_than_the_memory_are_warned_of(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    two = f'{ONE}[workers.b]\nmodel = "m.gguf"\nhost = "127.0.0.1"\nport = 8082\n'
    monkeypatch.setattr(file, "memory_bytes", lambda: 12 << 30)
    with pytest.warns(
        UserWarning, match=r"fleet.toml: 2 servers may keep up to 16384 MiB .* has 12288 MiB"
    ):
        load(tmp_path, two)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        bounded = load(tmp_path, f"[defaults]\ncache_ram_mib = 1024\n{two}")
    assert bounded["b"].server_cmd[-2:] == ("--cache-ram", "1024")
