"""Small stories, in as many orders as there is time for; `python -m tests.simulation.systematic`
plays them all."""

from __future__ import annotations

import pytest

from tests.simulation.systematic import STORIES, Story, explore

LIMIT = 60


@pytest.mark.parametrize("story", STORIES, ids=lambda story: story.name)
def test_a_story_holds_in_every_order(story: Story) -> None:
    assert explore(story, LIMIT).played >= 2
