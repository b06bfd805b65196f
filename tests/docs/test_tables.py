"""What the documentation says of the code, in tables above all, and of the project is so."""

import ast
import inspect
import json
import os
import re
import tomllib
from collections.abc import Callable
from dataclasses import MISSING, Field, fields
from datetime import UTC, datetime
from pathlib import Path
from typing import Any, get_args

import pytest
import typer

import llama_worker
from benchmarks import publish
from llama_worker import (
    BiosContext,
    RequestFailReason,
    StartFailReason,
    TimeoutProfile,
    default_bios,
    exit_tools,
)
from llama_worker.actors.messages import RequestMessage, UpstreamMessage, WorkerMessage
from llama_worker.bios import STATUS_CLOSE, STATUS_OPEN
from llama_worker.cli.app import app
from llama_worker.request.messages import ToolMessage, TransportMessage
from llama_worker.responses.config import ResponsesProxyConfig
from llama_worker.responses.messages import ProxyMessage
from llama_worker.server.messages import ProcessMessage, WatchdogMessage
from llama_worker.server.traits import answers_during_batches, visibility_warnings
from llama_worker.types.request import NotFound, NotReady, SubmitErrorCode
from tests.chaos.campaign import STEPS_PER_EPISODE
from tests.docs.pages import DOCS, PAGES, ROOT, blocks, names_in, table
from tests.recordings import builds
from tests.recordings.conformance import LEFT_OUT
from tests.responses.clients.__main__ import CLIENTS
from tests.scenarios.cases import TWINS
from tests.simulation.faults import KINDS
from tests.simulation.test_planted_bugs import BUGS, RUNS

# ---------------------------------------------------------------- reference.md


def test_the_reference_has_exactly_the_public_names() -> None:
    page, _, _ = (DOCS / "reference.md").read_text().partition("## Further modules")
    # pytest adds names with @ to the modules of an installed plugin, such as this package
    names = [name for name in dir(llama_worker.public) if not name.startswith(("_", "@"))]
    assert sorted(re.findall(r"^::: llama_worker\.(\w+)$", page, re.M)) == names


def test_the_reference_has_every_call_with_its_parameters() -> None:
    calls = {}
    for name, method in vars(llama_worker.LlamaWorker).items():
        if inspect.isfunction(method) and not name.startswith("_"):
            _, *given = inspect.signature(method).parameters.values()
            bare = inspect.Signature(
                [each.replace(annotation=inspect.Parameter.empty) for each in given]
            )
            calls[name] = f"{name}{bare}".replace("'", '"')
    rows = table((DOCS / "reference.md").read_text(), "call")
    assert sorted(names_in(call)[0] for call, *_ in rows) == sorted(calls.values())


# -------------------------------------------------------- configuration.md, how-to/slow-hardware.md


def shown_default(field: Field[Any]) -> str:
    """A field's default, as the page writes it."""
    if field.default_factory is not MISSING:
        made = field.default_factory()
        return "`{}`" if made == {} else f"`{type(made).__name__}()`"
    if field.default is MISSING:
        return "required"
    if field.default is default_bios:
        return "`default_bios`"
    return "`" + repr(field.default).replace("'", '"') + "`"


@pytest.mark.parametrize(
    "kind", [llama_worker.WorkerConfig, llama_worker.RestartPolicy, llama_worker.LoopDetector]
)
def test_configuration_page_has_every_field_and_its_default(kind: type[Any]) -> None:
    section = (DOCS / "configuration.md").read_text().partition(f"## `{kind.__name__}`")[2]
    rows = [(name.strip("`"), default) for name, default, _ in table(section, "field")]
    assert rows == [(field.name, shown_default(field)) for field in fields(kind)]


def test_the_configuration_page_has_every_event() -> None:
    section = (DOCS / "configuration.md").read_text().partition("## `on_event`")[2]
    listed = [name for events, _ in table(section, "event") for name in names_in(events)]
    modules = ("actors/worker.py", "actors/server_life.py", "server/journal.py")
    code = "".join((PACKAGE / module).read_text() for module in modules)
    noted = re.findall(r'(?:note\(|"event": |event = |is not None else )\s*"(\w+)"', code)
    assert sorted(listed) == sorted(set(noted))


def test_responses_page_has_every_field_and_its_default() -> None:
    rows = table((DOCS / "responses.md").read_text(), "field")
    documented = [(name.strip("`"), default) for name, default, _ in rows]
    assert documented == [
        (field.name, shown_default(field)) for field in fields(ResponsesProxyConfig)
    ]


def test_page_shows_the_bios_of_a_toolless_worker() -> None:
    section = (DOCS / "configuration.md").read_text().partition("## What a model is told")[2]
    context = BiosContext(
        now=datetime(2026, 10, 1, 12, 30, 5, tzinfo=UTC),
        timezone_name="UTC",
        worker_name="small",
        tool_iters_remaining=8,
        normal_tools=(),
        exit_tools=(),
        tool_call_mode="native",
    )
    bios = default_bios(context)
    shown = f"{bios.stable}\n\n{STATUS_OPEN}\n{bios.volatile}\n{STATUS_CLOSE}\n"
    assert blocks(section)[0].code == shown


def test_profiles_have_the_values_the_page_says() -> None:
    page = (DOCS / "how-to" / "slow-hardware.md").read_text()
    profiles = [
        TimeoutProfile.slow_prefill(),
        TimeoutProfile.normal(),
        TimeoutProfile.fast(),
        TimeoutProfile.debug(),
    ]
    rows = {names_in(row[0])[0]: row[1:] for row in table(page, "seconds")}
    assert list(rows) == [field.name for field in fields(TimeoutProfile)]
    for name, cells in rows.items():
        values = [getattr(profile, name) for profile in profiles]
        # not all may be None
        shown = ["off" if value is None or value >= 1e8 else f"{value:g}" for value in values]
        assert cells == shown, name


def test_exit_tools_have_the_arguments_the_page_says() -> None:
    page = (DOCS / "how-to" / "exit-tools.md").read_text()
    rows = {names_in(tool)[0]: arguments for tool, arguments in table(page, "tool")}
    tools = {
        tool["function"]["name"]: tool["function"]["parameters"]
        for tool in exit_tools.ALL_EXIT_TOOLS
    }
    assert list(rows) == list(tools)
    for name, schema in tools.items():
        values = [value for told in schema["properties"].values() for value in told.get("enum", ())]
        assert sorted(names_in(rows[name])) == sorted([*schema["properties"], *values])
        assert set(re.findall(r"optional `(\w+)`", rows[name])) == set(schema["properties"]) - set(
            schema["required"]
        )


# ---------------------------------------------------------------- failure-reasons.md

REASONS: dict[str, set[str]] = {
    "How a request fails": set(RequestFailReason),
    "Why a start fails": set(StartFailReason),
    "Why a submit is refused": set(get_args(SubmitErrorCode)),
    "Other answers": {
        code
        for answer in (NotFound, NotReady)
        for code in get_args(answer.__annotations__["error"])
    },
}


@pytest.mark.parametrize("section", REASONS)
def test_every_reason_is_explained_once_and_no_other(section: str) -> None:
    page = (DOCS / "failure-reasons.md").read_text()
    text = page.partition(f"\n## {section}\n")[2].partition("\n## ")[0]
    entries = re.findall(r"^### `(\w+)`\n\n(.*?)(?=^### |\Z)", text, flags=re.DOTALL | re.MULTILINE)
    assert sorted(name for name, _ in entries) == sorted(REASONS[section])
    for name, entry in entries:
        parts = re.findall(r"^- \*\*(.+?)\*\* \S", entry, flags=re.MULTILINE)
        assert parts == ["What happened.", "What the worker did.", "What to do."], name


# ---------------------------------------------------------------- how-it-works.md

HOW_IT_WORKS = DOCS / "how-it-works.md"
PACKAGE = Path(llama_worker.__file__).parent


def test_message_table_lists_exactly_the_messages_and_receivers() -> None:
    unions = {
        "WorkerActor": WorkerMessage,
        "ProcessActor": ProcessMessage,
        "TransportActor": TransportMessage,
        "RequestActor": RequestMessage,
        "ToolLoopActor": ToolMessage,
        "WatchdogActor": WatchdogMessage,
        "UpstreamActor": UpstreamMessage,
        "ResponsesProxyActor": ProxyMessage,
    }
    in_code = sorted(
        (actor, kind.__name__) for actor, union in unions.items() for kind in get_args(union)
    )
    rows = table(HOW_IT_WORKS.read_text(), "to the")
    assert sorted((to, name) for to, _, names in rows for name in names_in(names)) == in_code


def test_the_listed_actors_are_those_with_messages() -> None:
    page = HOW_IT_WORKS.read_text()
    listed = {re.match(r"\w+", actor)[0] for actor, _ in table(page, "actor")}  # type: ignore[index]
    assert listed == {to for to, _, _ in table(page, "to the")}


def test_every_package_that_is_needed_has_its_place() -> None:
    needed = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["dependencies"]
    _, _, section = HOW_IT_WORKS.read_text().partition("## What the packages do here")
    names = {re.split("[<>=]", each)[0] for each in needed}
    assert {name for name in names if name not in section.lower()} == set()


def test_the_map_has_every_folder_and_module() -> None:
    rooms = {
        "".join(names_in(room)): {name for name in names_in(text) if name.endswith(".py")}
        for room, text in table(HOW_IT_WORKS.read_text(), "room")
    }
    folders = {
        f"{Path(folder).relative_to(PACKAGE)}/"
        for folder, _, names in os.walk(PACKAGE, followlinks=True)
        if "__init__.py" in names
    }
    assert set(rooms) - {""} == folders - {"./"}
    assert rooms[""] == {path.name for path in PACKAGE.glob("*.py")} - {"__init__.py"}
    named = [(room, name) for room, names in rooms.items() for name in names]
    missing = [
        (room, name)
        for room, name in named
        if not any((PACKAGE / base / name).is_file() for base in ("", room))
    ]
    assert missing == []


QUESTIONS = table(HOW_IT_WORKS.read_text(), "question")


@pytest.mark.parametrize(
    ("files", "names"), [q[1:] for q in QUESTIONS], ids=[q[0] for q in QUESTIONS]
)
def test_the_file_of_a_question_defines_its_name(files: str, names: str) -> None:
    answers = list(zip(names_in(files), names_in(names), strict=True))
    assert 1 <= len(answers) <= 2, "a reader opens two files at most"
    for file, name in answers:
        assert name in defined_names(PACKAGE / file), file


def defined_names(module: Path) -> set[str]:
    """The classes, functions, fields and constants of a module, at any depth."""
    names = set()
    for node in ast.walk(ast.parse(module.read_text())):
        match node:
            case ast.ClassDef(name=name) | ast.FunctionDef(name=name):
                names.add(name)
            case ast.AnnAssign(target=ast.Name(id=name)) | ast.Assign(targets=[ast.Name(id=name)]):
                names.add(name)
    return names


# --------------------------------------------------------------- what the project's pages say of it


def test_the_table_of_builds_is_what_was_measured() -> None:
    page = (DOCS / "servers.md").read_text()
    assert "\n".join(builds.table()) in page
    command = "python -m tests.recordings.builds " + " ".join(
        column.removeprefix("b") for column in builds.table()[0].strip("| ").split(" | ")
    )
    assert command in page


@pytest.mark.parametrize(
    ("row", "is_known"),
    [
        ("`/slots` shows how far a prompt is read", lambda build: not visibility_warnings(build)),
        ("`/slots` answers in the middle of a batch", answers_during_batches),
    ],
)
def test_a_build_is_known_by_its_measurements(row: str, is_known: Callable[[int], bool]) -> None:
    head, _, *rows = (line.strip("| ").split(" | ") for line in builds.table())
    measured = next(facts for name, *facts in rows if name == row)
    numbers = [int(build.removeprefix("b")) for build in head]
    assert ["yes" if is_known(number) else "no" for number in numbers] == measured


def test_what_the_simulated_server_leaves_out_is_listed() -> None:
    listed = table((DOCS / "servers.md").read_text(), "situation")
    told = [(name, about.strip("`"), why) for name, about, why in listed if name != "every"]
    assert told == [(*key, why) for key, why in LEFT_OUT.items()]


@pytest.mark.parametrize(
    ("page", "counted"),
    [
        ("testing.md", f"has {len(BUGS)} bugs"),
        ("testing.md", f"within {RUNS} hours of service"),
        ("testing.md", f"faults of {len(KINDS)} kinds"),
        ("testing.md", f"and {4 * STEPS_PER_EPISODE} steps of chaos"),
        ("hung-or-slow.md", f"{len(TWINS)} kinds of hang are told"),
    ],
)
def test_the_pages_count_right(page: str, counted: str) -> None:
    assert counted in " ".join((DOCS / page).read_text().split())


def test_the_changelog_begins_with_this_version() -> None:
    versions = re.findall(
        r"^## (\S+) \((?:unreleased|\d{4}-\d\d-\d\d)\)$", (ROOT / "CHANGELOG.md").read_text(), re.M
    )
    assert versions[0] == llama_worker.__version__


def test_client_table_has_every_scenario_that_is_played() -> None:
    *rows, _ = table((DOCS / "responses.md").read_text(), "scenario")
    shown = {
        (client, name)
        for name, *cells in rows
        for client, cell in zip(CLIENTS, cells, strict=True)
        if cell
    }
    assert shown == {
        (client, one.__name__.replace("_", " "))
        for client, found in CLIENTS.items()
        for one in found
    }


def test_the_pages_of_the_command_name_every_option() -> None:
    text = "".join((DOCS / page).read_text() for page in ("command-line.md", "responses.md"))
    proxy = {f"--{each.name.replace('_', '-')}" for each in fields(ResponsesProxyConfig)}
    commands = vars(typer.main.get_command(app))["commands"].values()
    options = {name for command in commands for each in command.params for name in each.opts}
    long = {name for name in options if name.startswith("--")}
    assert long - {*re.findall(r"--[a-z][\w-]*", text)} - proxy == set()


def test_every_make_target_that_is_named_is_there() -> None:
    targets = set(re.findall(r"^([a-z-]+):", (ROOT / "Makefile").read_text(), re.M))
    named = {
        target for page in PAGES for target in re.findall(r"`make ([a-z-]+)", page.read_text())
    }
    assert named
    assert named <= targets


def test_the_navigation_has_every_page_once() -> None:
    navigation = (
        (ROOT / "mkdocs.yml").read_text().partition("\nnav:\n")[2].partition("\nvalidation:")[0]
    )
    pages = {str(page.relative_to(ROOT)).removeprefix("docs/") for page in PAGES} - {"README.md"}
    assert sorted(re.findall(r": (\S+\.md)$", navigation, re.M)) == sorted(pages)


@pytest.mark.parametrize(
    "page", [ROOT / "README.md", DOCS / "index.md", DOCS / "tutorial.md"], ids=lambda p: p.name
)
def test_first_example_is_short_and_runs_as_is(page: Path) -> None:
    first = next(block for block in blocks(page.read_text()) if block.language == "python")
    assert len([line for line in first.code.splitlines() if line.strip()]) <= 4
    assert first.mark in ("runnable", "first.py")  # what runs it: test_docs, test_tutorial


def test_performance_page_and_plot_match_the_data_file() -> None:
    figures = json.loads(publish.DATA.read_text())
    page = publish.PAGE.read_text()
    assert publish.render(figures, page) == page
    assert publish.plot(figures) == publish.PLOT.read_text()


def test_a_goal_that_was_missed_is_called_so() -> None:
    figures = json.loads(publish.DATA.read_text())
    figures["latency"]["added_ms"]["in all"] = 9.0
    assert "| 9 ms | no |" in publish.goals(figures)
