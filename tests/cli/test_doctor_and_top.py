"""`llama-worker doctor` and `llama-worker top`, as a person starts them."""

import contextlib
import json
import os
import re
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
from prometheus_client import CollectorRegistry, Gauge, start_http_server

from llama_worker.cli import top, top_rows
from llama_worker.cli.exits import Problem
from llama_worker.metrics import WorkerCollector
from llama_worker.testing.scripts import Exit, HttpError, Script, Text, WaitClose, plain_reply
from tests.actors.conftest import HOST, MakeWorker, eventually, running
from tests.cli.conftest import COLUMNS, MakeProgram, OpenTerminal, Run
from tests.conftest import shell_program
from tests.server.pace import lean_server


def test_the_doctor_finds_nothing_wrong(run: Run, program: MakeProgram, model: str) -> None:
    server = program()
    done = run("doctor", model, "--json", LLAMA_SERVER=server.path)
    report = json.loads(done.stdout)
    findings = {finding["subject"]: finding for finding in report["findings"]}
    problems = [finding for finding in report["findings"] if finding["level"] == "problem"]
    # the tester's machine may have some
    assert (done.returncode, report["ok"]) == (int(bool(problems)), not problems)
    assert (report["server"]["how"], report["server"]["version"]) == (
        "LLAMA_SERVER",
        "11000 (fake)",
    )
    assert "4096 tokens of context" in findings["start"]["text"]
    assert findings["tools"]["text"].startswith("native")
    assert findings["/proc"]["level"] == "ok"
    assert findings["build"]["text"].startswith("llama-server b11000 has CVE-2026-107183: ")
    assert findings["build"]["todo"] == "use a build later than b11392"
    assert server.is_gone()


MISSPELT = "--server-arg=--ctx-sise --server-arg=512 --server-arg=--cache-ram --server-arg=64"
TOO_NEW = "llama_model_load: error loading model: unknown model architecture: 'new'"


@pytest.mark.parametrize(
    ("args", "said"),
    [
        (
            "/no/such.gguf --server /bin/true",
            "llama-server .*not report its version.*model .*there is no file.*pidfd",
        ),
        ("--server /no/such/server", "llama-server .*does not exist.*what to do: .*pidfd"),
        (
            f"MODEL --server SERVER {MISSPELT}",
            "command .*does not know --ctx-sise: did you mean '--ctx-size'",
        ),
        (
            "MODEL --server SERVER",
            f"start .*what to do: this llama-server is too old for the model.*{TOO_NEW}",
        ),
    ],
    ids=["no version, no model", "no server", "an unknown flag", "no start"],
)
def test_the_doctor_names_a_problem_and_goes_on(
    run: Run, program: MakeProgram, model: str, args: str, said: str
) -> None:
    server = program(Script(exits=[Exit(1, "before_bind", log=[TOO_NEW])])).path
    done = run("doctor", *args.replace("MODEL", model).replace("SERVER", server).split())
    assert done.returncode == 1
    assert re.search(f"problem  {said}", done.stdout, re.DOTALL), done.stdout
    assert "prompt caches" not in done.stdout


@pytest.mark.parametrize(
    ("args", "says"),
    [
        (
            "MODEL --server SERVER --server-arg=--port --server-arg=5",
            "--port 5.*cannot be set by it",
        ),
        ("fleet.toml --server /bin/true", "--server"),
        ("fleet.toml --server-arg x", "--server-arg"),
        ("--server-arg x", "--server-arg"),
    ],
)
def test_the_doctor_refuses_wrong_usage(
    run: Run, program: MakeProgram, model: str, args: str, says: str
) -> None:
    given = args.replace("MODEL", model).replace("SERVER", program().path)
    done = run("doctor", *given.split(), "--json")
    assert (done.returncode, done.stdout) == (2, "")
    assert re.search(says, done.stderr, re.DOTALL)


def test_the_doctor_examines_a_fleet(
    run: Run, program: MakeProgram, model: str, tmp_path: Path
) -> None:
    fleet = tmp_path / "fleet.toml"
    head = (
        f'[defaults]\nhost = "127.0.0.1"\nexecutable = "{program().path}"\nmodel = "{model}"\n'
        "cache_ram_mib = 1\n"
    )
    workers = f"{head}[workers.a]\nport = 21001\n[workers.b]\nport = 21002\n"
    fleet.write_text(workers)
    done = run("doctor", str(fleet))
    assert done.returncode == 0, done.stdout
    assert done.stdout.count("the llama-server knows every flag of its command") == 2
    fleet.write_text(
        f'{workers}extra_args = ["--tools", "all", "-b", "2048"]\n'
        'model = "none.gguf"\ncache_ram_mib = -1\n'
    )
    done = run("doctor", str(fleet), "--json")
    report = json.loads(done.stdout)
    said = ["{level} {subject}: {text}".format(**finding) for finding in report["findings"]]
    assert (done.returncode, report["ok"], report["workers"]) == (1, False, ["a", "b"])
    for text in (
        "problem b: this llama-server does not know --tools",
        "note b: server_cmd has --tools: the server may start programs",
        "note b: llama-server b11000 has CVE-2026-107183: ",
        "note b: the server reads prompts in batches of 2048 tokens",
        "problem model: there is no file none.gguf",
        "note prompt caches: 2 servers may keep up to inf MiB of prompts in memory",
    ):
        assert any(line.startswith(text) for line in said), said
    fleet.write_text("[workers.a]\n")
    done = run("doctor", str(fleet))
    assert (done.returncode, "fleet.toml:1: workers.a: host is missing" in done.stdout) == (1, True)


LISTS_A_GPU = """[ "$LLAMA_ARG_ODD" ] && exit 1
case $1 in
--version) echo "version: 11000 (fake)" ;;
--list-devices) cat <<'END'
Available devices:
  BLAS: OpenBLAS (0 MiB, 0 MiB free)
  CUDA0: A (999999999 MiB, 999999999 MiB free)
END
;;
--help) printf -- '%s N\n' --model --host --port --parallel --batch-size --cache-ram ;;
esac"""


def test_a_fleets_model_may_be_on_its_gpus(run: Run, tmp_path: Path) -> None:
    server, fleet = tmp_path / "llama-server", tmp_path / "fleet.toml"
    shell_program(server, LISTS_A_GPU)
    with (tmp_path / "m.gguf").open("wb") as file:
        file.write(b"GGUF")
        file.truncate(1 << 43)
    (tmp_path / "llama.cpp").mkdir()
    (tmp_path / "llama.cpp/config.ini").touch()
    fleet.write_text(
        f'[workers.a]\nhost = "{HOST}"\nport = 21001\ncache_ram_mib = 1\n'
        f'model = "{tmp_path}/m.gguf"\nexecutable = "{server}"\n'
    )
    # the variable would break a server of the shell's, but not a worker's
    done = run("doctor", str(fleet), LLAMA_ARG_ODD="1", XDG_CONFIG_HOME=str(tmp_path))
    assert done.returncode == 0, done.stdout
    assert re.search("note +a +llama-server takes options from .*config.ini", done.stdout)


@pytest.mark.parametrize(
    ("words", "level", "says"),
    [
        ("-m ~/model.gguf", "problem", r"~/model\.gguf: .*does not expand ~"),
        ("-m none.gguf", "problem", "there is no file none.gguf"),
        ("-m none.gguf -mu https://a", "note", "none.gguf: its server downloads it"),
        ("-m none.gguf -mu https://a --offline", "problem", "there is no file none.gguf"),
        ("-m none.gguf -m MODEL", "ok", "model.gguf"),  # the server takes the last
    ],
)
def test_fleets_model_is_sought_as_its_server_does(
    run: Run, model: str, tmp_path: Path, words: str, level: str, says: str
) -> None:
    program = shell_program(tmp_path / "llama-server", "exit 1")
    command, fleet = [program, *words.replace("MODEL", model).split()], tmp_path / "fleet.toml"
    fleet.write_text(f'[workers.a]\nhost = "{HOST}"\nport = 21001\nserver_cmd = {command}\n')
    done = run("doctor", str(fleet), "--json", HOME=str(Path(model).parent))
    (found,) = (each for each in json.loads(done.stdout)["findings"] if each["subject"] == "model")
    assert found["level"] == level
    assert re.search(says, found["text"])


@pytest.mark.parametrize(
    ("executable", "found"),
    [("/nope", None), ("nope", None), ("llama-server", None), ("llama-server", "LLAMA_SERVER")],
)
def test_a_fleet_without_a_server_is_a_problem(
    run: Run, program: MakeProgram, model: str, tmp_path: Path, executable: str, found: str | None
) -> None:
    fleet = tmp_path / "fleet.toml"
    fleet.write_text(
        f'[workers.a]\nhost = "{HOST}"\nport = 21001\ncache_ram_mib = 1\n'
        f'model = "{model}"\nexecutable = "{executable}"\n'
    )
    nowhere = {"PATH": str(tmp_path / "empty"), "LLAMA_SERVER": str(tmp_path / "none")}
    done = run("doctor", str(fleet), **({found: program().path} if found else nowhere))
    said = re.sub(r"\s+", " ", done.stdout)
    if found:
        assert (done.returncode, "a the llama-server knows every flag" in said) == (0, True), said
    else:
        assert done.returncode == 1
        assert "problem a " in said
        assert "what to do: get one" in said


@pytest.mark.parametrize(
    ("does", "command", "level"),
    [
        ("kill -ILL $$", '["llama-server"]', "problem"),
        ("exit 1", '["DIR/llama-server"]', "problem"),
        ("exit 1", '["nice", "DIR/llama-server"]', "note"),  # the wrapper may find another
        ('[ "$NEEDED" ] && echo "version: 11000 (fake)"', '["DIR/llama-server"]', "note"),
    ],
)
def test_fleets_server_is_asked_as_worker_runs_it(
    run: Run, tmp_path: Path, does: str, command: str, level: str
) -> None:
    for name in ("llama-server", "serve"):
        shell_program(tmp_path / name, does)
    fleet = tmp_path / "fleet.toml"
    fleet.write_text(
        f'[workers.a]\nhost = "{HOST}"\nport = 21001\n'
        f'env = {{ NEEDED = "1", LLAMA_SERVER = "{tmp_path}/llama-server", '
        'LLAMA_ARG_CACHE_RAM = "1" }\n'
        f"server_cmd = {command.replace('DIR', str(tmp_path))}\n"
    )
    found = json.loads(run("doctor", str(fleet), "--json").stdout)["findings"]
    (of_program,) = (
        each
        for each in found
        if each["subject"] == "a"
        and re.search("does not report its version|--version ended|no flags", each["text"])
    )
    assert of_program["level"] == level
    assert bool(of_program["todo"]) == (level == "problem")


def test_a_fleets_script_is_not_run(run: Run, tmp_path: Path) -> None:
    """It may start a server, whatever its options."""
    shell_program(tmp_path / "serve", f"echo run >> {tmp_path}/runs\nexec sleep 1000")
    fleet = tmp_path / "fleet.toml"
    fleet.write_text(
        f'[workers.a]\nhost = "{HOST}"\nport = 21001\nserver_cmd = ["{tmp_path}/serve"]\n'
        'env = { LLAMA_ARG_CACHE_RAM = "1" }\n'
    )
    found = json.loads(run("doctor", str(fleet), "--json").stdout)["findings"]
    (note,) = (each for each in found if each["subject"] == "a")
    assert note["level"] == "note"
    assert "serve is not run, since it may start a server" in note["text"]
    assert not (tmp_path / "runs").exists()


@pytest.mark.server
def test_the_doctor_tries_the_real_server(run: Run, thin_model: str, tmp_path: Path) -> None:
    done = run("doctor", thin_model, "--server", str(lean_server(tmp_path)), "--json")
    trial = json.loads(done.stdout)["trial"]
    assert (trial["tools"], trial["slots"]) == (False, 1)  # the model's own template has none
    assert trial["n_ctx"] > 0


@pytest.mark.parametrize("name", ["llama-server", "nvidia-smi"])
def test_the_doctor_leaves_no_silent_program_running(
    terminal: OpenTerminal, tmp_path: Path, name: str
) -> None:
    pid_file, script = tmp_path / "pid", "echo $$ > pid.new && mv pid.new pid\nexec sleep 1000"
    shell_program(tmp_path / name, f"cd {tmp_path}\n{script}")
    path = f"{tmp_path}:{os.environ['PATH']}"
    screen = terminal("doctor", "--server", str(tmp_path / "llama-server"), PATH=path)
    eventually(pid_file.exists, "the program was started")
    screen.process.terminate()
    assert screen.wait() == 143
    seen = {int(pid_file.read_text()): time.time()}
    eventually(lambda: not running(seen), "the program's end")


# ---------------------------------------------------------------- top


@pytest.fixture
def fleet(make_worker: MakeWorker, tmp_path: Path, free_port: Callable[[], int]) -> Path:
    """A fleet of two: one scripted server with two slots, one with a long name that is not
    there."""
    path = tmp_path / "fleet.toml"
    path.write_text(
        f'[defaults]\nhost = "{HOST}"\nmodel = "m.gguf"\nslots = 2\ncache_ram_mib = -1\n'
        f"[workers.planner]\nport = {make_worker(slots=2).config.port}\n"
        f"[workers.{'coder' * 10}]\nport = {free_port()}\n"
    )
    return path


def test_top_asks_the_servers_of_a_fleet(
    run: Run, fleet: Path, recwarn: pytest.WarningsRecorder
) -> None:
    done = run("top", str(fleet))
    assert (done.returncode, done.stderr) == (0, "")
    assert not recwarn.list, "it starts no server that would need memory"
    heading, planner, coder = (line.split() for line in done.stdout.splitlines())
    assert heading[:3] == ["worker", "state", "slots"]
    assert planner == ["planner", "ready", "0/2", "-", "-", "-", "-", "-", "-"]
    assert coder == ["coder" * 10, "down", "-/2", "-", "-", "-", "-", "-", "connection", "refused"]


def test_top_cuts_names_rather_than_reasons(terminal: OpenTerminal, fleet: Path) -> None:
    screen = terminal("top", str(fleet), "--interval", "2")
    screen.expect("planner", count=2)
    screen.send("q")
    assert screen.wait() == 0
    assert "connection refused" in screen.shown
    assert max(map(len, screen.shown.splitlines())) <= COLUMNS


def test_a_key_counts_during_the_first_look(terminal: OpenTerminal, fleet: Path) -> None:
    screen = terminal("top", str(fleet), "--interval", "86400")
    screen.send("q")
    assert screen.wait() == 0


@pytest.mark.parametrize("env", [{}, {"COLUMNS": "0"}], ids=str)
def test_a_single_table_mentions_no_keys(
    terminal: OpenTerminal, fleet: Path, env: dict[str, str]
) -> None:
    screen = terminal("top", str(fleet), "--once", **env)
    assert screen.wait() == 0
    assert "planner" in screen.shown
    assert "Ctrl-C" not in screen.shown


@contextlib.contextmanager
def served(registry: CollectorRegistry, port: int) -> Iterator[str]:
    """The URL of an endpoint with these metrics."""
    server, thread = start_http_server(port, addr=HOST, registry=registry)
    try:
        yield f"http://{HOST}:{port}/metrics"
    finally:
        server.shutdown()
        server.server_close()
        thread.join()


@pytest.fixture
def metrics_url(make_worker: MakeWorker, free_port: Callable[[], int]) -> Iterator[str]:
    """The endpoint of a host with one worker: one request completed, one failed, one runs."""
    registry = CollectorRegistry()
    rig = make_worker(name="planner", slots=2)
    registry.register(WorkerCollector([rig.worker]))
    rig.run(*plain_reply(Text("ok")))
    rig.run(HttpError(400, "no"))
    rig.submit(Text("..."), WaitClose())
    with served(registry, free_port()) as url:
        yield url


def test_a_hosts_metrics_fit_in_80_columns(terminal: OpenTerminal, metrics_url: str) -> None:
    screen = terminal("top", "--metrics", metrics_url)
    screen.expect("q or Ctrl-C ends")
    screen.send("\x03")
    assert screen.wait() == 0
    heading, row = screen.shown.splitlines()[:2]
    assert heading.split() == " ".join(column.heading for column in top_rows.COLUMNS).split()
    assert row.split() == ["planner", "ready", "1/2", "-", "1", "1", "0", "0", "http_error"]


@pytest.mark.parametrize(
    ("args", "code", "said"),
    [
        ([], 2, "give either a fleet file or --metrics URL"),
        ([""], 2, "give either a fleet file or --metrics URL"),  # an empty $VARIABLE
        (["--metrics", ""], 2, "give either a fleet file or --metrics URL"),
        (["/no/such.toml"], 1, "No such file"),
        (["/no/such.toml", "--interval", "inf"], 2, "--interval"),
        (["--metrics", f"http://{HOST}:9/metrics"], 1, "connection refused"),
        (["--metrics", "nonsense"], 1, "what to do"),
        (["--metrics", "http://[::1/metrics"], 1, "what to do"),
    ],
)
def test_top_says_what_to_do(run: Run, args: list[str], code: int, said: str) -> None:
    done = run("top", *args)
    assert (done.returncode, done.stdout) == (code, "")
    assert said in done.stderr
    assert "Traceback" not in done.stderr


@pytest.mark.parametrize("said", [b"<html>", b'x{a="b", ="d"} 1'])
def test_malformed_metrics_are_a_problem(monkeypatch: pytest.MonkeyPatch, said: bytes) -> None:
    monkeypatch.setattr(top, "ask", lambda *_, **__: (200, said))
    with pytest.raises(Problem, match="does not serve metrics"):
        top.MetricsSource("http://host/metrics").rows()


def test_the_metrics_of_many_workers_are_read(free_port: Callable[[], int]) -> None:
    registry = CollectorRegistry()
    slots = Gauge("llama_worker_slots", "h" * (5 << 20), ["worker"], registry=registry)
    slots.labels("planner").set(2)
    with served(registry, free_port()) as url:
        (row,) = top.MetricsSource(url).rows()
    assert (row.worker, row.slots_total) == ("planner", 2)
