"""Supervises one llama.cpp `llama-server` from inside a threaded Python program and runs chat
requests on it.

The public names are defined in `llama_worker.public`, which is imported when one of them is first
used (PEP 562): so the command line handles Ctrl-C before the slow imports, without a traceback.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING

__version__ = "0.1.0"

if TYPE_CHECKING:
    from llama_worker.public import *  # noqa: F403 - it has public names only
else:

    def __getattr__(name: str) -> object:
        if name == "__all__":
            return _public_names()
        if name not in _public_names():
            raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
        return getattr(importlib.import_module(f"{__name__}.public"), name)

    def __dir__() -> list[str]:
        return sorted({*globals(), *_public_names()})

    def _public_names() -> list[str]:
        public = importlib.import_module(f"{__name__}.public")
        return [name for name in vars(public) if not name.startswith("_")]
