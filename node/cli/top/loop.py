"""Loop of `thinwire top`: read the daemon's files, draw the screen, and read keys."""

from __future__ import annotations

import os
import sys
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from io import TextIOWrapper
from select import select

from rich.console import Console
from rich.live import Live
from rich.text import Text
from thinwire.node.cli.page.run_view import RunView
from thinwire.node.cli.top.screen import TABS, Rates, everything, screen

SECONDS = 1.0
"""Pause between two refreshes; the daemon writes its status as often."""

COLUMNS = 80
"""Width of a snapshot that goes to no terminal."""


def show(view: RunView, *, once: bool) -> bool:
    """Show a run until the key q or a signal; return False if there is none.

    One snapshot is printed with `once`, and where stdin or stdout is no terminal that can move its cursor.
    """
    console, rates = Console(highlight=False), Rates()
    state = view.state()
    if state["status"] is None:
        return False
    utf8 = "utf" in (console.encoding or "").lower()
    if not utf8 and isinstance(sys.stdout, TextIOWrapper):
        sys.stdout.reconfigure(errors="replace")
    if once or not console.is_terminal or console.is_dumb_terminal or not sys.stdin.isatty():
        rates.update(state["status"])
        for line in everything(state, rates, COLUMNS, utf8=utf8):
            print(line.plain.rstrip())
        return True
    tab = TABS[0]
    with _keys() as pressed, Live(console=console, screen=True, auto_refresh=False) as live:
        while True:
            state = view.state()
            if state["status"] is not None:
                rates.update(state["status"])
                lines = screen(state, rates, tab, console.width, console.height, utf8=utf8)
                live.update(Text("\n", no_wrap=True, end="").join(lines), refresh=True)
            key = pressed(SECONDS)
            if key in ("q", "Q"):
                return True
            if key == "\t":
                tab = TABS[(TABS.index(tab) + 1) % len(TABS)]
            elif key.isdigit() and 0 < int(key) <= len(TABS):
                tab = TABS[int(key) - 1]
            else:
                tab = next((one for one in TABS if key and one.startswith(key.lower())), tab)


@contextmanager
def _keys() -> Iterator[_Pressed]:
    """Let stdin return each key at once and without an echo; restore the terminal at the end."""
    try:
        import termios
        import tty
    except ImportError:  # on Windows: Ctrl-C ends the command
        yield _Pressed(None)
        return
    descriptor = sys.stdin.fileno()
    before = termios.tcgetattr(descriptor)
    try:
        tty.setcbreak(descriptor)
        yield _Pressed(descriptor)
    finally:
        with suppress(termios.error, OSError):  # the terminal may be gone
            termios.tcsetattr(descriptor, termios.TCSADRAIN, before)


class _Pressed:
    """Waits up to some seconds for a key; returns "" if none was pressed, and "q" at the end of the input."""

    def __init__(self, descriptor: int | None) -> None:
        self._descriptor = descriptor

    def __call__(self, seconds: float) -> str:
        places = [] if self._descriptor is None else [self._descriptor]
        if not select(places, [], [], seconds)[0] or self._descriptor is None:
            return ""
        try:
            read = os.read(self._descriptor, 16).decode("ascii", "replace")
        except OSError:  # the terminal is gone
            return "q"
        return read[0] if len(read) == 1 else "" if read else "q"  # longer: an arrow key, for example
