"""Joint analysis of the event logs of all peers on one machine, for the summary of a local swarm.

All peers of a machine share its clock, so their wall times (seconds since 1970) can be compared. Nothing is accepted
because a daemon claims success: replicas are compared by the digests that each peer logged.
"""

from __future__ import annotations

import statistics
from bisect import bisect_right
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any, TypeAlias

Event: TypeAlias = dict[str, Any]


@dataclass(slots=True)
class EventAnalysis:
    """The events of one peer so far, in the order of the log."""

    name: str
    events: list[Event] = field(default_factory=list)

    def of(self, kind: str) -> Iterator[Event]:
        """Return its events of one kind."""
        return (event for event in self.events if event["kind"] == kind)

    def last(self, kind: str) -> Event | None:
        """Return its newest event of one kind."""
        return next((event for event in reversed(self.events) if event["kind"] == kind), None)

    @property
    def peer(self) -> bytes:
        """Its peer id; empty before its start event."""
        start = next(self.of("start"), None)
        return bytes.fromhex(start["peer"]) if start else b""

    @property
    def run(self) -> bytes:
        """The run's id; empty before its start event."""
        start = next(self.of("start"), None)
        return bytes.fromhex(start["run"]) if start else b""

    @property
    def end(self) -> Event | None:
        """Its last event about its own replica, when it left.

        None while it runs, also after it left for another stage.
        """
        for event in reversed(self.events):
            if event["kind"] == "start" or (event["kind"] == "left" and "digest" in event):
                return event if event["kind"] == "left" else None
        return None

    @property
    def round(self) -> int:
        """The newest round whose state it has."""
        return max((event["round"] for kind in ("ready", "synced", "round") for event in self.of(kind)), default=0)


def commits(analyses: Iterable[EventAnalysis]) -> dict[int, float]:
    """Return round -> wall time at which the first of the peers committed it."""
    first: dict[int, float] = {}
    for analysis in analyses:
        for event in analysis.events:
            decided = event["kind"] == "phase" and event["phase"] == "commit"
            if decided or event["kind"] == "round":
                number, wall = event["round"], event["wall"]
                first[number] = min(wall, first.get(number, wall))
    return dict(sorted(first.items()))


def usual_round(committed: dict[int, float]) -> float:
    """Return the median seconds between two commits; 0 with fewer than two."""
    walls = list(committed.values())
    return statistics.median(b - a for a, b in zip(walls, walls[1:], strict=False)) if len(walls) > 1 else 0.0


def round_at(committed: dict[int, float], wall: float) -> float:
    """Return the position of a wall time on the axis of rounds, with a fraction, for a plot."""
    rounds, walls = list(committed), list(committed.values())
    after = bisect_right(walls, wall)
    if after == 0:
        return 0.0
    if after == len(walls):
        return float(rounds[-1])
    part = (wall - walls[after - 1]) / (walls[after] - walls[after - 1])
    return rounds[after - 1] + part * (rounds[after] - rounds[after - 1])


@dataclass(frozen=True, slots=True)
class Recovery:
    """Recovery after a kill.

    round: the next committed round. first, last: seconds from the kill until the first and the last peer had it.
    """

    round: int
    first: float
    last: float


def recovery(analyses: Sequence[EventAnalysis], killed_at: float) -> Recovery | None:
    """Return the recovery according to the survivors' events; None if they have committed nothing since."""
    later = {number: wall for number, wall in commits(analyses).items() if wall > killed_at}
    if not later:
        return None
    number = min(later)
    # Only peers that applied it; a peer that arrived later or fetched the state has no event of that round.
    applied = [e["wall"] for analysis in analyses for e in analysis.of("round") if e["round"] == number]
    return Recovery(number, later[number] - killed_at, max(applied, default=later[number]) - killed_at)


@dataclass(frozen=True, slots=True)
class DigestComparison:
    """Result of the comparison of logged digests.

    `rounds` were compared between at least two replicas, by `digests` digests altogether; `differences` names each
    round in which they differ. `final` is the digest of all live replicas after `round`, or "" if they did not end in
    one round and with one digest; `live` is their number. `alike`: whether replicas must be equal; otherwise nothing is
    compared.
    """

    rounds: int
    digests: int
    differences: tuple[str, ...]
    final: str
    round: int
    live: int
    alike: bool = True

    @property
    def holds(self) -> bool:
        """True if there were comparisons, all were equal, and the live replicas ended equal."""
        return not self.alike or bool(self.final) and self.live > 0 and self.rounds > 0 and not self.differences


def compare_digests(
    analyses: Sequence[EventAnalysis], live: Sequence[EventAnalysis], *, alike: bool = True
) -> DigestComparison:
    """Compare the digests of all peers by round, and the final ones of `live` peers.

    Nothing is compared unless replicas must be `alike`.
    """
    if not alike:
        return DigestComparison(
            0, 0, (), "", max((analysis.end["round"] for analysis in live if analysis.end), default=0), len(live), alike
        )
    holders_of: dict[int, dict[str, set[str]]] = {}
    for analysis in analyses:
        for event in analysis.events:
            # A daemon also writes "left" about other peers; that event has no digest.
            if event["kind"] in ("round", "synced", "left") and "digest" in event:
                holders_of.setdefault(event["round"], {}).setdefault(event["digest"], set()).add(analysis.name)
    differences, compared, digests = [], 0, 0
    for number, holders in sorted(holders_of.items()):
        names = set[str]().union(*holders.values())
        if len(names) > 1 and number > 0:
            compared, digests = compared + 1, digests + len(names)
        if len(holders) > 1:
            groups = "; ".join(f"{digest[:8]}: {', '.join(sorted(who))}" for digest, who in sorted(holders.items()))
            differences.append(f"round {number} ({groups})")
    number, final = _final([analysis.end for analysis in live])
    return DigestComparison(compared, digests, tuple(differences), final, number, len(live))


def _final(ends: Sequence[Event | None]) -> tuple[int, str]:
    """Return the last round of all and the digest of the model that all have after it, or (0, "").

    Fragments with separate rounds are compared one by one, on whichever peers hold them.
    """
    known = [end for end in ends if end]
    if len(known) < len(ends) or not known:
        return 0, ""
    if all("fragments" in end for end in known):
        newest = max(known, key=lambda end: (len(end["fragments"]), end["round"]))
        alike = all(newest["fragments"].get(n) == one for end in known for n, one in end["fragments"].items())
        return (newest["round"], newest["digest"]) if alike else (0, "")
    last = {(end["round"], end["digest"]) for end in known}
    return last.pop() if len(last) == 1 else (0, "")


def bytes_sent(analysis: EventAnalysis) -> int:
    """Return all bytes that the peer sent, up to its newest round."""
    newest = analysis.last("round")
    return int(newest["bytes_up"]) if newest else 0


def saved_factor(analysis: EventAnalysis) -> float:
    """Return the factor by which synchronous data parallelism in fp32 would have sent more; 0: unknown."""
    newest = analysis.last("round")
    return float(newest["factor"]) if newest else 0.0


def lineages(analyses: Iterable[EventAnalysis]) -> tuple[str, ...]:
    """Return the text of every lineage that peers founded, each once, in the order of the peers."""
    return tuple(dict.fromkeys(event["detail"] for one in analyses for event in one.of("lineage")))
