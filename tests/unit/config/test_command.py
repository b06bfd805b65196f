"""A llama-server command: built from parts, held against the config, shown without its keys."""

from functools import partial
from typing import Any

import pytest

from llama_worker import ConfigError, WorkerConfig
from llama_worker.config.command import flag_values, llama_server_cmd, masked_server_cmd
from llama_worker.errors import MASK
from tests.unit.config.cases import config, refuses

COMMAND = partial(llama_server_cmd, "m.gguf", host="h", port=1, slots=1)


@pytest.mark.parametrize(
    ("words", "told", "field", "value"),
    [
        ("--host 0.0.0.0", "--host 0.0.0.0", "host", "'127.0.0.1'"),
        ("--host=10.0.0.1", "--host 10.0.0.1", "host", "'127.0.0.1'"),
        ("--port", "--port", "port", "9001"),
        ("--port 9001 --port=9002", "--port 9002", "port", "9001"),
        ("--port 9001 --fim-qwen-7b-spec", "--fim-qwen-7b-spec's --port 8012", "port", "9001"),
        (
            "--parallel 1 --gpt_oss_20b_default --port 9001",
            "--gpt-oss-20b-default's --parallel 2",
            *("slots", "1"),
        ),
        *((words, words, "slots", "1") for words in ("-np 4", "--n-parallel 4", "--parallel one")),
    ],
)
def test_a_command_that_contradicts_the_config_is_refused(
    words: str, told: str, field: str, value: str
) -> None:
    make = partial(config, server_cmd=("s.sh", *words.split()))
    refuses(make, "server_cmd", ConfigError, told, field, value)


@pytest.mark.parametrize(
    ("name", "value", "field", "flag"),
    [
        ("HOST", "0.0.0.0", "host", "--host 127.0.0.1"),
        ("PORT", "9002", "port", "--port 9001"),
        ("N_PARALLEL", "4", "slots", "--parallel 1"),
    ],
)
def test_a_variable_that_contradicts_the_config_is_refused(
    name: str, value: str, field: str, flag: str
) -> None:
    env = {f"LLAMA_ARG_{name}": value}
    make = partial(config, server_cmd=("s.sh",), env=env)
    refuses(make, "env", ConfigError, f"env says LLAMA_ARG_{name} {value}, but {field} is")
    config(server_cmd=("s.sh", *flag.split()), env=env)  # the flag counts
    config(server_cmd=("s.sh",), env={f"LLAMA_ARG_{name}": ""})


@pytest.mark.parametrize(
    ("host", "words"),
    [
        ("127.0.0.1", ""),
        ("127.0.0.1", "--host localhost"),
        ("localhost", "--host=127.0.0.1 --port=9001 -np 1"),
        ("127.0.0.1", "--port 9002 --port 9001"),  # the server takes the last
        ("127.0.0.1", "--gpt-oss-20b-default --port 9001 -np 1"),
        ("::1", "--host 0:0:0:0:0:0:0:1"),
        ("[::1]", "--host ::1"),
        ("GPU7.local", "--host gpu7.local"),
    ],
)
def test_a_command_may_say_the_same_otherwise(host: str, words: str) -> None:
    command = ("s.sh", *words.split())
    assert config(host=host, server_cmd=command).server_cmd == command


@pytest.mark.parametrize(
    ("words", "values"),
    [
        ("numactl -m 0 llama-server -m m.gguf", ["m.gguf"]),
        ("numactl -m 0 ./serve.sh -m m.gguf", ["m.gguf"]),
        ("numactl -m 0 ./serve.sh", []),
        ("python3 -m my_server --model m.gguf", ["m.gguf"]),
        ("python3 -m my_server -m m.gguf", ["m.gguf"]),
    ],
)
def test_a_wrappers_short_flags_are_not_the_servers(words: str, values: list[str]) -> None:
    found = flag_values(words.split(), ("-m", "--model"))
    assert [value for _, value in found] == values


def test_a_built_command_ends_in_extra_args() -> None:
    built = "llama-server --model m.gguf --host h --port 1 --parallel 1 --cache-ram 0 -c 4096"
    command = COMMAND(cache_ram_mib=0, batch_size=None, extra_args=["-c", "4096"])
    assert command == tuple(built.split())


@pytest.mark.parametrize(
    ("given", "words"),
    [
        ({}, ["--batch-size", "512"]),
        ({"batch_size": 64}, ["--batch-size", "64"]),
        ({"batch_size": None, "cache_ram_mib": -1}, ["--cache-ram", "-1"]),
        ({"batch_size": None}, []),
        ({"extra_args": ["-b", "256"]}, ["-b", "256"]),
        ({"extra_args": ["--batch-size=256"], "batch_size": 64}, ["--batch-size=256"]),
        ({"extra_args": ["-ub", "2048"]}, ["-ub", "2048"]),  # the server cuts it down to -b
        ({"extra_args": ["--ubatch-size", "1024"]}, ["--ubatch-size", "1024"]),
    ],
)
def test_a_command_has_small_batches_unless_told_otherwise(
    given: dict[str, Any], words: list[str]
) -> None:
    assert COMMAND(**given) == (*COMMAND(batch_size=None), *words)


@pytest.mark.parametrize(
    ("host", "reached_at"),
    [
        ("0.0.0.0", "127.0.0.1"),
        ("::", "::1"),
        ("[::1]", "::1"),
        ("10.0.0.7", "10.0.0.7"),
        ("gpu7", "gpu7"),
    ],
)
def test_wildcard_hosts_are_reached_at_the_loopback(host: str, reached_at: str) -> None:
    assert config(host=host, server_cmd=("s",)).connect_host == reached_at


def test_an_address_in_brackets_is_listened_at() -> None:
    made = WorkerConfig.for_model("m.gguf", host="[::1]", port=9)
    assert made.host == "::1"
    assert made.server_cmd[3:5] == ("--host", "::1")


@pytest.mark.parametrize("wrong", [None, 7, b"/models/small.gguf"])
@pytest.mark.parametrize("field", ["model", "executable"])
def test_what_is_no_path_is_refused(field: str, wrong: Any) -> None:
    given = {"model": "m.gguf", "host": "h", "port": 9, "slots": 1, field: wrong}
    for make in (llama_server_cmd, WorkerConfig.for_model):
        refuses(partial(make, **given), field, TypeError, "must be a path")


@pytest.mark.parametrize(
    ("field", "wrong", "error", "says"),
    [
        ("host", "", ConfigError, "empty"),
        ("port", "9", TypeError, "an int, not str"),
        ("port", 65536, ConfigError, "from 1 to 65535"),
        ("slots", 0, ConfigError, "from 1 to 256"),
    ],
)
def test_a_command_is_built_of_good_values(
    field: str, wrong: Any, error: type[Exception], says: str
) -> None:
    given = {"host": "h", "port": 9, "slots": 1, field: wrong}
    refuses(partial(llama_server_cmd, "m.gguf", **given), field, error, says)


@pytest.mark.parametrize(
    ("words", "api_key", "shown"),
    [
        ("--api-key sesame -c 9", None, f"--api-key {MASK} -c 9"),
        ("--api-key=sesame", None, f"--api-key={MASK}"),
        ("--hf-token sesame", None, f"--hf-token {MASK}"),
        ("-hft sesame", None, f"-hft {MASK}"),
        ("--hf_token sesame", None, f"--hf_token {MASK}"),  # the server takes both
        ("--api_key=sesame", None, f"--api_key={MASK}"),
        ('--mcp-servers-json {"a":{"env":{"TOKEN":"sesame"}}}', None, f"--mcp-servers-json {MASK}"),
        ("--header Bearer:sesame", "sesame", f"--header Bearer:{MASK}"),
        ("env HF_TOKEN=sesame A=b llama-server", None, f"env HF_TOKEN={MASK} A=b llama-server"),
        ("docker run -e api_key=sesame image", None, f"docker run -e api_key={MASK} image"),
        ("llama-server TOKEN=2", None, "llama-server TOKEN=2"),  # the value of an option
    ],
)
def test_keys_are_masked_in_the_command(words: str, api_key: str | None, shown: str) -> None:
    assert masked_server_cmd(words.split(), api_key) == tuple(shown.split())


def test_host_port_and_slots_are_written_once() -> None:
    given: dict[str, Any] = {"port": 9, "slots": 2, "extra_args": ["-c", "8"], "cache_ram_mib": 0}
    made = WorkerConfig.for_model("/models/small.gguf", log_lines=7, **given)
    assert (made.name, made.host) == ("small", "127.0.0.1")
    assert (made.port, made.slots, made.log_lines) == (9, 2, 7)
    assert made.server_cmd == llama_server_cmd("/models/small.gguf", host="127.0.0.1", **given)
