"""Signals that end a daemon, or all daemons of a machine, in an orderly way."""

from __future__ import annotations

import signal
import threading
from types import FrameType

HANGUP = getattr(signal, "SIGHUP", None)
"""The terminal has closed; the system and the shell may each send it."""

INTERRUPTED = 128 + signal.SIGINT
"""Exit code of a process that Ctrl-C has ended."""


def ending() -> list[signal.Signals]:
    """Return the signals to handle: under nohup a process ignores HANGUP."""
    outlives = HANGUP is None or signal.getsignal(HANGUP) is signal.SIG_IGN
    return [signal.SIGINT, signal.SIGTERM, *(() if outlives else (HANGUP,))]


class Termination:
    """SIGTERM as an interrupt: while the block runs, it does what Ctrl-C does.

    So files and sockets are closed. `code`: exit code of an interrupted process. A command may set another handler for SIGTERM.
    """

    code = INTERRUPTED

    def __enter__(self) -> None:
        main = threading.current_thread() is threading.main_thread()
        if main and signal.getsignal(signal.SIGTERM) is signal.SIG_DFL:
            signal.signal(signal.SIGTERM, self._interrupt)

    def __exit__(self, *error: object) -> None:
        if signal.getsignal(signal.SIGTERM) == self._interrupt:
            signal.signal(signal.SIGTERM, signal.SIG_DFL)

    def _interrupt(self, number: int, frame: FrameType | None) -> None:
        self.code = 128 + number
        interrupt = signal.getsignal(signal.SIGINT)  # asyncio sets one that cancels its tasks
        if not callable(interrupt):
            raise KeyboardInterrupt
        interrupt(signal.SIGINT, frame)
