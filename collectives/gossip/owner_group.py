"""A peer's gossip group whose chunks have owners: a butterfly without agreement.

Each member owns some chunks. It takes the mean of the contributions to them that arrive, and sends it to their
contributors. Nothing is agreed upon: a member that fails, or whose link fails, is left out of the chunks that are not
computed yet, and where a mean is missing the member makes a step alone. Each mean goes only to the members whose
contributions are in it, so that averaging does not change the mean of all replicas, which makes the steps of DiLoCo (Moshpit
SGD, Ryabinin et al., arXiv 2103.03239, averages groups likewise; there groups are the rows of a grid, here they are drawn at
random). If a mean does not arrive, the mean of all replicas is off by the difference between the contribution and that mean,
for these chunks. Chunks of a sparse Δ have no owners: they go to all members, each of which takes the mean
(`PairCodec.averaged`).

All members must have drawn the same group, or the chunks would have other owners: announcements name it. Peers whose
views differ when they are ready are not in one group.
"""

from __future__ import annotations

from collections.abc import Collection, Container, Iterable, Sequence
from dataclasses import replace

import blake3
import msgspec
import numpy as np
from thinwire.collectives.aggregation.screening import NORM_LIMIT, lower_median, outliers
from thinwire.collectives.deterministic_rounding import encode
from thinwire.collectives.gossip.group import GossipGroup
from thinwire.collectives.gossip.means import Means, MeshMeans, OwnerMeans, SplitMeans
from thinwire.collectives.gossip.owner_pair import OwnerPair
from thinwire.collectives.gossip.pair import PairTerms
from thinwire.collectives.gossip.partner_patience import STALLED
from thinwire.collectives.topology.shards import shares
from thinwire.compression.core.types import Buffer, Floats
from thinwire.swarm.messages.registry import Base, PeerId, Ready

MESH = 8
"""Largest group whose members send all chunks to each other; in larger ones chunks have owners."""


class OwnerGroup(GossipGroup):
    """Gossip group of one peer in one round, whose chunks have owners.

    Used as a GossipGroup. `means` has the results after `wait`.
    """

    def __init__(self, terms: PairTerms, *, me: PeerId, size: int, attempt: int = 0) -> None:
        super().__init__(terms, size=size, attempt=attempt)
        self._me, self._drawn_terms = me, replace(terms, mismatch="other group or plan")
        self._owner_pairs: dict[PeerId, OwnerPair] = {}
        self._drawn: tuple[PeerId, ...] | None = None
        """Other members that were drawn last; None before the first draw."""
        self._owners: dict[int, PeerId] = {}
        """Owner of each chunk that has one, by the number of the chunk."""
        self._source: Sequence[Buffer] = ()
        self._pending: dict[int, None] = {}
        """Numbers of our own chunks without a mean yet, in order."""
        self._means: dict[int, Buffer] = {}
        """Means of our other own chunks, by number."""

    def choose(self, drawn: tuple[PeerId, ...], here: Container[PeerId]) -> bool:
        """Set the other members, as drawn; again when views have changed. Return False if they stay the same."""
        if self.ours is not None or tuple(self.pairs) == drawn == self._drawn:
            return False
        self._drawn = drawn
        for pair in self.pairs.values():
            pair.withdraw_data()
        terms, members = self._drawn_terms, tuple(sorted((*drawn, self._me)))
        self._terms = replace(terms, plan=blake3.blake3(terms.plan + b"".join(members)).digest())
        count, mixed = len(terms.grid), terms.mixed
        fast, slow = range(count if terms.codecs.averaged else 0), [count + index for index in mixed]
        self._owners = {
            number: owner
            for numbers in (fast, slow)
            for number, owner in zip(numbers, shares(len(numbers), members, fragment=terms.round), strict=True)
        }
        ours, shared = self._owned(self._me), range(len(fast), count)
        self._pending = dict.fromkeys(ours)
        self._means = {}
        self._owner_pairs = {
            peer: OwnerPair(
                peer,
                self._terms,
                self._look,
                ours=ours,
                owned=self._owned(peer),
                shared=shared,
                arrived=self._reduce_complete,
                reduced=lambda: not self._pending,
            )
            for peer in drawn
        }
        self.pairs = dict(self._owner_pairs)
        if self._posted is not None:
            # A mean of the former group must not count in this one: it names the attempt.
            self.attempt += 1
            self._post(msgspec.structs.replace(self._posted, attempt=self.attempt, plan=self._terms.plan))
        return True

    def _owned(self, peer: PeerId) -> tuple[int, ...]:
        return tuple(number for number, owner in self._owners.items() if owner == peer)

    def close(self) -> None:
        super().close()
        self._owner_pairs = {}

    def drop(self, peer: PeerId, reason: str) -> None:
        """Continue without a departed peer; before we are ready the next `choose` draws another group."""
        super().drop(peer, reason)
        if peer not in self.pairs:
            self._owner_pairs.pop(peer, None)
            self._reduce_complete()

    def accepts(self, peer: PeerId, message: Base | Ready) -> bool:
        """Return True if an announcement belongs to our group, or may belong to one that we still draw."""
        return self.ours is not None or (peer in self.pairs and message.plan == self._terms.plan)

    def announce(
        self, source: Sequence[Buffer], hashes: bytes, *, weight: int, loss: float, speed: float, deadline: float
    ) -> None:
        """Announce our encoded chunks to the members. The chunks must not change any more."""
        self._source = source
        super().announce(source, hashes, weight=weight, loss=loss, speed=speed, deadline=deadline)

    def means(self, members: Collection[PeerId]) -> Means:
        """Return the means of these members, each of which is us or another.

        These are the means that they sent of the chunks that they own. Of chunks without an owner they are the means of
        their contributions, if they are not ours alone.
        """

        def find(number: int) -> Buffer | None:
            owner = self._owners.get(number)
            if owner is None or owner not in members:
                return None
            if owner == self._me:
                return self._means.get(number)
            pair = self._owner_pairs.get(owner)
            return pair.mean(number) if pair is not None else None

        terms, chunks = self._terms, range(len(self._terms.grid))
        owned = OwnerMeans([find(i) for i in chunks], [find(len(chunks) + i) for i in chunks], terms.codecs)
        if terms.codecs.averaged or set(members) <= {self._me}:
            return owned
        payloads = [self._shared(peer) for peer in sorted(members)]
        return SplitMeans(MeshMeans(payloads, 0, terms.grid, terms.codecs, terms.round), owned)

    def _shared(self, peer: PeerId) -> Sequence[Buffer]:
        """Return the contribution of a member, or ours, to the chunks without an owner."""
        find = self.own if peer == self._me else self._owner_pairs[peer].contribution
        found = (find(number) for number in range(len(self._terms.grid)))
        return [payload for payload in found if payload is not None]

    def tick(self) -> None:
        """Let time pass: give up members that are silent, stalled or late.

        Once more than half of the ready members have sent their contributions, the others have one patience for each
        chunk, because all members wait for the slowest contributor. Means are awaited three times as long, since their
        owner may be waiting for a contributor.
        """
        for pair in self.pairs.values():
            pair.tick()
        if self.ours is not None:
            ready = [
                one for one in self._owner_pairs.values() if one.theirs is not None and (one.open or one.exchanged)
            ]
            self._hurry(ready, [one for one in ready if one.complete], self._terms.patience)
            self._hurry(ready, [one for one in ready if one.exchanged], 3 * self._terms.patience)

    def _hurry(self, ready: Sequence[OwnerPair], done: Sequence[OwnerPair], wait: float) -> None:
        if 2 * len(done) > len(ready):
            now, last = self._terms.now(), max(pair.progressed_at for pair in done)
            for pair in ready:
                if pair not in done and pair.open and now > max(last, pair.progressed_at) + wait:
                    pair.fail(STALLED)

    # --- our chunks

    def _post(self, posted: Base) -> None:
        super()._post(posted)
        self._reduce_complete()

    def _look(self) -> None:
        self._reduce_complete()
        super()._look()

    def _reduce_complete(self, number: int | None = None) -> None:
        """Send the means of our chunks, or of one, that wait for no contribution any more."""
        for one in list(self._pending) if number is None else [number]:
            if one in self._pending and self.own(one) is not None:
                if all(pair.contribution(one) is not None for pair in self._owner_pairs.values() if pair.open):
                    del self._pending[one]
                    self._reduce(one)
                    if not self._pending:
                        for pair in tuple(self._owner_pairs.values()):
                            pair.look()

    def own(self, number: int) -> Buffer | None:
        """Return our contribution to a chunk; None before it is announced."""
        count = len(self._terms.grid)
        if number < count:
            return self._source[number] if self.ours is not None else None
        return self.base[self._terms.mixed.index(number - count)] if self._posted is not None else None

    def _reduce(self, number: int) -> None:
        """Compute the mean of a chunk, and send it to the members that are part of it."""
        count, codecs = len(self._terms.grid), self._terms.codecs
        own, payloads = self.own(number), dict[PeerId, Buffer]()
        for peer in sorted((*self._owner_pairs, self._me)):
            payload = own if peer == self._me else self._usable(peer, number)
            if payload is not None:
                payloads[peer] = payload
        fast = number < count
        codec = codecs.fast if fast or codecs.slow is None else codecs.slow
        mean, one = (np.empty(self._terms.grid.size(number % count), np.float32) for _ in range(2))

        def decode(payload: Buffer) -> Floats:
            codec.decode(payload, one)
            return one

        # Vectors of parameters are compared by their distance from ours, pseudo-gradients by their length. Where most are
        # zero, as the distances of equal replicas, the length of our parameters is the limit.
        origin = None if fast and codecs.slow is not None else decode(payloads[self._me]).copy()
        lengths = {peer: _length(decode(payload), origin) for peer, payload in payloads.items()}
        others = [length for peer, length in lengths.items() if origin is None or peer != self._me]
        usual = max(lower_median(others or [0.0]), self._size_near(number % count) / NORM_LIMIT)
        far, _ = outliers(lengths, usual)
        for peer in far:
            del payloads[peer]
        self._refuse(far, "norm")
        mean[:] = 0.0
        with np.errstate(over="ignore", invalid="ignore"):
            for payload in payloads.values():
                mean += decode(payload)
            mean *= np.float32(1.0 / max(1, len(payloads)))
        if not np.isfinite(mean).all():
            return self._refuse(payloads, "no mean")
        if len(payloads) > 1:
            encoded = None
            for peer, payload in payloads.items():
                if encoded is None or not fast:
                    with np.errstate(over="ignore"):
                        values = mean if fast else mean - decode(payload)
                    if not np.isfinite(values).all():
                        self._refuse((peer,), "no mean")
                        continue
                    encoded = np.empty(codecs.means.nbytes(mean.size), np.uint8)
                    encode(codecs.means, values, encoded)
                if peer == self._me:
                    self._means[number] = encoded.data
                else:
                    self._owner_pairs[peer].send_mean(number, encoded.data)

    def _refuse(self, peers: Iterable[PeerId], reason: str) -> None:
        for peer in peers:
            if peer in self._owner_pairs:
                self._owner_pairs[peer].fail(reason)

    def _size_near(self, place: int) -> float:
        """Return the L2 norm of our own parameters in a chunk, as sent; 0 if they are not sent yet.

        If no parameters of the chunk travel in this round, return the norm of a chunk nearby that does.
        """
        terms, first = self._terms, 0
        if terms.codecs.slow is not None:
            mixed, first = terms.mixed, len(terms.grid)
            if not mixed:
                return 0.0
            place = mixed[min(place // terms.codecs.parts, len(mixed) - 1)]
        own, out = self.own(first + place), np.empty(terms.grid.size(place), np.float32)
        if own is None:
            return 0.0
        (terms.codecs.slow or terms.codecs.fast).decode(own, out)
        return _length(out, None)

    def _usable(self, peer: PeerId, number: int) -> Buffer | None:
        pair = self._owner_pairs[peer]
        return pair.contribution(number) if pair.open or pair.exchanged else None


def _length(values: Floats, origin: Floats | None) -> float:
    with np.errstate(over="ignore", invalid="ignore"):
        away = values if origin is None else values - origin
        square = float(np.dot(away, away))
    return float(np.sqrt(square)) if np.isfinite(square) else float("inf")
