"""Which signals end a daemon, or all daemons of a machine, well."""

from __future__ import annotations

import signal

HANGUP = getattr(signal, "SIGHUP", None)
"""The terminal is gone; the system and the shell may each say so."""


def ending() -> list[signal.Signals]:
    """The signals to be handled now: under nohup a process outlives its terminal."""
    outlives = HANGUP is None or signal.getsignal(HANGUP) is signal.SIG_IGN
    return [signal.SIGINT, signal.SIGTERM, *(() if outlives else (HANGUP,))]
