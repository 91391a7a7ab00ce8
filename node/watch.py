"""What a peer notices of others' health while it hears them: frames become measures, findings become events."""

from __future__ import annotations

from collections.abc import Callable

from thinwire.collectives.diagnosis import Diagnosis, Finding, named
from thinwire.collectives.outbox import Outbox
from thinwire.swarm.frame import Frame, nbytes
from thinwire.swarm.protocol import Chunk, Hour, Open, Partial, PeerId, Ready
from thinwire.swarm.roster import Roster

TELL_SECONDS = 10.0
"""Time between two tellings of our wall clock,"""

TOLD = 8
"""each to so many peers, in turn."""


HASH = 32
"""Bytes of a chunk's hash in an announcement."""


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
        self._chunks, self._lap = 0, (b"", 0, 0)

    def shown(self, peer: PeerId) -> str:
        """What is known of a peer's sickness, for a status."""
        return named(self.diagnosis.findings, peer)

    def slow(self) -> set[PeerId]:
        """Peers that hold up whoever waits for them: all that are sick but those whose clock is wrong."""
        return {peer for peer, found in self.diagnosis.findings.items() if found.cause != "clock skew"}

    def saw(self, peer: PeerId, frame: Frame) -> bool:
        """A frame came. True when it was for us alone."""
        message = frame.message
        if isinstance(message, (Chunk, Partial)):
            if message.fragment == self.fragment and (isinstance(message, Chunk) or self._own(peer, message)):
                trip = self._roster.distances.rtt(peer)
                self.diagnosis.chunk(peer, message.round, nbytes(frame.payload), self._now(), trip=trip)
        elif isinstance(message, Open):
            if message.fragment == self.fragment:
                self.diagnosis.opened(message.round, self._now())
        elif isinstance(message, Ready):
            if message.fragment == self.fragment and message.weight:
                self._chunks = len(message.hashes) // HASH
                self.diagnosis.ready(peer, message.round, message.speed)
                self._compare()
        elif isinstance(message, Hour):
            self.diagnosis.hour(peer, message.wall - self._wall())
            self._compare()
            return True
        return False

    def paired(self) -> None:
        """Rounds are of pairs from now on, and every peer counts its own."""
        self.diagnosis = Diagnosis(paired=True)

    def _own(self, peer: PeerId, message: Partial) -> bool:
        """Whether this is of the first lap of a ring: what its sender had itself, and waited for nobody to send."""
        if self._lap[:2] != (peer, message.round):
            self._lap = peer, message.round, 0
        self._lap = *self._lap[:2], self._lap[2] + 1
        return self._lap[2] * (len(self._live) + 1) <= self._chunks

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
