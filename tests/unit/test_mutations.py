"""The small mistakes of `make mutants`."""

import ast
import tomllib
from pathlib import Path

import pytest

from tools.mutations import mutations

ROOT = Path(__file__).parents[2]


def mutants(body: str) -> set[str]:
    """Every mutant of a function with that body, as the body."""
    head = "def f(a, b):\n    "
    source = f"{head}{body}\n".encode()
    found = {each.applied(source).decode() for each in mutations("f.py", source)}
    return {each.removeprefix(head).rstrip("\n") for each in found}


@pytest.mark.parametrize(
    ("body", "expected"),
    [
        ("return a < b", {"pass", "return (a <= b)", "return (a >= b)"}),
        ("return a is b", {"pass", "return (a is not b)"}),
        ("return a and b", {"pass", "return (a or b)", "return a", "return b"}),
        ("return not a", {"pass", "return a"}),
        ("return a + 3", {"pass", "return (a - 3)", "return a + 4"}),
        (
            "return a if b else True",
            {"pass", "return (True if b else a)", "return a if b else False"},
        ),
        ("return 0.5", {"pass", "return 1.0"}),
        ("return max(a, b)", {"pass", "return min(a, b)"}),
        ("a.end(b)", {"pass"}),
        ("a.n += 1", {"pass", "a.n += 2"}),
        (
            "return a, (b(), a())",
            {"pass", "return a, (a(),)", "return a, (b(),)", "return a, (a(), b())"},
        ),
        ("if a: pass", {"if (not a): pass"}),
        ("raise ValueError(f'{a + 1}')", {"pass"}),
        ("assert a < b", set()),
        ("return zip(a, strict=True)", {"pass"}),
        ("if a is b: return False", {"if (a is not b): return False", "if a is b: return True"}),
        ("_logger.info(a + b)", set()),
        ("return a.sent_at < b", {"pass", "return (a.sent_at >= b)"}),
    ],
)
def test_what_a_person_could_have_written(body: str, expected: set[str]) -> None:
    assert mutants(body) == expected


def test_a_case_may_never_match() -> None:
    body = "match a:\n        case int() if b: pass\n        case {}: pass"
    never = body.replace("if b", "if False").format("str()"), body.format('"nothing like it"')
    assert mutants(body.format("str()")) == set(never)


@pytest.mark.parametrize("path", ["actors/worker.py", "src/llama_worker/stream/decoder.py"])
def test_every_mutant_is_a_valid_program(path: str) -> None:
    source = (ROOT / path).read_bytes()
    found = mutations(path, source)
    assert len(found) > 100
    for each in found[::5]:
        ast.parse(each.applied(source))


def test_every_equivalent_mutant_can_be_made() -> None:
    listed = tomllib.loads((ROOT / "tools" / "equivalent_mutants.toml").read_text())["equivalent"]
    for each in listed:
        found = mutations(each["path"], (ROOT / each["path"]).read_bytes())
        texts = [(mutant.inside, mutant.before, mutant.after) for mutant in found]
        assert texts.count((each["inside"], each["before"], each["after"])) == 1, each
        assert each["reason"]
