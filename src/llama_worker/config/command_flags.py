"""Warns of options of a llama-server command that break a promise of this library or cost memory
or time, and finds options that a build does not know. Pure."""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping, Sequence
from typing import TypeAlias

from msgspec import Struct

from llama_worker.config.command import (
    BATCH_FLAGS,
    BATCH_SIZE,
    SLOT_FLAGS,
    flag_of,
    flag_values,
    program_at,
)
from llama_worker.config.profiles import TimeoutProfile
from llama_worker.config.validation import did_you_mean

DEFAULT_CACHE_RAM_MIB = 8192  # of every server since October 2025
DEFAULT_BATCH_SIZE = 2048

_MODEL_FLAGS = (
    *("-m", "--model", "-mu", "--model-url", "-dr", "--docker-repo"),
    *("-hf", "-hfr", "--hf-repo", "-hff", "--hf-file"),
)
_MODEL_VARIABLES = (
    "LLAMA_ARG_MODEL",
    "LLAMA_ARG_MODEL_URL",
    "LLAMA_ARG_DOCKER_REPO",
    "LLAMA_ARG_HF_REPO",
)
_TIMEOUT_FLAGS = ("-to", "--timeout")
_CACHE_RAM_FLAGS = ("-cram", "--cache-ram")


# an option's flags, and the names of its values
_HELP_LINE = re.compile(r"(-[\w.-]+(?:, +-[\w.-]+)*)((?: [^\s-]\S*)*)(?:\s{2,}|$)")


class _UnsafeOption(Struct, frozen=True):
    """Flags and environment variables that break a promise of this library. `why` completes
    "server_cmd has FLAG: "."""

    flags: tuple[str, ...]
    why: str
    variables: tuple[str, ...] = ()
    off: str | None = None  # the value that turns it off
    negations: tuple[str, ...] = ()  # flags that turn it off if they come later
    among_slots: bool = False  # harmless with a single slot


_UNSAFE_OPTIONS = (
    _UnsafeOption(
        ("--tools", "-ag", "--agent", "--mcp-servers-config", "--mcp-servers-json"),
        "the server may start programs outside its own process tree, which outlive it; give the "
        "worker's tools as normal_tools",
        variables=(
            "LLAMA_ARG_TOOLS",
            "LLAMA_ARG_AGENT",
            "LLAMA_ARG_MCP_SERVERS_CONFIG",
            "LLAMA_ARG_MCP_SERVERS_JSON",
        ),
    ),
    _UnsafeOption(
        ("--sleep-idle-seconds",),
        "the server unloads its model when idle; the next request waits for the load, and "
        "may be taken for hung",
        off="-1",
    ),
    _UnsafeOption(("--log-prompts-dir",), "the server writes every prompt to disk"),
    _UnsafeOption(
        ("-kvu", "--kv-unified", "--kv-unified-per-slot"),
        "all slots share one context; requests that fill it together are all aborted, and one "
        "may fill all of it",
        variables=("LLAMA_ARG_KV_UNIFIED", "LLAMA_ARG_KV_UNIFIED_PER_SLOT"),
        negations=("-no-kvu", "--no-kv-unified"),
        among_slots=True,
    ),
    _UnsafeOption(
        ("--context-shift",),
        "a request that fills its context does not end; the server forgets the beginning of "
        "it and goes on",
        variables=("LLAMA_ARG_CONTEXT_SHIFT",),
        negations=("--no-context-shift",),
    ),
    _UnsafeOption(
        ("--slot-save-path",),
        "while a slot is saved, the server answers nothing else; it may be taken for hung",
    ),
    _UnsafeOption(
        ("-nocb", "--no-cont-batching"),
        "no prompt is read while another request generates; one that waits may be taken for hung",
        variables=("LLAMA_ARG_NO_CONT_BATCHING",),
        negations=("-cb", "--cont-batching"),
        among_slots=True,
    ),
    _UnsafeOption(
        ("--reuse-port",),
        "another process may listen on the same port, and receive the worker's requests",
        variables=("LLAMA_ARG_REUSE_PORT",),
    ),
    _UnsafeOption(
        ("--lora", "--lora-scaled", "--lora-init-without-apply"),
        "requests with different scales (`lora` among their params) are not computed side by side: "
        "one waits until the others have ended, and may be taken for hung; use one worker for each "
        "set of scales",
        among_slots=True,
    ),
)
_OFF_VALUES = ("0", "false", "off", "disabled")  # of an environment variable


def command_warnings(
    command: Sequence[str], env: Mapping[str, str], timeouts: TimeoutProfile, slots: int
) -> list[str]:
    """Lines for the user: what in a server's command or `env` breaks a promise of this library."""
    lines = []
    for option in _UNSAFE_OPTIONS:
        named = _given(option, command, env)
        if named and not (option.among_slots and slots == 1):
            lines.append(f"server_cmd has {', '.join(named)}: {option.why}")
    if program_at(command) is not None and not _names_model(command, env):
        lines.append(
            "server_cmd names no model: llama-server then runs as a router, which starts a server "
            "of its own for each model; give --model, and use one worker per model"
        )
    if slots > 1 and not _sets_slots(command, env):
        lines.append(
            "server_cmd has no --parallel: the server opens four slots that share one context, "
            "even with -no-kvu; requests that fill it together are all aborted; give "
            f"--parallel {slots}"
        )
    lines += _timeout_warnings(command, env, timeouts)
    return lines


def cache_ram_mib(command: Sequence[str], env: Mapping[str, str]) -> float:
    """MiB of memory that the server may use to keep prompts: infinite without a limit, the server's
    default if not given."""
    try:
        limit = int(_last_value(command, _CACHE_RAM_FLAGS, env.get("LLAMA_ARG_CACHE_RAM", "")))
    except ValueError:  # not given, or not a number, which the server refuses
        return DEFAULT_CACHE_RAM_MIB
    return limit if limit >= 0 else float("inf")


def commanded_n_ctx(command: Sequence[str], env: Mapping[str, str], slots: int) -> int | None:
    """The tokens of context per slot that the command asks for; None if it leaves that to the
    server."""
    tokens = _last_value(command, ("-c", "--ctx-size"), env.get("LLAMA_ARG_CTX_SIZE", ""))
    return int(tokens) // slots if tokens.isdecimal() and int(tokens) > 0 else None


def batch_warning(command: Sequence[str], env: Mapping[str, str]) -> str | None:
    """A line for the user if batches are larger than needed: others wait for them. Else None."""
    size_text = _last_value(command, BATCH_FLAGS, env.get("LLAMA_ARG_BATCH", ""))
    size = int(size_text) if size_text.isdecimal() else DEFAULT_BATCH_SIZE
    if size <= BATCH_SIZE:
        return None
    return (
        f"the server reads prompts in batches of {size} tokens: other requests' tokens, cancels "
        f"and progress reports wait until a batch is done; set --batch-size {BATCH_SIZE}, which is "
        "hardly slower on a CPU"
    )


def memory_warning(limits: Mapping[str, float], memory_bytes: int) -> str | None:
    """A line for the user if the servers' prompt caches (`limits`: MiB by worker) may together
    outgrow the machine's memory. Else None."""
    total = sum(limits.values())
    memory_mib = memory_bytes >> 20
    if total <= memory_mib:
        return None
    shown = ", ".join(f"{name}: {limit:g} MiB" for name, limit in limits.items())
    what = "a server" if len(limits) == 1 else f"{len(limits)} servers"
    return (
        f"{what} may keep up to {total:g} MiB of prompts in memory ({shown}), besides the models; "
        f"this machine has {memory_mib} MiB: set cache_ram_mib (--cache-ram; a server's default is "
        f"{DEFAULT_CACHE_RAM_MIB} MiB)"
    )


# ---------------------------------------------------------------- a command and its build's --help


KnownFlags: TypeAlias = Mapping[str, int]
"""The flags of a build, with the number of words that follow each."""


def read_help(text: str) -> KnownFlags | None:
    """The flags in the output of `llama-server --help`; None if it lists none."""
    counts: dict[str, int] = {}
    for line in text.splitlines():
        match = _HELP_LINE.match(line)
        if match:
            flags, hint = match.groups()
            # "<tensor name pattern>=<buffer type>,..." is one word
            words_count = 1 if "<" in hint else len(hint.split())
            counts |= dict.fromkeys(re.split(", +", flags), words_count)
    return counts or None


def program_of(command: Sequence[str]) -> str:
    """The llama-server of the command, also after a wrapper (`nice`, `numactl`); else the first
    word."""
    at = program_at(command)
    return command[at or 0]


def unknown_flags(command: Sequence[str], known: KnownFlags) -> list[str]:
    """Words that the build does not know, each with what may have been meant; [] if no word of the
    command names a llama-server."""
    at = program_at(command)
    words = list(command[at + 1 :]) if at is not None else []
    unknown = []
    while words:
        word = words.pop(0)
        is_flag = word.startswith("-")
        flag, equals, _ = flag_of(word).partition("=")
        if is_flag and equals:
            word = word.partition("=")[0] + "=..."  # the value may be a key
        if flag not in known:
            meant = did_you_mean(flag, known) if is_flag else None
            unknown.append(f"{word}: {meant}" if meant else word)
            if is_flag and not equals and words and not words[0].startswith("-"):
                del words[0]  # its value
        elif equals:
            unknown.append(f"{word}: the value must be a word of its own")
        else:
            del words[: known[flag]]
    return unknown


# ---------------------------------------------------------------- parts


def _last_value(command: Sequence[str], flags: tuple[str, ...], variable: str = "") -> str:
    """The value that the server uses: that of the last flag, else `variable`; "" without both."""
    return ([variable] + [value for _, value in flag_values(command, flags)])[-1]


def _given(option: _UnsafeOption, command: Sequence[str], env: Mapping[str, str]) -> list[str]:
    """The flags and variables of the option that are in effect."""
    given = flag_values(command, (*option.flags, *option.negations))
    if given and given[-1][0] in option.negations:
        return []  # a flag overrides a variable
    named = [flag for flag, value in given if flag not in option.negations and value != option.off]
    values = {name: env.get(name, "") for name in option.variables}
    return named + [
        name for name, value in values.items() if value and value.lower() not in _OFF_VALUES
    ]


def _sets_slots(command: Sequence[str], env: Mapping[str, str]) -> bool:
    """Whether the number of slots is set. True for another program, too: it may pass the flag."""
    said = flag_values(command, SLOT_FLAGS) or env.get("LLAMA_ARG_N_PARALLEL")
    return bool(said) or program_at(command) is None


def _names_model(command: Sequence[str], env: Mapping[str, str]) -> bool:
    flags = {flag_of(word) for word in command} - {"--spec-default"}
    by_default = any(flag.endswith("-default") for flag in flags)
    return bool(by_default or flag_values(command, _MODEL_FLAGS)) or any(
        env.get(name) for name in _MODEL_VARIABLES
    )


def _timeout_warnings(
    command: Sequence[str], env: Mapping[str, str], timeouts: TimeoutProfile
) -> Iterator[str]:
    limits = {
        name: getattr(timeouts, name)
        for name in ("prefill_liveness_timeout_s", "idle_stream_timeout_s", "silent_work_timeout_s")
    }
    by_variable = [("LLAMA_ARG_TIMEOUT", env.get("LLAMA_ARG_TIMEOUT", ""))]
    for flag, value in flag_values(command, _TIMEOUT_FLAGS) or by_variable:
        longer = [
            name
            for name, limit_s in limits.items()
            if value.isdecimal() and (limit_s or 1e9) > int(value)
        ]
        if longer:
            yield (
                f"server_cmd has {flag} {value}, shorter than the profile's {', '.join(longer)}: "
                "the server may close a connection for which the worker still waits"
            )
