"""What is started for a `with` block, and closed at its end. Pure."""

from __future__ import annotations

from abc import ABC, abstractmethod
from types import TracebackType
from typing import Protocol, Self


class _Starting(Protocol):
    """A future."""

    def get(self) -> object: ...


class Startable(ABC):
    """Has a `start` and a `close`, and so is a context manager."""

    @abstractmethod
    def start(self) -> _Starting:
        """Begin. Never blocks: the future resolves once it runs, or raises what kept it from
        that."""

    @abstractmethod
    def close(self) -> None:
        """End for good. Blocks; idempotent."""

    def __enter__(self) -> Self:
        """`start().get()`; what does not start is closed."""
        try:
            self.start().get()
        except BaseException:
            self.close()
            raise
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        self.close()
