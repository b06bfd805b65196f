"""What a server's command breaks, costs, and what a build does not know of it."""

import math

import pytest

from llama_worker.config.command_flags import (
    KnownFlags,
    batch_tokens,
    batch_warning,
    cache_ram_mib,
    command_warnings,
    commanded_n_ctx,
    memory_warning,
    read_help,
    unknown_flags,
)
from tests.unit.config.cases import config

MODEL = ("llama-server", "--model", "m.gguf")
GIB = 1 << 30
HELP = """\
----- common params -----

-h,    --help, --usage                  print usage and exit
-m,    --model FNAME                    model path to load
                                        (env: LLAMA_ARG_MODEL)
-fa,   --flash-attn [on|off|auto]       set Flash Attention use ('on', 'off', or 'auto', default: 'auto')
-np,   --parallel N                     number of server slots
-kvu,  --kv-unified, -no-kvu, --no-kv-unified
                                        use single unified KV buffer (default: enabled)
-ot,   --override-tensor <tensor name pattern>=<buffer type>,...
                                        override tensor buffer type
--control-vector-layer-range START END
                                        layer range to apply the control vector(s) to, start and end inclusive
--fim-qwen-1.5b-default                 use default Qwen 2.5 Coder 1.5B
--port PORT                             port to listen on
"""


# ---------------------------------------------------------------- what breaks a promise


@pytest.mark.parametrize(
    ("words", "env", "says"),
    [
        ("", {}, None),
        ("--tools all", {}, "server_cmd has --tools: the server may start programs outside its"),
        ("--agent", {}, "server_cmd has --agent: "),
        ("-ag", {}, "server_cmd has -ag: "),
        (
            "--mcp-servers-json {} --mcp-servers-config x",
            {},
            "has --mcp-servers-config, --mcp-servers-json: ",
        ),
        ("", {"MCP_SERVERS_CONFIG": "x.json"}, "has LLAMA_ARG_MCP_SERVERS_CONFIG: "),
        ("", {"TOOLS": ""}, None),
        ("", {"NO_AGENT": "1", "AGENT": "1"}, None),
        ("--skip-chat-parsing", {}, "server_cmd has --skip-chat-parsing: the server leaves tool"),
        ("", {"SKIP_CHAT_PARSING": "1"}, "server_cmd has LLAMA_ARG_SKIP_CHAT_PARSING: "),
        ("--no-skip-chat-parsing", {"SKIP_CHAT_PARSING": "1"}, None),
        ("--no-cache-prompt", {}, "--no-cache-prompt: the server reads the whole prompt again in"),
        ("", {"CACHE_PROMPT": "0"}, "server_cmd has LLAMA_ARG_CACHE_PROMPT: "),
        ("", {"NO_CACHE_PROMPT": ""}, "server_cmd has LLAMA_ARG_NO_CACHE_PROMPT: "),
        ("--cache-prompt", {"NO_CACHE_PROMPT": "1"}, None),
        ("", {"CACHE_PROMPT": "1"}, None),
        ("--sleep-idle-seconds 60", {}, "-idle-seconds: the server unloads its model when idle"),
        ("--sleep-idle-seconds=60", {}, "-idle-seconds: the server unloads its model when idle"),
        ("--sleep-idle-seconds -1", {}, None),
        ("--log-prompts-dir /tmp/p", {}, "-prompts-dir: the server writes every prompt to disk"),
        ("-kvu", {}, "server_cmd has -kvu: all slots share one context"),
        ("--kv-unified-per-slot 4096", {}, None),  # it only limits each slot
        ("--kv-unified", {}, "server_cmd has --kv-unified: "),
        ("--kv-unified --no-kv-unified", {}, None),
        ("-no-kvu -kvu", {}, "server_cmd has -kvu: "),
        ("", {"KV_UNIFIED": "1"}, "server_cmd has LLAMA_ARG_KV_UNIFIED: "),
        ("", {"KV_UNIFIED": "false"}, None),
        ("-no-kvu", {"KV_UNIFIED": "1"}, None),
        ("", {"KV_UNIFIED": "1", "NO_KV_UNIFIED": "1"}, None),
        ("-kvu", {"NO_KV_UNIFIED": "1"}, "server_cmd has -kvu: "),
        ("--context-shift", {}, "a request that fills its context does not end"),
        ("--no-context-shift", {}, None),
        ("", {"CONTEXT_SHIFT": "on"}, "server_cmd has LLAMA_ARG_CONTEXT_SHIFT: "),
        ("", {"SLOT_SAVE_PATH": "/tmp"}, "server_cmd has LLAMA_ARG_SLOT_SAVE_PATH: "),
        ("--slot-save-path /tmp", {}, "while a slot is saved, the server answers nothing else"),
        ("-nocb", {}, "server_cmd has -nocb: no prompt is read while another request generates"),
        ("-nocb -cb", {}, None),
        ("", {"CONT_BATCHING": "0"}, "server_cmd has LLAMA_ARG_CONT_BATCHING: "),
        ("", {"CONT_BATCHING": "1"}, None),
        ("", {"NO_CONT_BATCHING": "0"}, "server_cmd has LLAMA_ARG_NO_CONT_BATCHING: "),
        ("", {"NO_CONT_BATCHING": "0", "CONT_BATCHING": "1"}, "has LLAMA_ARG_NO_CONT_BATCHING: "),
        ("--no-slots", {}, "server_cmd has --no-slots: only the server's slots show"),
        ("--no-slots --slots", {}, None),
        ("", {"ENDPOINT_SLOTS": "0"}, "server_cmd has LLAMA_ARG_ENDPOINT_SLOTS: "),
        ("--slots", {"NO_ENDPOINT_SLOTS": "1"}, None),
        ("", {"NO_ENDPOINT_SLOTS": "1"}, "server_cmd has LLAMA_ARG_NO_ENDPOINT_SLOTS: "),
        ("--rpc gpu7:50052", {}, "server_cmd has --rpc: the work of other machines is not seen"),
        ("", {"RPC": "gpu7:50052"}, "server_cmd has LLAMA_ARG_RPC: "),
        ("--reuse-port", {}, "another process may listen on the same port"),
        ("", {"REUSE_PORT": "1"}, "server_cmd has LLAMA_ARG_REUSE_PORT: "),
        ("", {"REUSE_PORT": "yes"}, None),  # the server does not take it for true
        ("--lora a.gguf", {}, "requests with different scales (`lora`"),
        ("--lora-scaled a.gguf:0.5", {}, "server_cmd has --lora-scaled: "),
        ("--lora a.gguf --lora b.gguf", {}, "server_cmd has --lora: "),
        ("--timeout 1", {}, None),  # it does not end a connection on which the server is silent
        ("-hf org/model", {}, "server_cmd has -hf: the server asks the network at each start"),
        ("--mmproj-url https://a", {}, "server_cmd has --mmproj-url: "),
        ("-mu https://a", {}, "server_cmd has -mu: "),  # besides --model: where to get it
        ("-hfd org/draft", {"HF_REPO": "org/model"}, "has LLAMA_ARG_HF_REPO, -hfd: "),
        ("--gpt-oss-20b-default --parallel 2", {}, "has --gpt-oss-20b-default's --hf-repo: "),
        ("-hf org/model --offline", {}, None),
        ("-hf org/model", {"OFFLINE": "1"}, None),
        ("-hf org/model", {"OFFLINE": "0"}, "server_cmd has -hf: "),
        ("-dr smollm2 --offline", {}, "server_cmd has -dr: the server asks the network at each"),
    ],
)
def test_a_flag_that_breaks_a_promise_is_named(
    words: str, env: dict[str, str], says: str | None
) -> None:
    variables = {f"LLAMA_ARG_{name}": value for name, value in env.items()}
    command = (*MODEL, "--port", "9001", "--parallel", "2", *words.split())
    lines = command_warnings(command, variables, 2)
    assert len(lines) == (says is not None)
    assert (says or "") in "".join(lines)


NO_PORT, NO_PARALLEL, NO_MODEL = "has no --port: ", "has no --parallel: ", "names no model"
MODELS = ("/opt/llama-server-cuda", "--models-dir", "/models")
OFFLINE = ("llama-server", "--offline")
NAMES_A_MODEL = (
    *("-hf org/model", "--hf_repo org/model", "--gpt-oss-20b-default", "--gpt_oss_20b_default"),
    *("--fim-qwen-7b-spec", "--fim-qwen-14b-spec", "-m m.gguf -mu https://org/model"),
)
NAMES_NONE = ("-mu https://org/model", "--model_url https://org/model", "-hff m.gguf")


@pytest.mark.parametrize(
    ("command", "slots", "env", "says"),
    [
        (MODEL, 1, {"LLAMA_ARG_PORT": ""}, NO_PORT),
        (("./serve.sh",), 1, {"LLAMA_ARG_PORT": ""}, None),
        ((*MODEL, "--port", "9001"), 1, {"LLAMA_ARG_PORT": ""}, None),
        *(((*MODEL, *more), 1, {}, None) for more in ((), ("--kv-unified",), ("--lora", "a.gguf"))),
        (MODEL, 2, {}, NO_PARALLEL),
        ((*MODEL, "-no-kvu"), 2, {}, NO_PARALLEL),
        ((*MODEL, "-np", "2"), 2, {}, None),
        (MODEL, 2, {"LLAMA_ARG_N_PARALLEL": "2"}, None),
        (MODEL, 2, {"LLAMA_ARG_N_PARALLEL": "-1"}, NO_PARALLEL),
        ((*MODEL, "--parallel", "-1"), 2, {}, NO_PARALLEL),
        (("llama-server", "--fim-qwen-7b-spec", "--offline"), 2, {}, NO_PARALLEL),
        (("llama-server", "--gpt-oss-20b-default", "--offline"), 2, {}, None),
        (("./serve.sh",), 2, {}, None),  # it may name both itself
        (("llama-server",), 1, {}, NO_MODEL),
        (MODELS, 1, {}, NO_MODEL),
        (("nice", "-n", "5", "llama-server"), 1, {}, NO_MODEL),
        (("numactl", "-m", "0", "llama-server", "--spec-default"), 1, {}, NO_MODEL),
        *(((*OFFLINE, *words.split()), 1, {}, None) for words in NAMES_A_MODEL),
        *(((*OFFLINE, *words.split()), 1, {}, NO_MODEL) for words in NAMES_NONE),
        (("llama-server", "-mu", "https://org/model"), 1, {}, NO_MODEL),
        (OFFLINE, 1, {"LLAMA_ARG_HF_REPO": "org/model"}, None),
        (OFFLINE, 1, {"LLAMA_ARG_MODEL_URL": "https://org/model"}, NO_MODEL),
    ],
)
def test_what_a_command_leaves_out_is_named(
    command: tuple[str, ...], slots: int, env: dict[str, str], says: str | None
) -> None:
    lines = command_warnings(command, {"LLAMA_ARG_PORT": "9001", **env}, slots)
    assert [says in line for line in lines if says] == [True] * (says is not None)
    assert says or lines == []


def test_a_config_has_the_warnings_of_its_command() -> None:
    it = config(server_cmd=(*MODEL, "--port", "9001", "--tools", "all"))
    assert [line.partition(":")[0] for line in it.warnings] == ["server_cmd has --tools"]


# ---------------------------------------------------------------- memory


@pytest.mark.parametrize(
    ("words", "env", "mib"),
    [
        ((), {}, 8192),
        (("--cache-ram", "0"), {}, 0),
        (("-cram", "512"), {}, 512),
        (("-cram", "-1"), {}, math.inf),
        (("-cram",), {}, 8192),
        ((), {"LLAMA_ARG_CACHE_RAM": "64"}, 64),
        (("-cram", "512"), {"LLAMA_ARG_CACHE_RAM": "64"}, 512),
    ],
)
def test_what_a_server_may_keep_of_prompts(
    words: tuple[str, ...], env: dict[str, str], mib: float
) -> None:
    assert cache_ram_mib((*MODEL, *words), env) == mib


@pytest.mark.parametrize(
    ("limits", "memory", "says"),
    [
        ({"a": 8192}, 16 * GIB, None),
        ({"a": 8192, "b": 8192}, 16 * GIB, None),
        ({"a": 8192, "b": 8192, "c": 8192}, 16 * GIB, "3 servers may keep up to 24576 MiB"),
        ({"a": 8192, "b": math.inf}, 64 * GIB, "inf MiB of prompts in memory (a: 8192 MiB, b: "),
        ({"a": 8192}, 4 * GIB, "a server may keep up to 8192 MiB"),
        ({}, 0, None),
    ],
)
def test_caches_beyond_memory_are_named(
    limits: dict[str, float], memory: int, says: str | None
) -> None:
    line = memory_warning(limits, memory)
    assert (line is None) == (says is None)
    assert (says or "") in (line or "")


# ---------------------------------------------------------------- batches


@pytest.mark.parametrize(
    ("words", "env", "size"),
    [
        ((), {}, 2048),
        (("-b", "1024"), {}, 1024),
        (("--batch-size=4096",), {"LLAMA_ARG_BATCH": "64"}, 4096),
        (("-b", "2048", "--batch-size", "512"), {}, None),
        ((), {"LLAMA_ARG_BATCH": "256"}, None),
        (("-b", "many"), {}, 2048),  # the server will refuse it
        (("-b", "512", "--gpt-oss-20b-default"), {}, 32768),
        (("--gpt-oss-20b-default", "-b", "512"), {}, None),
    ],
)
def test_batches_that_everything_waits_for_are_named(
    words: tuple[str, ...], env: dict[str, str], size: int | None
) -> None:
    line = batch_warning((*MODEL, *words), env)
    assert (line is None) == (size is None)
    assert size is None or f"in batches of {size} tokens" in (line or "")


def test_only_an_explicit_command_tells_its_batch_size() -> None:
    assert batch_tokens(MODEL, {}) is None
    assert batch_tokens(("./serve.sh",), {}) is None
    assert batch_tokens(("./serve.sh", "-b", "64"), {}) == 64
    assert batch_tokens(("chrt", "-b", "0", "./serve.sh", "-b", "64"), {}) == 64
    assert batch_tokens((*MODEL, "-b", "0"), {}) is None
    assert batch_tokens(("./serve.sh",), {"LLAMA_ARG_BATCH": "256"}) == 256


# ---------------------------------------------------------------- what a build knows


NO_VALUE = "-h --help --usage -kvu --kv-unified -no-kvu --no-kv-unified --fim-qwen-1.5b-default"
ONE_VALUE = "-m --model -fa --flash-attn -np --parallel -ot --override-tensor --port"
KNOWN = (
    dict.fromkeys(NO_VALUE.split(), 0)
    | dict.fromkeys(ONE_VALUE.split(), 1)
    | {"--control-vector-layer-range": 2}
)


@pytest.mark.parametrize(
    ("text", "known"), [(HELP, KNOWN), ("", None), ("error: unknown argument: --help", None)]
)
def test_the_help_is_read_where_it_lists_flags(text: str, known: KnownFlags | None) -> None:
    assert read_help(text) == known


@pytest.mark.parametrize(
    ("words", "unknown"),
    [
        (("-m", "--model", "--port", "80"), ()),  # a value may look like a flag
        (("--control-vector-layer-range", "1", "2", "-kvu"), ()),
        (("--flash_attn", "on"), ()),
        (("--flash-atn", "on", "--port", "80"), ("--flash-atn: did you mean '--flash-attn'?",)),
        (("--port=80",), ("--port=...: the value must be a word of its own",)),
        (("--modle=s3cret", "80"), ("--modle=...: did you mean '--model'?", "80")),
        (("80",), ("80",)),
        (("--zzz", "--port", "80", "--qqqqq"), ("--zzz", "--qqqqq")),
        (("-np",), ()),  # the server itself says that its value is missing
    ],
)
def test_what_a_build_does_not_know_is_named(
    words: tuple[str, ...], unknown: tuple[str, ...]
) -> None:
    assert unknown_flags(("numactl", "-N0", "/bin/llama-server", *words), KNOWN) == list(unknown)


def test_words_of_another_program_are_not_checked() -> None:
    assert unknown_flags(("./serve.sh", "--zzz"), KNOWN) == []


@pytest.mark.parametrize(
    ("command", "env", "n_ctx"),
    [
        (("-c", "4096"), "", 2048),
        (("-c", "4096", "--ctx-size", "8192"), "1024", 4096),
        (("--ctx_size", "8192"), "1024", 4096),
        (("-c", "4096", "--gpt-oss-20b-default"), "", 131072),
        ((), "1024", 512),
        (("-c", "0"), "", None),  # the model's own
        (("-c", "much"), "", None),
        ((), "", None),
    ],
)
def test_the_context_that_a_command_gives_each_slot(
    command: tuple[str, ...], env: str, n_ctx: int | None
) -> None:
    asked = commanded_n_ctx((*MODEL, *command), {"LLAMA_ARG_CTX_SIZE": env}, slots=2)
    assert asked == n_ctx
