"""End this process when its parent process ends.

The parent holds the other end of a pipe, usually standard input. However the parent ends, even by kill -9, the system
closes that end. A read that waits for the end of the pipe works on every system and needs no code between fork and
exec.
"""

from __future__ import annotations

import os
import signal
import threading


def watch(descriptor: int) -> None:
    """Kill this process when the other end of the pipe `descriptor` is closed."""

    def wait() -> None:
        while os.read(descriptor, 4096):
            pass
        os.kill(os.getpid(), signal.SIGKILL)

    threading.Thread(target=wait, name="parent-watch", daemon=True).start()
