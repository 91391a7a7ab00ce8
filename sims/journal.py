"""What happened in a simulation: events as they come, and a sample of every peer at each interval.

The world fills it in virtual time, `real.py` from the event logs of real daemons; report, plots and live view read it. Only
ever appended to. An event of a peer has the kind and the fields that a daemon's event log has (`node/events.py`): "round",
"ready", "synced", "left" and so on. The world adds, with the peer's index where one is concerned:
    "up"     a peer's process runs (again)          "down"   it is gone: fields {"reason": "killed" | "left" | …}
    "fault"  what `fault_fields` says: a fault begins, or with "over" true it ends
    "violation"  {"oracle", "detail"}
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any, NamedTuple, TypeAlias

import msgspec

from .faults import Fault

WORLD = -1
"""Index in events that concern no single peer."""


class Event(NamedTuple):
    """Something that happened `at` (seconds since the start) to the peer with this index."""

    at: float
    peer: int
    name: str
    fields: Mapping[str, Any]


class PeerSample(NamedTuple):
    """One peer at one moment: bytes since it was started, round, loss of its last round, and what it is doing.

    `busy`: seconds in which it has computed since it was started, for utilisation.
    """

    up: int
    down: int
    round: int
    loss: float | None
    phase: str
    busy: float = 0.0


class Sample(NamedTuple):
    """All peers at one moment, by index; None: not there (not yet, killed, left)."""

    at: float
    peers: tuple[PeerSample | None, ...]


def fault_fields(fault: Fault, *, over: bool = False) -> dict[str, Any]:
    """Fields of a "fault" event."""
    return {"fault": fault.kind, "peers": list(fault.peers), "seconds": fault.seconds, "amount": fault.amount,
            "detail": fault.detail, "over": over}  # fmt: skip


class Journal:
    """Events and samples, in order of time."""

    def __init__(self, names: tuple[str, ...]) -> None:
        """`names` of all peers, by index."""
        self.names = names
        self.events: list[Event] = []
        self.samples: list[Sample] = []

    @property
    def now(self) -> float:
        """Time of what was written last."""
        return max(self.events[-1].at if self.events else 0.0, self.samples[-1].at if self.samples else 0.0)

    def event(self, at: float, peer: int, name: str, fields: Mapping[str, Any] | None = None) -> None:
        """Something happened."""
        self.events.append(Event(at, peer, name, fields or {}))

    def sample(self, at: float, peers: tuple[PeerSample | None, ...]) -> None:
        """How all peers are, by index."""
        self.samples.append(Sample(at, peers))

    def of(self, name: str) -> Iterator[Event]:
        """Events of one name."""
        return (event for event in self.events if event.name == name)

    def write(self, directory: Path) -> None:
        """Write events.jsonl and samples.jsonl, one object a line. Raises OSError."""
        encoder = msgspec.json.Encoder(enc_hook=str)
        with open(directory / "events.jsonl", "wb") as file:
            for at, peer, name, fields in self.events:
                file.write(encoder.encode({"at": round(at, 6), "kind": name, "index": peer, **fields}) + b"\n")
        with open(directory / "samples.jsonl", "wb") as file:
            for at, peers in self.samples:
                rows = [one and one._asdict() for one in peers]
                file.write(encoder.encode({"at": round(at, 6), "peers": rows}) + b"\n")


Watch: TypeAlias = Callable[[Journal], None]
"""Called after each sample. What it raises ends the simulation."""
