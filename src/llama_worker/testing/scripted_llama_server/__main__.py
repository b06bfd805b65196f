"""Runs the server by this folder's path: see `server`."""

import os
import sys
from importlib import import_module

if __name__ == "__main__":
    # Not as a part of llama_worker, whose import takes a while and more than the standard library.
    sys.path[0] = os.path.dirname(os.path.dirname(os.path.abspath(__file__)))
    import_module("scripted_llama_server.server").main(sys.argv)
