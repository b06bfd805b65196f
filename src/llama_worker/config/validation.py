"""Checks single values, and dataclasses whose annotations say what their fields may hold.

Pure. A wrong type raises TypeError, a bad value ConfigError; the text has field and value.
"""

from __future__ import annotations

import dataclasses
import difflib
import functools
import inspect
import json
import math
import os
from collections.abc import Callable, Iterable, Mapping
from types import NoneType, UnionType
from typing import (
    Annotated,
    Any,
    Literal,
    TypeAlias,
    TypeVar,
    Union,
    get_args,
    get_origin,
    get_type_hints,
)

from llama_worker.errors import ConfigError

T = TypeVar("T")
MAX_SECONDS = 1e9  # some 30 years; Linux and Python cannot wait much longer
NONE_TOO = " (None is allowed, too)"
_MAX_INT_BITS = 1023
_SHOWN_CHARS = 80
_MAX_COUNT = 1 << 63
_MAX_JSON_DEPTH = 100  # far below Python's recursion limit; also stops at what contains itself


def shown(value: object) -> str:
    """The value for an error message, cut short."""
    try:
        text = repr(value)
    except Exception:  # a host's __repr__ that raises must not hide the actual error
        text = f"a {type(value).__name__}"
    return text if len(text) <= _SHOWN_CHARS else f"{text[:_SHOWN_CHARS]}..."


def did_you_mean(name: str, known: Iterable[str], *, cutoff: float = 0.6) -> str | None:
    """`did you mean 'slots'?`; None if no known name is close."""
    near = difflib.get_close_matches(name, list(known), n=1, cutoff=cutoff)
    return f"did you mean {near[0]!r}?" if near else None


def checked_number(
    name: str,
    value: object,
    *,
    above: float | None = None,
    at_least: float | None = None,
    at_most: float | None = None,
) -> None:
    """Check for a finite int or float within the bounds that fits a double."""
    if isinstance(value, bool) or not isinstance(value, (int, float)):
        raise TypeError(f"{name} must be a number, not {type(value).__name__}: {shown(value)}")
    if isinstance(value, int) and value.bit_length() > _MAX_INT_BITS:
        raise ConfigError(f"{name} must fit a double, not be an int of {value.bit_length()} bits")
    if not math.isfinite(value):
        raise ConfigError(f"{name} must be finite, not {shown(value)}")
    if above is not None and value <= above:
        raise ConfigError(f"{name} must be above {above:g}, not {shown(value)}")
    if at_least is not None and value < at_least:
        raise ConfigError(f"{name} must be {at_least:g} or more, not {shown(value)}")
    if at_most is not None and value > at_most:
        raise ConfigError(f"{name} must be {at_most:g} or less, not {shown(value)}")


checked_seconds = functools.partial(checked_number, at_most=MAX_SECONDS)


def checked_int(name: str, value: object, *, at_least: int, at_most: int | None = None) -> None:
    """Check for an int (not a bool) within the bounds."""
    if isinstance(value, bool) or not isinstance(value, int):
        raise TypeError(f"{name} must be an int, not {type(value).__name__}: {shown(value)}")
    checked_number(name, value)
    if value < at_least or (at_most is not None and value > at_most):
        bounds = f"{at_least} or more" if at_most is None else f"from {at_least} to {at_most}"
        raise ConfigError(f"{name} must be {bounds}, not {shown(value)}")


def checked_str(
    name: str, value: object, *, empty: bool = True, nul: bool = True, secret: bool = False
) -> None:
    """Check for a str that can be encoded: servers refuse lone surrogates (b11434). If `secret`,
    the error does not show the value."""
    safe_text = "(not shown)" if secret else shown(value)
    if not isinstance(value, str):
        raise TypeError(f"{name} must be a str, not {type(value).__name__}: {safe_text}")
    if not empty and not value:
        raise ConfigError(f"{name} must not be empty")
    if not nul and "\0" in value:
        raise ConfigError(f"{name} must not contain a NUL character: {safe_text}")
    try:
        value.encode()
    except UnicodeEncodeError:
        raise ConfigError(
            f"{name} must be valid Unicode, without lone surrogates: {safe_text}"
        ) from None


def checked_api_key(name: str, key: Any) -> None:
    """Check for text that an HTTP header can hold: a line break would begin another header."""
    checked_str(name, key, empty=False, secret=True)
    if key != key.strip():
        raise ConfigError(
            f"{name} must not begin or end with white space: a key file ends with a line break, "
            "so read it with Path(...).read_text().strip()"
        )
    if not key.isascii() or not key.isprintable():
        raise ConfigError(f"{name} must be printable ASCII: it travels in an HTTP header")


def checked_path(name: str, value: object) -> str:
    """Check a file's path; returns it as str."""
    if not isinstance(value, (str, os.PathLike)):
        raise TypeError(f"{name} must be a path, not {type(value).__name__}: {shown(value)}")
    path = os.fspath(value)
    checked_str(name, path, empty=False, nul=False)
    return path


def as_count(value: object) -> int | None:
    """A count that a server reports; None if it is not an int, negative, or 2**63 or more."""
    if not isinstance(value, int) or isinstance(value, bool):
        return None
    return value if 0 <= value < _MAX_COUNT else None


def json_of(text: bytes | str) -> Any:
    """The parsed JSON; None if it is not JSON."""
    try:
        return json.loads(text)
    except (ValueError, RecursionError):
        return None


def plain_str(text: str) -> str:
    """The text as a plain str: a subclass may hold what cannot be copied, or change."""
    return str.__str__(text)


def checked_json_object(name: str, value: object) -> dict[str, Any]:
    """Check for a mapping that JSON can hold (str keys, no NaN, no lone surrogates); returns a copy
    of plain types."""
    if not isinstance(value, Mapping):
        raise TypeError(f"{name} must be a mapping, not {type(value).__name__}: {shown(value)}")
    copied = _copied(name, value, 1)
    assert isinstance(copied, dict)
    return copied


def _copied(where: str, value: object, depth: int) -> object:
    if depth > _MAX_JSON_DEPTH:
        where = f"{where[:_SHOWN_CHARS]}..."
        raise ConfigError(
            f"{where} must be nested {_MAX_JSON_DEPTH} levels deep at most, without cycles"
        )
    match value:
        case None | bool():
            return value
        case str():
            checked_str(where, value)
            return plain_str(value)
        case int():
            checked_number(where, value)
            return int.__int__(value)
        case float():
            checked_number(where, value)
            return float.__float__(value)
        case Mapping():
            for key in value:
                if not isinstance(key, str):
                    raise TypeError(f"{where} has the key {shown(key)}; JSON needs str keys")
                checked_str(f"a key of {where}", key)
            return {
                plain_str(key): _copied(f"{where}[{key!r}]", item, depth + 1)
                for key, item in value.items()
            }
        case list() | tuple():
            return [
                _copied(f"{where}[{index}]", item, depth + 1) for index, item in enumerate(value)
            ]
        case _:
            raise TypeError(
                f"{where} must be JSON-serializable (str, int, float, bool, None, list, tuple or "
                f"mapping), not {type(value).__name__}: {shown(value)}"
            )


def check_takes(field: str, function: object, /, *given: str, **named: str) -> None:
    """Check that `function` takes so many positional arguments, and keywords of these names.

    The values say what the arguments are, for the error's text. A built-in function without a
    signature passes.
    """
    if not callable(function):
        raise TypeError(f"{field} must be callable, not {shown(function)}")
    try:
        signature = inspect.signature(function)
    except (TypeError, ValueError):
        return
    try:
        signature.bind(*given, **named)
    except TypeError as error:
        call = ", ".join((*given, *(f"{key}=..." for key in named)))
        raise TypeError(
            f"{field} is called as ({call}), and its signature is {signature}: {error}"
        ) from None


def takes(function: Callable[..., object], parameter: str) -> bool:
    """Whether the callable has a parameter of that name."""
    try:
        return parameter in inspect.signature(function).parameters
    except (TypeError, ValueError):  # a built-in function without a signature
        return False


def check_callback(
    field: str, function: object, /, *given: str, instead: str = "", **named: str
) -> None:
    """As `check_takes`; also refuses an `async def`, or an object whose `__call__` is one: nothing
    would await its coroutine. `instead`: what to do, for the error's text."""
    check_takes(field, function, *given, **named)
    if any(map(inspect.iscoroutinefunction, (function, type(function).__call__))):
        raise TypeError(f"{field} must not be async: write it with 'def'{instead}")


def optional(check: Callable[..., T], name: str, value: object, **bounds: Any) -> T | None:
    """Apply `check` unless the value is None; returns what `check` returns."""
    if value is None:
        return None
    try:
        return check(name, value, **bounds)
    except (TypeError, ConfigError) as error:
        raise type(error)(f"{error}{NONE_TOO}") from None


def checked_type(name: str, value: object, kind: type) -> None:
    if not isinstance(value, kind):
        raise TypeError(
            f"{name} must be a {kind.__name__}, not {type(value).__name__}: {shown(value)}"
        )


def _checked_choice(name: str, value: object, choices: tuple[str, ...]) -> None:
    checked_str(name, value)
    if value not in choices:
        raise ConfigError(
            f"{name} must be one of {', '.join(map(repr, choices))}, not {shown(value)}"
        )


# ---------------------------------------------------------------- dataclasses

Seconds: TypeAlias = Annotated[float, functools.partial(checked_seconds, above=0)]
SecondsOrZero: TypeAlias = Annotated[float, functools.partial(checked_seconds, at_least=0)]
Count: TypeAlias = Annotated[int, functools.partial(checked_int, at_least=1)]
CountOrZero: TypeAlias = Annotated[int, functools.partial(checked_int, at_least=0)]


def check_fields(checked: object) -> None:
    """Check each field of a dataclass against its annotation.

    It checks `Annotated` fields by their check, which may return a copy to store instead, a bool, a
    Literal by its choices, another dataclass by its type, and each of these `| None`.
    """
    kind: Any = type(checked)
    for name, check in _field_checks(kind).items():
        kept = check(name, getattr(checked, name))
        if kept is not None:
            object.__setattr__(checked, name, kept)  # the dataclass is frozen


@functools.cache
def _field_checks(kind: Any) -> dict[str, Callable[[str, object], object]]:
    hints = get_type_hints(kind, include_extras=True)
    checks = {each.name: _check_of(hints[each.name]) for each in dataclasses.fields(kind)}
    return {name: check for name, check in checks.items() if check is not None}


def _check_of(hint: Any) -> Callable[..., object] | None:
    origin, parts = get_origin(hint), get_args(hint)
    if origin is Annotated:
        check: Callable[..., object] = hint.__metadata__[0]
        return check
    if origin is Literal:
        return functools.partial(_checked_choice, choices=parts)
    if origin in (Union, UnionType) and len(parts) == 2 and parts[1] is NoneType:
        of_value = _check_of(parts[0])
        return of_value and functools.partial(optional, of_value)
    is_checked = hint is bool or (isinstance(hint, type) and dataclasses.is_dataclass(hint))
    return functools.partial(checked_type, kind=hint) if is_checked else None


def names_near_fields(kind: type[T]) -> type[T]:
    """Decorator of a dataclass: an unknown argument raises a TypeError with the nearest field."""
    make = kind.__init__

    @functools.wraps(make)
    def __init__(self: T, *args: Any, **given: Any) -> None:
        for name in given:
            if name not in kind.__dataclass_fields__:  # type: ignore[attr-defined]
                known = [field.name for field in dataclasses.fields(kind)]  # type: ignore[arg-type]
                hint = did_you_mean(name, known) or f"known: {', '.join(known)}"
                raise TypeError(f"{kind.__name__} has no field {name!r}; {hint}")
        make(self, *args, **given)

    kind.__init__ = __init__  # type: ignore[method-assign,assignment]
    return kind
