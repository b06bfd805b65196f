"""Builds a llama-server command, checks it against its config, and masks its secrets. Pure."""

from __future__ import annotations

import ipaddress
import os
import re
from collections.abc import Iterable, Mapping, Sequence
from functools import partial

from llama_worker.config.validation import checked_int, checked_path, checked_str, optional, shown
from llama_worker.errors import MASK, ConfigError, masked

PROGRAM = "llama-server"
SLOT_FLAGS = ("-np", "--parallel", "--n-parallel")
BATCH_FLAGS = ("-b", "--batch-size")
_UBATCH_FLAGS = ("-ub", "--ubatch-size")
BATCH_SIZE = 512  # the server's default for --ubatch-size, the tokens that it computes at once
_TWO_WORDS = re.compile(r"(--?[a-zA-Z][\w-]*)\s+(\S.*)", re.DOTALL)  # no shell would split them
# Flags that set several options, at their place in the command (b11434).
_FIM = {"--hf-repo": "ggml-org", "--port": "8012", "--batch-size": "1024", "--ctx-size": "0"}
_GPT_OSS = {"--hf-repo": "ggml-org", "--port": "8013", "--batch-size": "32768", "--parallel": "2"}
_VISION = {"--hf-repo": "ggml-org", "--port": "8014", "--ctx-size": "0"}
_EMBEDDING = {"--hf-repo": "ggml-org", "--port": "8011", "--batch-size": "2048", "--parallel": "32"}
_PRESETS = {
    "--embd-gemma-default": {**_EMBEDDING, "--ctx-size": "65536"},
    "--fim-qwen-1.5b-default": _FIM,
    "--fim-qwen-3b-default": _FIM,
    "--fim-qwen-7b-default": _FIM,
    "--fim-qwen-7b-spec": _FIM,
    "--fim-qwen-14b-spec": _FIM,
    "--fim-qwen-30b-default": _FIM,
    "--gpt-oss-20b-default": {**_GPT_OSS, "--ctx-size": "262144"},
    "--gpt-oss-120b-default": {**_GPT_OSS, "--ctx-size": "262144"},
    "--vision-gemma-4b-default": _VISION,
    "--vision-gemma-12b-default": _VISION,
}
# the environments and headers of MCP servers mostly hold a token
_SECRET_FLAGS = ("--api-key", "-hft", "--hf-token", "--mcp-servers-json")
SECRET_VARIABLE = re.compile("KEY|TOKEN|SECRET|PASSW|CREDENTIAL", re.IGNORECASE)
checked_port = partial(checked_int, at_least=1, at_most=65535)
checked_slots = partial(checked_int, at_least=1, at_most=256)  # LLAMA_MAX_SEQ of b11434


def llama_server_cmd(
    model: str | os.PathLike[str],
    *,
    host: str,
    port: int,
    slots: int,
    executable: str | os.PathLike[str] = "llama-server",
    extra_args: Iterable[str] = (),
    cache_ram_mib: int | None = None,
    batch_size: int | None = BATCH_SIZE,
) -> tuple[str, ...]:
    """A command for `WorkerConfig.server_cmd` that agrees with its host, port and slots;
    `WorkerConfig.for_model` makes both at once.

    An `executable` of `llama-server` is looked up where the server is started: in LLAMA_SERVER, on
    the PATH, in this Python environment.

    It passes `--parallel`: without it a server opens four slots that share one context (b11434).
    `batch_size` is how many prompt tokens the server processes at a time: another request's next
    token and the handling of a cancel wait that long. None leaves it to the server, whose default
    is 2048; batch sizes (-b, -ub) in `extra_args` win. `cache_ram_mib` limits the memory in which
    the server keeps prompts (0: none, -1: no limit); None leaves it to the server, whose default of
    8192 MiB is too much if several servers share a machine.
    """
    optional(checked_int, "cache_ram_mib", cache_ram_mib, at_least=-1)
    optional(checked_int, "batch_size", batch_size, at_least=1)
    checked_str("host", host, empty=False)
    checked_port("port", port)
    checked_slots("slots", slots)
    if isinstance(extra_args, Iterable) and not isinstance(extra_args, (str, bytes)):
        extra_args = tuple(extra_args)
    extra_words = checked_words("extra_args", extra_args, may_be_empty=True)
    if flag_values((PROGRAM, *extra_words), (*BATCH_FLAGS, *_UBATCH_FLAGS)):
        batch_size = None
    return (
        checked_path("executable", executable),
        *("--model", checked_path("model", model)),
        *("--host", without_brackets(host)),
        *("--port", str(port)),
        *("--parallel", str(slots)),
        *(("--batch-size", str(batch_size)) if batch_size is not None else ()),
        *(("--cache-ram", str(cache_ram_mib)) if cache_ram_mib is not None else ()),
        *extra_words,
    )


def masked_server_cmd(server_cmd: Sequence[str], api_key: str | None) -> tuple[str, ...]:
    """The command with its keys masked, safe to show; also those that a wrapper puts into the
    environment (`env HF_TOKEN=...`). Pure."""
    words: list[str] = []
    wrapper_words = len(server_cmd[: program_at(server_cmd)])
    for index, word in enumerate(server_cmd):
        name, equals, _ = word.partition("=")
        is_variable = index < wrapper_words and name.isidentifier()
        is_secret = (is_variable and SECRET_VARIABLE.search(name)) or flag_of(name) in _SECRET_FLAGS
        if words and flag_of(words[-1]) in _SECRET_FLAGS:
            words.append(MASK)
        elif equals and is_secret:
            words.append(f"{name}={MASK}")
        else:
            words.append(masked(word, api_key))
    return tuple(words)


def checked_words(name: str, value: object, *, may_be_empty: bool = False) -> tuple[str, ...]:
    """Check a command or a part of one; returns a copy. Raises TypeError or ConfigError."""
    if isinstance(value, str):
        masked_words = " ".join(masked_server_cmd(value.split(), None))
        raise TypeError(f"{name} must be a sequence of words, not one str: {masked_words!r}")
    if isinstance(value, bytes) or not isinstance(value, Sequence):
        raise TypeError(f"{name} must be a sequence of str, not {type(value).__name__}")
    if not may_be_empty and (not value or value[0] == ""):
        raise ConfigError(f"{name} must begin with the executable, not be {shown(value[:1])}")
    for index, word in enumerate(value):
        secret = index > 0 and flag_of(value[index - 1]) in _SECRET_FLAGS
        checked_str(f"{name}[{index}]", word, nul=False, secret=secret)
        if parts := _TWO_WORDS.fullmatch(word):
            option, given = parts[1], MASK if flag_of(parts[1]) in _SECRET_FLAGS else parts[2]
            raise ConfigError(
                f"{name}[{index}] holds an option and its value, {f'{option} {given}'!r}: split it "
                f"into two words, {option!r}, {given!r}"
            )
    return tuple(value)


def check_command(
    command: Sequence[str], env: Mapping[str, str], *, host: str, port: int, slots: int
) -> None:
    """Raises ConfigError if the command, or else `env`, sets another host, port or number of slots:
    the last flag counts."""
    for name, flags, variable, value in (
        ("host", ("--host",), "LLAMA_ARG_HOST", host),
        ("port", ("--port",), "LLAMA_ARG_PORT", port),
        ("slots", SLOT_FLAGS, "LLAMA_ARG_N_PARALLEL", slots),
    ):
        for source, option, given in _settings(command, env, flags, variable)[-1:]:
            if canonical(given) != canonical(str(value)):
                raise ConfigError(
                    f"{source} says {option} {given}, but {name} is {value!r}: make them agree"
                )


def _settings(
    command: Sequence[str], env: Mapping[str, str], flags: tuple[str, ...], variable: str
) -> list[tuple[str, str, str]]:
    """Where an option is set, by which flag or variable, and to what; a later one counts more."""
    by_env = [("env", variable, env[variable])] if env.get(variable) else []
    return by_env + [("server_cmd", *setting) for setting in flag_values(command, flags)]


def ip_address_of(host: str) -> str | None:
    """The IP address in its canonical form; None if `host` is a name."""
    try:
        return str(ipaddress.ip_address(without_brackets(host)))
    except ValueError:
        return None


def without_brackets(host: str) -> str:
    """The host without the brackets of an IPv6 URL: a server cannot listen on those (b11434)."""
    return host.removeprefix("[").removesuffix("]")


def program_at(command: Sequence[str]) -> int | None:
    """Index of the llama-server's name, which a wrapper (`numactl`, `nice`) may precede; None if
    there is none."""
    return next(
        (i for i, word in enumerate(command) if os.path.basename(word).startswith(PROGRAM)), None
    )


def flag_values(command: Sequence[str], flags: tuple[str, ...]) -> list[tuple[str, str]]:
    """Each of the flags that the command gives its server, with its value: what follows `=`, or the
    next word ("" if there is none). A flag that a preset sets is named `--PRESET's --port`."""
    values = []
    words = command[_flags_begin_at(command) :]
    for index, word in enumerate(words):
        given, equals, value = word.partition("=")
        if (flag := flag_of(given)) in flags:
            values.append((flag, value if equals else "".join(words[index + 1 : index + 2])))
        preset = _PRESETS.get(flag, {})
        values += [(f"{flag}'s {name}", preset[name]) for name in flags if name in preset]
    return values


def _flags_begin_at(command: Sequence[str]) -> int:
    """Index from which on the flags are the server's: those of a wrapper (`numactl -m 0`) precede
    it."""
    program = program_at(command)
    if program is not None:
        return program
    scripts = (index for index, word in enumerate(command) if word.endswith(".sh"))
    runs_module = os.path.basename(command[0]).startswith("python") and "-m" in command[1:2]
    return next(scripts, 2 if runs_module else 0)


def flag_of(word: str) -> str:
    """The flag as the server reads it: in a long flag, `_` counts as `-` (b11434)."""
    return word.replace("_", "-") if word.startswith("--") else word


def canonical(value: str) -> str:
    """The same text for all spellings of a host; a number only loses white space around it."""
    value = value.strip().lower()
    return ip_address_of(value) or ("127.0.0.1" if value == "localhost" else value)
