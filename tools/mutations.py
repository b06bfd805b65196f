"""Small mistakes that a person could make in a source file: each one a replacement of its text.

Annotations, docstrings, imports, f-strings, log lines and the texts of errors are left alone. So is
what nobody could see: a `return False` or `None` behind which nothing follows, and whether a
comparison of times includes the instant in which they are equal.
"""

from __future__ import annotations

import ast
import difflib
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Final

_COMPARISONS: Final[dict[type[ast.cmpop], tuple[type[ast.cmpop], ...]]] = {
    ast.Lt: (ast.LtE, ast.GtE),
    ast.LtE: (ast.Lt, ast.Gt),
    ast.Gt: (ast.GtE, ast.LtE),
    ast.GtE: (ast.Gt, ast.Lt),
    ast.Eq: (ast.NotEq,),
    ast.NotEq: (ast.Eq,),
    ast.Is: (ast.IsNot,),
    ast.IsNot: (ast.Is,),
    ast.In: (ast.NotIn,),
    ast.NotIn: (ast.In,),
}
_OF_TIMES: Final = {ast.LtE: ast.Gt, ast.Lt: ast.GtE, ast.GtE: ast.Lt, ast.Gt: ast.LtE}
_ARITHMETIC: Final[dict[type[ast.operator], type[ast.operator]]] = {
    ast.Add: ast.Sub,
    ast.Sub: ast.Add,
    ast.Mult: ast.Div,
    ast.Div: ast.Mult,
}
_SWAPPED_CALLS: Final = {"min": "max", "max": "min", "any": "all", "all": "any"}
_RETURNS_NOTHING: Final = ("return", "return None", "return False")
_EFFECTFUL: Final = (ast.Expr, ast.Assign, ast.AugAssign, ast.Return, ast.Raise, ast.Delete)


@dataclass(frozen=True, slots=True)
class Mutation:
    """One changed place of one file."""

    path: str
    inside: str  # the function or class, with its owners
    before: str  # on one line, as is `after`: what names the mutation beside the place
    after: str
    begin: int  # bytes of the file
    end: int

    @property
    def is_in_function(self) -> bool:
        """And not in a class's body or the module's, which an import executes."""
        return self.inside.rpartition(".")[2].lstrip("_")[:1].islower()

    def line(self, source: bytes) -> int:
        """Where it begins, from 1."""
        return source.count(b"\n", 0, self.begin) + 1

    def applied(self, source: bytes) -> bytes:
        return source[: self.begin] + self.after.encode() + source[self.end :]

    def diff(self, source: bytes) -> str:
        """Of the file, for a person."""
        return "".join(
            difflib.unified_diff(
                source.decode().splitlines(keepends=True),
                self.applied(source).decode().splitlines(keepends=True),
                self.path,
                f"{self.path} (in {self.inside or 'the module'})",
                n=2,
            )
        )


def mutations(path: str, source: bytes) -> list[Mutation]:
    """All that can be made in the file, in its order."""
    finder = _Finder(path, source)
    finder.visit(ast.parse(source))
    return sorted(set(finder.found), key=lambda each: (each.begin, each.end, each.after))


class _Finder(ast.NodeVisitor):
    def __init__(self, path: str, source: bytes) -> None:
        self.found: list[Mutation] = []
        self._path, self._source = path, source
        self._line_starts = [0]
        for line in source.splitlines(keepends=True):
            self._line_starts.append(self._line_starts[-1] + len(line))
        self._owners: list[str] = []
        self._without_effect = set[ast.AST]()

    # ------------------------------------------------------------ what is found

    def _offsets(self, node: ast.AST) -> tuple[int, int]:
        begin = self._line_starts[node.lineno - 1] + node.col_offset  # type: ignore[attr-defined]
        end = self._line_starts[node.end_lineno - 1] + node.end_col_offset  # type: ignore[attr-defined]
        return begin, end

    def _replace(self, node: ast.AST, after: str) -> None:
        begin, end = self._offsets(node)
        before = " ".join(self._source[begin:end].decode().split())
        owners = ".".join(self._owners)
        self.found.append(Mutation(self._path, owners, before, after, begin, end))

    def _replace_expression(self, node: ast.expr, after: ast.expr) -> None:
        text = ast.unparse(after)
        simple = isinstance(after, (ast.Name, ast.Constant, ast.Attribute, ast.Call, ast.Tuple))
        self._replace(node, text if simple else f"({text})")

    # ------------------------------------------------------------ expressions

    def visit_Compare(self, node: ast.Compare) -> None:
        for index, operator in enumerate(node.ops):
            others = _COMPARISONS[type(operator)]
            if type(operator) in _OF_TIMES and any(map(_is_time, (node.left, *node.comparators))):
                others = (_OF_TIMES[type(operator)],)
            for other in others:
                ops = [*node.ops[:index], other(), *node.ops[index + 1 :]]
                changed = ast.Compare(left=node.left, ops=ops, comparators=node.comparators)
                self._replace_expression(node, changed)
        self.generic_visit(node)

    def visit_BoolOp(self, node: ast.BoolOp) -> None:
        other = ast.Or() if isinstance(node.op, ast.And) else ast.And()
        self._replace_expression(node, ast.BoolOp(op=other, values=node.values))
        for index in range(len(node.values)):
            rest = node.values[:index] + node.values[index + 1 :]
            left = rest[0] if len(rest) == 1 else ast.BoolOp(op=node.op, values=rest)
            self._replace_expression(node, left)
        self.generic_visit(node)

    def visit_UnaryOp(self, node: ast.UnaryOp) -> None:
        if isinstance(node.op, ast.Not):
            self._replace_expression(node, node.operand)
        self.generic_visit(node)

    def visit_BinOp(self, node: ast.BinOp) -> None:
        other = _ARITHMETIC.get(type(node.op))
        texts = (node.left, node.right)
        if other is not None and not any(isinstance(each, ast.JoinedStr) for each in texts):
            changed = ast.BinOp(left=node.left, op=other(), right=node.right)
            self._replace_expression(node, changed)
        self.generic_visit(node)

    def visit_IfExp(self, node: ast.IfExp) -> None:
        changed = ast.IfExp(test=node.test, body=node.orelse, orelse=node.body)
        self._replace_expression(node, changed)
        self.generic_visit(node)

    def visit_Constant(self, node: ast.Constant) -> None:
        match node.value:
            case bool(value):
                self._replace(node, str(not value))
            case int(value):
                self._replace(node, str(value + 1))
            case float(value):
                self._replace(node, repr(2 * value if value else 1.0))

    def visit_Call(self, node: ast.Call) -> None:
        if isinstance(node.func, ast.Name) and node.func.id in _SWAPPED_CALLS:
            self._replace(node.func, _SWAPPED_CALLS[node.func.id])
        self.generic_visit(node)

    def visit_Tuple(self, node: ast.Tuple) -> None:
        self._visit_effects(node)

    def visit_List(self, node: ast.List) -> None:
        self._visit_effects(node)

    def _visit_effects(self, node: ast.Tuple | ast.List) -> None:
        """Where each is made there and then: without one of them, or two the other way round."""
        kind = type(node)
        made = [each.value if isinstance(each, ast.Starred) else each for each in node.elts]
        if isinstance(node.ctx, ast.Load) and all(isinstance(each, ast.Call) for each in made):
            for index in range(len(made)):
                rest = node.elts[:index] + node.elts[index + 1 :]
                self._replace_expression(node, kind(elts=rest, ctx=ast.Load()))
            if len(made) == 2:
                self._replace_expression(node, kind(elts=node.elts[::-1], ctx=ast.Load()))
        self.generic_visit(node)

    def visit_JoinedStr(self, node: ast.JoinedStr) -> None: ...

    # ------------------------------------------------------------ statements

    def visit(self, node: ast.AST) -> None:
        if isinstance(node, _EFFECTFUL) and self._owners and node not in self._without_effect:
            self._replace(node, "pass")
        super().visit(node)

    def visit_keyword(self, node: ast.keyword) -> None:
        if not (node.arg == "strict" and ast.unparse(node.value) == "True"):  # an assertion
            self.visit(node.value)

    def visit_Raise(self, node: ast.Raise) -> None: ...

    def visit_Assert(self, node: ast.Assert) -> None: ...

    def visit_Import(self, node: ast.Import) -> None: ...

    def visit_ImportFrom(self, node: ast.ImportFrom) -> None: ...

    def visit_Assign(self, node: ast.Assign) -> None:
        self.visit(node.value)

    def visit_AnnAssign(self, node: ast.AnnAssign) -> None:
        if node.value is not None:
            self.visit(node.value)

    def visit_If(self, node: ast.If) -> None:
        if ast.unparse(node.test) == "TYPE_CHECKING":
            return
        if not isinstance(node.test, (ast.Compare, ast.BoolOp, ast.UnaryOp)):
            self._replace_expression(node.test, ast.UnaryOp(op=ast.Not(), operand=node.test))
        self.generic_visit(node)

    def visit_match_case(self, node: ast.match_case) -> None:
        body = node.body[0]
        never = isinstance(body, ast.Expr) and ast.unparse(body.value).startswith("assert_never")
        if node.guard is not None:
            self._replace_expression(node.guard, ast.Constant(value=False))
        elif not never:
            self._replace(node.pattern, '"nothing like it"')
        for each in (node.guard, *node.body):
            if each is not None:
                self.visit(each)

    def visit_Expr(self, node: ast.Expr) -> None:
        if not _is_logged(node):
            self.generic_visit(node)

    def visit_ClassDef(self, node: ast.ClassDef) -> None:
        self._visit_body(node)

    def visit_FunctionDef(self, node: ast.FunctionDef) -> None:
        if node.name not in ("__repr__", "__str__", "describe", "masked"):
            ends = (each for each in _ends(node.body) if ast.unparse(each) in _RETURNS_NOTHING)
            self._without_effect.update(ends)
            self._visit_body(node)

    def _visit_body(self, node: ast.ClassDef | ast.FunctionDef) -> None:
        self._owners.append(node.name)
        said = (each for each in ast.walk(node) if _is_docstring(each) or _is_logged(each))
        self._without_effect.update(said)
        for each in node.body:
            self.visit(each)
        self._owners.pop()


def _is_time(node: ast.expr) -> bool:
    """Whether its name says that it is an instant or a duration."""
    name = ast.unparse(node).rpartition(".")[2]
    return name in ("now", "at") or name.endswith(("_s", "_at"))


def _is_docstring(node: ast.AST) -> bool:
    """Or `...`."""
    return isinstance(node, ast.Expr) and isinstance(node.value, ast.Constant)


def _is_logged(node: ast.AST) -> bool:
    return isinstance(node, ast.Expr) and ast.unparse(node).startswith("_logger.")


def _ends(body: list[ast.stmt]) -> Iterator[ast.stmt]:
    """The statements behind which nothing of the body follows."""
    match body[-1]:
        case ast.If(body=inner, orelse=other):
            yield from (*_ends(inner), *_ends(other or inner))
        case ast.With(body=inner):
            yield from _ends(inner)
        case ast.Try(body=inner, handlers=handlers, orelse=other, finalbody=[]):
            for each in (other or inner, *(handler.body for handler in handlers)):
                yield from _ends(each)
        case ast.Match(cases=cases):
            for case in cases:
                yield from _ends(case.body)
        case last:
            yield last
