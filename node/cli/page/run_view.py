"""State and history of the daemon of one home, read from status.json and events.jsonl.

The reader does not talk to the daemon, so it neither slows training nor depends on it: it survives a restart of the
daemon, and shows a run that has ended.
"""

from __future__ import annotations

import time
from collections import deque
from pathlib import Path
from typing import Any, NamedTuple

import msgspec
from thinwire.node.peer.status import Status, alive, read_status, unresponsive
from thinwire.node.runtime.directories import Directories
from thinwire.node.runtime.event_log import end_of_events, read_events

ROUNDS = 4096
"""Rounds of the history, the latest ones."""

NOTES = 512
"""Other events of the history, the latest ones."""

SHOWN = (
    *("wall", "round", "fragment", "loss", "peers", "contributors", "members", "missing", "lineage", "digest"),
    *("bytes_up", "bytes_down", "sync_seconds", "tokens_per_second"),
)
"""Fields of a round in the history."""

SECRET = frozenset({"invite"})
"""Fields of a status that no page shows: any program that reads them could join."""

PRIVATE = frozenset({"addresses", "links", "reach", "checkpoint", "process", "process_started"})
"""Fields of a status that a public page leaves out."""

HISTORY_BYTES = 64 << 20
"""Bytes of the event log that are read at first, from its end."""

PUBLIC_NOTES = ("kind", "wall", "peer", "round", "reason", "cause")
"""Fields of an event that a public page shows. The others may contain addresses and paths."""


class Tail(NamedTuple):
    """Events after an offset, and the offset behind them."""

    events: list[dict[str, Any]]
    offset: int


class RunView:
    """Reader of one home. public: leave out addresses, and all else that shows where peers are."""

    def __init__(self, directories: Directories, *, public: bool = False) -> None:
        self._directories, self._public = directories, public
        self._path: Path | None = None
        self._offset = 0
        self._clear()

    def _clear(self) -> None:
        self._rounds: deque[dict[str, Any]] = deque(maxlen=ROUNDS)
        self._notes: deque[dict[str, Any]] = deque(maxlen=NOTES)
        self._phase = ""

    def status(self) -> Status | None:
        """Return the last status; None if no daemon has run here."""
        return read_status(self._directories.status)

    def running(self, status: Status) -> bool:
        """Return True if the daemon that wrote a status still runs."""
        return alive(status, self._directories.lock)

    def healthy(self) -> bool:
        """Return True if the daemon runs and writes its status."""
        status = self.status()
        return status is not None and self.running(status) and not unresponsive(status, time.time())

    def state(self) -> dict[str, Any]:
        """Return what `/api/v1/state` answers: `present`, and the history up to `offset` of the event log."""
        self._read()
        history = {"rounds": list(self._rounds), "notes": list(self._notes), "offset": self._offset}
        return {"version": 1, **self.present(), **history}

    def present(self) -> dict[str, Any]:
        """Return the status, whether the daemon runs, and the phase of the round."""
        status, shown = self.status(), None
        if status is not None:
            left_out = SECRET | PRIVATE if self._public else SECRET
            shown = {name: value for name, value in msgspec.to_builtins(status).items() if name not in left_out}
            if self._public:
                shown["peers"] = [{**peer, "address": "", "rtt": 0.0, "obstacle": ""} for peer in shown["peers"]]
        running, saved = status is not None and self.running(status), 0.0 if status is None else status.saved_factor
        return {"status": shown, "running": running, "saved_factor": saved, "phase": self._phase}

    def news(self) -> dict[str, Any]:
        """Return the rounds and notes since the last call, and the offsets before and after them.

        A reader whose offset is not `before` has missed events, and must read `state` again.
        """
        before, rounds, notes = self._read()
        return {"before": before, "offset": self._offset, "rounds": rounds, "notes": notes}

    def _find_log(self) -> None:
        """Change to the log of the run that the status names, if that is another one."""
        status = self.status()
        if status is not None and status.run:
            path = self._directories.run(bytes.fromhex(status.run)).events
            if path != self._path:
                self._path, self._offset = path, max(0, end_of_events(path) - HISTORY_BYTES)
                self._clear()

    def _tail(self, offset: int) -> Tail:
        assert self._path is not None
        found = read_events(self._path, offset)
        return Tail(found.events, found.offset)

    def _read(self) -> tuple[int, list[dict[str, Any]], list[dict[str, Any]]]:
        """Read new events. Return the offset before them, the rounds, and the other events."""
        self._find_log()
        if self._path is None:
            return 0, [], []
        before, tail = self._offset, self._tail(self._offset)
        if tail.offset < before:
            self._clear()
        self._offset = tail.offset
        rounds, notes = [], []
        for event in tail.events:
            if event["kind"] == "phase":
                self._phase = str(event.get("phase", ""))
            elif event["kind"] == "round":
                rounds.append({name: event[name] for name in SHOWN if name in event})
            else:
                names = PUBLIC_NOTES if self._public else tuple(name for name in event if name != "at")
                notes.append({name: event[name] for name in names if name in event})
        self._rounds += rounds
        self._notes += notes
        return before, rounds, notes
