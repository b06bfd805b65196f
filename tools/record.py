"""Records a command in a terminal of its own as an asciicast (version 2), which `svg-term` draws as
an SVG.

python -m tools.record FILE.cast COMMAND...
"""

from __future__ import annotations

import codecs
import fcntl
import json
import os
import pty
import struct
import sys
import termios
import time
from pathlib import Path

COLUMNS, LINES = 80, 16
TYPED = 0.03  # s per character of the command line that is shown first
LAST = 3.0  # s that the end stays


def record(shown: str, command: list[str]) -> list[tuple[float, str]]:
    """What the terminal showed, and when (s): the command line as if typed, then the command's own
    output."""
    seen = [(TYPED * i, char) for i, char in enumerate(f"$ {shown}")]
    began = time.monotonic() - seen[-1][0] - 0.3
    seen.append((seen[-1][0] + 0.3, "\r\n"))
    pid, terminal = pty.fork()
    if pid == 0:
        os.environ["TERM"] = "xterm-256color"
        fcntl.ioctl(0, termios.TIOCSWINSZ, struct.pack("HHHH", LINES, COLUMNS, 0, 0))
        os.execvp(command[0], command)
    decoder = codecs.getincrementaldecoder("utf-8")("replace")
    while True:
        try:
            data = os.read(terminal, 65536)
        except OSError:  # the command has ended
            break
        seen.append((time.monotonic() - began, decoder.decode(data)))
    os.waitpid(pid, 0)
    os.close(terminal)
    return [*seen, (seen[-1][0] + LAST, "")]


def main() -> None:
    """Write the file."""
    path, *command = sys.argv[1:]
    shown = " ".join(f'"{word}"' if " " in word else os.path.basename(word) for word in command)
    header = {"version": 2, "width": COLUMNS, "height": LINES}
    lines = [
        json.dumps(header),
        *(json.dumps([round(at, 3), "o", text]) for at, text in record(shown, command)),
    ]
    Path(path).write_text("\n".join(lines) + "\n")


if __name__ == "__main__":
    main()
