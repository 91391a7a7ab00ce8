"""The data ledger: samples are leased, drawn and booked exactly once."""

from __future__ import annotations

import asyncio
import heapq
import random
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from thinwire.collectives.state_sync.state_sync import OtherModelState
from thinwire.collectives.topology.shards import Grid
from thinwire.node.outer.round_loop import mismatch
from thinwire.node.runtime.asyncio_extra import at_once
from thinwire.node.runtime.disk import RealDisk
from thinwire.node.runtime.environment import Environment
from thinwire.node.state.checkpoint_store import CheckpointStore
from thinwire.node.state.checkpointer import Checkpointer
from thinwire.node.state.data_ledger import DataLease, DataLedger, deal, fill
from thinwire.node.state.layout import Layout, Piece
from thinwire.node.state.replica import Replica
from thinwire.node.training.batches import Batches, split
from thinwire.node.training.corpus import Corpus
from thinwire.node.training.learner import WorkShare
from thinwire.node.training.local_learner import Computing, build_learner
from thinwire.node.training.models.tokenizer import DataError
from thinwire.swarm.identity.identity import Identity
from thinwire.swarm.manifest.parser import parse
from thinwire.swarm.messages.registry import Contribution

COUNTS = st.lists(st.integers(0, 40), min_size=1, max_size=12)
CONTEXT = 5


def peer(i: int) -> bytes:
    return bytes([i]) * 32


def counts(values: list[int]) -> np.ndarray:
    return np.array(values, np.int64)


@given(COUNTS, st.integers(0, 300))
def test_draws_come_from_least_used_shards(used: list[int], count: int) -> None:
    heap = [(value, place) for place, value in enumerate(used)]
    heapq.heapify(heap)
    for _ in range(count):
        value, place = heap[0]
        heapq.heapreplace(heap, (value + 1, place))
    expected = [value for value, place in sorted(heap, key=lambda entry: entry[1])]
    assert fill(counts(used), count).tolist() == expected


@given(COUNTS, st.integers(0, 90), st.integers(0, 90))
def test_draws_can_be_split_anywhere(used: list[int], a: int, b: int) -> None:
    assert fill(fill(counts(used), a), b).tolist() == fill(counts(used), a + b).tolist()


@given(COUNTS, st.sets(st.integers(0, 255), min_size=1, max_size=15), st.integers(0, 99))
def test_leases_are_disjoint_complete_and_even(used: list[int], ids: set[int], round: int) -> None:
    members = [peer(i) for i in ids]
    leases = deal(counts(used), members, round)
    assert sorted(shard for mine in leases.values() for shard in mine) == list(range(len(used)))
    sizes = [mine.size for mine in leases.values()]
    assert leases.keys() == set(members) and max(sizes) - min(sizes) <= 1


def test_least_used_shard_rotates_among_members() -> None:
    used, members = counts([7, 9, 3, 9]), [peer(i) for i in range(3)]
    holders = [next(p for p, mine in deal(used, members, round).items() if 2 in mine) for round in range(3)]
    assert sorted(holders) == members


def ledger(shards: int = 6) -> DataLedger:
    return DataLedger(np.zeros(2 * shards, np.float32), CONTEXT)


def test_only_contributors_consume_their_leases() -> None:
    book, members = ledger(), [peer(1), peer(2)]
    first, second = (book.lease(members, who, 0, 4) for who in members)
    assert book.lease(members, peer(3), 0, 4).shards.size == 0 and not book.lease(members, peer(3), 0, 4)
    # Seven samples and a part of one; a peer without a lease, and an excluded member.
    book.book([Contribution(peer(1), 1, 7 * CONTEXT + 2), Contribution(peer(9), 1, 99 * CONTEXT)], members, 0)
    assert book.used[first.shards].sum() == 7 and book.used[second.shards].sum() == 0


def test_ledger_counts_are_exact_as_floats() -> None:
    book, members = ledger(1), [peer(1)]
    total = 0
    for weight in (2**22 - 1, 1, 3, 2**40, 2**44):
        book.book([Contribution(peer(1), 1, weight * CONTEXT)], members, 0)
        total += weight
        assert book.used.tolist() == [total]


def test_ledger_takes_no_words_unless_data_is_used_once() -> None:
    assert DataLedger.words(parse("")) == 0
    assert DataLedger.words(parse("[data]\nexactly_once = true\nshards = 10")) == 20


def text(samples: int = 97, shards: int = 6) -> Batches:
    corpus = Corpus((np.arange(samples * (CONTEXT + 1), dtype=np.uint32),), samples * (CONTEXT + 1), "")
    return Batches(split(corpus, CONTEXT, 3, shards, 0.1), 4, range(shards))


def test_shard_is_exhausted_before_samples_repeat() -> None:
    batches = text()
    size = batches.split.training.size
    mine = {int(batches.split.training[p]) for p in range(size) if p * 6 // size == 2}
    batches.lease(DataLease(counts([2]), counts([0]), 4))
    drawn = [int(sample) for _ in range(3 * len(mine)) for sample in batches.next_samples(1)]
    epochs = [drawn[at : at + len(mine)] for at in (0, len(mine), 2 * len(mine))]
    assert all(sorted(epoch) == sorted(mine) for epoch in epochs) and epochs[0] != epochs[1]
    batches.lease(DataLease(counts([2]), counts([5]), 4))
    assert batches.next_samples(3).tolist() == drawn[5:8]


def test_batch_size_does_not_change_drawn_samples() -> None:
    one, two = text(), text()
    for batches in (one, two):
        batches.lease(DataLease(counts([0, 3, 4]), counts([2, 0, 9]), 4))
    together = one.next_samples(24)
    assert sorted(together.tolist()) == sorted(int(s) for size in (1, 4, 7, 12) for s in two.next_samples(size))
    assert np.unique(together).size == 24


def test_returned_lease_leaves_samples_unchanged() -> None:
    one, two = text(), text()
    two.lease(DataLease(counts([0]), counts([0]), 4))
    two.next_samples()
    two.lease(None)
    assert one.next_samples().tolist() == two.next_samples().tolist()


def test_more_shards_than_samples_are_refused() -> None:
    with pytest.raises(DataError, match="fewer than 80 shards"):
        text(samples=60, shards=80).lease(DataLease(counts([0]), counts([0]), 4))


@settings(max_examples=12, deadline=None)
@given(st.integers(0, 10_000))
def test_samples_are_drawn_exactly_once_under_churn(seed: int) -> None:
    """Members and contributors of rounds change randomly; each peer draws samples from the common ledger."""
    rng, book, batches = random.Random(seed), ledger(), text()
    size = batches.split.training.size
    used: list[int] = []
    members = [peer(i) for i in range(rng.randint(1, 4))]
    for round in range(25):
        entries = []
        for who in members:
            lease = book.lease(members, who, round, rng.randint(1, 5))
            steps = rng.randint(0, 4)
            batches.lease(lease)
            drawn = [
                int(sample) for _ in range(steps if lease else 0) for sample in batches.next_samples(lease.samples)
            ]
            if drawn and rng.random() < 0.7:  # all others die, or are late, or are left out
                entries.append(Contribution(who, 1, len(drawn) * CONTEXT))
                used += drawn
        book.book(entries, members, round)
        members = sorted({who for who in members if rng.random() < 0.8} | {peer(rng.randint(0, 8))})
    assert sum(book.used) == len(used)
    for shard, count in enumerate(book.used.tolist()):
        mine = [int(batches.split.training[p]) for p in range(size) if p * 6 // size == shard]
        times = [used.count(sample) for sample in mine]
        assert sum(times) == count and max(times) - min(times) <= 1  # each once before any comes again


def test_ledger_may_need_a_separate_chunk() -> None:
    manifest = parse("[data]\nexactly_once = true\nshards = 6")
    parameters = 1 << 17  # with momentum exactly one chunk
    layout = Layout((Piece("flat", (parameters,), "float32", 0, parameters),), parameters, bytes(32))
    replica = Replica.begin(manifest, layout, None, Grid(0, 1), np.ones(parameters, np.float32), [peer(1)])
    assert len(replica) == len(replica.hashes) == 1
    replica.keep_ledger(manifest)
    assert len(replica) == len(replica.hashes) == 2 and replica.hashes[1] != bytes(32)


def test_ledger_is_part_of_state_and_checkpoints(tmp_path: Path) -> None:
    manifest = parse(f"[data]\nexactly_once = true\nshards = 6\n[model]\ncontext = {CONTEXT}")
    layout = Layout((Piece("flat", (50,), "float32", 0, 50),), 50, bytes(32))

    def made() -> Replica:
        replica = Replica.begin(manifest, layout, None, Grid(0, 1), np.ones(50, np.float32), [peer(1), peer(2)])
        replica.keep_ledger(manifest)
        return replica

    def keep() -> Checkpointer:
        environment = Environment(lambda: 0.0, lambda: 1e9, random.Random(1), RealDisk())
        store = CheckpointStore(tmp_path, RealDisk(), Identity.generate(b"1" * 32))
        return Checkpointer(store, b"r" * 32, environment, lambda kind, fields: None)

    replica, empty = made(), made()
    assert replica.ledger is not None and empty.ledger is not None and replica.digest == empty.digest
    assert np.array_equal(replica.theta, np.ones(50)) and not replica.momentum.any() and replica.extra.size == 12
    replica.ledger.book([Contribution(peer(2), 1, 9 * CONTEXT)], replica.members, replica.round)
    replica.seal()
    assert replica.digest != empty.digest  # another ledger is another state
    keep().save(replica, layout, None)
    asyncio.run(keep().restore(empty, layout, at_once))
    assert empty.digest == replica.digest and empty.ledger.used.tolist() == replica.ledger.used.tolist()
    assert empty.ledger.used.sum() == 9
    twin = replica.twin()  # a checkpoint is being written
    replica.move_from_twins()
    replica.ledger.book([Contribution(peer(2), 1, 3 * CONTEXT)], replica.members, replica.round)
    replica.seal()
    assert twin.digest == empty.digest != replica.digest and replica.ledger.used.sum() == 12


@pytest.mark.parametrize(
    ("toml", "extra", "theirs", "words"),
    [
        ("[data]\nexactly_once = true\nshards = 6", 0, 70, "has 70 trainable parameters, the one here has 50"),
        ("[data]\nexactly_once = true\nshards = 6", 0, 50, "has 50 trainable parameters too"),
        (
            "[data]\nexactly_once = true\nshards = 6",
            3,
            70,
            "other trainable parameters or buffers than the one here, which has 50",
        ),
        ("", 0, 3, "has 3 trainable parameters, the one here has 50"),
        ("", 9, 45, "parameters or buffers"),
    ],
)
def test_other_model_is_recognized_by_state_size(toml: str, extra: int, theirs: int, words: str) -> None:
    manifest = parse(toml)
    ours, other = (Replica(b"l" * 32, np.zeros(size, np.float32), [peer(1)], extra=extra) for size in (50, theirs))
    for replica in (ours, other):
        replica.keep_ledger(manifest)
    error = mismatch(ours, OtherModelState(other.state.nbytes))
    assert words in str(error) and error.exit_code == 5


def test_peer_with_private_text_trains_on_all_of_it(tmp_path: Path) -> None:
    (tmp_path / "text.txt").write_text("".join(f"line {number} of a text\n" for number in range(250)))
    size = "[model]\nlayers = 1\nwidth = 16\nheads = 2\ncontext = 8"
    for toml, part in (("[outer]\nmethod = 'merge'\n", 1.0), ("", 0.5)):
        training = build_learner(
            parse(toml + size),
            Computing("cpu", 1),
            data=tmp_path / "text.txt",
            cache=tmp_path,
            here=tmp_path,
            clock=lambda: 0.0,
        )
        training.assign(WorkShare([peer(1), peer(2)], peer(1), 1))
        batches, total = training.trainer.batches, training.split.training.size
        epoch = [int(s) for _ in range(total) for s in batches.next_samples(1) if batches.cursor.epoch == 0]
        assert len(epoch) == pytest.approx(part * total, abs=total / 64)


def test_global_batch_share_is_trained_in_usual_batches(tmp_path: Path) -> None:
    (tmp_path / "text.txt").write_text("".join(f"line {number} of a text\n" for number in range(800)))
    manifest = parse(
        "[data]\nexactly_once = true\nshards = 8\n[inner]\nglobal_batch = 10\nbatch = 4\n[outer]\nsync_every = 3\n"
        "[model]\nlayers = 1\nwidth = 16\nheads = 2\ncontext = 8"
    )
    training = build_learner(
        manifest, Computing("cpu", 1), data=tmp_path / "text.txt", cache=tmp_path, here=tmp_path, clock=lambda: 0.0
    )
    book, members = DataLedger(np.zeros(16, np.float32), 8), [peer(1)]
    assert manifest.max_weight == 3 * 10 * 8
    drawn: list[int] = []
    draw = training.trainer.batches.next_samples

    def noted(size: int = 0) -> np.ndarray:
        drawn.append(size)
        return draw(size)

    training.trainer.batches.next_samples = noted  # type: ignore[method-assign]
    training.assign(WorkShare(members, peer(1), 7, book.lease(members, peer(1), 7, 10), step=21))
    assert training.trainer.step == 21  # the swarm's, for the learning rate
    report = training.trainer.run_steps(2)
    assert drawn == [4, 4, 2, 4, 4, 2] and report.tokens == 2 * 10 * 8
    training.assign(WorkShare(members, peer(1), 8, book.lease(members, peer(1), 8, 3)))
    training.trainer.run_steps(1)
    assert drawn[6:] == [3]


def test_fetched_ledger_is_clamped() -> None:
    words = np.array([1e38, 1.0, -5.0, -1.0, 0.4, 2.6, 3.0, 3e7], np.float32)
    used = DataLedger(words, 8).used
    assert used.min() >= 0 and used.max() < 1 << 46 and used[2] == 3
    DataLedger(words, 8).book([Contribution(peer(1), 1, 64)], [peer(1)], 1)
    assert np.isfinite(words).all() and (DataLedger(words, 8).used >= 0).all()
