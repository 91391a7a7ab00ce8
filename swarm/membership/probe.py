"""Probes of peers: direct, through others, and on behalf of others (SWIM, with Lifeguard's Nack)."""

from __future__ import annotations

import math
import random
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import TypeAlias

from thinwire.swarm.membership.presets import Preset
from thinwire.swarm.membership.suspicion import Awareness
from thinwire.swarm.membership.view import LivePeers
from thinwire.swarm.messages.registry import Ack, Message, Nack, PeerId, Ping, PingRequest

Outgoing: TypeAlias = list[tuple[PeerId, Message]]
"""Messages to send, with their receivers."""

MAX_INDIRECT = 64
"""Maximum number of probes on behalf of others at a time."""

INDIRECT_PER_PEER = 8
"""Maximum number of probes on behalf of one peer at a time."""


@dataclass(slots=True)
class _RoundTrip:
    """Smoothed round-trip time and its variation in seconds (RFC 6298)."""

    mean: float
    variation: float

    def add(self, sample: float) -> None:
        self.variation += (abs(sample - self.mean) - self.variation) / 4
        self.mean += (sample - self.mean) / 8


@dataclass(slots=True)
class _Probe:
    """Probe of `target`, sent at the time `sent`.

    ask_at: time at which `helpers` are asked to probe it, too. fail_at: time at which the probe has failed. nacks: helpers that
    have no answer of the target so far.
    """

    target: PeerId
    sent: float
    ask_at: float
    fail_at: float
    helpers: tuple[PeerId, ...] = ()
    nacks: dict[PeerId, None] = field(default_factory=dict)


@dataclass(slots=True)
class _IndirectProbe:
    """Probe on behalf of `asker`, whose number for it is `sequence`."""

    asker: PeerId
    sequence: int
    target: PeerId
    nack_at: float
    end: float


class Prober:
    """Runner of probes, and of indirect probes for other peers.

    `helpers(target)` returns peers that may be asked to probe the target; `items(to)` returns items to piggyback;
    `on_round_trip` is called with each round-trip time.
    """

    def __init__(
        self,
        preset: Preset,
        rng: random.Random,
        awareness: Awareness,
        helpers: Callable[[PeerId], list[PeerId]],
        items: Callable[[PeerId], tuple[bytes, ...]],
        on_round_trip: Callable[[PeerId, float], None] = lambda peer, seconds: None,
    ) -> None:
        self.progress = 0
        self._preset, self._rng, self._awareness = preset, rng, awareness
        self._helpers, self._items, self._on_round_trip = helpers, items, on_round_trip
        self._sequence = rng.getrandbits(32)
        self._probes: dict[int, _Probe] = {}
        self._indirect: dict[int, _IndirectProbe] = {}
        self._round_trips: dict[PeerId, _RoundTrip] = {}

    def period(self) -> float:
        """Return the time that a probe may take, which is also the time between probes, in seconds.

        It is longer while this peer itself is slow.
        """
        return self._preset.probe_period * (self._awareness.score + 1)

    def start(self, target: PeerId, now: float) -> Outgoing:
        """Probe `target`, unless a probe of it is in progress."""
        if any(probe.target == target for probe in self._probes.values()):
            return []
        sequence = self._next()
        self._probes[sequence] = _Probe(target, now, now + self._timeout(target), now + self.period())
        return [(target, Ping(sequence, self.progress, self._items(target)))]

    def probe_for(self, asker: PeerId, request: PingRequest, now: float) -> Outgoing:
        """Probe on behalf of another peer. Requests above the limits are answered with Nack at once."""
        running = [one for one in self._indirect.values() if one.asker == asker]
        if len(running) >= INDIRECT_PER_PEER or len(self._indirect) >= MAX_INDIRECT:
            return [(asker, Nack(request.sequence))]
        nack_at = now + self._preset.nack_share * self._timeout(request.target)
        end = now + 2 * self._preset.probe_period
        sequence = self._next()
        self._indirect[sequence] = _IndirectProbe(asker, request.sequence, request.target, nack_at, end)
        return [(request.target, Ping(sequence, self.progress, self._items(request.target)))]

    def on_ack(self, sender: PeerId, ack: Ack, now: float) -> tuple[PeerId | None, Outgoing]:
        """Process an Ack. Returns the peer that is proved alive, if any, and messages to send."""
        probe = self._probes.get(ack.sequence)
        if probe is not None and (sender == probe.target or sender in probe.helpers):
            if sender == probe.target and not probe.helpers:  # after a second ping it is unclear which one was answered
                self._sample(sender, now - probe.sent)
            del self._probes[ack.sequence]
            self._awareness.add(-1)
            return probe.target, []
        one = self._indirect.get(ack.sequence)
        if one is not None and sender == one.target:
            del self._indirect[ack.sequence]
            return sender, [(one.asker, Ack(one.sequence, ack.progress, self._items(one.asker)))]
        return None, []

    def on_nack(self, sender: PeerId, nack: Nack) -> None:
        """Record that a helper has no answer so far, but is alive itself."""
        probe = self._probes.get(nack.sequence)
        if probe is not None and sender in probe.helpers:
            probe.nacks[sender] = None

    def tick(self, now: float) -> tuple[Outgoing, list[PeerId], list[PeerId]]:
        """Return the messages that are due, the peers whose probe has failed, and the silent helpers."""
        messages: Outgoing = []
        failed: list[PeerId] = []
        silent: list[PeerId] = []
        if not self._probes and not self._indirect:
            return messages, failed, silent
        for sequence, probe in list(self._probes.items()):
            if probe.fail_at <= now:
                del self._probes[sequence]
                pool = self._helpers(probe.target)
                missing = [peer for peer in probe.helpers if peer not in probe.nacks and peer in pool]
                self._awareness.add(len(missing) if probe.helpers else 1)
                silent += missing
                failed.append(probe.target)
            elif probe.ask_at <= now:
                probe.ask_at = math.inf
                pool = self._helpers(probe.target)
                probe.helpers = tuple(self._rng.sample(pool, min(self._preset.indirect, len(pool))))
                messages += [(to, PingRequest(sequence, probe.target, self._items(to))) for to in probe.helpers]
                messages.append((probe.target, Ping(sequence, self.progress, self._items(probe.target))))
        for sequence, one in list(self._indirect.items()):
            if one.nack_at <= now:
                one.nack_at = math.inf
                messages.append((one.asker, Nack(one.sequence)))
            if one.end <= now:
                del self._indirect[sequence]
        return messages, failed, silent

    def deadline(self) -> float:
        times = [min(probe.ask_at, probe.fail_at) for probe in self._probes.values()]
        times += [min(one.nack_at, one.end) for one in self._indirect.values()]
        return min(times, default=math.inf)

    def shift(self, lag: float, now: float) -> None:
        """Exclude the last `lag` seconds, in which we did not listen, from the time-outs."""
        for probe in self._probes.values():
            stalled = min(lag, now - probe.sent)
            probe.ask_at += stalled
            probe.fail_at += stalled
        self._indirect.clear()

    def forget(self, peer: PeerId) -> None:
        self._round_trips.pop(peer, None)

    def _next(self) -> int:
        self._sequence = (self._sequence + 1) % 2**32
        return self._sequence

    def _timeout(self, peer: PeerId) -> float:
        trip = self._round_trips.get(peer)
        most = self._preset.ping_max
        return most if trip is None else min(most, max(self._preset.ping_min, 3 * trip.mean + 4 * trip.variation))

    def _sample(self, peer: PeerId, seconds: float) -> None:
        self._on_round_trip(peer, seconds)
        if peer in self._round_trips:
            self._round_trips[peer].add(seconds)
        else:
            self._round_trips[peer] = _RoundTrip(seconds, seconds / 2)


class Rotation:
    """Order of probes: every peer in turn, reshuffled after each pass, so that the wait is bounded."""

    def __init__(self, rng: random.Random) -> None:
        self._rng = rng
        self._order: list[PeerId] = []
        self._turn = 0
        self._prioritized: set[PeerId] = set()

    def insert(self, peer: PeerId) -> None:
        """Insert a new peer at a random position among those still to come in this pass."""
        self._order.insert(self._rng.randint(self._turn, len(self._order)), peer)

    def prioritize(self, peers: Sequence[PeerId]) -> None:
        """Make these peers the next ones, each only once in a pass, so that the others do not wait long."""
        new = [peer for peer in peers if peer not in self._prioritized]
        self._prioritized.update(new)
        self._order, self._turn = [*dict.fromkeys((*new, *self._order[self._turn :]))], 0

    def next(self, live: LivePeers) -> PeerId | None:
        """Return the next peer of `live`, or None if it is empty."""
        for _ in range(2):
            while self._turn < len(self._order):
                peer = self._order[self._turn]
                self._turn += 1
                if live.has(peer):
                    return peer
            self._order, self._turn = live.others(), 0
            self._prioritized.clear()
            self._rng.shuffle(self._order)
        return None
