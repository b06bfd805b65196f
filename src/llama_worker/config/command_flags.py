"""Warns of options of a llama-server command that break a promise of this library or cost memory
or time, and finds options that a build does not know. Pure."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from typing import Literal, TypeAlias

from msgspec import Struct

from llama_worker.config.command import (
    BATCH_FLAGS,
    BATCH_SIZE,
    SLOT_FLAGS,
    flag_of,
    flag_values,
    program_at,
)
from llama_worker.config.validation import did_you_mean

DEFAULT_CACHE_RAM_MIB = 8192  # of every server since October 2025
DEFAULT_BATCH_SIZE = 2048

# an option's flags, and the names of its values
_HELP_LINE = re.compile(r"(-[\w.-]+(?:, +-[\w.-]+)*)((?: [^\s-]\S*)*)(?:\s{2,}|$)")


class _Option(Struct, frozen=True):
    """An option of llama-server. It is in effect if it has a value ("set"), or as a switch if that
    is "on" or "off"."""

    flags: tuple[str, ...]
    variable: str = ""
    when: Literal["set", "on", "off"] = "set"
    unset: str = ""  # a value as good as none
    negations: tuple[str, ...] = ()  # flags that turn a switch off


def _switch(name: str, when: Literal["on", "off"], *short: str) -> _Option:
    """The switch `--name`, which `--no-name` turns off. `short`: other names of the two."""
    variable = f"LLAMA_ARG_{name.upper().replace('-', '_')}"
    negations = (f"--no-{name}", *short[1:])
    return _Option((f"--{name}", *short[:1]), variable, when, negations=negations)


class _Risk(Struct, frozen=True):
    """Options that break a promise of this library. `why` completes "server_cmd has FLAG: "."""

    why: str
    options: tuple[_Option, ...]
    only: Literal["always", "several slots", "online"] = "always"


_SWITCH_VALUES = {"on": ("on", "enabled", "true", "1"), "off": ("off", "disabled", "false", "0")}
_CACHE_RAM = _Option(("-cram", "--cache-ram"), "LLAMA_ARG_CACHE_RAM")
_CTX_SIZE = _Option(("-c", "--ctx-size"), "LLAMA_ARG_CTX_SIZE")
_BATCH_SIZE = _Option(BATCH_FLAGS, "LLAMA_ARG_BATCH")
_PORT = _Option(("--port",), "LLAMA_ARG_PORT")
_SLOTS = _Option(SLOT_FLAGS, "LLAMA_ARG_N_PARALLEL", unset="-1")
_SKIP_CHAT_PARSING = _switch("skip-chat-parsing", "on")
_KV_UNIFIED = _switch("kv-unified", "on", "-kvu", "-no-kvu")
_OFFLINE = _Option(("--offline",), "LLAMA_ARG_OFFLINE", "on")
_HF_REPO = _Option(("-hf", "-hfr", "--hf-repo"), "LLAMA_ARG_HF_REPO")
_MODEL_URL = _Option(("-mu", "--model-url"), "LLAMA_ARG_MODEL_URL")
_DOCKER_REPO = _Option(("-dr", "--docker-repo"), "LLAMA_ARG_DOCKER_REPO")
# with none of these a server is a router, even if it has a --model-url (b11434)
_MODELS = (_Option(("-m", "--model"), "LLAMA_ARG_MODEL"), _HF_REPO, _DOCKER_REPO)

_RISKS = (
    _Risk(
        "the server may start programs outside its own process tree, which outlive it; give the "
        "worker's tools as normal_tools",
        (
            _Option(("--tools",), "LLAMA_ARG_TOOLS"),
            _switch("agent", "on", "-ag", "-no-ag"),
            _Option(("--mcp-servers-config",), "LLAMA_ARG_MCP_SERVERS_CONFIG"),
            _Option(("--mcp-servers-json",), "LLAMA_ARG_MCP_SERVERS_JSON"),
        ),
    ),
    _Risk(
        "the server leaves tool calls in the text, where only those in <tool_call> tags are found: "
        "tools and exit tools may not work",
        (_SKIP_CHAT_PARSING,),
    ),
    _Risk(
        "the server reads the whole prompt again in every turn", (_switch("cache-prompt", "off"),)
    ),
    _Risk(
        "the server unloads its model when idle; the next request waits for the load, and may be "
        "taken for hung; a long prompt that comes during the unloading may crash the server",
        (_Option(("--sleep-idle-seconds",), unset="-1"),),
    ),
    _Risk("the server writes every prompt to disk", (_Option(("--log-prompts-dir",)),)),
    _Risk(
        "all slots share one context; requests that fill it together are all aborted, and one "
        "may fill all of it",
        (_KV_UNIFIED,),
        "several slots",
    ),
    _Risk(
        "a request that fills its context does not end; the server forgets the beginning of "
        "it and goes on",
        (_switch("context-shift", "on"),),
    ),
    _Risk(
        "while a slot is saved, the server answers nothing else; it may be taken for hung",
        (_Option(("--slot-save-path",), "LLAMA_ARG_SLOT_SAVE_PATH"),),
    ),
    _Risk(
        "no prompt is read while another request generates; one that waits may be taken for hung",
        (_switch("cont-batching", "off", "-cb", "-nocb"),),
        "several slots",
    ),
    _Risk(
        "only the server's slots show a livelock, a lost request or a stuck task queue: without "
        "them it is found far later, while the server computes only by silent_work_timeout_s",
        (_Option(("--slots",), "LLAMA_ARG_ENDPOINT_SLOTS", when="off", negations=("--no-slots",)),),
    ),
    _Risk(
        "the work of other machines is not seen: while they compute, or receive a model over a "
        "slow link, the server may be taken for hung; raise idle_stream_timeout_s and "
        "prefill_liveness_timeout_s above the time of a batch, suspect_after_s above that of a "
        "token, startup_timeout_s above that of the load",
        (_Option(("--rpc",), "LLAMA_ARG_RPC"),),
    ),
    _Risk(
        "another process may listen on the same port, and receive the worker's requests",
        (_Option(("--reuse-port",), "LLAMA_ARG_REUSE_PORT", "on"),),
    ),
    _Risk(
        "requests with different scales (`lora` among their params) are not computed side by side: "
        "one waits until the others have ended, and may be taken for hung; use one worker for each "
        "set of scales",
        (
            _Option(("--lora",)),
            _Option(("--lora-scaled",)),
            _Option(("--lora-init-without-apply",), when="on"),
        ),
        "several slots",
    ),
    _Risk(
        "the server asks the network at each start; where a firewall drops packets, that takes "
        "longer than startup_timeout_s allows by default; add --offline once all is downloaded, "
        "or raise startup_timeout_s",
        (
            _HF_REPO,
            _MODEL_URL,
            _Option(("-mmu", "--mmproj-url"), "LLAMA_ARG_MMPROJ_URL"),
            _Option(
                ("-hfd", "-hfrd", "--hf-repo-draft", "--spec-draft-hf"),
                "LLAMA_ARG_SPEC_DRAFT_HF_REPO",
            ),
        ),
        "online",
    ),
    _Risk(
        "the server asks the network at each start, even with --offline, and ends without an "
        "answer; name the downloaded file with --model instead",
        (_DOCKER_REPO,),
    ),
)
_NO_MODEL = (
    "server_cmd names no model: llama-server then runs as a router, which starts a server of its "
    "own for each model; give --model, and use one worker per model"
)
_NO_PORT = (
    "server_cmd has no --port: the server listens on 8080, or from b11549 on 9931, whatever the "
    "worker's port is; give --port"
)
_NO_SLOTS = (
    "server_cmd has no --parallel: the server opens four slots that share one context, even with "
    "-no-kvu; requests that fill it together are all aborted; give --parallel "
)


def command_warnings(command: Sequence[str], env: Mapping[str, str], slots: int) -> list[str]:
    """Lines for the user: what in a server's command or `env` breaks a promise of this library."""
    has_model = any(_in_effect(option, command, env) for option in _MODELS)
    applies = {
        "always": True,
        "several slots": slots > 1,
        "online": has_model and not _in_effect(_OFFLINE, command, env),
    }
    lines = []
    for risk in _RISKS:
        named = [name for option in risk.options if (name := _in_effect(option, command, env))]
        if named and applies[risk.only]:
            lines.append(f"server_cmd has {', '.join(named)}: {risk.why}")
    if program_at(command) is None:
        return lines  # another program may pass the flags that are missing here
    if not has_model:
        lines.append(_NO_MODEL)
    if not _in_effect(_PORT, command, env):
        lines.append(_NO_PORT)
    if slots > 1 and not _in_effect(_SLOTS, command, env):
        lines.append(f"{_NO_SLOTS}{slots}")
    return lines


def parses_chats(command: Sequence[str], env: Mapping[str, str]) -> bool:
    """Whether the command has a server take reasoning and calls out of the text, as by default;
    False for a script, which may not."""
    skips = _in_effect(_SKIP_CHAT_PARSING, command, env)
    return not skips and program_at(command) is not None


def downloads_model(command: Sequence[str], env: Mapping[str, str]) -> bool:
    """Whether the server downloads its --model if there is no such file (b11434)."""
    return bool(_in_effect(_MODEL_URL, command, env)) and not _in_effect(_OFFLINE, command, env)


def cache_ram_mib(command: Sequence[str], env: Mapping[str, str]) -> float:
    """MiB of memory that the server may use to keep prompts: infinite without a limit, the server's
    default if not given."""
    try:
        limit = int(_setting(_CACHE_RAM, command, env)[1])
    except ValueError:  # not given, or not a number, which the server refuses
        return DEFAULT_CACHE_RAM_MIB
    return limit if limit >= 0 else float("inf")


def commanded_n_ctx(command: Sequence[str], env: Mapping[str, str], slots: int) -> int | None:
    """The tokens of context per slot that the command asks for; None if it leaves that to the
    server."""
    _, tokens = _setting(_CTX_SIZE, command, env)
    return int(tokens) // slots if tokens.isdecimal() and int(tokens) > 0 else None


def contexts_count(command: Sequence[str], env: Mapping[str, str], slots: int) -> int:
    """How many contexts of the model's length a server takes that is not told the size: one for
    each slot, unless the slots share one, as they do without --parallel (b11434)."""
    is_shared = _in_effect(_KV_UNIFIED, command, env) or not _in_effect(_SLOTS, command, env)
    return 1 if is_shared else slots


def batch_tokens(command: Sequence[str], env: Mapping[str, str]) -> int | None:
    """How many tokens the server computes at most in one batch; None if the command does not say
    so: a script, or a file of options, may."""
    _, tokens = _setting(_BATCH_SIZE, command, env)
    return int(tokens) if tokens.isdecimal() and int(tokens) > 0 else None


def batch_warning(command: Sequence[str], env: Mapping[str, str]) -> str | None:
    """A line for the user if batches are larger than needed: others wait for them. Else None."""
    size = batch_tokens(command, env)
    if size is None and program_at(command) is not None:
        size = DEFAULT_BATCH_SIZE
    if size is None or size <= BATCH_SIZE:
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


def _in_effect(option: _Option, command: Sequence[str], env: Mapping[str, str]) -> str:
    """The flag or variable that puts the option into effect; "" if none does."""
    name, value = _setting(option, command, env)
    if option.when == "set":
        return name if value not in ("", option.unset) else ""
    return name if value in _SWITCH_VALUES[option.when] else ""


def _setting(option: _Option, command: Sequence[str], env: Mapping[str, str]) -> tuple[str, str]:
    """The flag or variable that decides the option, and its value: "1" or "0" for a flag of a
    switch, "" if nothing sets the option. A flag overrides a variable, the last flag the others,
    and LLAMA_ARG_NO_SWITCH, whatever its value, LLAMA_ARG_SWITCH (b11434)."""
    for flag, value in flag_values(command, (*option.flags, *option.negations))[-1:]:
        return flag, value if option.when == "set" else str(int(flag not in option.negations))
    negation = option.variable.replace("LLAMA_ARG_", "LLAMA_ARG_NO_")
    if option.negations and negation in env:
        return negation, "0"
    return option.variable, env.get(option.variable, "")
