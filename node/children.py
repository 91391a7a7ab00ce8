"""Processes of a local swarm: each a daemon with a home of its own, that cannot outlive the process that made it."""

from __future__ import annotations

import contextlib
import os
import subprocess
import sys
import time
from collections.abc import Sequence
from pathlib import Path
from typing import IO

from .config import PREFIX
from .diary import Diary
from .directories import RunDirectory, directories
from .events import read_events
from .status import Status, read_status

# -P: what lies in the working directory must not be imported.
WARDED = (sys.executable, "-P", "-m", "thinwire.node.ward")
"""The program of a child: any of our commands, that ends with its maker."""

KILLED = "killed"
"""The state of a child that we killed on purpose."""


class Child:
    """One process. `home` is made; what it prints goes to the files stdout and stderr in it."""

    def __init__(
        self,
        name: str,
        home: Path,
        command: Sequence[str],
        directory: Path,
        events: Path | None = None,
        program: Sequence[str] = WARDED,
    ) -> None:
        """Start it, with `directory` as its working directory. `events`: its log, when it is not a daemon's. Raises OSError."""
        self.name, self.home = name, home
        self.diary = Diary(name)
        self.killed_at: float | None = None
        """Wall time at which we killed it on purpose."""
        self._events = events
        self._offset = 0
        home.mkdir(mode=0o700, parents=True, exist_ok=True)
        # A setting in our environment would reach all of them: each is told all it needs by flags.
        environment = {key: value for key, value in os.environ.items() if not key.startswith(PREFIX)}
        with _private(home / "stdout") as out, _private(home / "stderr") as errors:
            self.process = subprocess.Popen(
                [*program, *command],
                stdin=subprocess.PIPE,
                stdout=out,
                stderr=errors,
                cwd=directory,
                env=environment,
                # The terminal's Ctrl-C is for us alone; we tell them.
                start_new_session=True,
            )

    @property
    def code(self) -> int | None:
        """Exit code; None while it runs."""
        return self.process.poll()

    @property
    def live(self) -> bool:
        """Whether it runs, or has ended by itself and well: its replica counts."""
        return self.killed_at is None and self.code in (None, 0)

    @property
    def state(self) -> str:
        """One word."""
        if self.killed_at is not None:
            return KILLED
        if self.code is not None:
            return "done" if self.code == 0 else "failed"
        status = self.status()
        return status.phase if status else "starting"

    @property
    def log(self) -> Path:
        """What it says when something is wrong."""
        path = directories(self.home).log
        return path if path.exists() else self.home / "stderr"

    def status(self) -> Status | None:
        """What it last said of itself."""
        return read_status(directories(self.home).status)

    def printed(self) -> str:
        """All it wrote to stdout, whole lines."""
        text = _read(self.home / "stdout")
        return text[: text.rfind("\n") + 1]

    def complaint(self) -> str:
        """Its last `error:` line without that word, or its last line."""
        lines = [line for line in _read(self.home / "stderr").splitlines() if line.strip()]
        errors = [line.removeprefix("error: ") for line in lines if line.startswith("error: ")]
        return (errors or lines or ["it said nothing"])[-1]

    def poll(self) -> None:
        """Read what is new in its event log."""
        if self._events is None:
            found = sorted(directories(self.home).runs.glob("*/events.jsonl"))
            if not found:
                return
            self._events = found[0]
        tail = read_events(self._events, self._offset)
        self.diary.events += tail.events
        self._offset = tail.offset

    def run_directory(self) -> RunDirectory:
        """Where its run's files are. Raises FileNotFoundError before there are any."""
        if self._events is None:
            raise FileNotFoundError(f"{self.name} has no run yet")
        return RunDirectory(self._events.parent)

    def kill(self) -> None:
        """kill -9, on purpose."""
        self.killed_at = time.time()
        self.process.kill()

    def tell(self, text: str) -> None:
        """Give it a line to read."""
        assert self.process.stdin is not None
        with contextlib.suppress(BrokenPipeError):  # it has ended, which its exit code will say
            self.process.stdin.write(text.encode() + b"\n")
            self.process.stdin.flush()

    def end(self, *, now: bool) -> None:
        """Ask it to finish, or with `now` leave it no choice. Does not wait."""
        if self.code is None:
            (self.process.kill if now else self.process.terminate)()


def _private(path: Path) -> IO[bytes]:
    return open(os.open(path, os.O_WRONLY | os.O_CREAT | os.O_TRUNC | os.O_CLOEXEC, 0o600), "wb")


def _read(path: Path) -> str:
    try:
        return path.read_text(encoding="utf-8", errors="replace")
    except FileNotFoundError:
        return ""
