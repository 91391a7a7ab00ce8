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
from pathlib import Path

from kit.real.waiting import CAP
from kit.real.warm_process import WarmProcess

ESCAPE = re.compile(r"\x1b(\[[0-?]*[ -/]*[@-~]|[()][0-9A-B]|[=>78])")
"""Control sequences of a terminal."""


class Terminal:
    """A `thinwire` command with a terminal of `columns` × `rows` as stdin, stdout and stderr.

    warm: start by fork, without stdin; that takes less of the processor if the command needs torch.
    """

    def __init__(
        self,
        *words: object,
        columns: int = 80,
        rows: int = 24,
        environment: Mapping[str, str] | None = None,
        warm: bool = False,
    ) -> None:
        self._controller, self._terminal = pty.openpty()
        fcntl.ioctl(self._terminal, termios.TIOCSWINSZ, struct.pack("HHHH", rows, columns, 0, 0))
        self.process: subprocess.Popen[bytes] | WarmProcess
        environment = {"TERM": "xterm-256color", **(environment or {})}
        if warm:
            place = Path(os.ttyname(self._terminal))
            self.process = WarmProcess(list(map(str, words)), place, place, environment=environment)
        else:
            inherited = {key: value for key, value in os.environ.items() if key not in ("NO_COLOR", "COLUMNS", "LINES")}
            self.process = subprocess.Popen(
                [sys.executable, "-m", "thinwire", *map(str, words)],
                stdin=self._terminal,
                stdout=self._terminal,
                stderr=self._terminal,
                start_new_session=True,
                env={**inherited, **environment},
            )
        self.output = ""

    @property
    def text(self) -> str:
        """All output without control sequences."""
        return ESCAPE.sub("", self.output)

    def read(self, seconds: float = 0.0) -> None:
        """Read what there is, waiting up to `seconds`."""
        if select.select([self._controller], [], [], seconds)[0]:
            self.output += os.read(self._controller, 1 << 16).decode("utf-8", "replace")

    def wait_for(self, text: str, *, after: int = 0) -> int:
        """Wait until the text appears behind position `after` of `text`; return its end there."""
        until = time.monotonic() + CAP
        while (found := self.text.find(text, after)) < 0:
            over = self.process.poll() is not None
            self.read(0.2)
            assert not over and time.monotonic() < until, f"never {text!r}: {self.text[after:][-2000:]}"
        return found + len(text)

    def type(self, keys: str) -> None:
        """Send keys."""
        os.write(self._controller, keys.encode())

    def exit(self) -> int:
        """Read to the end, and return the exit code."""
        until = time.monotonic() + CAP
        while self.process.poll() is None:
            self.read(0.2)
            assert time.monotonic() < until, self.text[-2000:]
        while select.select([self._controller], [], [], 0)[0]:
            self.read()
        return self.process.wait(CAP)

    def close(self) -> None:
        """Close the terminal: writing to it is an error then."""
        os.close(self._controller)
        self._controller = -1

    def end(self) -> None:
        """Kill the process in any state."""
        self.process.kill()
        self.process.wait()
        os.close(self._terminal)
        if self._controller >= 0:
            self.close()
