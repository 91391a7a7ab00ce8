"""First thing in a process that `start --local` makes: end when its maker ends, and then be one of our commands.

The maker holds the other end of standard input. However it goes, also by kill -9, the system closes that end; a read that
waits for it works on every system and needs no code between fork and exec.
"""

from __future__ import annotations

import os
import signal
import sys
import threading


def watch(descriptor: int) -> None:
    """Kill this process when the other end of the pipe `descriptor` is closed."""

    def wait() -> None:
        while os.read(descriptor, 4096):
            pass
        os.kill(os.getpid(), signal.SIGKILL)

    threading.Thread(target=wait, name="ward", daemon=True).start()


def main(arguments: list[str]) -> int:
    """Run `alone …` (see alone.py), `standby …` or any thinwire command. Returns its exit code.

    Standby loads what takes seconds to load and then waits for a line, the invite, with which it joins.
    """
    if arguments[:1] == ["standby"]:
        from thinwire.compression.warmup import warm_up

        from . import daemon  # noqa: F401

        warm_up()
        invite = sys.stdin.readline().strip()
        if not invite:
            return 0
        arguments = ["join", invite, *arguments[1:]]
    watch(sys.stdin.fileno())
    # Imported after the watch has begun: loading takes seconds in which the maker may die too.
    if arguments[:1] == ["alone"]:
        from .alone import main as alone

        return alone(arguments[1:])
    from .cli import main as command

    return command(arguments)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
