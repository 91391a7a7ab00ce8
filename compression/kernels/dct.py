"""Orthonormal cosine transform (DCT-II) of square blocks.

Q = DᵀBD with D[i, j] = s_j·cos(π(2i+1)j / 2n). Both directions give the same bits on every machine and for any number
of threads, because replicas rebuild parameters from them. Each pass applies the even/odd split of Chen, Smith and
Fralick (1977) until one row is left: with u_i = x_i + x_{n−1−i} and w_i = x_i − x_{n−1−i}, i < n/2, the odd outputs are
Σ_i D[i, j]·w_i and the even outputs are the transform of u. This takes a third of the products of DᵀB and is as
accurate. All arithmetic is in float32, sums are in ascending order of i (inverse: of j), and nothing is fused.
"""

from __future__ import annotations

import math
from functools import cache

import numpy as np
import torch
from numba import njit
from numpy.typing import NDArray
from thinwire.compression.core.types import Floats

SIDES = (16, 32, 64)
"""Allowed sides of a block, in elements."""


@cache
def matrix(side: int) -> Floats:
    """Return D as a read-only float32 matrix (side × side).

    It is built from one quarter wave of 64-bit cosines, so that entries that are equal in theory are equal in bits.
    """
    if side not in SIDES:
        raise ValueError(f"dct: side must be one of {', '.join(map(str, SIDES))}, not {side}")
    # Angles are multiples of π / 2n. They are reduced to 0…π/2 in integers, because floating point would round.
    wave = [math.cos(math.pi * step / (2 * side)) for step in range(side)] + [0.0]
    d = np.empty((side, side), np.float32)
    for i in range(side):
        for j in range(side):
            step = (2 * i + 1) * j % (4 * side)
            step = min(step, 4 * side - step)
            value = wave[step] if step <= side else -wave[2 * side - step]
            d[i, j] = value * math.sqrt((2 if j else 1) / side)
    d.flags.writeable = False
    return d


@cache
def transposed(side: int) -> Floats:
    """Return Dᵀ as a read-only float32 matrix."""
    dt = np.ascontiguousarray(matrix(side).T)
    dt.flags.writeable = False
    return dt


def forward_torch(blocks: torch.Tensor) -> torch.Tensor:
    """Return DᵀBD of each block (blocks, side, side), on any device.

    The operations are those of the kernels in the same order.
    """
    d = torch.from_numpy(matrix(blocks.shape[1]).copy()).to(blocks.device)
    return _analyse(_analyse(blocks, d).mT, d).mT.contiguous()


def _analyse(x: torch.Tensor, d: torch.Tensor) -> torch.Tensor:
    """Return DᵀX for each block."""
    side, step = x.shape[1], 1
    out = torch.empty_like(x)
    while step < side:
        half = x.shape[1] // 2
        low, high = x[:, :half], x[:, half:].flip(1)
        x, odd = low + high, low - high
        columns = torch.arange(step, side, 2 * step, device=x.device)
        total = d[0, columns, None] * odd[:, 0, None, :]
        for i in range(1, half):
            total = total + d[i, columns, None] * odd[:, i, None, :]
        out[:, columns] = total
        step *= 2
    out[:, 0] = d[0, 0] * x[:, 0]
    return out


@njit(error_model="numpy")  # type: ignore[untyped-decorator]
def transpose(source: NDArray[np.float32], target: NDArray[np.float32]) -> None:
    """Write sourceᵀ to target, in tiles of 8 × 8."""
    side = source.shape[0]
    for r in range(0, side, 8):
        for c in range(0, side, 8):
            for i in range(r, r + 8):
                for j in range(c, c + 8):
                    target[j, i] = source[i, j]


@njit(error_model="numpy")  # type: ignore[untyped-decorator]
def _sums(
    factors: NDArray[np.float32],
    at: int,
    between: int,
    source: NDArray[np.float32],
    first: int,
    stride: int,
    count: int,
    out: NDArray[np.float32],
) -> None:
    """Compute out[j] = Σ factors[j, i]·source[i] for the `count` rows at, at + between, … of out.

    The sum is over `count` indices i = first, first + stride, …, in that order. Sums start at −0, because adding to −0
    changes no value.
    """
    side = out.shape[1]
    if count < 4:
        for j in range(at, at + count * between, between):
            for c in range(side):
                out[j, c] = factors[j, first] * source[first, c]
            for i in range(first + stride, first + count * stride, stride):
                for c in range(side):
                    out[j, c] = out[j, c] + factors[j, i] * source[i, c]
        return
    # Blocks of four by four: each value read is used four times, and so is each partial sum.
    for j in range(at, at + count * between, 4 * between):
        k, m, n = j + between, j + 2 * between, j + 3 * between
        o, p, q, r = out[j], out[k], out[m], out[n]
        o[:] = p[:] = q[:] = r[:] = np.float32(-0.0)
        for i in range(first, first + count * stride, 4 * stride):
            f, g, h = i + stride, i + 2 * stride, i + 3 * stride
            s, t, u, v = source[i], source[f], source[g], source[h]
            j0, j1, j2, j3 = factors[j, i], factors[j, f], factors[j, g], factors[j, h]
            k0, k1, k2, k3 = factors[k, i], factors[k, f], factors[k, g], factors[k, h]
            m0, m1, m2, m3 = factors[m, i], factors[m, f], factors[m, g], factors[m, h]
            n0, n1, n2, n3 = factors[n, i], factors[n, f], factors[n, g], factors[n, h]
            for c in range(side):
                w, x, y, z = s[c], t[c], u[c], v[c]
                o[c] = o[c] + j0 * w + j1 * x + j2 * y + j3 * z
                p[c] = p[c] + k0 * w + k1 * x + k2 * y + k3 * z
                q[c] = q[c] + m0 * w + m1 * x + m2 * y + m3 * z
                r[c] = r[c] + n0 * w + n1 * x + n2 * y + n3 * z


@njit(error_model="numpy")  # type: ignore[untyped-decorator]
def columns(
    x: NDArray[np.float32], dt: NDArray[np.float32], out: NDArray[np.float32], odd: NDArray[np.float32]
) -> None:
    """Compute out = DᵀX, with dt = Dᵀ. Overwrites x."""
    side = x.shape[0]
    half, step = side // 2, 1
    while half > 0:
        for i in range(half):
            near, far, other = x[i], x[2 * half - 1 - i], odd[i]
            for c in range(side):
                low, high = near[c], far[c]
                near[c] = low + high
                other[c] = low - high
        _sums(dt, step, 2 * step, odd, 0, 1, half, out)
        half //= 2
        step *= 2
    for c in range(side):
        out[0, c] = dt[0, 0] * x[0, c]


@njit(error_model="numpy")  # type: ignore[untyped-decorator]
def rows_back(
    q: NDArray[np.float32], d: NDArray[np.float32], out: NDArray[np.float32], odd: NDArray[np.float32]
) -> None:
    """Compute out = DQ."""
    side = q.shape[0]
    for c in range(side):
        out[0, c] = d[0, 0] * q[0, c]
    half, step = 1, side // 2
    while step > 0:
        _sums(d, 0, 1, q, step, 2 * step, half, odd)
        for i in range(half):
            near, far, other = out[i], out[2 * half - 1 - i], odd[i]
            for c in range(side):
                even = near[c]
                near[c] = even + other[c]
                far[c] = even - other[c]
        half *= 2
        step //= 2
