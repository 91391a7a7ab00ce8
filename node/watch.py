"""What a peer notices of others' health while it hears them: frames become measures, findings become events."""

from __future__ import annotations

from collections.abc import Callable

from thinwire.collectives.diagnosis import Diagnosis, Finding, named
from thinwire.collectives.outbox import Outbox
from thinwire.swarm.frame import Frame, nbytes
from thinwire.swarm.protocol import Chunk, Hour, PeerId, Ready
from thinwire.swarm.roster import Roster

TELL_SECONDS = 10.0
"""Time between two tellings of our wall clock,"""

TOLD = 8
"""each to so many peers, in turn."""


class Watch:
    """See the module. `wall`: seconds since 1970. `emit` gets "sick" and "well"."""

    def __init__(
        self,
        roster: Roster,
        outbox: Outbox,
        live: set[PeerId],
        *,
        now: Callable[[], float],
        wall: Callable[[], float],
        emit: Callable[[str, dict[str, object]], None],
    ) -> None:
        self.diagnosis = Diagnosis()
        self.fragment = 0
        """Whose rounds are looked at, where each fragment has its own."""
        self._roster, self._outbox, self._live = roster, outbox, live
        self._now, self._wall, self._emit = now, wall, emit
        self._told_at, self._last = now(), b""
        self._known: dict[PeerId, Finding] = {}

    def shown(self, peer: PeerId) -> str:
        """What is known of a peer's sickness, for a status."""
        return named(self.diagnosis.findings, peer)

    def slow(self) -> set[PeerId]:
        """Peers that hold up whoever waits for them: all that are sick but those whose clock is wrong."""
        return {peer for peer, found in self.diagnosis.findings.items() if found.cause != "clock skew"}

    def saw(self, peer: PeerId, frame: Frame) -> bool:
        """A frame came. True when it was for us alone."""
        message = frame.message
        if isinstance(message, Chunk):
            if message.fragment == self.fragment:
                self.diagnosis.chunk(peer, message.round, nbytes(frame.payload), self._now())
        elif isinstance(message, Ready):
            if message.fragment == self.fragment and message.weight:
                self.diagnosis.ready(peer, message.round, message.speed)
                self._compare()
        elif isinstance(message, Hour):
            self.diagnosis.hour(peer, message.wall - self._wall())
            self._compare()
            return True
        return False

    def lost(self, peer: PeerId) -> None:
        """A peer's link broke."""
        self.diagnosis.lost(peer)
        self._compare()

    def ticked(self) -> None:
        """Time passes: some are told what our clock says."""
        now = self._now()
        if now < self._told_at + TELL_SECONDS:
            return
        self._told_at = now
        peers = sorted(self._live)
        after = [peer for peer in peers if peer > self._last] + [peer for peer in peers if peer <= self._last]
        for peer in after[:TOLD]:
            self._last = peer
            self._outbox.control(peer, Hour(max(0, int(self._wall()))))

    def _compare(self) -> None:
        findings = self.diagnosis.findings
        for peer, found in findings.items():
            if (known := self._known.get(peer)) is None or known.cause != found.cause:
                self._emit("sick", {"peer": peer.hex(), "cause": found.cause, "detail": found.evidence})
        for peer in self._known.keys() - findings.keys():
            gone = "" if peer in self._live else "; it is gone"
            self._emit("well", {"peer": peer.hex(), "detail": self._known[peer].cause + gone})
        self._known = dict(findings)
