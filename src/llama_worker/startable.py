"""The base class of what a `with` block starts and closes. Pure."""

from __future__ import annotations

from abc import ABC, abstractmethod
from typing import Any, Self


class Startable(ABC):
    """A context manager that calls `start` on entry and `close` on exit."""

    @abstractmethod
    def start(self) -> Any:
        """Begin to start. Never blocks: the future resolves once it runs, or raises the start's
        error."""

    @abstractmethod
    def close(self) -> None:
        """End for good. Blocks; idempotent."""

    def __enter__(self) -> Self:
        """Start, and wait until it runs; if the start fails, close, and raise its error."""
        try:
            self.start().get()
        except BaseException:
            self.close()
            raise
        return self

    def __exit__(self, *_: object) -> None:
        self.close()
