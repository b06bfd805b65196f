"""How many names a reader of the actors has to learn."""

from __future__ import annotations

from typing import get_args

from msgspec import Struct

from llama_worker import messages
from llama_worker.request import state
from llama_worker.server import lifecycle_states, watch


def test_messages_and_effects_have_sixty_names_at_most() -> None:
    kinds = {
        kind
        for kind in vars(messages).values()
        if isinstance(kind, type) and issubclass(kind, Struct) and kind.__module__ == messages.__name__
    }
    for effects in (state.Effect, lifecycle_states.Effect, watch.Order | watch.News):
        kinds |= set(get_args(effects))
    names = sorted(kind.__name__ for kind in kinds)
    assert len(names) <= 60, names
