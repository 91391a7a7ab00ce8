"""Which peer is sick, and of what: told from what a round shows anyway, without a word from the peer about its health.

Sans-IO. Every measure of a peer is compared with the median of the others', as this peer saw them in the same round; what is
slow for all, because the measuring peer itself is, accuses nobody; and of two in the middle the slower one is the measure, so
that one that is fast, or says so, makes nobody slow. A peer is named when it stood out in most of the last rounds and is not
named any more when it has not for as long; a new link alone makes nobody well. With fewer than two others to compare with
nobody is named.
"""

from __future__ import annotations

from collections import OrderedDict, deque
from collections.abc import Mapping
from dataclasses import dataclass, field
from statistics import median, median_high, median_low

from thinwire.swarm.protocol import PeerId

WINDOW, NAMED, WELL = 8, 6, 2
"""A peer is sick when it stood out in NAMED of the last WINDOW rounds, and well again when in no more than WELL."""

OTHERS = 2
"""Fewest others to compare with."""

SLOW = 4.0
"""An upload that is so many times slower than the others' stands out,"""

FELT = 0.2
"""when it took so many seconds."""

WEAK = 2.5
"""Inner steps that are so many times slower than the others' stand out."""

FALLEN, STEADY = 0.6, 0.85
"""So does a speed that has fallen to this part of the peer's own best, while the others' kept that part of theirs."""

STALL, STALLS = 0.15, 8.0
"""A gap between two chunks of so many seconds, and so many times the usual one, is a stall: something was sent again."""

STALLED, LONG, RARE, OFTEN = 8, 24, 3, 3
"""A link is lossy with stalls in STALLED of the last LONG rounds, and OFTEN times as many as any other; well with RARE."""

APART, ASTRAY = 30.0, 3
"""Seconds that a clock may be away from most others', and how often it is found further away before it is named."""

MEMORY = 64
"""Rounds of speeds that are kept."""

AWAY = 64
"""Peers without a link whose record is kept."""

CAUSES = ("lossy link", "slow upload", "thermal throttling", "slow compute", "clock skew")


@dataclass(frozen=True, slots=True)
class Finding:
    """What a peer suffers from, one of CAUSES, and what shows it."""

    cause: str
    evidence: str


@dataclass(slots=True)
class _Flow:
    """Chunks of one peer in one round."""

    first: float
    last: float
    nbytes: int = 0
    gaps: list[float] = field(default_factory=list)


class Diagnosis:
    """One peer's view of all others. `findings`: who is sick, as of the last round that was judged."""

    def __init__(self) -> None:
        self.findings: dict[PeerId, Finding] = {}
        self._round = 0
        self._flows: dict[PeerId, _Flow] = {}
        self._said: dict[PeerId, int] = {}
        self._speed: dict[tuple[PeerId, int], float] = {}
        self._speeds: dict[PeerId, deque[float]] = {}
        self._ahead: dict[PeerId, float] = {}
        self._marks: dict[tuple[PeerId, str], deque[bool]] = {}
        self._shown: dict[tuple[PeerId, str], str] = {}
        self._away: OrderedDict[PeerId, int] = OrderedDict()  # and in which round the link of each broke

    def ready(self, peer: PeerId, round: int, speed: float) -> None:
        """A peer has announced what it trained, at so many tokens or samples per second (0: it does not say)."""
        self._away.pop(peer, None)
        self._said[peer] = round
        latest = median_low(self._said.values()) if len(self._said) > 1 else 0  # no few peers say which round it is
        if latest > self._round:
            self._judge()
            self._round = latest
            self._speed = {key: value for key, value in self._speed.items() if key[1] >= latest}
        elif latest < self._round - 1:
            self._round, self._flows = latest, {}  # who said otherwise is gone
        if speed > 0 and self._round <= round <= self._round + 1:
            self._speed[peer, round] = speed

    def chunk(self, peer: PeerId, round: int, nbytes: int, now: float) -> None:
        """A chunk of a contribution came."""
        if round != self._round:
            return
        flow = self._flows.get(peer)
        if flow is None:
            self._flows[peer] = _Flow(now, now)
        else:
            flow.gaps.append(now - flow.last)
            flow.nbytes, flow.last = flow.nbytes + nbytes, now

    def hour(self, peer: PeerId, ahead: float) -> None:
        """A peer's wall clock is so many seconds ahead of ours."""
        self._away.pop(peer, None)
        self._ahead[peer] = ahead
        others = [0.0, *(value for other, value in self._ahead.items() if other != peer)]
        if len(others) >= OTHERS:
            away = min(ahead - median_low(others), ahead - median_high(others), key=abs)
            text = f"its clock is {abs(away):.0f} s {'ahead of' if away > 0 else 'behind'} most others'"
            self._mark(peer, "clock skew", abs(away) > APART, text)

    def lost(self, peer: PeerId) -> None:
        """The link to a peer broke. Its record is kept for WINDOW rounds, so that a new link does not make anybody well."""
        for known in (self._flows, self._said, self._ahead):
            known.pop(peer, None)
        self._speed = {key: value for key, value in self._speed.items() if key[0] != peer}
        if not any(any(marks) for (other, _), marks in self._marks.items() if other == peer):
            self._forget(peer)
            return
        self._away[peer] = self._round
        self._away.move_to_end(peer)
        if len(self._away) > AWAY:
            self._forget(next(iter(self._away)))

    def _forget(self, peer: PeerId) -> None:
        self._away.pop(peer, None)
        self._speeds.pop(peer, None)
        self.findings.pop(peer, None)
        for key in [key for key in self._marks if key[0] == peer]:
            del self._marks[key]
            self._shown.pop(key, None)

    # --- one round

    def _judge(self) -> None:
        for peer in [peer for peer, round in self._away.items() if not round <= self._round < round + WINDOW]:
            self._forget(peer)
        self._judge_links()
        self._judge_speeds({peer: speed for (peer, round), speed in self._speed.items() if round == self._round})
        self._flows = {}

    def _judge_links(self) -> None:
        flows = {peer: flow for peer, flow in self._flows.items() if flow.gaps}
        rates = {peer: flow.nbytes / max(1e-3, flow.last - flow.first) for peer, flow in flows.items()}
        gaps = [gap for flow in flows.values() for gap in flow.gaps]
        usual = median(gaps) if gaps else 0.0
        stalls = {peer: [gap for gap in flow.gaps if gap > max(STALL, STALLS * usual)] for peer, flow in flows.items()}
        for peer, flow in flows.items():
            others = [other for other in flows if other != peer]
            if len(others) < OTHERS:
                continue
            # Where most chunks are late, it is the rate that is low.
            stalled = bool(stalls[peer]) and median(flow.gaps) < STALL
            often = 1e3 * median(flow.gaps)
            self._mark(
                peer, "lossy link", stalled, f"chunks come every {often:.0f} ms and stall for {max(flow.gaps):.1f} s"
            )
            typical = median_low(rates[other] for other in others)
            slow = SLOW * rates[peer] < typical and flow.last - flow.first > FELT
            text = f"upload {_rate(rates[peer])}, the others' median {_rate(typical)}"
            self._mark(peer, "slow upload", slow and not stalled, text)

    def _judge_speeds(self, speeds: Mapping[PeerId, float]) -> None:
        kept = {}
        for peer, speed in speeds.items():
            known = self._speeds.setdefault(peer, deque(maxlen=MEMORY))
            known.append(speed)
            if len(known) > WINDOW:
                best = max(median(list(known)[at : at + 4]) for at in range(len(known) - 3))
                kept[peer] = speed / best
        for peer, speed in speeds.items():
            others = [value for other, value in speeds.items() if other != peer]
            if len(others) < OTHERS:
                continue
            trend = [value for other, value in kept.items() if other != peer]
            hot = peer in kept and kept[peer] < FALLEN and len(trend) >= OTHERS and median(trend) > STEADY
            if peer in kept:
                rest = f"the others kept {100 * median(trend or [1]):.0f} %"
                text = f"speed fell to {100 * kept[peer]:.0f} % of its own best, {rest}"
                self._mark(peer, "thermal throttling", hot, text)
            typical = median_low(others)
            weak = WEAK * speed < typical
            self._mark(
                peer,
                "slow compute",
                weak and not hot,
                f"speed {speed:.3g}/s, the others' median {typical:.3g}/s",
            )

    def _mark(self, peer: PeerId, cause: str, bad: bool, text: str) -> None:
        marks = self._marks.setdefault((peer, cause), deque(maxlen=LONG if cause == "lossy link" else WINDOW))
        marks.append(bad)
        count = sum(marks)
        if bad:
            self._shown[peer, cause] = text
        if count >= self._needed(peer, cause):
            # The first of CAUSES explains the others.
            known = self.findings.get(peer)
            if known is None or CAUSES.index(cause) <= CAUSES.index(known.cause):
                what = "times" if cause == "clock skew" else "rounds"
                self.findings[peer] = Finding(cause, f"{self._shown[peer, cause]}, {count} of {len(marks)} {what}")
        elif count <= (RARE if cause == "lossy link" else WELL):
            found = self.findings.get(peer)
            if found is not None and found.cause == cause:
                del self.findings[peer]

    def _needed(self, peer: PeerId, cause: str) -> int:
        """Marks that are enough to name a cause."""
        if cause != "lossy link":
            return ASTRAY if cause == "clock skew" else NAMED
        others = [sum(marks) for (other, what), marks in self._marks.items() if what == cause and other != peer]
        return max(STALLED, OFTEN * (1 + max(others, default=0)))


def _rate(value: float) -> str:
    return f"{value / 1e6:.1f} MB/s" if value >= 1e5 else f"{value / 1e3:.1f} kB/s"


def named(findings: Mapping[PeerId, Finding], peer: PeerId) -> str:
    """What a status shows of a peer: empty, or its cause and the evidence."""
    found = findings.get(peer)
    return f"{found.cause}: {found.evidence}" if found is not None else ""
