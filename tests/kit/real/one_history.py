"""Checks of one history on the event logs of real daemons. All times are monotonic seconds of this machine."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Any, NamedTuple

from kit.histories import Slot

Event = dict[str, Any]
Logs = Mapping[str, Sequence[Event]]
"""Name of a daemon -> events of all its processes."""

ENOUGH, ENTERED = 4, 5.0
"""So many daemons that have been up for so many seconds commit rounds."""

SAVE_SECONDS, SAVE_ROUNDS, SAVING = 30.0, 10, 5.0
"""Interval between two checkpoints (node/peer/checkpoint_schedule.py), and a time for round and disk."""

TOLD = ("start", "ready", "synced", "lineage", "uncommitted", "alarm", "left", "dead")
"""Events that explain a violation."""


class Span(NamedTuple):
    """Span of time."""

    since: float
    until: float

    @property
    def seconds(self) -> float:
        return self.until - self.since


def commits(logs: Logs) -> Iterator[tuple[str, Event, Slot]]:
    """Yield (daemon, event, slot) of all committed rounds."""
    for name, events in logs.items():
        for event in events:
            if event["kind"] == "round":
                yield name, event, Slot(event.get("lineage", ""), event.get("fragment", 0), event["round"])


def two_digests(logs: Logs) -> dict[Slot, dict[str, list[str]]]:
    """Return the slots that have several digests, with digest -> daemons."""
    found: dict[Slot, dict[str, list[str]]] = {}
    for name, event, slot in commits(logs):
        names = found.setdefault(slot, {}).setdefault(event["digest"], [])
        if name not in names:
            names.append(name)
    return {slot: digests for slot, digests in found.items() if len(digests) > 1}


def reunion(logs: Logs, names: Iterable[str], since: float) -> tuple[float, Slot] | None:
    """Return when all these daemons first had committed the same slot with one digest after `since`, and the slot."""
    wanted = set(names)
    at: dict[tuple[Slot, str], dict[str, float]] = {}
    for name, event, slot in commits(logs):
        if name in wanted and event["at"] > since:
            at.setdefault((slot, event["digest"]), {}).setdefault(name, event["at"])
    return min(((max(times.values()), slot) for (slot, _), times in at.items() if times.keys() == wanted), default=None)


def crowded(ups: Mapping[str, Sequence[Span]], *, enough: int = ENOUGH, entered: float = ENTERED) -> list[Span]:
    """Return the spans in which at least `enough` daemons have been up for `entered` seconds."""
    edges = sorted(
        edge
        for spans in ups.values()
        for span in spans
        if span.seconds > entered
        for edge in ((span.since + entered, 1), (span.until, -1))
    )
    found, count, since = [], 0, 0.0
    for at, change in edges:
        if count + change == enough and change > 0:
            since = at
        elif count == enough and change < 0 and at > since:
            found.append(Span(since, at))
        count += change
    return found


def silences(logs: Logs, ups: Mapping[str, Sequence[Span]]) -> list[Span]:
    """Return the spans without a commit while enough daemons were up, the longest first."""
    times = sorted(event["at"] for _, event, _ in commits(logs))
    found = []
    for span in crowded(ups):
        edges = [span.since, *(at for at in times if span.since < at < span.until), span.until]
        found += [Span(*pair) for pair in zip(edges, edges[1:], strict=False)]
    return sorted(found, key=lambda one: -one.seconds)


class Return(NamedTuple):
    """Return of a daemon with its folder: its rounds before and after, and the one that a checkpoint must have had."""

    name: str
    at: float
    before: int
    after: int
    due: int
    alike: bool
    """True if it was in the same lineage before and after."""

    @property
    def lost(self) -> bool:
        """True if it lost more than the interval between two checkpoints."""
        return self.alike and self.after < self.due


def returns(name: str, lives: Sequence[Sequence[Event]]) -> list[Return]:
    """Return how far a daemon was behind after each start. `lives`: the events of its processes with one folder."""
    found, before = [], list[Event]()
    for life in lives:
        rounds = [event for event in life if event["kind"] == "round"]
        ready = next((event for event in life if event["kind"] == "ready"), None)
        if before and ready is not None:
            last = before[-1]
            saved = [e for e in before if last["at"] - e["at"] > SAVE_SECONDS + SAVING]
            due = min(saved[-1]["round"] if saved else 0, last["round"] - SAVE_ROUNDS)
            after = rounds[0].get("lineage", "") if rounds else None
            alike = after == last.get("lineage", "")
            found.append(Return(name, ready["at"], last["round"], ready["round"], due, alike))
        before = rounds or before
    return found


def lineages(logs: Logs) -> list[str]:
    """Return the lineages that committed a round, in the order of their first rounds."""
    first: dict[str, float] = {}
    for _, event, slot in commits(logs):
        first[slot.lineage] = min(first.get(slot.lineage, event["at"]), event["at"])
    return sorted(first, key=first.__getitem__)


def told(name: str, event: Event) -> str:
    """Return one line about an event."""
    fields = {key: value for key, value in event.items() if key not in ("at", "wall", "kind")}
    for key in ("lineage", "digest", "peer", "run"):
        if key in fields:
            fields[key] = fields[key][:8]
    if event["kind"] == "round":
        kept = ("round", "lineage", "digest", "contributors", "members", "missing")
        fields = {key: fields[key] for key in kept if key in fields}
    return f"{name} {event['kind']} " + " ".join(f"{key}={value}" for key, value in fields.items())


def timeline(
    logs: Logs, actions: Iterable[tuple[float, str]], span: Span, *, zero: float, rounds: bool = False
) -> list[str]:
    """Return lines of all faults, and of the events that explain them, in a span of time. `zero`: the time 0."""
    lines = [(at, text) for at, text in actions if span.since <= at <= span.until]
    for name, events in logs.items():
        for event in events:
            shown = event["kind"] in TOLD or (rounds and event["kind"] == "round")
            if shown and span.since <= event["at"] <= span.until:
                lines.append((event["at"], told(name, event)))
    return [f"{at - zero:8.2f}  {text}" for at, text in sorted(lines)]
