"""`python -m llama_worker.cli`."""

import sys

from llama_worker.cli import main

if __name__ == "__main__":
    sys.exit(main())
