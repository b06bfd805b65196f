"""A pytest plugin: the tests in an order that `--order-seed` draws."""

from __future__ import annotations

import random

import pytest


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption("--order-seed", type=int, required=True, help="the same seed, the same order")


@pytest.hookimpl(trylast=True)
def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """Last, behind those that sort them."""
    random.Random(config.getoption("order_seed")).shuffle(items)
