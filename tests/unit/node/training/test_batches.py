"""Samples: held out or trained on, sharded, ordered, and never repeated."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from thinwire.node.training.batches import Batches, Cursor, Split, cursor_after, shards_of, split
from thinwire.node.training.corpus import Corpus
from thinwire.node.training.models.tokenizer import DataError


def numbers(count: int, parts: int = 1) -> Corpus:
    """A corpus in which every token is another number."""
    return Corpus(tuple(np.array_split(np.arange(count, dtype=np.uint32), parts)), count, "")


def peer(i: int) -> bytes:
    return bytes([i]) * 32


def cut(tokens: int = 6000, context: int = 5, seed: int = 1, shards: int = 16, parts: int = 1) -> Split:
    return split(numbers(tokens, parts), context, seed, shards, holdout=0.1)


@settings(max_examples=60, deadline=None)
@given(st.integers(20, 9000), st.integers(1, 9), st.integers(0, 5), st.integers(1, 3), st.floats(0, 0.5))
def test_held_out_and_training_tokens_are_disjoint(
    tokens: int, context: int, seed: int, parts: int, holdout: float
) -> None:
    if tokens // parts < 4 * (context + 1):
        return
    made = split(numbers(tokens, parts), context, seed, 16, holdout)
    assert np.array_equal(np.sort(np.concatenate((made.training, made.held_out))), np.arange(made.starts[-1]))
    assert (made.held_out.size > 0) == (holdout > 0) and made.training.size > 0
    x, y = made.batch(np.concatenate((made.training, made.held_out)))
    everything = np.concatenate((x.numpy(), y.numpy()[:, -1:]), axis=1).ravel()
    assert np.unique(everything).size == everything.size
    assert np.array_equal(x.numpy() + 1, y.numpy())


def test_split_depends_only_on_seed() -> None:
    assert np.array_equal(cut(seed=1).held_out, cut(seed=1).held_out)
    assert not np.array_equal(cut(seed=1).held_out, cut(seed=2).held_out)
    assert cut().held_out.size == pytest.approx(100, abs=2)


def test_evaluation_batches_are_fixed_and_held_out() -> None:
    made = cut()
    once, again = list(made.evaluation(8, 5)), list(made.evaluation(8, 5))
    assert len(once) == 5 and all(x.shape == y.shape == (8, 5) for x, y in once)
    assert all((a[0] == b[0]).all() for a, b in zip(once, again, strict=True))
    held = {int(row[0]) for row in made.batch(made.held_out)[0]}
    drawn = [int(row[0]) for x, _ in once for row in x]
    assert set(drawn) <= held and len(set(drawn)) == 40
    assert sum(x.shape[0] for x, _ in made.evaluation(8, 1000)) == made.held_out.size


def test_too_little_text_is_an_error() -> None:
    for tokens, holdout in [(0, 0.0), (5, 0.0), (9, 0.1)]:
        with pytest.raises(DataError, match="too few"):
            split(numbers(tokens), 5, 0, 4, holdout)
    assert split(numbers(6), 5, 0, 4, 0.0).training.size == 1


def test_token_outside_vocabulary_is_an_error() -> None:
    made = split(Corpus((np.arange(100, dtype=np.uint16),), 50, ""), 4, 0, 1, 0.0)
    made.batch(np.arange(10))
    with pytest.raises(DataError, match="tokenizer knows 50"):
        made.batch(np.arange(11))


@settings(max_examples=40, deadline=None)
@given(st.sets(st.integers(0, 255), min_size=1, max_size=20), st.integers(1, 64), st.integers(0, 2**53 - 1))
def test_shards_are_disjoint_complete_and_even(ids: set[int], shards: int, seed: int) -> None:
    group = [peer(i) for i in ids]
    each = {member: shards_of(seed, shards, group, member) for member in group}
    assert sorted(shard for mine in each.values() for shard in mine) == list(range(shards))
    sizes = [len(mine) for mine in each.values()]
    assert max(sizes) - min(sizes) <= 1
    assert each == {member: shards_of(seed, shards, list(reversed(group)), member) for member in group}


def test_few_shards_move_when_a_peer_leaves() -> None:
    group = [peer(i) for i in range(8)]
    before = {m: set(shards_of(3, 256, group, m)) for m in group}
    after = {m: set(shards_of(3, 256, group[1:], m)) for m in group[1:]}
    kept = sum(len(before[m] & after[m]) for m in group[1:])
    assert kept >= 0.75 * (256 - 32)
    assert shards_of(4, 256, group, group[0]) != shards_of(3, 256, group, group[0])
    with pytest.raises(ValueError, match="not in the group"):
        shards_of(3, 256, group[1:], group[0])


def draw(batches: Batches, count: int) -> list[int]:
    return [int(sample) for _ in range(count) for sample in batches.next_samples()]


def test_epoch_uses_each_sample_once() -> None:
    made = cut()
    size = made.training.size
    batches = Batches(made, 7, [2, 3, 11])
    mine = {int(made.training[p]) for p in range(size) if p * 16 // size in (2, 3, 11)}
    drawn = draw(batches, -(-2 * len(mine) // 7))
    assert sorted(drawn[: len(mine)]) == sorted(drawn[len(mine) : 2 * len(mine)]) == sorted(mine)
    assert drawn[: len(mine)] != drawn[len(mine) : 2 * len(mine)]
    assert not mine & set(made.held_out.tolist())
    assert draw(Batches(made, 7, [2, 3, 11]), 3) == drawn[:21]


def test_peers_share_an_epoch_without_overlap() -> None:
    made = cut()
    group = [peer(i) for i in range(4)]
    drawn = [s for m in group for s in draw(Batches(made, 4, shards_of(1, 16, group, m)), 40)]
    assert len(set(drawn)) == len(drawn)


@settings(max_examples=25, deadline=None)
@given(st.integers(0, 120), st.integers(1, 9))
def test_saved_cursor_resumes_exactly(before: int, batch: int) -> None:
    made = cut(tokens=1500)
    first = Batches(made, batch, [0, 5])
    draw(first, before)
    saved = Cursor(first.cursor.epoch, first.cursor.position)
    assert draw(Batches(made, batch, [0, 5], saved), 20) == draw(first, 20)


@settings(max_examples=40, deadline=None)
@given(st.lists(st.tuples(st.sets(st.integers(0, 15), min_size=1), st.integers(0, 9)), min_size=1, max_size=8))
def test_sample_is_never_repeated_in_an_epoch(changes: list[tuple[set[int], int]]) -> None:
    batches = Batches(cut(), 3, [0])
    seen: list[int] = []
    for shards, count in changes:
        batches.assign(sorted(shards))
        for _ in range(count):
            samples = batches.next_samples().tolist()
            if batches.cursor.epoch == 0:
                seen.extend(samples)
    assert len(set(seen)) == len(seen)


def test_after_a_loss_only_recent_samples_can_repeat() -> None:
    made = cut(tokens=12_000)
    group = [peer(i) for i in range(4)]
    walkers = {m: Batches(made, 2, shards_of(1, 16, group, m)) for m in group}
    used = [s for _ in range(50) for walker in walkers.values() for s in walker.next_samples().tolist()]
    places = sorted(walker.cursor.position for walker in walkers.values())
    assert places[-1] - places[0] < 100
    # The dead peer's shards go to the others, each of which continues from its place.
    del walkers[group[2]]
    rest = list(walkers)
    for m, walker in walkers.items():
        walker.assign(shards_of(1, 16, rest, m))
    after = [s for _ in range(50) for walker in walkers.values() for s in walker.next_samples().tolist()]
    assert len(set(after)) == len(after) == 300
    assert len(set(used) & set(after)) <= places[-1] - places[0]


def test_cursor_counts_samples_used_by_the_swarm() -> None:
    made = cut()
    assert cursor_after(made, 400) == Cursor(0, 400)
    assert cursor_after(made, made.training.size + 3) == Cursor(1, 3)


def test_peer_without_samples_is_an_error() -> None:
    with pytest.raises(DataError, match="no training samples"):
        Batches(cut(), 2, [])
    made = split(numbers(60), 5, 0, 256, 0.0)
    full = {place * 256 // 10 for place in range(10)}
    assert draw(Batches(made, 10, sorted(full)), 1) != []
    with pytest.raises(DataError, match="no training samples"):
        Batches(made, 2, sorted(set(range(256)) - full))


def test_batches_are_inputs_and_next_tokens() -> None:
    x, y = Batches(cut(parts=3), 4, [1, 2]).next()
    assert x.shape == y.shape == (4, 5) and str(x.dtype) == "torch.int64"
    assert ((x + 1) == y).all()
