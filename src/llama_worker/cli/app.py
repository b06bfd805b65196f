"""Defines the commands and their options; the work of each command is in its own module."""

from __future__ import annotations

import errno
import io
import json
import sys
from collections.abc import Sequence
from typing import Annotated, Any, Literal

import typer

from llama_worker import __version__
from llama_worker.bios import default_bios
from llama_worker.cli import exits, run_report, terminal
from llama_worker.cli.exits import Problem, UsageProblem
from llama_worker.cli.gguf import find_model
from llama_worker.cli.text import printable, wrapped
from llama_worker.config.profiles import TIMEOUT_PRESETS, TimeoutPreset, TimeoutProfile
from llama_worker.errors import ConfigError, LlamaWorkerError
from llama_worker.exit_tools import ALL_EXIT_TOOLS
from llama_worker.runtime.process.free_port import free_port


def _end(code: int) -> None:
    """Exit with the code that the command returned."""
    sys.stdout.flush()
    raise typer.Exit(code)


app = typer.Typer(
    name="llama-worker",
    help="llama.cpp's llama-server: ask it, check it, watch it.\n\n" + exits.HELP,
    result_callback=_end,
    no_args_is_help=True,
    add_completion=False,
    rich_markup_mode=None,
    pretty_exceptions_enable=False,
)


def _print_version(asked: bool) -> None:
    if asked:
        print(f"llama-worker {__version__}")
        raise typer.Exit


@app.callback()
def _main(
    version: Annotated[
        bool,
        typer.Option(
            "--version",
            is_eager=True,
            expose_value=False,  # `_end` gets the others
            callback=_print_version,
            help="Print the version, and end.",
        ),
    ] = False,
) -> None:
    pass


def run_app(arguments: Sequence[str]) -> int:
    """Run the command; returns its exit code. Main thread only."""
    for stream in (sys.stdin, sys.stdout, sys.stderr):
        if isinstance(stream, io.TextIOWrapper):
            stream.reconfigure(errors="replace")  # if the locale is not UTF-8
    try:
        app(list(arguments), prog_name="llama-worker")
    except SystemExit as ended:
        if isinstance(ended.__context__, BrokenPipeError):  # how typer and rich report it
            return _exit_code_of(ended.__context__)
        return ended.code if isinstance(ended.code, int) else exits.FAILED
    except OSError as error:
        return _exit_code_of(error)
    except (UsageProblem, ConfigError) as problem:  # every value comes from an option
        _complain(problem)
        return exits.USAGE
    except (Problem, LlamaWorkerError, TypeError, ValueError) as problem:
        _complain(problem)
    return exits.FAILED


def _complain(problem: Exception) -> None:
    text = printable(f"llama-worker: {problem}")  # it may name files
    print(wrapped(text, terminal.width_of(sys.stderr)), file=sys.stderr)


def _exit_code_of(error: OSError) -> int:
    """Print the error, unless it means that the output was closed; returns the exit code."""
    closed = error.errno in (errno.EPIPE, errno.EIO)  # EIO: the terminal hung up
    if not closed:
        print(f"llama-worker: {error}", file=sys.stderr)
    terminal.discard_output()
    return exits.OUTPUT_CLOSED if closed else exits.FAILED


ServerOption = Annotated[
    str | None,
    typer.Option(
        "--server",
        metavar="EXE",
        help="The llama-server [LLAMA_SERVER, the PATH, this Python environment].",
    ),
]
ServerArgOption = Annotated[
    list[str] | None,
    typer.Option(metavar="WORD", help="An extra word for the server's command; may be repeated."),
]
Timeouts = Literal["slow", TimeoutPreset]
TimeoutsOption = Annotated[
    Timeouts,
    typer.Option(metavar="PRESET", help="Time limits: slow (slow_prefill), normal, fast or debug."),
]
JsonOption = Annotated[
    bool, typer.Option("--json", help="Print one JSON object on stdout, and nothing else.")
]


@app.command("run", epilog=exits.HELP)
def run_command(
    model: Annotated[
        str, typer.Argument(metavar="MODEL", help="The model: a GGUF file.", show_default=False)
    ],
    prompt: Annotated[
        str | None,
        typer.Argument(
            metavar="PROMPT", help="What to ask; read from stdin if it is - or left out."
        ),
    ] = None,
    chat: Annotated[
        bool, typer.Option("--chat", help="Hold a conversation; Ctrl-D ends it.")
    ] = False,
    system: Annotated[
        str, typer.Option("--system", metavar="TEXT", help="The system prompt.", show_default=False)
    ] = "",
    max_tokens: Annotated[
        int | None,
        typer.Option(min=1, metavar="N", help="Maximum length of the answer, in tokens [4096]."),
    ] = None,
    temperature: Annotated[
        float | None,
        typer.Option(
            min=0, max=100, metavar="X", help="Sampling temperature; 0: always the likeliest token."
        ),
    ] = None,
    seed: Annotated[
        int | None,
        typer.Option(
            metavar="N", help="Sampling seed: gives the same answer again, at the same load."
        ),
    ] = None,
    exit_tools: Annotated[
        bool,
        typer.Option(
            "--exit-tools",
            help="Offer and explain the ready-made exit tools to the model, and show its signals.",
        ),
    ] = False,
    server: ServerOption = None,
    ctx_size: Annotated[
        int | None,
        typer.Option(min=0, metavar="N", help="Size of the context, in tokens [the model's]."),
    ] = None,
    gpu_layers: Annotated[
        str | None,
        typer.Option(metavar="N|auto|all", help="Number of layers to put on GPUs [auto]."),
    ] = None,
    slots: Annotated[
        int, typer.Option(min=1, metavar="N", help="Requests handled at the same time.")
    ] = 1,
    server_arg: ServerArgOption = None,
    port: Annotated[
        int | None,
        typer.Option(min=1, max=65535, metavar="N", help="Port of the server [a free port]."),
    ] = None,
    timeouts: TimeoutsOption = "slow",
    as_json: JsonOption = False,
    quiet: Annotated[
        bool, typer.Option("--quiet", "-q", help="Show no progress, reasoning or statistics.")
    ] = False,
) -> int:
    """Ask a model; starts and stops a server for it.

    Sends PROMPT and --system as they are, and nothing else; --exit-tools adds the tools, and the
    library's own system prompt (the BIOS), which explains them. The answer's text goes to stdout,
    everything else to stderr. Ctrl-C cancels the answer and keeps the text received so far; a
    second Ctrl-C ends everything at once.
    """
    if chat and as_json:
        raise UsageProblem("--chat and --json cannot be combined: --json reports one answer")
    from llama_worker.cli.run import RunOptions, run
    from llama_worker.cli.servers import find_server, worker_config

    if prompt == "-":
        prompt = None  # with --chat, too: its turns are the lines of stdin
    options = RunOptions(
        prompt=_decoded(prompt or "") if chat else _prompt(prompt),
        system=_decoded(system),
        chat=chat,
        as_json=as_json,
        quiet=quiet,
        params=_given(max_tokens=max_tokens, temperature=temperature, seed=seed),
    )
    flags = _given(**{"--ctx-size": ctx_size, "--n-gpu-layers": gpu_layers})
    words = [word for flag, value in flags.items() for word in (flag, str(value))]
    try:
        config = worker_config(
            find_model(model),
            find_server(server).path,
            port=port or _free_port(),
            slots=slots,
            words=words,
            server_args=server_arg or (),
            timeouts=_profile(timeouts),
            exit_tools=ALL_EXIT_TOOLS if exit_tools else (),
            bios_provider=default_bios if exit_tools else None,
        )
        return run(config, options)
    except Problem as problem:
        if as_json:
            report = run_report.json_without_answer("not_started", problem.reason, problem.what)
            print(json.dumps(report), flush=True)
        raise


@app.command("doctor", epilog=exits.HELP)
def doctor_command(
    model: Annotated[
        str | None,
        typer.Argument(
            metavar="MODEL|FLEET.toml",
            help=(
                "A GGUF file: a server is started with it for a moment. A fleet file: its commands "
                "are checked, and nothing is started."
            ),
        ),
    ] = None,
    server: ServerOption = None,
    server_arg: ServerArgOption = None,
    as_json: JsonOption = False,
) -> int:
    """Check server, model and machine.

    Looks for what would keep a server from running well here, and says what to do about it.
    Exit code 0: no problem; 1: a problem.
    """
    from llama_worker.cli.doctor import examine

    return examine(model, server, server_arg or (), as_json=as_json)


@app.command("top", epilog=exits.HELP)
def top_command(
    fleet: Annotated[
        str | None, typer.Argument(metavar="FLEET.toml", help="Ask the servers of a fleet file.")
    ] = None,
    metrics: Annotated[
        str | None,
        typer.Option("--metrics", metavar="URL", help="Ask a running host's metrics endpoint."),
    ] = None,
    once: Annotated[bool, typer.Option("--once", help="Print one table and exit.")] = False,
    interval: Annotated[
        float, typer.Option(min=2, max=86400, metavar="SECONDS", help="Time between two updates.")
    ] = 3,
) -> int:
    """Watch workers in a live table; q or Ctrl-C ends.

    A metrics endpoint fills every column. The servers of a fleet file are asked directly and know
    only their own state: their workers live in another process. In a pipe one table is printed.
    """
    if bool(fleet) == bool(metrics):
        raise UsageProblem("give either a fleet file or --metrics URL")
    from llama_worker.cli import top

    source = top.FleetSource(fleet) if fleet else top.MetricsSource(metrics or "")
    return top.watch(source, once=once, interval_s=interval)


@app.command("responses-proxy", epilog=exits.HELP)
def responses_proxy_command(
    upstream: Annotated[
        str | None, typer.Option(metavar="URL", help="A running llama-server [LLAMA_CPP_URL].")
    ] = None,
    host: Annotated[
        str, typer.Option(metavar="HOST", envvar="PROXY_HOST", help="Address to listen on.")
    ] = "127.0.0.1",
    port: Annotated[
        int,
        typer.Option(
            metavar="N",
            envvar="PROXY_PORT",
            min=0,
            max=65535,
            help="Port to listen on; 0: a free port.",
        ),
    ] = 9998,
    api_key_env: Annotated[
        str | None,
        typer.Option(metavar="NAME", help="The variable that holds the upstream's API key."),
    ] = None,
    ca_file: Annotated[
        str | None,
        typer.Option(
            metavar="FILE",
            help="Certificates to trust for an https upstream (PEM) [public authorities].",
        ),
    ] = None,
    max_concurrent: Annotated[
        int | None,
        typer.Option(min=1, metavar="N", help="Refuse (503) more than N responses at once."),
    ] = None,
    allow_origin: Annotated[
        list[str] | None,
        typer.Option(
            metavar="URL",
            help=(
                "An origin of web pages that may use the proxy, or another host name of it; "
                "may be repeated."
            ),
        ),
    ] = None,
    model: Annotated[
        str | None, typer.Option(metavar="FILE", help="Start a llama-server with this GGUF file.")
    ] = None,
    server: ServerOption = None,
    slots: Annotated[
        int | None,
        typer.Option(min=1, metavar="N", help="Slots of the server that is started [1]."),
    ] = None,
    server_cmd: Annotated[
        str | None,
        typer.Option(
            metavar="CMD",
            help="Start a llama-server by this command; {host}, {port}, {slots} are filled in.",
        ),
    ] = None,
    timeouts: TimeoutsOption = "slow",
) -> int:
    """Serve OpenAI's Responses API.

    For clients that speak no other API. It stands in front of a running llama-server (--upstream),
    or of one that this command starts and supervises (--model, --server-cmd).
    """
    from llama_worker.cli.proxy import ServerChoice, serve
    from llama_worker.responses.config import ResponsesProxyConfig

    source = ServerChoice(url=upstream, model=model, server=server, slots=slots, command=server_cmd)
    config = ResponsesProxyConfig(
        host=host,
        port=port,
        ca_file=ca_file,
        max_concurrent=max_concurrent,
        allow_origins=tuple(allow_origin or ()),
        timeouts=_profile(timeouts),
    )
    return serve(source, config, api_key_env=api_key_env)


def _given(**options: Any) -> dict[str, Any]:
    """The options that were given; the server has defaults for the others."""
    return {name: value for name, value in options.items() if value is not None}


def _profile(named: Timeouts) -> TimeoutProfile:
    return TIMEOUT_PRESETS["slow_prefill" if named == "slow" else named]()


def _free_port() -> int:
    try:
        return free_port()
    except OSError as error:
        raise Problem("no_port", str(error), "give one with --port") from error


def _prompt(given: str | None) -> str:
    if given is None:
        if sys.stdin.isatty():
            raise UsageProblem(
                'no prompt was given: give one after the model ("..."), pipe one in, or add --chat'
            )
        given = sys.stdin.buffer.read().decode(errors="replace")
    if not given or not given.strip():
        raise UsageProblem('the prompt is empty: give one after the model ("..."), or pipe one in')
    return _decoded(given)


def _decoded(word: str) -> str:
    """The word with bytes that are not UTF-8 replaced, as on stdin."""
    return word.encode(errors="surrogateescape").decode(errors="replace")
