"""Runs examples/quickstart.py on the installed server and model. Whatever fails is told in a few
lines."""

from __future__ import annotations

import runpy
import sys

from llama_worker import LlamaWorkerError
from llama_worker.errors import described_error
from tools.found import find_model, find_server


def main() -> int:
    """The example, as a person would call it; the exit code."""
    try:
        sys.argv = ["examples/quickstart.py", "--server", find_server(), "--model", find_model()]
        runpy.run_path(sys.argv[0], run_name="__main__")
    except KeyboardInterrupt:
        return 130
    except (LlamaWorkerError, FileNotFoundError) as error:
        print(f"error: {error}", file=sys.stderr)
        return 1
    except Exception as error:  # a newcomer is told what to do, not where in the code it happened
        print(f"error: the demo failed: {described_error(error)}", file=sys.stderr)
        print(
            "  what to do: `.venv/bin/llama-worker doctor MODEL.gguf` looks for common causes",
            file=sys.stderr,
        )
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main())
