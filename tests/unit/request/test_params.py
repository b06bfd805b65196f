"""What a request's parameters mean, and which of them the user is warned of."""

from dataclasses import replace
from typing import Any

from llama_worker.config.settings import WorkerConfig
from llama_worker.request.params import needs_specific_slots, params_warnings
from tests.tables import cases
from tests.unit.config.cases import config
from tests.unit.request.playbook import PLAIN, WITH_TOOLS, Play, with_tools


def test_params_the_worker_sets_are_named() -> None:
    owned = {"messages": [], "tools": [{"x": 1}], "stream": False}
    for of, params in ((config(default_params=owned), {}), (config(), owned)):
        ignored = [line.split()[1] for line in params_warnings(of, params)]
        assert ignored == ["'messages'", "'tools'", "'stream'"]


JSON_OBJECT = {"response_format": {"type": "json_object"}}


@cases(
    "of, params, warns",
    {
        "two answers": (PLAIN, {"n": 2}, True),
        "two answers, in the server's own word": (PLAIN, {"n_cmpl": 2.0}, True),
        "one answer": (PLAIN, {"n": 1, "n_cmpl": None}, False),
        "probabilities": (PLAIN, {"logprobs": True}, True),
        "probabilities, in the server's own word": (PLAIN, {"n_probs": 5}, True),
        "no probabilities": (PLAIN, {"logprobs": False, "n_probs": 0}, False),
        "a prefill": (PLAIN, {"continue_final_message": "content"}, True),
        "no prefill": (PLAIN, {"continue_final_message": False}, False),
        "no beginning of an answer": (PLAIN, {"add_generation_prompt": False}, True),
        "its beginning": (PLAIN, {"add_generation_prompt": True}, False),
        "a format beside tools": (WITH_TOOLS, JSON_OBJECT, True),
        "a schema beside tools": (with_tools(exit_tools=()), {"json_schema": {}}, True),
        "a schema beside exit tools": (with_tools(normal_tools=()), {"json_schema": {}}, True),
        "a format without tools": (PLAIN, JSON_OBJECT, False),
        "a format, and no calls": (WITH_TOOLS, {**JSON_OBJECT, "tool_choice": "none"}, False),
        "free text beside tools": (WITH_TOOLS, {"response_format": {"type": "text"}}, False),
        "odd ones": (WITH_TOOLS, {"response_format": [1], "n": "2", "n_cmpl": [2]}, False),
    },
)
def test_params_that_break_a_promise_are_named(
    of: WorkerConfig, params: dict[str, Any], warns: bool
) -> None:
    name = next(iter(params))
    for where in ((of, params), (replace(of, default_params=params), {})):
        named = [line.split("'")[1] for line in params_warnings(*where)]
        assert named == ([name] if warns else [])


@cases(
    "slots, cache, params, warns",
    {
        "a busy slot": (2, (), {"id_slot": 0}, True),
        "any slot": (2, (), {"id_slot": -1}, False),
        "no other request": (1, (), {"id_slot": 0}, False),
        "no cache": (2, ("--cache-ram", "0"), {"id_slot": 0}, False),
    },
)
def test_a_slot_by_its_number_may_mix_conversations(
    slots: int, cache: tuple[str, ...], params: dict[str, Any], warns: bool
) -> None:
    command = ("llama-server", "-m", "m.gguf", *cache)
    of = replace(config(), slots=slots, server_cmd=command)
    assert bool([*params_warnings(of, params)]) is warns
    assert bool([*params_warnings(replace(of, default_params=params), {})]) is warns


@cases(
    "params, picks",
    {
        "none": ({}, False),
        "any slot": ({"id_slot": -1, "n": 1, "n_cmpl": 1}, False),
        "null": ({"id_slot": None, "n": None}, False),
        "odd ones": ({"id_slot": 0.5, "n": [2], "n_cmpl": True}, False),
        "one by its number": ({"id_slot": 0}, True),
        "one by a number with a point": ({"id_slot": 1.0}, True),
        "two answers": ({"n": 2}, True),
        "two answers, in the server's own word": ({"n_cmpl": 2}, True),
    },
)
def test_who_picks_its_slots(params: dict[str, Any], picks: bool) -> None:
    assert needs_specific_slots(params) is picks
    assert Play(params=params).request.progress().needs_specific_slots is picks
    assert Play(config(default_params=params)).request.progress().needs_specific_slots is picks
