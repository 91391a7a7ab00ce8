"""Signals that end a daemon, or all daemons of a machine, in an orderly way."""

from __future__ import annotations

import signal

HANGUP = getattr(signal, "SIGHUP", None)
"""The terminal has closed; the system and the shell may each send it."""


def ending() -> list[signal.Signals]:
    """Return the signals to handle: under nohup a process ignores HANGUP."""
    outlives = HANGUP is None or signal.getsignal(HANGUP) is signal.SIG_IGN
    return [signal.SIGINT, signal.SIGTERM, *(() if outlives else (HANGUP,))]
