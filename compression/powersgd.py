"""PowerSGD: matrices are averaged as two thin factors. Vogels, Karimireddy, Jaggi, arXiv 1905.13727.

A round on one peer, with Q of the previous round (in the first round: from the run's seed) and M = e + Δ:

    P = mean(M·Q);  orthonormalise P;  Q_i = Mᵀ·P;  Q = mean(Q_i);  result = P·Qᵀ;  e = M − P·Q_iᵀ

The second average depends on the first, and together they are one transaction: both must have the same contributors and
weights, and a round that loses a contributor in between is aborted as a whole. `PowerSGD` has the pure steps, `LowRank`
the state of one peer.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
from thinwire.compression.core.noise import normal
from thinwire.compression.core.parameter_chunks import VECTORS, Chunks, Section
from thinwire.compression.core.types import Floats, OnExclusion
from thinwire.compression.kernels import thin_factors as kernels
from thinwire.compression.sparse.error_feedback import ON_EXCLUSION

MAX_RANK = 256
"""Highest rank."""

GAIN = 2.0
"""Minimum size ratio of a matrix to its factors.

Other matrices, and all other tensors, are sent whole.
"""


@dataclass(frozen=True, slots=True)
class PowerSGD:
    """Rank-r averaging of matrices. All vectors are flat float32.

    The first vector of a round holds Pᵀ (rank × rows) of each compressed matrix and the elements of all other sections,
    in the order of the layout. The second holds Qᵀ (rank × cols) of each compressed matrix. Any dense codec can encode
    them, but the rounding errors of a lossy one do not enter the error feedback. Raises ValueError for a rank outside
    of 1…256.
    """

    rank: int = 4

    def __post_init__(self) -> None:
        if not 1 <= self.rank <= MAX_RANK:
            raise ValueError(f"powersgd: rank must be 1…{MAX_RANK}, not {self.rank}")

    @property
    def spec(self) -> str:
        return f"powersgd(rank={self.rank})"

    def compresses(self, section: Section) -> bool:
        """Return True if the section is a matrix that its two factors make at least GAIN times smaller."""
        matrix = section.name != VECTORS
        return matrix and section.size >= GAIN * self.rank * (section.rows + section.cols)

    def first_size(self, chunks: Chunks) -> int:
        """Return the number of elements of the first vector."""
        return sum(self.rank * s.rows if self.compresses(s) else s.size for s in chunks.sections)

    def second_size(self, chunks: Chunks) -> int:
        """Return the number of elements of the second vector; 0 if no matrix is compressed.

        Then there is no second average.
        """
        return sum(self.rank * s.cols for s in chunks.sections if self.compresses(s))

    def start(self, chunks: Chunks, seed: int) -> Floats:
        """Return Q of the first round, which depends only on the layout and the run's seed."""
        return normal(seed, "powersgd", self.second_size(chunks))

    def project(self, m: Floats, q: Floats, chunks: Chunks) -> Floats:
        """Return the first vector, from the accumulated M and the Q of the previous round."""
        out = np.empty(self.first_size(chunks), np.float32)
        at, q_at = 0, 0
        for s in chunks.sections:
            if self.compresses(s):
                size, q_size = self.rank * s.rows, self.rank * s.cols
                factor = q[q_at : q_at + q_size].reshape(self.rank, s.cols)
                kernels.project(
                    s.gather(m).reshape(s.rows, s.cols), factor, out[at : at + size].reshape(self.rank, s.rows)
                )
                q_at += q_size
            else:
                size = s.size
                out[at : at + size] = s.gather(m)
            at += size
        return out

    def orthonormalise(self, first: Floats, chunks: Chunks) -> None:
        """Make the columns of each averaged P orthonormal, in place. Uncompressed sections are not changed."""
        at = 0
        for s in chunks.sections:
            size = self.rank * s.rows if self.compresses(s) else s.size
            if self.compresses(s):
                kernels.orthonormalise(first[at : at + size].reshape(self.rank, s.rows))
            at += size

    def project_back(self, m: Floats, first: Floats, chunks: Chunks) -> Floats:
        """Return the second vector, from the accumulated M and the orthonormal P."""
        out = np.empty(self.second_size(chunks), np.float32)
        for s, p, q, _ in self._factors(first, out, chunks):
            kernels.project_back(s.gather(m).reshape(s.rows, s.cols), p, q)
        return out

    def rebuild(self, first: Floats, second: Floats, chunks: Chunks) -> Floats:
        """Return the round's result as the model's flat vector.

        It consists of P·Qᵀ of the averages, and of the uncompressed sections.
        """
        out = np.zeros(chunks.total, np.float32)
        for s, p, q, _ in self._factors(first, second, chunks):
            kernels.accumulate(p, q, np.float32(1.0), s.gather(out).reshape(s.rows, s.cols))
        at = 0
        for s in chunks.sections:
            size = self.rank * s.rows if self.compresses(s) else s.size
            if not self.compresses(s):
                s.put(first[at : at + size], out)
            at += size
        return out

    def residual(self, m: Floats, first: Floats, own: Floats, chunks: Chunks, sent: Floats | None = None) -> Floats:
        """Return e = M − P·Q_iᵀ, where `own` is this peer's own second vector.

        sent: this peer's first vector. In uncompressed sections the residual is M − sent, or zero if sent is None.
        """
        out, at = np.zeros(chunks.total, np.float32), 0
        for s in chunks.sections if sent is not None else ():
            size = self.rank * s.rows if self.compresses(s) else s.size
            if sent is not None and not self.compresses(s):
                s.put(s.gather(m) - sent[at : at + size], out)
            at += size
        for s, p, q, start in self._factors(first, own, chunks):
            out[start : start + s.size] = m[start : start + s.size]
            kernels.accumulate(p, q, np.float32(-1.0), out[start : start + s.size].reshape(s.rows, s.cols))
        return out

    def _factors(self, first: Floats, second: Floats, chunks: Chunks) -> list[tuple[Section, Floats, Floats, int]]:
        """Return section, views of Pᵀ and Qᵀ, and offset in the model's flat vector of each compressed matrix."""
        found, at, q_at = [], 0, 0
        for s in chunks.sections:
            if self.compresses(s):
                p_size, q_size = self.rank * s.rows, self.rank * s.cols
                p = first[at : at + p_size].reshape(self.rank, s.rows)
                found.append((s, p, second[q_at : q_at + q_size].reshape(self.rank, s.cols), s.spans[0][0]))
                at, q_at = at + p_size, q_at + q_size
            else:
                at += s.size
        return found


class LowRank:
    """State of one peer between rounds: its own residual e, and Q, which is equal on all peers.

    Call `prepare`, then `second_vector` with the first average, then `commit` with the second; or `restore` or `rollback` at
    any point after `prepare`. The state does not change before one of these three. on_exclusion: as in
    `error_feedback.ErrorFeedback`. Raises ValueError for any other value.
    """

    def __init__(self, codec: PowerSGD, chunks: Chunks, seed: int, on_exclusion: OnExclusion = "drop") -> None:
        if on_exclusion not in ON_EXCLUSION:
            raise ValueError(f"powersgd: on_exclusion is {' or '.join(ON_EXCLUSION)}, not {on_exclusion!r}")
        self.codec, self.chunks, self.on_exclusion = codec, chunks, on_exclusion
        self._residual = np.zeros(chunks.total, np.float32)
        self._q = codec.start(chunks, seed)
        self._m: Floats | None = None
        """M of the pending round; None if none is pending."""
        self._first: Floats | None = None
        """The first average, with orthonormal P."""
        self._own: Floats | None = None
        """This peer's second vector."""
        self._sent: Floats | None = None
        """This peer's first vector that is in the average, see `second_vector`."""

    @property
    def pending(self) -> bool:
        """True while a round waits for its outcome."""
        return self._m is not None

    @property
    def residual(self) -> Floats:
        """Read-only view of e as of the last decision."""
        return _frozen(self._residual)

    @property
    def q(self) -> Floats:
        """Read-only view of Q for the next round. It is part of the state that all replicas share."""
        return _frozen(self._q)

    def load(self, residual: Floats, q: Floats) -> None:
        """Load the state from a checkpoint or another peer.

        Raises ValueError if it does not fit, has non-finite values, or a round is pending.
        """
        self.chunks.check(residual)
        fits = q.dtype == np.float32 and q.shape == self._q.shape
        if self.pending or not fits or not (np.isfinite(residual).all() and np.isfinite(q).all()):
            raise ValueError("this is no state of that layout and rank, or a round is pending")
        self._residual = np.array(residual)
        np.copyto(self._q, q)

    def adopt(self, q: Floats) -> None:
        """Take over the Q that replicas share. Raises ValueError if it does not fit."""
        if q.dtype != np.float32 or q.shape != self._q.shape:
            raise ValueError("this is no Q of that layout and rank")
        np.copyto(self._q, q)

    def prepare(self, delta: Floats) -> Floats:
        """Return this peer's first vector for the pseudo-gradient delta.

        Raises ValueError if a value is not finite, RuntimeError if a round is pending.
        """
        if self.pending:
            raise RuntimeError("a round still waits for its outcome")
        self.chunks.check(delta)
        m = self._residual + delta
        first = self.codec.project(m, self._q, self.chunks)
        if not (np.isfinite(m).all() and np.isfinite(first).all()):
            raise ValueError("a value is not finite")
        self._m = m
        return first

    def second_vector(self, first: Floats, sent: Floats | None = None) -> Floats:
        """Return this peer's second vector, given the first average (which is copied).

        sent: the first vector of this peer that is in the average, if it may differ from the latest result of
        `prepare`.
        """
        if self._m is None or self._first is not None:
            raise RuntimeError("the first average comes after prepare, once")
        self._first, self._sent = first.copy(), sent
        self.codec.orthonormalise(self._first, self.chunks)
        self._own = self.codec.project_back(self._m, self._first, self.chunks)
        return self._own.copy()

    def commit(self, second: Floats, excluded: bool = False, delta: Floats | None = None) -> Floats:
        """Commit the round with the second average; return its result as the model's flat vector.

        excluded: the round's record does not name this peer. delta: the pseudo-gradient as it is now, if training
        continued since `prepare`; its change since then stays in the residual for the next round.
        """
        if self._m is None or self._first is None or self._own is None:
            raise RuntimeError("the second average comes after second_vector")
        since = None if delta is None else delta - (self._m - self._residual)
        result = self.codec.rebuild(self._first, second, self.chunks)
        if excluded and self.on_exclusion == "restore":
            self._residual = self._m
        else:
            self._residual = self.codec.residual(self._m, self._first, self._own, self.chunks, self._sent)
        if since is not None:
            np.add(self._residual, since, out=self._residual)
        np.copyto(self._q, second)
        self._clear()
        return result

    def restore(self) -> None:
        """Abort the round and discard the training since its start: e = M."""
        if self._m is None:
            raise RuntimeError("no round waits for an outcome")
        self._residual = self._m
        self._clear()

    def rollback(self) -> None:
        """Undo `prepare`."""
        if self._m is None:
            raise RuntimeError("no round waits for an outcome")
        self._clear()

    def _clear(self) -> None:
        self._m = self._first = self._own = self._sent = None


def warm_up() -> None:
    """Compile the kernels, or load them from the disk cache."""
    chunks = Chunks((("matrix", (16, 16)),), 256)
    peer = LowRank(PowerSGD(1), chunks, 0)
    peer.commit(peer.second_vector(peer.prepare(np.ones(chunks.total, np.float32))))


def _frozen(array: Floats) -> Floats:
    view = array.view()
    view.flags.writeable = False
    return view
