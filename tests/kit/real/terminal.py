"""A command on a pseudo-terminal of its size, as a person at a terminal has it."""

from __future__ import annotations

import fcntl
import os
import pty
import re
import select
import struct
import subprocess
import sys
import termios
import time
from collections.abc import Mapping

CAP = 100.0
"""Seconds after which missing output counts as a failure."""

ESCAPE = re.compile(r"\x1b(\[[0-?]*[ -/]*[@-~]|[()][0-9A-B]|[=>78])")
"""Control sequences of a terminal."""


class Terminal:
    """A `thinwire` command with a terminal of `columns` × `rows` as stdin, stdout and stderr."""

    def __init__(
        self, *words: object, columns: int = 80, rows: int = 24, environment: Mapping[str, str] | None = None
    ) -> None:
        self._controller, terminal = pty.openpty()
        fcntl.ioctl(terminal, termios.TIOCSWINSZ, struct.pack("HHHH", rows, columns, 0, 0))
        inherited = {key: value for key, value in os.environ.items() if key not in ("NO_COLOR", "COLUMNS", "LINES")}
        self.process = subprocess.Popen(
            [sys.executable, "-m", "thinwire", *map(str, words)],
            stdin=terminal,
            stdout=terminal,
            stderr=terminal,
            start_new_session=True,
            env={**inherited, "TERM": "xterm-256color", **(environment or {})},
        )
        os.close(terminal)
        self.output = ""

    @property
    def text(self) -> str:
        """All output without control sequences."""
        return ESCAPE.sub("", self.output)

    def read(self, seconds: float = 0.0) -> bool:
        """Read what there is, waiting up to `seconds`; return False at the end of the output."""
        if select.select([self._controller], [], [], seconds)[0]:
            try:
                part = os.read(self._controller, 1 << 16)
            except OSError:  # the process has closed the terminal
                part = b""
            if not part:
                return False
            self.output += part.decode("utf-8", "replace")
        return True

    def wait_for(self, text: str, *, after: int = 0) -> int:
        """Wait until the text appears behind position `after` of `text`; return its end there."""
        until = time.monotonic() + CAP
        while (found := self.text.find(text, after)) < 0:
            assert self.read(0.2) and time.monotonic() < until, f"never {text!r}: {self.text[after:][-2000:]}"
        return found + len(text)

    def type(self, keys: str) -> None:
        """Send keys."""
        os.write(self._controller, keys.encode())

    def exit(self) -> int:
        """Read to the end, and return the exit code."""
        until = time.monotonic() + CAP
        while self.read(0.2) and self.process.poll() is None:
            assert time.monotonic() < until, self.text[-2000:]
        while self.read(0.0) and select.select([self._controller], [], [], 0)[0]:
            pass
        return self.process.wait(CAP)

    def pause(self) -> None:
        """Wait a moment; fail if the process has ended."""
        assert self.process.poll() is None
        time.sleep(0.05)

    def close(self) -> None:
        """Close the terminal; the process continues."""
        os.close(self._controller)
        self._controller = -1

    def end(self) -> None:
        """Kill the process, whatever it does."""
        self.process.kill()
        self.process.wait()
        if self._controller >= 0:
            self.close()
