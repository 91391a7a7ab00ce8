"""Processes of a local swarm: each is a daemon with a separate home that cannot outlive its parent."""

from __future__ import annotations

import contextlib
import os
import subprocess
import time
from collections.abc import Sequence
from pathlib import Path
from typing import IO

from thinwire.node.local_swarm.event_analysis import EventAnalysis
from thinwire.node.local_swarm.forked_process import ForkedProcess
from thinwire.node.peer.status import Status, read_status
from thinwire.node.runtime.directories import RunDirectory, directories
from thinwire.node.runtime.event_log import read_events
from thinwire.node.runtime.settings import PREFIX

PROGRAM = "thinwire.node.cli.child_main"
"""Module of a child process: runs any of our commands, and ends with its parent."""

KILLED = "killed"
"""State of a child that was killed on purpose."""


class Child:
    """One process, which must end when its standard input ends.

    `home` is created; the output of the process goes to the files stdout and stderr there.
    """

    def __init__(
        self,
        name: str,
        home: Path,
        command: Sequence[str],
        directory: Path,
        events: Path | None = None,
        program: Sequence[str] = (),
    ) -> None:
        """Start it in `directory`.

        `events`: its event log, if it is not a daemon's. `program`: words that start another program than ours. Raises
        OSError.
        """
        self.name, self.home = name, home
        self.analysis = EventAnalysis(name)
        self.killed_at: float | None = None
        """Wall time of the deliberate kill."""
        self._events = events
        self._offset = 0
        home.mkdir(mode=0o700, parents=True, exist_ok=True)
        # A setting in our environment would reach all children: each gets all its settings by flags.
        environment = {key: value for key, value in os.environ.items() if not key.startswith(PREFIX)}
        out_path, errors_path = home / "stdout", home / "stderr"
        self.process: ForkedProcess | subprocess.Popen[bytes]
        if not program:
            self.process = ForkedProcess(
                PROGRAM, command, out=out_path, errors=errors_path, directory=directory, environment=environment
            )
            return
        with _private(out_path) as out, _private(errors_path) as errors:
            self.process = subprocess.Popen(
                [*program, *command],
                stdin=subprocess.PIPE,
                stdout=out,
                stderr=errors,
                cwd=directory,
                env=environment,
                # The terminal's Ctrl-C reaches only us; we pass it on.
                start_new_session=True,
            )

    @property
    def code(self) -> int | None:
        """Exit code; None while it runs."""
        return self.process.poll()

    @property
    def live(self) -> bool:
        """True if it runs, or has ended successfully by itself: its replica counts."""
        return self.killed_at is None and self.code in (None, 0)

    @property
    def state(self) -> str:
        """State of the process for display."""
        if self.killed_at is not None:
            return KILLED
        if self.code is not None:
            return "done" if self.code == 0 else "failed"
        status = self.status()
        return status.phase if status else "starting"

    @property
    def log(self) -> Path:
        """Its log file, or its stderr if it has none."""
        path = directories(self.home).log
        return path if path.exists() else self.home / "stderr"

    def status(self) -> Status | None:
        """Return its last status."""
        return read_status(directories(self.home).status)

    def printed(self) -> str:
        """Return the whole lines that it wrote to stdout."""
        text = _read(self.home / "stdout")
        return text[: text.rfind("\n") + 1]

    def last_message(self) -> str:
        """Return its newest log message, without the time; "" if there is none."""
        lines = _read(self.home / "stderr").splitlines()
        return lines[-1].partition(" ")[2] if lines else ""

    def error(self) -> str:
        """Return its last `error:` line without that prefix, or its last line."""
        lines = [line for line in _read(self.home / "stderr").splitlines() if line.strip()]
        errors = [line.removeprefix("error: ") for line in lines if line.startswith("error: ")]
        return (errors or lines or ["no output"])[-1]

    def hint(self) -> str:
        """Return its last `hint:` line without that prefix; "" if there is none."""
        lines = _read(self.home / "stderr").splitlines()
        return next((line.removeprefix("hint: ") for line in reversed(lines) if line.startswith("hint: ")), "")

    def poll(self) -> None:
        """Read new events from its event log."""
        if self._events is None:
            found = sorted(directories(self.home).runs.glob("*/events.jsonl"))
            if not found:
                return
            self._events = found[0]
        tail = read_events(self._events, self._offset)
        self.analysis.events += tail.events
        self._offset = tail.offset

    def run_directory(self) -> RunDirectory:
        """Return the directory of its run's files. Raises FileNotFoundError before there are any."""
        if self._events is None:
            raise FileNotFoundError(f"{self.name} has no run yet")
        return RunDirectory(self._events.parent)

    def kill(self) -> None:
        """Kill it with SIGKILL, on purpose."""
        self.killed_at = time.time()
        self.process.kill()

    def write_line(self, text: str) -> None:
        """Write a line to its stdin."""
        assert self.process.stdin is not None
        with contextlib.suppress(BrokenPipeError):  # it has ended, as its exit code will show
            self.process.stdin.write(text.encode() + b"\n")
            self.process.stdin.flush()

    def end(self, *, now: bool) -> None:
        """Ask it to finish, or with `now` kill it. Does not wait."""
        if self.code is None:
            (self.process.kill if now else self.process.terminate)()


def _private(path: Path) -> IO[bytes]:
    return open(os.open(path, os.O_WRONLY | os.O_CREAT | os.O_TRUNC | os.O_CLOEXEC, 0o600), "wb")


def _read(path: Path) -> str:
    try:
        return path.read_text(encoding="utf-8", errors="replace")
    except FileNotFoundError:
        return ""
