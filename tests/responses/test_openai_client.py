"""The official Python clients, against the real llama-server."""

import pytest

from tests.responses.conftest import Client
from tests.responses.scenarios.openai_python import SCENARIOS, Scenario, make_client


@pytest.mark.server
@pytest.mark.parametrize("scenario", SCENARIOS, ids=lambda scenario: scenario.__name__)
def test_scenario(real: Client, scenario: Scenario) -> None:
    with make_client(real.proxy.base_url) as client:
        scenario(client)
