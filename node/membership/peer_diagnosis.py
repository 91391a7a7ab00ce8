"""Feeds received frames to the diagnosis of peers' health and reports its findings as events."""

from __future__ import annotations

from bisect import bisect_left, bisect_right, insort
from collections.abc import Callable, Container, Iterable, Mapping

from thinwire.collectives.health.diagnosis import CLIPPED, Diagnosis, Finding, named
from thinwire.collectives.health.straggler_grace import Attendance
from thinwire.collectives.transport.sending.send_queue import SendQueue
from thinwire.swarm.frame import Frame, nbytes
from thinwire.swarm.membership.swim import Roster
from thinwire.swarm.messages.registry import Chunk, Partial, PeerId, Propose, Ready, WallClock

CLOCK_SECONDS = 10.0
"""Seconds between two announcements of our wall clock."""

CLOCK_PEERS = 8
"""Peers that get each announcement of our wall clock, in turn."""


HASH = 32
"""Bytes of a chunk's hash in an announcement."""


class PeerDiagnosis:
    """Observes received frames. `wall`: seconds since 1970.

    `emit` gets "unhealthy" and "healthy". `pauses`: see Transport.
    """

    def __init__(
        self,
        roster: Roster,
        send_queue: SendQueue,
        live: set[PeerId],
        *,
        now: Callable[[], float],
        wall: Callable[[], float],
        emit: Callable[[str, dict[str, object]], None],
        pauses: Callable[[], Mapping[PeerId, int]] = dict,
    ) -> None:
        self.diagnosis = Diagnosis()
        self.fragments: Container[int] = (0,)
        """Fragments whose rounds are observed."""
        self._roster, self._send_queue, self._live = roster, send_queue, live
        self._now, self._wall, self._emit = now, wall, emit
        self._pauses, self._counted = pauses, dict[PeerId, int]()
        self._clock_sent_at, self._last = now(), b""
        self._order = sorted(live)
        """Peers with a link in order of id."""
        self._known: dict[PeerId, Finding] = {}
        self._chunks, self._lap = 0, (b"", 0, 0, 0)

    def shown(self, peer: PeerId) -> str:
        """Return the known diagnosis of a peer, for a status."""
        return named(self.diagnosis.findings, peer)

    def slow(self) -> set[PeerId]:
        """Return peers that delay others: unhealthy ones, unless by a wrong clock or long contributions."""
        return {peer for peer, found in self.diagnosis.findings.items() if found.cause not in ("clock skew", CLIPPED)}

    def saw(self, peer: PeerId, frame: Frame) -> bool:
        """Observe a frame; return True if it concerns only the health monitor."""
        message = frame.message
        if isinstance(message, (Chunk, Partial)):
            if message.fragment in self.fragments and (isinstance(message, Chunk) or self._own(peer, message)):
                trip, size = self._roster.distances.rtt(peer), nbytes(frame.payload)
                self.diagnosis.chunk(peer, message.round, size, self._now(), trip=trip, fragment=message.fragment)
        elif isinstance(message, Propose):
            if message.fragment in self.fragments:
                self.diagnosis.opened(message.round, self._now(), fragment=message.fragment)
        elif isinstance(message, Ready):
            if message.fragment in self.fragments and message.weight:
                self._chunks = len(message.hashes) // HASH
                self.diagnosis.ready(peer, message.round, message.speed, fragment=message.fragment)
                self._compare()
        elif isinstance(message, WallClock):
            self.diagnosis.on_clock(peer, message.wall - self._wall(), int(self._now() // CLOCK_SECONDS))
            self._compare()
            return True
        return False

    def attended(self, members: Iterable[Attendance], *, fragment: int = 0) -> None:
        """Take the lateness of other members in a finished round."""
        if fragment in self.fragments:
            for one in members:
                self.diagnosis.on_attendance(one.peer, late=one.late, seconds=one.seconds)
            self._compare()

    def contributed(self, ratios: Mapping[PeerId, float], round: int, *, fragment: int = 0) -> None:
        """Take the norms of the contributions of a finished round, in units of their median."""
        if fragment in self.fragments and ratios:
            others = {peer: ratio for peer, ratio in ratios.items() if peer in self._live}
            self.diagnosis.on_norms(others, round)
            self._compare()

    def paired(self) -> None:
        """Expect rounds of pairs from now on, in which every peer counts its own rounds."""
        self.diagnosis = Diagnosis(paired=True)

    def _own(self, peer: PeerId, message: Partial) -> bool:
        """Return True if a Partial belongs to the first lap of a ring: its sender did not have to wait for it."""
        if self._lap[:3] != (peer, message.fragment, message.round):
            self._lap = peer, message.fragment, message.round, 0
        self._lap = *self._lap[:3], self._lap[3] + 1
        return self._lap[3] * (len(self._live) + 1) <= self._chunks

    def on_link_up(self, peer: PeerId) -> None:
        """Note a new link to a peer that had none."""
        insort(self._order, peer)

    def on_link_down(self, peer: PeerId) -> None:
        """Note a broken link."""
        place = bisect_left(self._order, peer)
        if self._order[place : place + 1] == [peer]:
            del self._order[place]
        self.diagnosis.on_link_down(peer)
        self._compare()

    def deadline(self) -> float:
        """Return the time before which `on_tick` does nothing."""
        return self._clock_sent_at + CLOCK_SECONDS

    def on_tick(self) -> None:
        """Let time pass: look for peers that send too many frames, and send our clock to some peers."""
        now = self._now()
        if now < self._clock_sent_at + CLOCK_SECONDS:
            return
        self._clock_sent_at = now
        self._look_at_pauses()
        place = bisect_right(self._order, self._last)
        after = self._order[place : place + CLOCK_PEERS]
        clock = WallClock(max(0, int(self._wall())))
        for peer in (*after, *self._order[: min(place, CLOCK_PEERS - len(after))]):
            self._last = peer
            self._send_queue.control(peer, clock)

    def _look_at_pauses(self) -> None:
        before, self._counted = self._counted, dict(self._pauses())
        if self._counted:
            self.diagnosis.on_pauses({peer: count - before.get(peer, 0) for peer, count in self._counted.items()})
            self._compare()

    def _compare(self) -> None:
        findings = self.diagnosis.findings
        if not findings and not self._known:
            return  # the usual case: called with each frame that may change a finding
        for peer, found in findings.items():
            if (known := self._known.get(peer)) is None or known.cause != found.cause:
                self._emit("unhealthy", {"peer": peer.hex(), "cause": found.cause, "detail": found.evidence})
        for peer in sorted(self._known.keys() - findings.keys()):
            gone = "" if peer in self._live else "; it is gone"
            self._emit("healthy", {"peer": peer.hex(), "detail": self._known[peer].cause + gone})
        self._known = dict(findings)
