"""Alarms about peers that continued without a quorum, and their end."""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping
from dataclasses import dataclass, field

from thinwire.node.state.replica import Replica
from thinwire.swarm.lineage import name_of_fork
from thinwire.swarm.messages.registry import Fork, PeerId

ROUNDS = 100
"""Rounds of a lineage after which its alarm waits no longer for members that cannot be reached."""

MOST = 64
"""Alarms that are remembered."""


@dataclass(slots=True)
class LineageAlarm:
    """Alarm about one lineage.

    `met`: peers that have been members of the lineage after a round. `over`: why the alarm has ended; empty: it has not.
    """

    name: str
    text: str
    met: set[PeerId] = field(default_factory=set)
    over: str = ""

    @property
    def summary(self) -> str:
        """Text for the summary at the end."""
        past = self.text.replace(" continue as ", " continued as ")
        return f"{past}; {self.over}" if self.over else past


class LineageAlarms:
    """Alarms about the lineages that this peer has founded or entered, the oldest first.

    An alarm ends when this peer has taken over the state of a lineage that does not contain the alarm's, or when every
    member of the parent has been a member of it after a round. After ROUNDS rounds only members that can be reached count.
    """

    def __init__(self) -> None:
        self._all: list[LineageAlarm] = []

    def begin(self, fields: Mapping[str, object]) -> None:
        """Add the alarm of an event "lineage"."""
        self._all = [*self._all, LineageAlarm(str(fields.get("lineage", "")), str(fields.get("detail", "")))][-MOST:]

    def look(self, replicas: Iterable[Replica], live: Collection[PeerId]) -> list[LineageAlarm]:
        """Return the alarms that end now: after a round, with these reachable peers."""
        ended, held = [], list(replicas)
        for alarm in self._all:
            if not alarm.over:
                alarm.over = _end(alarm, held, live)
                ended += [alarm] if alarm.over else []
        return ended

    @property
    def summaries(self) -> dict[str, str]:
        """Texts of all alarms, as they were given and for the summary."""
        return {alarm.text: alarm.summary for alarm in self._all}


def _end(alarm: LineageAlarm, held: Collection[Replica], live: Collection[PeerId]) -> str:
    found = [(one, fork) for one in held if (fork := _fork(one, alarm.name)) is not None]
    if not found:
        return "then this peer took over another lineage"
    replica, fork = found[0]
    if replica.round <= fork.round:
        return ""
    alarm.met.update(replica.members)
    outside = set(fork.before) - alarm.met
    if not outside:
        return f"all were together again in round {replica.round}"
    if replica.round - fork.round >= ROUNDS and not outside.intersection(live):
        return f"{len(outside)} did not come back for {ROUNDS} rounds"
    return ""


def _fork(replica: Replica, name: str) -> Fork | None:
    forks = (entry.fork for entry in replica.chain)
    return next((fork for fork in forks if name_of_fork(fork).hex() == name), None)
