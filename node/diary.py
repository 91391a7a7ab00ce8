"""What the peers of one machine wrote into their event logs, read together: the facts behind a local swarm's last screen.

All peers of a machine share its clock, so their wall times (seconds since 1970) can be compared. Nothing here is believed
because a daemon says that all is well: replicas are compared by the digests each of them logged.
"""

from __future__ import annotations

import statistics
from bisect import bisect_right
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any, TypeAlias

Event: TypeAlias = dict[str, Any]


@dataclass(slots=True)
class Diary:
    """The events of one peer so far, in the order in which it wrote them."""

    name: str
    events: list[Event] = field(default_factory=list)

    def of(self, kind: str) -> Iterator[Event]:
        """Its events of one kind."""
        return (event for event in self.events if event["kind"] == kind)

    def last(self, kind: str) -> Event | None:
        """Its newest event of one kind."""
        return next((event for event in reversed(self.events) if event["kind"] == kind), None)

    @property
    def peer(self) -> bytes:
        """Its id; empty before it has said who it is."""
        start = next(self.of("start"), None)
        return bytes.fromhex(start["peer"]) if start else b""

    @property
    def run(self) -> bytes:
        """The run's id; empty before it has said which."""
        start = next(self.of("start"), None)
        return bytes.fromhex(start["run"]) if start else b""

    @property
    def end(self) -> Event | None:
        """What it said last of its replica, when it left; None while it lives, as when it has left for another stage."""
        for event in reversed(self.events):
            if event["kind"] == "start" or (event["kind"] == "left" and "digest" in event):
                return event if event["kind"] == "left" else None
        return None

    @property
    def round(self) -> int:
        """The newest round whose state it has."""
        return max((event["round"] for kind in ("ready", "synced", "round") for event in self.of(kind)), default=0)


def commits(diaries: Iterable[Diary]) -> dict[int, float]:
    """Round -> wall time at which the first of the peers had it committed."""
    first: dict[int, float] = {}
    for diary in diaries:
        for event in diary.events:
            decided = event["kind"] == "phase" and event["phase"] == "commit"
            if decided or event["kind"] == "round":
                number, wall = event["round"], event["wall"]
                first[number] = min(wall, first.get(number, wall))
    return dict(sorted(first.items()))


def usual_round(committed: dict[int, float]) -> float:
    """Median seconds between two commits; 0 with fewer than two."""
    walls = list(committed.values())
    return statistics.median(b - a for a, b in zip(walls, walls[1:], strict=False)) if len(walls) > 1 else 0.0


def round_at(committed: dict[int, float], wall: float) -> float:
    """Where between two rounds a moment lies, as a fraction of rounds (for a picture)."""
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
    """After a kill: the next round that was committed, and seconds from the kill until the first and the last had it."""

    round: int
    first: float
    last: float


def recovery(diaries: Sequence[Diary], killed_at: float) -> Recovery | None:
    """Read from what the survivors wrote; None when they have committed nothing since."""
    later = {number: wall for number, wall in commits(diaries).items() if wall > killed_at}
    if not later:
        return None
    number = min(later)
    # Those who applied it; one that arrived later or fetched the state has no line of that round.
    applied = [e["wall"] for diary in diaries for e in diary.of("round") if e["round"] == number]
    return Recovery(number, later[number] - killed_at, max(applied, default=later[number]) - killed_at)


@dataclass(frozen=True, slots=True)
class Proof:
    """What the logged digests say. `rounds` were compared between two replicas or more, by `digests` digests in all;
    `differences` names each round in which they differ. `final` is the digest of all live replicas after `round`, or ""
    when they do not end in one round and with one digest; `live` is their number. `alike`: whether replicas are meant to be
    equal; otherwise nothing is compared.
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
        """Every comparison came out equal, there were some, and the live replicas ended equal."""
        return not self.alike or bool(self.final) and self.live > 0 and self.rounds > 0 and not self.differences


def proof(diaries: Sequence[Diary], live: Sequence[Diary], *, alike: bool = True) -> Proof:
    """Compare the digests of all peers round by round, and those of the `live` ones at their end; unless none are `alike`."""
    if not alike:
        return Proof(
            0, 0, (), "", max((diary.end["round"] for diary in live if diary.end), default=0), len(live), alike
        )
    said: dict[int, dict[str, set[str]]] = {}
    for diary in diaries:
        for event in diary.events:
            # "left" is also what a daemon notes about others; then there is no digest.
            if event["kind"] in ("round", "synced", "left") and "digest" in event:
                said.setdefault(event["round"], {}).setdefault(event["digest"], set()).add(diary.name)
    differences, compared, digests = [], 0, 0
    for number, holders in sorted(said.items()):
        names = set[str]().union(*holders.values())
        if len(names) > 1 and number > 0:
            compared, digests = compared + 1, digests + len(names)
        if len(holders) > 1:
            groups = "; ".join(f"{digest[:8]}: {', '.join(sorted(who))}" for digest, who in sorted(holders.items()))
            differences.append(f"round {number} ({groups})")
    number, final = _final([diary.end for diary in live])
    return Proof(compared, digests, tuple(differences), final, number, len(live))


def _final(ends: Sequence[Event | None]) -> tuple[int, str]:
    """The last round of all and the digest that all have of the model after it, or (0, "").

    Where fragments have rounds of their own they are compared one by one, wherever each is held.
    """
    said = [end for end in ends if end]
    if len(said) < len(ends) or not said:
        return 0, ""
    if all("fragments" in end for end in said):
        whole = max(said, key=lambda end: (len(end["fragments"]), end["round"]))
        alike = all(whole["fragments"].get(n) == one for end in said for n, one in end["fragments"].items())
        return (whole["round"], whole["digest"]) if alike else (0, "")
    last = {(end["round"], end["digest"]) for end in said}
    return last.pop() if len(last) == 1 else (0, "")


def bytes_sent(diary: Diary) -> int:
    """All that the peer put on the wire, up to its newest round."""
    newest = diary.last("round")
    return int(newest["bytes_up"]) if newest else 0


def saved_factor(diary: Diary) -> float:
    """How many times more synchronous data parallelism in fp32 would have sent for the same steps; 0: nothing to compare."""
    newest = diary.last("round")
    return float(newest["factor"]) if newest else 0.0
