"""A config to change, bad values in tables, and what is said of them."""

import re
from collections.abc import Callable
from typing import Any

import pytest

from llama_worker import WorkerConfig
from llama_worker.config.validation import shown

CMD = (
    *("llama-server", "--model", "m.gguf", "--host", "127.0.0.1"),
    *("--port", "9001", "--parallel", "1"),
)
SURROGATE = "a\ud800b"


def config(**changed: Any) -> WorkerConfig:
    given: dict[str, Any] = {"name": "w", "host": "127.0.0.1", "port": 9001, "server_cmd": CMD}
    return WorkerConfig(**(given | changed))


def tool(name: Any = "add", **function: Any) -> Any:
    return {"type": "function", "function": {"name": name, **function}}


def bad(field: str, value: Any, error: type[Exception], *says: str) -> Any:
    """One line of a table; `says`: what is in the message beside the field's name."""
    # every process that runs tests must name them alike
    name = re.sub(r" at 0x[0-9a-f]*", "", shown(value))
    return pytest.param(field, value, error, says, id=f"{field}={name[:40]}")


def refuses(make: Callable[[], object], field: str, error: type[Exception], *says: str) -> None:
    """The error names the field, says all this, and is no longer than a few lines."""
    with pytest.raises(error) as caught:
        make()
    text = str(caught.value)
    assert all(part in text for part in (field, *says)), text
    assert len(text) < 400
