"""View of a run in its past: what a RunView would have shown while the events of its log happened."""

from __future__ import annotations

import time
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

import msgspec
from thinwire.node.cli.page.run_view import HISTORY_BYTES, RunView, Tail
from thinwire.node.peer.reports.standing_alarms import StandingAlarms
from thinwire.node.peer.status import PeerStatus, Status
from thinwire.node.runtime.directories import Directories, RunDirectory
from thinwire.node.runtime.event_log import end_of_events, read_events

STATES = {
    **{"joined": "alive", "updated": "alive", "refuted": "alive", "pardoned": "alive"},
    **{"suspect": "suspect", "dead": "dead", "banned": "banned", "revoked": "banned", "left": "left"},
}
"""Event -> state of the peer that it names."""


@dataclass(slots=True)
class PastClock:
    """Clock of a replay: seconds since 1970 at which the run is shown, `speed` times as fast as it was.

    `first` and `last`: times of the first and the last event. The clock begins at `first` when it is read first.
    """

    first: float
    last: float
    speed: float
    _began: float | None = field(default=None)

    def now(self) -> float:
        """Return the time that is shown; it ends at the last event."""
        here = time.monotonic()
        self._began = here if self._began is None else self._began
        return min(self.last, self.first + (here - self._began) * self.speed)

    def skip_to(self, wall: float) -> None:
        """Let the clock show a later time from now on."""
        self._began = time.monotonic() - (wall - self.first) / self.speed


class PastRun(RunView):
    """Reader of the events of one run up to the time of a clock; the status is made from them.

    A status has only values that events contain: no addresses, no links, and the states of the peers by their last event.
    """

    def __init__(
        self, directories: Directories, run: RunDirectory, name: str, clock: PastClock, **options: bool
    ) -> None:
        super().__init__(directories, **options)
        self._log, self._name, self._clock = run.events, name, clock
        self._events = events_of(run)
        self._seen = 0
        self._past = Status(process=0, process_started=0.0, wall=0.0, peer="", run_name=name)
        self._peers: dict[str, PeerStatus] = {}
        self._alarms = StandingAlarms()

    def status(self) -> Status | None:
        """Return the status at the time of the clock; None before the first event."""
        now = self._clock.now()
        while self._seen < len(self._events) and self._events[self._seen]["wall"] <= now:
            self._apply(self._events[self._seen])
            self._seen += 1
        return msgspec.structs.replace(self._past, peers=tuple(self._peers.values())) if self._seen else None

    def running(self, status: Status) -> bool:
        """Return True while the run trained at the time of the clock."""
        return status.phase != "done"

    def _tail(self, offset: int) -> Tail:
        """Return the events since the event number `offset`."""
        self.status()
        return Tail(self._events[offset : self._seen], self._seen)

    def _find_log(self) -> None:
        self._path = self._log

    def _apply(self, event: Mapping[str, Any]) -> None:
        kind, peer = event["kind"], str(event.get("peer", ""))
        changes: dict[str, Any] = {"wall": float(event["wall"])}
        if kind == "start":
            self._peers.clear()
            changes |= {"peer": peer, "run": str(event.get("run", "")), "phase": "joining", "alarm": ""}
        elif kind == "ready":
            changes |= {"phase": "training", "round": int(event.get("round", 0))}
        elif kind == "left" and not peer:
            changes["phase"] = "done"
        elif kind == "phase":
            changes["phase"] = "training"
        elif kind == "round":
            names = (
                "round",
                "loss",
                "digest",
                "bytes_up",
                "bytes_down",
                "sync_seconds",
                "tokens_per_second",
                "lineage",
            )
            changes |= {name: event[name] for name in names if name in event}
            changes["fp32_bytes"] = int(float(event.get("factor", 0.0)) * float(event.get("bytes_up", 0)))
        elif kind == "held_out":
            changes |= {"held_out": event.get("loss"), "held_out_round": int(event.get("round", 0))}
        elif kind in ("alarm", "alarm_over"):
            change = self._alarms.begin if kind == "alarm" else self._alarms.end
            change(str(event.get("detail" if kind == "alarm" else "alarm", "")))
            changes["alarm"] = self._alarms.shown
        elif kind in STATES and peer:
            self._peers[peer] = PeerStatus(peer=peer, state=STATES[kind], reason=str(event.get("detail", "")))
        self._past = msgspec.structs.replace(self._past, **changes)


def events_of(run: RunDirectory) -> list[dict[str, Any]]:
    """Return the latest HISTORY_BYTES of the events of a run; none if there is no log."""
    start = max(0, end_of_events(run.events) - HISTORY_BYTES)
    return read_events(run.events, start).events


def past_clock(run: RunDirectory, speed: float, round: int = 0) -> PastClock | None:
    """Return a clock that begins with the first event, or with a round; None if there are no events."""
    events = events_of(run)
    if not events:
        return None
    clock = PastClock(events[0]["wall"], max(event["wall"] for event in events), speed)
    wanted = (event["wall"] for event in events if event["kind"] == "round" and event["round"] >= round)
    if round and (wall := next(wanted, None)) is not None:
        clock.skip_to(wall)
    return clock
