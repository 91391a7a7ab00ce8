"""The mean of sparse contributions against the reference: denominators, clipping, thread counts."""

from __future__ import annotations

import math

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from kit.reference import sparse as reference
from thinwire.compression.core import parameter_chunks
from thinwire.compression.core.norm_clip import clipping
from thinwire.compression.core.parameter_chunks import Chunks, Section
from thinwire.compression.sparse import mean as sparsemean
from thinwire.compression.sparse import select
from thinwire.compression.sparse.header import DENSE, EMPTY
from thinwire.compression.sparse.topk import Part, Selected, Sparse

from benchmarks.compression.torchmeans import sparse_mean

CHUNKS = Chunks((("a", (130, 70)), ("b", (5,)), ("c", (1, 1)), ("d", (300, 64)), ("e", (200,))))


def draw(seed: int, scale: float = 1.0) -> np.ndarray:
    return (np.random.default_rng(seed).standard_t(3, CHUNKS.total) * scale).astype(np.float32)


def contributions(codec: Sparse, scales: list[float]) -> list[Selected]:
    return [codec.select(draw(i, scale), CHUNKS) for i, scale in enumerate(scales)]


def expected(selected: list[Selected], weights: list[float], denominator: str, clip: bool) -> np.ndarray:
    out = np.zeros(CHUNKS.total, np.float32)
    for i, section in enumerate(CHUNKS.sections):
        parts = [one.parts[i] for one in selected]
        vectors = [np.zeros(0) if p.mode == EMPTY else one.values(p) for one, p in zip(selected, parts, strict=True)]
        norms = [math.sqrt(math.fsum(float(x) ** 2 for x in vector)) for vector in vectors]
        some = sorted(n for n, weight in zip(norms, weights, strict=True) if n and weight)
        median = some[(len(some) - 1) // 2] if some else 0.0
        heavy = sorted(w for n, w in zip(norms, weights, strict=True) if n and w)
        usual = heavy[(len(heavy) - 1) // 2] if heavy else 1.0
        most = [median * max(1.0, w / usual) if clip and len(some) > 2 else math.inf for w in weights]
        factors = [limit / n if n > limit else 1.0 for n, limit in zip(norms, most, strict=True)]
        sums, counts = np.zeros(section.size), np.zeros(section.size)
        for r, part in enumerate(parts):
            if part.mode == EMPTY:
                continue
            k = selected[r].codec.k
            where = slice(None) if part.mode == DENSE else reference.positions(section, part.indices, k)
            sums[where] += weights[r] * factors[r] * vectors[r].astype(np.float64)
            counts[where] += weights[r]
        below = np.where(counts > 0, counts, 1)
        if denominator != "contributor_mean":
            share = 1.0 if denominator == "mean" else usual_share(section, selected, i, weights)
            below = np.maximum(below, math.fsum(weights) * share)
        section.put((sums / below).astype(np.float32), out)
    return out


def usual_share(section: Section, selected: list[Selected], i: int, weights: list[float]) -> float:
    """Return the lower median, over the contributors, of the mean part of the contributors that sent their values, too."""
    sets = []
    for one, weight in zip(selected, weights, strict=True):
        if weight and one.parts[i].mode == EMPTY:
            sets.append(set())
        elif weight:
            dense = one.parts[i].mode == DENSE
            places = range(section.size) if dense else reference.positions(section, one.parts[i].indices, one.codec.k)
            sets.append({int(place) for place in places})
    shares = sorted(
        np.mean([sum(place in other for other in sets) for place in own]) / len(sets) if own else 1.0 for own in sets
    )
    return float(shares[(len(shares) - 1) // 2])


@settings(max_examples=25, deadline=None)
@given(
    st.lists(st.sampled_from([0.0, 0.5, 1.0, 3.0]), min_size=1, max_size=5).filter(any),
    st.sampled_from(sparsemean.DENOMINATORS),
    st.booleans(),
    st.sampled_from([Sparse(64), Sparse(300, values="1bit", indices="fixed"), Sparse(4096)]),
)
def test_sparse_mean_equals_the_reference(weights: list[float], denominator: str, clip: bool, codec: Sparse) -> None:
    selected = contributions(codec, [1.0, 0.0, 20.0, 1e-3, 2.0][: len(weights)])
    got = sparsemean.mean(selected, weights, CHUNKS, denominator, clip)
    # Norms are summed in another order here: hence not bit for bit where they clip.
    np.testing.assert_allclose(got, expected(selected, weights, denominator, clip), rtol=1e-6, atol=1e-12)


def test_sparse_mean_bits_do_not_depend_on_threads_or_wire(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sparsemean, "CHUNKS", 1)
    monkeypatch.setattr(select, "CHUNKS", 1)
    codec = Sparse(100)
    selected = contributions(codec, [1.0, 2.0, 5.0, 0.1])
    received = [codec.decode(codec.encode(each), CHUNKS) for each in selected]
    for denominator in sparsemean.DENOMINATORS:
        alone = sparsemean.mean(selected, [1, 2, 3, 4], CHUNKS, denominator)
        for threads in (2, 3):
            again = sparsemean.mean(received, [1, 2, 3, 4], CHUNKS, denominator, threads=threads)
            assert again.tobytes() == alone.tobytes()
        given = np.full(CHUNKS.total, np.nan, np.float32)
        assert sparsemean.mean(received, [1, 2, 3, 4], CHUNKS, denominator, out=given) is given
        assert given.tobytes() == alone.tobytes()


@pytest.mark.parametrize("codec", [Sparse(), Sparse(700, values="1bit"), Sparse(4096)], ids=lambda codec: codec.spec)
@pytest.mark.parametrize("strip", [1, 10_000, 1 << 18])
def test_sparse_mean_has_the_same_bits_strip_by_strip(
    codec: Sparse, strip: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(parameter_chunks, "STRIP", strip)
    selected, weights = contributions(codec, [1.0, 0.0, 5.0, 1e-3]), [1.0, 2.0, 3.0, 4.0]
    for denominator in sparsemean.DENOMINATORS:
        for clip in (False, True):
            whole = sparsemean.mean(selected, weights, CHUNKS, denominator, clip)
            assert (
                sparsemean.flat(sparsemean.means(selected, weights, CHUNKS, denominator, clip), CHUNKS).tobytes()
                == whole.tobytes()
            )
    if strip == 1:
        assert len(list(sparsemean.means(selected, weights, CHUNKS))) == 3 + 1 + 5 + 1


def test_sparse_mean_divides_only_where_contributions_overlap() -> None:
    codec = Sparse(64)
    one, two = contributions(codec, [1.0, 1.0])
    first, second = np.zeros((2, CHUNKS.total), np.float32)
    one.scatter(first)
    two.scatter(second)
    assert np.array_equal(sparsemean.mean([one], [7.0], CHUNKS), first)
    alone = sparsemean.mean([one, two], [1.0, 0.0], CHUNKS)
    assert np.array_equal(alone, first)
    both = (first != 0) & (second != 0)
    total = first.astype(np.float64) + second
    assert 0 < np.count_nonzero(both) < np.count_nonzero(first)
    got = sparsemean.mean([one, two], [1.0, 1.0], CHUNKS, "contributor_mean")
    np.testing.assert_array_equal(got, np.where(both, total / 2, total).astype(np.float32))
    plain = sparsemean.mean([one, two], [1.0, 1.0], CHUNKS, "mean")
    np.testing.assert_array_equal(plain, (total / 2).astype(np.float32))


def test_bounded_mean_of_a_value_that_only_a_liar_sends_has_the_usual_divisor() -> None:
    """Five contributors send the same values, and a liar sends others, as long."""
    codec, size = Sparse(64), 130 * 70
    honest = draw(0)
    honest[size:] = 0.0  # only the liar sends anything in the other sections
    lie, common = np.roll(honest, 3), codec.select(honest, CHUNKS)
    liar = codec.select(lie + (np.arange(CHUNKS.total) >= size).astype(np.float32), CHUNKS)
    true, false = np.zeros((2, CHUNKS.total), np.float32)
    common.scatter(true)
    liar.scatter(false)
    got = sparsemean.mean([common] * 5 + [liar], [2.0] * 6, CHUNKS, clip=False)
    alone = (false != 0) & (true == 0)
    assert np.count_nonzero(alone[:size]) > 100
    np.testing.assert_allclose(got[:size][alone[:size]], false[:size][alone[:size]] / 5, rtol=0.02)
    np.testing.assert_array_equal(got[size:], (false[size:].astype(np.float64) / 6).astype(np.float32))
    full = sparsemean.mean([common] * 5 + [liar], [2.0] * 6, CHUNKS, "contributor_mean", clip=False)
    np.testing.assert_array_equal(full[alone], false[alone])


@pytest.mark.parametrize("liars", [1, 2])
def test_liars_move_the_usual_share_only_within_the_range_of_the_others(liars: int) -> None:
    codec, section = Sparse(64), CHUNKS.sections[0]
    common = draw(0)
    honest = [codec.select(common + draw(1 + i, 0.5), CHUNKS).parts[0] for i in range(5)]

    def share(lies: list[Part]) -> float:
        return sparsemean.usual_share(section, codec.k, honest + lies, 5 + liars)

    def count(part: Part) -> float:
        """Return the mean number of honest contributors that send a value of a part."""
        sent = [set(reference.positions(section, one.indices, codec.k).tolist()) for one in (part, *honest)]
        return float(np.mean([sum(place in other for other in sent[1:]) for place in sent[0]]))

    counts = [count(part) for part in honest]
    for lie in (honest[0], codec.select(draw(9), CHUNKS).parts[0]):
        assert min(counts) <= share([lie] * liars) * (5 + liars) <= max(counts) + liars
    # Those that send nothing agree on zeros.
    assert sparsemean.usual_share(section, codec.k, honest, 11) == 1.0


def test_sparse_mean_clips_outliers_to_the_lower_median_norm() -> None:
    codec = Sparse(64)
    calm = [codec.select(draw(i), CHUNKS) for i in range(3)]
    loud = codec.select(draw(3, 1e4), CHUNKS)
    mean = sparsemean.mean([*calm, loud], [1.0] * 4, CHUNKS)
    part = [one.parts[0] for one in (*calm, loud)]
    norms = [sparsemean.norm(one, p) for one, p in zip((*calm, loud), part, strict=True)]
    assert clipping(norms, [1.0] * 4)[3] == pytest.approx(sorted(norms)[1] / norms[3])
    size = 130 * 70
    assert np.linalg.norm(mean[:size]) < 4 * max(norms[:3])
    # With two contributors, none is clipped.
    assert np.linalg.norm(sparsemean.mean([calm[0], loud], [1.0] * 2, CHUNKS)[:size]) > 0.5 * norms[3]
    assert clipping([1.0, 5.0], [1.0, 1.0]) == [1.0, 1.0]
    # A contributor without values is not in the median.
    assert clipping([0.0, 0.0, 7.0], [1.0] * 3) == clipping([0.0, 0.0, 0.0], [1.0] * 3) == [1.0, 1.0, 1.0]
    assert clipping([0.0, 0.0, 0.0, 2.0, 2.0, 8.0], [1.0] * 6)[3:] == pytest.approx([1.0, 1.0, 0.25])


@pytest.mark.parametrize("denominator", sparsemean.DENOMINATORS)
@pytest.mark.parametrize("scale", [1e-6, 1e6])
def test_sparse_mean_ignores_contributors_of_weight_zero(denominator: str, scale: float) -> None:
    codec, weights = Sparse(64), [3.0, 1.0, 2.0]
    heard = contributions(codec, [1.0, 3.0, 20.0])
    silent = [codec.select(draw(seed, scale), CHUNKS) for seed in (7, 8)]
    expected = sparsemean.mean(heard, weights, CHUNKS, denominator)
    assert sparsemean.mean([*heard, *silent], [*weights, 0.0, 0.0], CHUNKS, denominator).tobytes() == expected.tobytes()
    # Two contributors are not clipped, whatever a third one of weight 0 has sent.
    pair = sparsemean.mean(heard[1:], [1.0, 2.0], CHUNKS, denominator)
    assert sparsemean.mean([silent[0], *heard[1:]], [0.0, 1.0, 2.0], CHUNKS, denominator).tobytes() == pair.tobytes()
    found = sparse_mean([*heard, *silent], [*weights, 0.0, 0.0], CHUNKS, "cpu", denominator)
    assert found.numpy().tobytes() == expected.tobytes()


def test_sparse_mean_refuses_invalid_input() -> None:
    codec = Sparse(64)
    (one,) = contributions(codec, [1.0])
    other = Sparse(32).select(draw(0), CHUNKS)
    elsewhere = codec.select(np.zeros(4, np.float32), Chunks((("x", (4,)),)))
    for selected, weights, denominator in (
        ([one], [1.0], "median"),
        ([one], [], "mean"),
        ([], [], "mean"),
        ([one], [0.0], "mean"),
        ([one], [-1.0], "mean"),
        ([one], [math.nan], "mean"),
        ([one], [math.inf], "mean"),
        ([one, other], [1.0, 1.0], "mean"),
        ([elsewhere], [1.0], "mean"),
    ):
        with pytest.raises(ValueError):
            sparsemean.mean(selected, weights, CHUNKS, denominator)
