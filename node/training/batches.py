"""Division of training data among peers and its order.

It is a pure function of the seed, so that no state is lost with a peer.

A sample is context + 1 consecutive tokens, and no token is in two samples. Runs of samples (blocks) are held out for
evaluation; the rest is divided into shards, which are assigned to peers by rendezvous hashing. Within an epoch all
training samples have one seeded order; a peer walks along it and takes those in its shards. Its position in that order
is the whole state of its data. When its shards change it continues from the same position, so it never repeats its own
samples, and repeats or skips samples of another peer only between the two peers' positions, which are close as long as
both advance at the same rate.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import TypeAlias

import blake3
import numpy as np
import torch
from numpy.typing import NDArray
from thinwire.node.state.data_ledger import DataLease
from thinwire.node.training.corpus import Corpus
from thinwire.node.training.models.tokenizer import DataError
from thinwire.swarm.messages.registry import PeerId
from thinwire.swarm.rendezvous_hash import rank

Batch: TypeAlias = tuple[torch.Tensor, torch.Tensor]
"""Inputs and targets (the next tokens), int64 [batch, context] each."""

Indices: TypeAlias = NDArray[np.int64]

MAX_BLOCK = 64
"""Most samples in a block.

Neighbours in the text are held out together, else training would have seen their context.
"""

MIN_BLOCKS = 1024
"""Blocks of a small corpus, if it has as many samples."""


@dataclass(frozen=True, slots=True)
class Split:
    """Samples of a corpus: `training` and `held_out` are sample numbers in ascending order, disjoint.

    Shard s holds the training samples at positions p with p·shards // training.size == s.
    """

    corpus: Corpus
    context: int
    seed: int
    shards: int
    training: Indices
    held_out: Indices
    starts: Indices
    """Number of the first sample of each part, followed by the number of all samples."""

    def batch(self, samples: Indices) -> Batch:
        """Return the tokens of some samples. Raises DataError for a token id outside the vocabulary."""
        width = self.context + 1
        rows = np.empty((samples.size, width), np.int64)
        which = np.searchsorted(self.starts, samples, side="right") - 1
        for row, sample, part in zip(rows, samples, which, strict=True):
            offset = int(sample - self.starts[part]) * width
            row[:] = self.corpus.parts[part][offset : offset + width]
        if rows.size and int(rows.max()) >= self.corpus.vocab:
            raise DataError(
                f"token id {int(rows.max())} in the data, the tokenizer knows {self.corpus.vocab}",
                "set data.tokenizer to the tokenizer the file was made with",
            )
        tokens = torch.from_numpy(rows)
        return tokens[:, :-1], tokens[:, 1:]

    def evaluation(self, batch: int, count: int) -> Iterator[Batch]:
        """Yield at most `count` batches of held-out samples, spread evenly; the same ones every time."""
        total = min(batch * count, self.held_out.size)
        chosen = self.held_out[np.arange(total) * self.held_out.size // max(total, 1)]
        for start in range(0, total, batch):
            yield self.batch(chosen[start : start + batch])


def split(corpus: Corpus, context: int, seed: int, shards: int = 256, holdout: float = 0.02) -> Split:
    """Split a corpus into training and held-out samples.

    `holdout`: fraction held out for evaluation (at least one block unless it is 0).

    Raises DataError if there is no sample to train on.
    """
    counts = [part.size // (context + 1) for part in corpus.parts]
    starts = np.concatenate(([0], np.cumsum(counts))).astype(np.int64)
    total = int(starts[-1])
    block = max(1, min(MAX_BLOCK, total // MIN_BLOCKS))
    blocks = -(-total // block)
    kept = min(max(1, round(holdout * blocks)), blocks - 1) if holdout > 0 else 0
    if total < 1 or (holdout > 0 and kept < 1):
        raise DataError(
            f"{corpus.tokens} tokens are too few for sequences of {context + 1}",
            "provide more text, or lower model.context",
        )
    order = sorted(range(blocks), key=lambda number: _hash(seed, number))
    held = np.zeros(blocks, bool)
    held[order[:kept]] = True
    samples = np.arange(total, dtype=np.int64)
    away = held[samples // block]
    return Split(corpus, context, seed, shards, samples[~away], samples[away], starts)


def _hash(seed: int, number: int) -> bytes:
    return blake3.blake3(b"thinwire/block/1\0" + seed.to_bytes(8, "big") + number.to_bytes(8, "big")).digest()


def shards_of(seed: int, shards: int, peers: Sequence[PeerId], me: PeerId) -> tuple[int, ...]:
    """Return the shards of `me` among `peers`, in ascending order.

    All peers' shards are disjoint and complete, and their numbers differ by at most one.

    Each shard goes to the first peer in its rendezvous ranking that has room (bounded loads: Mirrokni, Thorup and
    Zadimoghaddam, arXiv 1608.01350), so a change of the group moves few of them. Empty if there are more peers than
    shards and none is left for `me`. Raises ValueError if `me` is not among the peers.
    """
    group = sorted(set(peers))
    if me not in group:
        raise ValueError("a peer that is not in the group has no shards")
    least, larger = divmod(shards, len(group))
    loads = dict.fromkeys(group, 0)
    mine: list[int] = []
    for shard in range(shards):
        for peer in rank(seed.to_bytes(8, "big"), "shard", group, shard):
            if loads[peer] < least or (loads[peer] == least and larger > 0):
                larger -= loads[peer] == least
                loads[peer] += 1
                if peer == me:
                    mine.append(shard)
                break
    return tuple(mine)


@dataclass(frozen=True, slots=True)
class Cursor:
    """Position in the order of an epoch's training samples.

    All samples before `position` are used or belong to other peers.
    """

    epoch: int = 0
    position: int = 0


class Batches:
    """Endless training batches of one peer. `cursor` may be read, stored and set at any time."""

    def __init__(self, split: Split, batch: int, shards: Sequence[int], cursor: Cursor = Cursor()) -> None:
        self.split = split
        self.batch = batch
        self.cursor = cursor
        self._epoch = -1
        self._order: Indices = np.empty(0, np.int64)
        self._lease: DataLease | None = None
        self._trial_samples: Indices | None = None
        self._orders: dict[int, tuple[int, Indices]] = {}
        self.assign(shards)

    def assign(self, shards: Sequence[int]) -> None:
        """Change to other shards, at the same position in the order.

        Raises DataError if they contain no sample.
        """
        mask = np.zeros(self.split.shards, bool)
        mask[list(shards)] = True
        size = self.split.training.size
        if not mask[np.arange(size) * self.split.shards // size].any():
            raise DataError(
                f"no training samples in this peer's {len(shards)} of {self.split.shards} shards",
                "provide more text, or raise data.shards above the number of peers",
            )
        self._mask = mask
        self._epoch = -1

    def lease(self, lease: DataLease | None) -> None:
        """Draw only what a lease allows from now on; None returns to shards and cursor. Raises DataError."""
        if lease is not None and self.split.training.size < self.split.shards:
            raise DataError(
                f"data.exactly_once: {self.split.training.size} samples are fewer than {self.split.shards} shards",
                "provide more text, or lower data.shards",
            )
        self._lease = lease

    def repeat(self, samples: Indices | None) -> None:
        """Draw only these samples from now on, again and again; None returns to shards and cursor."""
        self._trial_samples = samples

    def next(self, size: int = 0) -> Batch:
        """Return the next `size` samples (0: `batch`) of this peer's shards.

        Continues with the next epoch if necessary.
        """
        return self.split.batch(self.next_samples(size))

    def next_samples(self, size: int = 0) -> Indices:
        """Return the sample numbers of the next batch."""
        if self._trial_samples is not None:
            drawn = self._trial_samples[: size or self.batch]
            self._trial_samples = np.roll(self._trial_samples, -drawn.size)
            return drawn
        if self._lease is not None:
            return self._leased(self._lease, size or self.batch)
        chosen: list[Indices] = []
        missing = size or self.batch
        while missing:
            self._enter(self.cursor.epoch)
            first = int(np.searchsorted(self._places, self.cursor.position))
            places = self._places[first : first + missing]
            chosen.append(self.split.training[self._order[places]])
            missing -= places.size
            if missing:
                self.cursor = Cursor(self.cursor.epoch + 1)
            elif places.size:
                self.cursor = Cursor(self.cursor.epoch, int(places[-1]) + 1)
        return np.concatenate(chosen)

    def _leased(self, lease: DataLease, size: int) -> Indices:
        self._lease = lease.after(size)
        drawn = zip(lease.shards.tolist(), lease.used.tolist(), self._lease.used.tolist(), strict=True)
        return np.array([self._sample(shard, at) for shard, first, end in drawn for at in range(first, end)], np.int64)

    def _sample(self, shard: int, count: int) -> int:
        """Return the sample that is drawn from a shard after `count` draws.

        Each sample comes once before any is repeated.
        """
        size, shards = self.split.training.size, self.split.shards
        first, end = -(-shard * size // shards), -(-(shard + 1) * size // shards)
        epoch, place = divmod(count, end - first)
        known, order = self._orders.get(shard, (-1, self._order))
        if known != epoch:
            draw = np.random.Generator(np.random.Philox(np.random.SeedSequence([self.split.seed, epoch, shard])))
            order = draw.permutation(end - first)
            self._orders[shard] = epoch, order
        return int(self.split.training[first + order[place]])

    def _enter(self, epoch: int) -> None:
        """Compute the order of an epoch and this peer's positions in it, once."""
        if epoch == self._epoch:
            return
        size = self.split.training.size
        draw = np.random.Generator(np.random.Philox(np.random.SeedSequence([self.split.seed, epoch])))
        self._order = draw.permutation(size)
        self._places: Indices = np.flatnonzero(self._mask[self._order * self.split.shards // size])
        self._epoch = epoch


TRIAL_BATCHES = 8
"""Batches of a peer on trial in one round: few, so that its training on them can be measured."""


def trial_samples(split: Split, batch: int, peer: PeerId, round: int) -> Indices:
    """Return the samples of a peer on trial after `round`: at most TRIAL_BATCHES, drawn by a hash."""
    draw = _drawn(split.seed, b"lesson" + peer + round.to_bytes(8, "big"))
    return split.training[draw.permutation(split.training.size)[: TRIAL_BATCHES * batch]]


def trial_batches(split: Split, batch: int, peer: PeerId, round: int, salt: bytes) -> tuple[Batch, Batch]:
    """Return two batches that score a peer on trial: one of its `trial_samples`, and one of other samples.

    `salt` draws them.
    """
    assigned, draw = (
        trial_samples(split, batch, peer, round),
        _drawn(split.seed, salt + peer + round.to_bytes(8, "big")),
    )
    others = split.held_out if split.held_out.size >= batch else split.training
    chosen = draw.choice(assigned, min(batch, assigned.size), replace=False)
    return split.batch(chosen), split.batch(draw.choice(others, batch))


def _drawn(seed: int, name: bytes) -> np.random.Generator:
    digest = blake3.blake3(b"thinwire/trial/1\0" + seed.to_bytes(8, "big") + name).digest()
    return np.random.default_rng(int.from_bytes(digest, "big"))


def cursor_after(split: Split, samples: int) -> Cursor:
    """Return the cursor at which a joiner starts.

    All peers of the swarm together have used `samples` training samples.
    """
    return Cursor(*divmod(samples, split.training.size))
