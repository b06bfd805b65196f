"""Runs examples/quickstart.py on the installed server and model."""

from __future__ import annotations

import runpy
import sys

from tools.found import find_model, find_server


def main() -> None:
    """The example, as a person would call it."""
    sys.argv = ["examples/quickstart.py", "--server", find_server(), "--model", find_model()]
    runpy.run_path(sys.argv[0], run_name="__main__")


if __name__ == "__main__":
    main()
