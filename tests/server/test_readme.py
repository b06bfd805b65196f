"""The README's example runs as it stands."""

from __future__ import annotations

import re
from collections.abc import Callable
from pathlib import Path

import pytest

pytestmark = pytest.mark.server
README = Path(__file__).parents[2] / "README.md"


def test_the_example_of_the_readme_prints_an_answer(
    llama_server: str, smollm2: str, free_port: Callable[[], int], capsys: pytest.CaptureFixture[str]
) -> None:
    (code,) = re.findall(r"```python\n(.*?)```", README.read_text(), flags=re.DOTALL)
    code = code.replace("8080", str(free_port())).replace('"model.gguf"', repr(smollm2))
    code = code.replace("slots=2)\nwith", f"slots=2, executable={llama_server!r})\nwith")
    exec(compile(code, str(README), "exec"), {})
    assert capsys.readouterr().out.strip()
