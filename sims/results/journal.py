"""Journal of a simulation: events, and a sample of every peer at each interval.

The world fills it in virtual time, and `player.py` fills it from the event logs of real daemons; report, plots and live
view read it. Entries are only appended. An event of a peer has the kind and the fields of a daemon's event log
(`node/runtime/event_log.py`): "round", "ready", "synced", "left" and so on. The world adds, with the peer's index if a
peer is concerned:
    "up"     a peer's process runs (again)          "down"   it ended: fields {"reason": "killed" | "left" | …}
    "fault"  fields of `fault_fields`: a fault starts, or ends with "over" true
    "violation"  {"oracle", "detail"}
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any, NamedTuple, TypeAlias

import msgspec
from thinwire.sims.scenario.faults import Fault

WORLD = -1
"""Index in events that concern no single peer."""


class Event(msgspec.Struct, frozen=True, gc=False):
    """Event `at` (seconds since the start) of the peer with this index."""

    at: float
    peer: int
    name: str
    fields: Mapping[str, Any]


class PeerSample(NamedTuple):
    """State of one peer: bytes, round, loss of its last round, and its phase.

    `busy`: seconds of computing, for utilisation. Bytes and seconds are since the start of the process.
    """

    up: int
    down: int
    round: int
    loss: float | None
    phase: str
    busy: float = 0.0


class SwarmSample(NamedTuple):
    """State of all peers by index; None for an absent peer (not yet arrived, killed, left)."""

    at: float
    peers: tuple[PeerSample | None, ...]


def fault_fields(fault: Fault, *, over: bool = False) -> dict[str, Any]:
    """Return the fields of a "fault" event."""
    return {"fault": fault.kind, "peers": list(fault.peers), "seconds": fault.seconds, "amount": fault.amount,
            "detail": fault.detail, "over": over}  # fmt: skip


class Journal:
    """Events and samples, in order of time."""

    def __init__(self, names: tuple[str, ...]) -> None:
        """`names` of all peers, by index."""
        self.names = names
        self.events: list[Event] = []
        self.samples: list[SwarmSample] = []
        self._shared: dict[tuple[tuple[str, Any], ...], Mapping[str, Any]] = {}
        """Fields of events of joins, by content."""

    @property
    def now(self) -> float:
        """Time of the last entry."""
        return max(self.events[-1].at if self.events else 0.0, self.samples[-1].at if self.samples else 0.0)

    def event(self, at: float, peer: int, name: str, fields: Mapping[str, Any] | None = None) -> None:
        """Append an event."""
        if name == "joined" and fields:
            # Among a thousand peers, a million such events name the same peers and addresses.
            fields = self._shared.setdefault(tuple(fields.items()), fields)
        else:
            fields = dict(fields or {})
        self.events.append(Event(at, peer, name, fields))

    def sample(self, at: float, peers: tuple[PeerSample | None, ...]) -> None:
        """Append the state of all peers, by index."""
        self.samples.append(SwarmSample(at, peers))

    def of(self, name: str) -> Iterator[Event]:
        """Events of one name."""
        return (event for event in self.events if event.name == name)

    def write(self, directory: Path) -> None:
        """Write events.jsonl and samples.jsonl, one object a line. Raises OSError."""
        encoder = msgspec.json.Encoder(enc_hook=str)
        with open(directory / "events.jsonl", "wb") as file:
            for event in self.events:
                line = {"at": round(event.at, 6), "kind": event.name, "index": event.peer, **event.fields}
                file.write(encoder.encode(line) + b"\n")
        with open(directory / "samples.jsonl", "wb") as file:
            for at, peers in self.samples:
                rows = [one and one._asdict() for one in peers]
                file.write(encoder.encode({"at": round(at, 6), "peers": rows}) + b"\n")


Watch: TypeAlias = Callable[[Journal], None]
"""Function that is called after each sample. An exception that it raises ends the simulation."""
