"""Diagnosis of slow or faulty peers from the observable course of rounds, without their cooperation.

Sans-IO. Every measurement of a peer is compared with the median of the others, as this peer saw them in the same round,
or the last time if a round has few (`data_lateness`). If all others seem slow because the measuring peer itself is slow, no
peer is named. Of two middle values the slower one is used, so that one peer that is fast, or claims to be, makes no other
seem slow. A peer is named if it stood out in most of the last rounds, and cleared when it has stood out in few of them; a new
link alone does not clear it. With fewer than two others to compare with, no peer is named.
"""

from __future__ import annotations

from collections import OrderedDict, defaultdict, deque
from collections.abc import Collection, Mapping
from dataclasses import dataclass
from statistics import median, median_low

from thinwire.collectives.health.clocks import Clocks
from thinwire.collectives.health.data_lateness import OTHERS, ArrivalTimes, ChunkFlow
from thinwire.swarm.messages.registry import PeerId

WINDOW, NAMED, CLEARED = 8, 6, 2
"""A peer is named if it stood out in NAMED of the last WINDOW rounds, and cleared at CLEARED or fewer."""

LEAST, MOSTLY = 4, 0.75
"""The same for peers that average in pairs: LEAST marks, and MOSTLY of the last WINDOW exchanges."""

WEAK = 2.5
"""Inner steps stand out if they take this many times as long as those of the others."""

FALLEN, STEADY = 0.6, 0.85
"""A speed below FALLEN of the peer's own best stands out, if the others kept STEADY of theirs."""

STALLED, LONG, RARE, OFTEN = 8, 24, 3, 2
"""A link is lossy if it stalled in STALLED rounds more than OFTEN times as many as any other link.

Rounds with stalls are counted among the last LONG ones. A factor alone would not suffice: while equal links have few stalls,
one of them often has several times as many as the others by chance. A lossy link is cleared at RARE or fewer.
"""

LATE = 3
"""A peer is named "slow" if it was too late in LATE of the last WINDOW rounds that it was a member of."""

PIECE, PIECES = "lost piece", 64
"""For data in a single piece, which is seldom lost, STALLED and RARE apply to the last PIECES rounds."""

PARTNERS = 16
"""Number of partners whose latest speeds are compared if peers average in pairs."""

CLOCK_TOLERANCE, CLOCK_EXCESSES = 30.0, 3
"""Tolerated clock difference to most others in seconds, and number of excesses before a peer is named."""

MEMORY = 64
"""Number of rounds whose speeds are stored."""

AWAY = 64
"""Number of peers without a link whose marks are stored."""

CLIPPED, EXCESS = "clipped", 5.0
"""A contribution stands out if its norm is more than EXCESS times the median."""

FLOOD = "too many frames"
"""A peer is named once the transport had to limit its frames.

It is cleared after WINDOW intervals without that.
"""

CAUSES = (FLOOD, CLIPPED, "lossy link", "slow upload", "thermal throttling", "slow compute", "slow", "clock skew")


@dataclass(frozen=True, slots=True)
class Finding:
    """Problem of a peer, one of CAUSES, with its evidence."""

    cause: str
    evidence: str


class _Observation:
    """Measurements in the current round of one fragment.

    announced: latest round that each peer announced. speed: announced speeds by peer and round.
    """

    def __init__(self) -> None:
        self.round = 0
        self.opened: tuple[int, float] = (-1, 0.0)
        self.flows: dict[PeerId, ChunkFlow] = {}
        self.announced: dict[PeerId, int] = {}
        self.speed: dict[tuple[PeerId, int], float] = {}
        self.arrivals = ArrivalTimes()

    def on_link_down(self, peer: PeerId) -> None:
        """Note that the link to a peer broke."""
        self.flows.pop(peer, None)
        self.announced.pop(peer, None)
        self.speed = {key: value for key, value in self.speed.items() if key[0] != peer}


class Diagnosis:
    """One peer's view of all others. `findings`: named peers as of the last round that was judged.

    paired: every peer counts its own rounds and meets one or a few others in each; a partner is compared with earlier
    partners. Rounds of every fragment that the caller passes count alike.
    """

    def __init__(self, *, paired: bool = False) -> None:
        self.findings: dict[PeerId, Finding] = {}
        self._paired, self._judged = paired, 0
        self._observations: defaultdict[int, _Observation] = defaultdict(_Observation)
        self._met: OrderedDict[PeerId, float] = OrderedDict()  # latest speed of each
        self._trips: dict[PeerId, float] = {}
        self._speeds: dict[PeerId, deque[float]] = {}
        self._clocks = Clocks()
        self._latest: dict[PeerId, float] = {}  # longest lateness of each
        # Tuples are a tenth of the size of short deques, and a thousand peers have two million of them.
        self._marks: dict[tuple[PeerId, str], tuple[bool, ...]] = {}
        self._marked: dict[tuple[PeerId, str], int] = {}  # round of the last mark
        self._shown: dict[tuple[PeerId, str], str] = {}
        self._away: OrderedDict[PeerId, int] = OrderedDict()  # number of judged rounds when the link of each broke

    @property
    def marked(self) -> frozenset[PeerId]:
        """Peers of which marks are stored: those with a link, and AWAY others at most."""
        return frozenset(peer for peer, _ in self._marks)

    def ready(self, peer: PeerId, round: int, speed: float, *, fragment: int = 0) -> None:
        """Process the announcement of a peer: its speed in tokens or samples per second (0: unknown)."""
        self._away.pop(peer, None)
        seen = self._observations[fragment]
        if self._paired:
            self._process_partner(seen, peer, round, speed)
            return
        seen.announced[peer] = round
        # a few peers must not determine the round
        latest = median_low(seen.announced.values()) if len(seen.announced) > 1 else 0
        if latest > seen.round:
            self._judge(seen)
            seen.round = latest
            seen.speed = {key: value for key, value in seen.speed.items() if key[1] >= latest}
        elif latest < seen.round - 1:
            seen.round, seen.flows = latest, {}  # the peers that announced a later round have departed
        if speed > 0 and seen.round <= round <= seen.round + 1:
            seen.speed[peer, round] = speed

    def _process_partner(self, seen: _Observation, peer: PeerId, round: int, speed: float) -> None:
        """Process the announcement of a partner in one of its own rounds."""
        if seen.announced.get(peer) == round:
            return
        seen.announced[peer], self._judged = round, self._judged + 1  # exchanges are counted
        flow = seen.flows.pop(peer, None)
        if flow is not None:
            self._judge_links(seen, {peer: flow})
        if speed > 0:
            self._met[peer] = speed
            self._met.move_to_end(peer)
            if len(self._met) > PARTNERS:
                self._met.popitem(last=False)
            self._judge_speeds(self._met, (peer,), self._judged)

    def opened(self, round: int, now: float, *, fragment: int = 0) -> None:
        """Note that a round opens; data is in transit from now on."""
        seen = self._observations[fragment]
        if round == seen.round and seen.opened[0] != round:
            seen.opened = round, now

    def chunk(self, peer: PeerId, round: int, nbytes: int, now: float, *, trip: float = 0.0, fragment: int = 0) -> None:
        """Process a chunk of a contribution. trip: round-trip time over an idle link in seconds, 0: unknown."""
        seen = self._observations[fragment]
        if round != (seen.announced.get(peer) if self._paired else seen.round):
            return
        if not self._paired:
            self.opened(round, now, fragment=fragment)  # the data has overtaken the proposal, or answers ours
        self._trips[peer] = trip
        flow = seen.flows.get(peer)
        if flow is None:
            seen.flows[peer] = ChunkFlow(None if self._paired else seen.opened[1], now, now, nbytes)
        else:
            flow.add(nbytes, now)

    def on_clock(self, peer: PeerId, ahead: float, interval: int | None = None) -> None:
        """Process a comparison of clocks: the peer's wall clock is `ahead` seconds ahead of ours.

        Comparisons of one `interval` share a mark, which is bad if all of them are: messages that have waited, such as while
        we were suspended, arrive together, and make the clock of their sender appear to be behind.
        """
        self._away.pop(peer, None)
        if (away := self._clocks.compare(peer, ahead)) is not None:
            text = f"its clock is {abs(away):.0f} s {'ahead of' if away > 0 else 'behind'} most others'"
            self._mark(peer, "clock skew", abs(away) > CLOCK_TOLERANCE, text, interval)

    def on_attendance(self, peer: PeerId, *, late: bool, seconds: float) -> None:
        """Process the lateness of a member in a finished round.

        It announced, or the round ended, `seconds` after a quorum had announced.
        """
        self._away.pop(peer, None)
        if late:
            self._latest[peer] = max(seconds, self._latest.get(peer, 0.0))
        text, others = f"late by {self._latest.get(peer, 0.0):.0f} s or more", self._speeds.keys() - {peer}
        if peer in self._speeds and len(others) >= OTHERS:
            typical = median_low(self._speeds[other][-1] for other in others)
            if self._speeds[peer][-1] < typical:
                text += f", speed {self._speeds[peer][-1]:.3g}/s, the others' median {typical:.3g}/s"
        self._mark(peer, "slow", late, text)

    def on_norms(self, ratios: Mapping[PeerId, float], round: int) -> None:
        """Process the norms of contributions to a round, in units of their median."""
        for peer, ratio in ratios.items():
            text = f"its contribution was {ratio:.3g} times the median"
            self._mark(peer, CLIPPED, ratio > EXCESS, text, round)

    def on_pauses(self, pauses: Mapping[PeerId, int]) -> None:
        """Process an interval: how often each peer was not read because it sent too many frames."""
        for peer, count in pauses.items():
            if count or any(self._marks.get((peer, FLOOD), ())):
                self._mark(peer, FLOOD, count > 0, "it sent more small frames than are read from one peer")

    def on_link_down(self, peer: PeerId) -> None:
        """Note that the link to a peer broke.

        Its marks are stored for WINDOW more rounds, so that a new link does not clear a peer.
        """
        self._clocks.forget(peer)
        for known in (self._met, self._trips):
            known.pop(peer, None)
        for seen in self._observations.values():
            seen.on_link_down(peer)
        if not any(any(marks) for (other, _), marks in self._marks.items() if other == peer):
            self._forget(peer)
            return
        self._away[peer] = self._judged
        self._away.move_to_end(peer)
        if len(self._away) > AWAY:
            self._forget(next(iter(self._away)))

    def _forget(self, peer: PeerId) -> None:
        for known in (self._away, self._speeds, self._latest, self.findings):
            known.pop(peer, None)
        for key in [key for key in self._marks if key[0] == peer]:
            del self._marks[key]
            self._shown.pop(key, None)
            self._marked.pop(key, None)

    # --- one round

    def _judge(self, seen: _Observation) -> None:
        self._judged += 1
        self._forget_away()
        self._judge_links(seen, seen.flows)
        speeds = {peer: speed for (peer, round), speed in seen.speed.items() if round == seen.round}
        self._judge_speeds(speeds, speeds, seen.round)
        seen.flows = {}

    def _forget_away(self) -> None:
        for peer in [peer for peer, judged in self._away.items() if self._judged > judged + WINDOW]:
            self._forget(peer)

    def _judge_links(self, seen: _Observation, flows: Mapping[PeerId, ChunkFlow]) -> None:
        round = self._judged if self._paired else seen.round
        for peer, found in seen.arrivals.judge(flows, self._trips).items():
            if found.stalled is not None:
                self._mark(peer, PIECE if found.single else "lossy link", found.stalled, found.stall, round)
            if found.slow is not None:
                self._mark(peer, "slow upload", found.slow, found.pace, round)

    def _judge_speeds(self, speeds: Mapping[PeerId, float], new: Collection[PeerId], round: int) -> None:
        """Judge the peers whose speeds are `new` in a round, by all known speeds."""
        for peer in new:
            self._speeds.setdefault(peer, deque(maxlen=MEMORY)).append(speeds[peer])
        of_best: dict[PeerId, float] = {}
        for peer, speed in speeds.items():
            known = list(self._speeds[peer])
            if len(known) > WINDOW:
                of_best[peer] = speed / max(median(known[at : at + 4]) for at in range(len(known) - 3))
        for peer in new:
            others = [value for other, value in speeds.items() if other != peer]
            if len(others) < OTHERS:
                continue
            speed, trend = speeds[peer], [value for other, value in of_best.items() if other != peer]
            hot = peer in of_best and of_best[peer] < FALLEN and len(trend) >= OTHERS and median(trend) > STEADY
            if peer in of_best:
                rest = f"the others kept {100 * median(trend or [1]):.0f} %"
                text = f"speed fell to {100 * of_best[peer]:.0f} % of its own best, {rest}"
                self._mark(peer, "thermal throttling", hot, text, round)
            typical = median_low(others)
            text = f"speed {speed:.3g}/s, the others' median {typical:.3g}/s"
            self._mark(peer, "slow compute", WEAK * speed < typical and not hot, text, round)

    def _mark(self, peer: PeerId, kind: str, bad: bool, text: str, round: int | None = None) -> None:
        """Record a mark for one of CAUSES, or for lost pieces, which count as lossy link.

        Rounds of several fragments with the same number share a mark, which is bad if all of them were: a slow peer is slow
        in all. Losses are independent of each other, so each round has a mark.
        """
        if kind in ("lossy link", PIECE):
            round = None
        cause = "lossy link" if kind == PIECE else kind
        length = {"lossy link": LONG, PIECE: PIECES}.get(kind, WINDOW)
        marks = self._marks.get((peer, kind), ())
        if round is not None and self._marked.get((peer, kind)) == round and marks:
            marks = (*marks[:-1], marks[-1] and bad)
        else:
            marks = (*marks[-length + 1 :], bad)
        self._marks[peer, kind] = marks
        if round is not None:
            self._marked[peer, kind] = round
        count = sum(marks)
        if bad:
            self._shown[peer, kind] = text
        if count >= self._needed(peer, kind):
            # The first of CAUSES explains the others.
            known = self.findings.get(peer)
            if known is None or CAUSES.index(cause) <= CAUSES.index(known.cause):
                what = {"clock skew": "times", FLOOD: "intervals"}.get(cause, "rounds")
                self.findings[peer] = Finding(cause, f"{self._shown[peer, kind]}, {count} of {len(marks)} {what}")
        elif cause == "lossy link":
            if sum(sum(self._marks.get((peer, one), ())) for one in (cause, PIECE)) <= RARE:
                self._clear(peer, cause)
        elif count <= CLEARED:
            self._clear(peer, cause)

    def _clear(self, peer: PeerId, cause: str) -> None:
        found = self.findings.get(peer)
        if found is not None and found.cause == cause:
            del self.findings[peer]

    def _needed(self, peer: PeerId, kind: str) -> float:
        """Return the number of marks that is enough to name a cause."""
        if kind == "clock skew":
            return CLOCK_EXCESSES
        if kind == "slow":
            return LATE
        if kind == FLOOD:
            return 1
        if kind not in ("lossy link", PIECE):
            return max(LEAST, MOSTLY * len(self._marks[peer, kind])) if self._paired else NAMED
        # Scaled, because others may have been judged less often.
        length = len(self._marks[peer, kind])
        others = [
            sum(marks) * max(1.0, length / len(marks))
            for (other, what), marks in self._marks.items()
            if what == kind and other != peer
        ]
        return STALLED + OFTEN * max(others, default=0.0)


def named(findings: Mapping[PeerId, Finding], peer: PeerId) -> str:
    """Return the text for a status: empty, or the peer's cause and evidence."""
    found = findings.get(peer)
    return f"{found.cause}: {found.evidence}" if found is not None else ""
