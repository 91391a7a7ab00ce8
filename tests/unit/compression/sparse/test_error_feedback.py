"""Error feedback: sent values and residual always sum to the delta, after every outcome of a round."""

from __future__ import annotations

import tracemalloc
from dataclasses import dataclass
from functools import partial
from typing import Any

import numpy as np
import pytest
from numpy.typing import NDArray
from thinwire.compression.core.codec import Codec, CodecError
from thinwire.compression.core.parameter_chunks import Chunks, Gather, Section
from thinwire.compression.core.types import Buffer, Floats
from thinwire.compression.registry import dense
from thinwire.compression.sparse.demo import Demo
from thinwire.compression.sparse.error_feedback import ErrorFeedback, stored
from thinwire.compression.sparse.topk import Sparse

CHUNKS = Chunks((("a", (130, 70)), ("b", (5,)), ("c", ()), ("d", (0, 3)), ("e", (1, 1))))


@dataclass(frozen=True, slots=True, eq=False)
class Encoded:
    """Decoded content of a `Whole` payload: a dense codec's payload of all n elements."""

    codec: Codec
    payload: NDArray[np.uint8]

    def scatter(self, out: Floats, scale: float = 1.0) -> None:
        """Add scale·decoded to out, in float32."""
        values = np.empty_like(out)
        self.codec.decode(self.payload.data, values)
        if scale != 1.0:
            np.multiply(values, np.float32(scale), out=values)
        np.add(out, values, out=out)


@dataclass(frozen=True, slots=True)
class Whole:
    """Dense codec as a tensor codec: one payload for the whole model."""

    codec: Codec

    @property
    def spec(self) -> str:
        return self.codec.spec

    def bound(self, chunks: Chunks) -> int:
        return self.codec.nbytes(chunks.total)

    def select_from(self, gather: Gather, chunks: Chunks) -> Encoded:
        """Encode the whole vector. Raises CodecError if a value is not finite."""
        a = np.empty(chunks.total, np.float32)
        for section in chunks.sections:
            section.put(gather(section), a)
        if not np.isfinite(a).all():
            raise CodecError("a value is not finite", "not finite")
        payload = np.empty(self.codec.nbytes(a.size), np.uint8)
        self.codec.encode(a, payload)
        return Encoded(self.codec, payload)

    def nbytes(self, selected: Encoded) -> int:
        return selected.payload.size

    def encode(self, selected: Encoded) -> bytes:
        return selected.payload.tobytes()

    def decode(self, payload: Buffer, chunks: Chunks) -> Encoded:
        """Wrap a payload. Raises CodecError unless it is valid for this layout."""
        self.codec.check(payload, chunks.total)
        return Encoded(self.codec, np.frombuffer(payload, np.uint8))


CODECS: list[Any] = [Sparse(), Sparse(200, values="1bit", indices="fixed"), Whole(dense("int8")), Whole(dense("fp16"))]
ids = [codec.spec for codec in CODECS]


def draw(seed: int) -> np.ndarray:
    return np.random.default_rng(seed).standard_normal(CHUNKS.total).astype(np.float32)


def decoded(codec: Any, payload: bytes) -> np.ndarray:
    out = np.zeros(CHUNKS.total, np.float32)
    codec.decode(payload, CHUNKS).scatter(out)
    return out


def accumulated(residual: np.ndarray, delta: np.ndarray, beta: float = 0.95) -> np.ndarray:
    return np.float32(beta) * residual + delta


@pytest.mark.parametrize("codec", CODECS, ids=ids)
def test_sent_values_and_residual_sum_to_the_accumulator(codec: Any) -> None:
    feedback, residual = ErrorFeedback(codec, CHUNKS), np.zeros(CHUNKS.total, np.float32)
    for round_ in range(4):
        delta = draw(round_)
        payload = feedback.prepare(stored(delta))
        assert feedback.residual.tobytes() == residual.tobytes()
        a = accumulated(residual, delta)
        selected = codec.select_from(partial(Section.gather, flat=a), CHUNKS)
        assert payload == codec.encode(selected)
        assert len(payload) == codec.nbytes(selected) <= codec.bound(CHUNKS)
        feedback.commit()
        residual = a - decoded(codec, payload)
        assert feedback.residual.tobytes() == residual.tobytes()


@pytest.mark.parametrize("codec", CODECS[:3:2], ids=ids[:3:2])
def test_residual_follows_each_round_outcome(codec: Any) -> None:
    for policy in ("drop", "restore"):
        for outcome in ("commit", "excluded", "restore", "rollback"):
            feedback = ErrorFeedback(codec, CHUNKS, 0.9, policy)
            feedback.prepare(stored(draw(0)))
            feedback.commit()
            before, delta = feedback.residual.copy(), draw(1)
            payload = feedback.prepare(stored(delta))
            assert feedback.pending
            a = accumulated(before, delta, 0.9)
            left = a - decoded(codec, payload)
            if outcome == "excluded":
                feedback.commit(excluded=True)
            else:
                getattr(feedback, outcome)()
            assert not feedback.pending
            kept = {"commit": left, "excluded": left if policy == "drop" else a, "restore": a, "rollback": before}
            assert feedback.residual.tobytes() == kept[outcome].tobytes()
            # After a rollback the same Δ makes the same payload.
            if outcome == "rollback":
                assert feedback.prepare(stored(delta)) == payload


@pytest.mark.parametrize("codec", [Sparse(), Demo()])
def test_no_vector_of_the_size_of_the_model_is_made(codec: Any) -> None:
    chunks = Chunks(tuple((f"{n:02}", (512, 128)) for n in range(32)))
    feedback, delta = ErrorFeedback(codec, chunks), np.ones(chunks.total, np.float32)
    first = feedback.memory
    feedback.prepare(stored(delta))
    feedback.commit()
    tracemalloc.start()
    try:
        feedback.prepare(stored(delta))
        feedback.commit()
        _, peak = tracemalloc.get_traced_memory()
    finally:
        tracemalloc.stop()
    assert peak < 0.4 * delta.nbytes and feedback.memory is first


def test_non_finite_delta_changes_no_residual() -> None:
    for codec in CODECS:
        feedback = ErrorFeedback(codec, CHUNKS)
        feedback.prepare(stored(draw(0)))
        feedback.commit()
        before, delta = feedback.residual.copy(), draw(1)
        delta[77] = np.inf
        with pytest.raises(CodecError) as caught:
            feedback.prepare(stored(delta))
        assert caught.value.reason == "not finite" and not feedback.pending
        assert feedback.residual.tobytes() == before.tobytes()
        feedback.prepare(stored(draw(1)))


def test_each_payload_takes_exactly_one_outcome() -> None:
    feedback = ErrorFeedback(Sparse(), CHUNKS)
    for decide in (feedback.commit, feedback.restore, feedback.rollback):
        with pytest.raises(RuntimeError):
            decide()
        feedback.prepare(stored(draw(0)))
        with pytest.raises(RuntimeError):
            feedback.prepare(stored(draw(0)))
        decide()


def test_error_feedback_resumes_from_saved_state() -> None:
    feedback, other = ErrorFeedback(Sparse(), CHUNKS), ErrorFeedback(Sparse(), CHUNKS)
    feedback.prepare(stored(draw(0)))
    feedback.commit()
    with pytest.raises(ValueError):
        feedback.residual[0] = 1.0
    other.load(feedback.residual)
    assert other.prepare(stored(draw(1))) == feedback.prepare(stored(draw(1)))
    for bad in (np.zeros(3, np.float32), np.full(CHUNKS.total, np.nan, np.float32)):
        with pytest.raises(ValueError):
            ErrorFeedback(Sparse(), CHUNKS).load(bad)
    with pytest.raises(ValueError, match="waits"):
        other.load(np.zeros(CHUNKS.total, np.float32))


def test_error_feedback_refuses_invalid_settings() -> None:
    for beta, policy in ((1.1, "drop"), (-0.1, "drop"), (float("nan"), "drop"), (0.9, "keep")):
        with pytest.raises(ValueError, match="error feedback"):
            ErrorFeedback(Sparse(), CHUNKS, beta, policy)


def test_error_feedback_sends_everything_in_the_end() -> None:
    # A constant Δ: without feedback the small values are never sent; with it the sent values approach their sum.
    delta, sent = draw(0), np.zeros(CHUNKS.total, np.float32)
    codec, feedback = Sparse(), ErrorFeedback(Sparse(), CHUNKS, beta=1.0)
    for _ in range(400):
        payload = feedback.prepare(stored(delta))
        feedback.commit()
        sent += decoded(codec, payload)
    assert np.linalg.norm(sent / 400 - delta) < 0.2 * np.linalg.norm(delta)
    alone = decoded(codec, codec.encode(codec.select(delta, CHUNKS)))
    assert np.linalg.norm(alone - delta) > 0.8 * np.linalg.norm(delta)
