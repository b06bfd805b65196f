"""Parametrized tests as tables whose rows have names."""

from collections.abc import Mapping
from typing import Any

import pytest


def cases(names: str, rows: Mapping[str, Any]) -> pytest.MarkDecorator:
    """Runs the test once for each row: the values of `names`, a tuple where there are several."""
    return pytest.mark.parametrize(names, list(rows.values()), ids=list(rows))
