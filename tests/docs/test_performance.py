"""The page of measured figures is what its data says."""

from __future__ import annotations

import json

from benchmarks import publish


def test_the_page_and_its_plot_hold_the_figures_of_the_data_file() -> None:
    figures = json.loads(publish.DATA.read_text())
    page = publish.PAGE.read_text()
    assert publish.render(figures, page) == page
    assert publish.plot(figures) == publish.PLOT.read_text()


def test_a_goal_that_was_missed_is_called_so() -> None:
    figures = json.loads(publish.DATA.read_text())
    figures["latency"]["added_ms"]["in all"] = 9.0
    assert "| 9 ms | no |" in publish.goals(figures)
