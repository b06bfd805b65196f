"""Prints where each Python that the library supports is installed: on the PATH, or by pyenv.

For the Makefile and the soak: a name on the PATH may be a shim of pyenv's with nothing behind it.
"""

from __future__ import annotations

import os
import shutil
import subprocess
from pathlib import Path

NAMES = ("python3.11", "python3.12", "python3.13")


def find(name: str) -> str | None:
    """The path of that Python; None where it is not installed."""
    version = name.removeprefix("python")
    pyenv = Path(os.environ.get("PYENV_ROOT", "~/.pyenv")).expanduser()
    there = sorted(map(str, pyenv.glob(f"versions/{version}.*/bin/{name}")))
    for path in (shutil.which(name), *reversed(there)):
        if path and subprocess.run([path, "--version"], capture_output=True).returncode == 0:
            return path
    return None


if __name__ == "__main__":
    print(*filter(None, map(find, NAMES)))
