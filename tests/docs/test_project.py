"""What the project's own pages say of it is so."""

from __future__ import annotations

import json
import re
from pathlib import Path

import pytest

import llama_worker
from benchmarks import publish
from tests.docs.pages import DOCS, PAGES, ROOT, blocks


def test_the_changelog_begins_with_this_version() -> None:
    versions = re.findall(r"^## (\S+) \((?:unreleased|\d{4}-\d\d-\d\d)\)$", (ROOT / "CHANGELOG.md").read_text(), re.M)
    assert versions[0] == llama_worker.__version__


def test_every_make_target_that_is_named_is_there() -> None:
    targets = set(re.findall(r"^([a-z-]+):", (ROOT / "Makefile").read_text(), re.M))
    named = {target for page in PAGES for target in re.findall(r"`make ([a-z-]+)", page.read_text())}
    assert named
    assert named <= targets


def test_the_navigation_has_every_page_once() -> None:
    navigation = (ROOT / "mkdocs.yml").read_text().partition("\nnav:\n")[2].partition("\nvalidation:")[0]
    pages = {str(page.relative_to(ROOT)).removeprefix("docs/") for page in PAGES} - {"README.md"}
    assert sorted(re.findall(r": (\S+\.md)$", navigation, re.M)) == sorted(pages)


@pytest.mark.parametrize(
    "page", [ROOT / "README.md", DOCS / "index.md", DOCS / "tutorial.md"], ids=lambda page: page.name
)
def test_the_first_example_is_short_and_runs_as_it_stands(page: Path) -> None:
    first = next(block for block in blocks(page.read_text()) if block.language == "python")
    assert len([line for line in first.code.splitlines() if line.strip()]) <= 4
    assert first.mark in ("runnable", "first.py")  # what runs it: test_docs, test_tutorial


def test_the_page_of_performance_and_its_plot_hold_the_figures_of_the_data_file() -> None:
    figures = json.loads(publish.DATA.read_text())
    page = publish.PAGE.read_text()
    assert publish.render(figures, page) == page
    assert publish.plot(figures) == publish.PLOT.read_text()


def test_a_goal_that_was_missed_is_called_so() -> None:
    figures = json.loads(publish.DATA.read_text())
    figures["latency"]["added_ms"]["in all"] = 9.0
    assert "| 9 ms | no |" in publish.goals(figures)
