"""The fast path on the CPU: numba kernels that release the GIL and give the same bits on every machine.

No `fastmath`: without it the compiler neither reassociates sums nor fuses a multiplication with an addition, so each kernel is
the exact sequence of IEEE operations its docstring states. Kernels trust their arguments; the codecs check lengths first.
Payloads of several peers come in as addresses, because a kernel that took a list of arrays would be compiled anew for each
number of peers. `reference.py` has the same arithmetic in numpy; tests hold the two equal bit for bit.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, TypeVar

import numpy as np
from numba import carray, njit, types
from numba.extending import intrinsic
from numpy.typing import NDArray

F = TypeVar("F", bound=Callable[..., Any])

TILE = 4096
"""Elements whose float64 sums are kept in the first-level cache (32 KiB) while all peers are added."""

LANES = 64
"""Independent float64 partial sums of a squared norm; fixed, because their number decides the rounding."""

MAGNITUDE, INFINITE = np.uint32(0x7FFFFFFF), np.uint32(0x7F800000)
"""Bits of a float32: all but the sign, and infinity (any magnitude from here on is not finite)."""

OK, BAD_SCALE, BAD_CODE, NOT_FINITE = 0, 1, 2, 3


def kernel(function: F) -> F:
    """Compile on first use, keep the machine code on disk, release the GIL."""
    compiled: F = njit(nogil=True, cache=True, error_model="numpy")(function)
    return compiled


def inline(function: F) -> F:
    """A scalar helper that is compiled into its callers."""
    compiled: F = njit(inline="always", error_model="numpy")(function)
    return compiled


@intrinsic  # type: ignore[untyped-decorator]
def _pointer(typing_context: Any, address: Any) -> Any:
    """An address as a pointer to bytes."""
    pointer = types.CPointer(types.uint8)

    def codegen(context: Any, builder: Any, signature: Any, arguments: Any) -> Any:
        return builder.inttoptr(arguments[0], context.get_value_type(pointer))

    return pointer(types.uint64), codegen


@inline
def half_to_float(half: np.int64) -> np.float32:
    """A non-negative finite fp16, given by its bits, as float32 (exact)."""
    if half < 0x400:
        return np.float32(half) * np.float32(2.0**-24)
    return np.uint32((half << 13) + 0x38000000).view(np.float32)


@inline
def half_above(peak: np.float32, top: np.float32) -> np.int64:
    """Bits of the smallest fp16 s with top·s ≥ peak, at most the largest finite fp16. peak is finite and ≥ 0; top < 2**13.

    Rounding up means that no code is ever clipped, in the subnormal range neither. top·s is exact in float32.
    """
    guess = peak / top
    if guess >= np.float32(65504.0):
        return np.int64(0x7BFF)
    if guess < np.float32(2.0**-14):
        half = np.int64(guess * np.float32(2.0**24))
    else:
        half = (np.int64(np.float32(guess).view(np.uint32)) - 0x38000000) >> 13
    if half_to_float(half) * top < peak and half < 0x7BFF:
        half += 1
    return half


@kernel
def int8_encode(x: NDArray[np.float32], out: NDArray[np.uint8], block: int) -> int:
    """Scales (fp16, little-endian) then codes (int8). Returns OK, or NOT_FINITE with `out` in an undefined state.

    Per block: s = smallest fp16 with 127·s ≥ max|x|; code = clip(rint(x·(1/s)), ±127), all in float32.
    """
    n = x.size
    blocks = (n + block - 1) // block
    bits = x.view(np.uint32)
    codes = out[2 * blocks :].view(np.int8)
    top = np.float32(127.0)
    for b in range(blocks):
        start, stop = b * block, min(b * block + block, n)
        values, magnitudes, target = x[start:stop], bits[start:stop], codes[start:stop]
        # The largest magnitude as an integer: vectorises without fastmath, and anything non-finite wins.
        peak = np.uint32(0)
        for i in range(magnitudes.size):
            peak = max(peak, np.uint32(magnitudes[i] & MAGNITUDE))
        if peak >= INFINITE:
            return NOT_FINITE
        half = half_above(np.uint32(peak).view(np.float32), top)
        out[2 * b] = half & 0xFF
        out[2 * b + 1] = half >> 8
        inverse = np.float32(0.0)
        if half > 0:
            inverse = np.float32(1.0) / half_to_float(half)
        for i in range(target.size):
            target[i] = np.int8(np.int32(np.rint(min(max(values[i] * inverse, -top), top))))
    return OK


@kernel
def int8_decode(payload: NDArray[np.uint8], out: NDArray[np.float32], block: int) -> int:
    """x = s·code in float32 (exact). Returns OK, BAD_SCALE or BAD_CODE."""
    n = out.size
    blocks = (n + block - 1) // block
    codes = payload[2 * blocks :].view(np.int8)
    lowest = np.int8(0)
    for b in range(blocks):
        half = np.int64(payload[2 * b]) | np.int64(payload[2 * b + 1]) << 8
        if half >= 0x7C00:
            return BAD_SCALE
        scale = half_to_float(half)
        source, target = codes[b * block : b * block + block], out[b * block : b * block + block]
        for i in range(target.size):
            lowest = min(lowest, source[i])
            target[i] = scale * np.float32(source[i])
    return BAD_CODE if lowest == -128 else OK


@kernel
def int8_check(payload: NDArray[np.uint8], n: int, block: int) -> tuple[int, float]:
    """(OK, Σ s²·Σ code² in float64, block by block), or (BAD_SCALE or BAD_CODE, 0)."""
    blocks = (n + block - 1) // block
    codes = payload[2 * blocks :].view(np.int8)
    total = 0.0
    for b in range(blocks):
        half = np.int64(payload[2 * b]) | np.int64(payload[2 * b + 1]) << 8
        if half >= 0x7C00:
            return BAD_SCALE, 0.0
        lowest = np.int8(0)
        squares = np.int32(0)
        source = codes[b * block : b * block + block]
        for i in range(source.size):
            lowest = min(lowest, source[i])
            squares += np.int32(source[i]) * np.int32(source[i])
        if lowest == -128 or (half == 0 and squares > 0):
            return BAD_CODE, 0.0
        scale = np.float64(half_to_float(half))
        total += scale * scale * np.float64(squares)
    return OK, total


@kernel
def int8_mean(addresses: NDArray[np.uint64], shares: NDArray[np.float64], out: NDArray[np.float32], block: int) -> None:
    """out = float32(Σ share·(s·code)): s·code in float32 (exact), the rest in float64, one peer after the other as given."""
    n = out.size
    blocks = (n + block - 1) // block
    step = max(1, TILE // block)
    sums = np.empty(step * block, np.float64)
    for first in range(0, blocks, step):
        last = min(first + step, blocks)
        start = first * block
        stop = min(last * block, n)
        sums[: stop - start] = 0.0
        for p in range(addresses.size):
            payload = carray(_pointer(addresses[p]), (2 * blocks + n,))
            codes = payload[2 * blocks :].view(np.int8)
            share = shares[p]
            for b in range(first, last):
                scale = half_to_float(np.int64(payload[2 * b]) | np.int64(payload[2 * b + 1]) << 8)
                source = codes[b * block : b * block + block]
                target = sums[(b - first) * block : (b - first) * block + source.size]
                for i in range(target.size):
                    target[i] += share * np.float64(scale * np.float32(source[i]))
        result = out[start:stop]
        for i in range(result.size):
            result[i] = np.float32(sums[i])


@kernel
def fp32_decode(source: NDArray[np.uint32], out: NDArray[np.uint32]) -> int:
    """Copy. Returns OK, or NOT_FINITE when any value is."""
    peak = np.uint32(0)
    for i in range(out.size):
        peak = max(peak, np.uint32(source[i] & MAGNITUDE))
        out[i] = source[i]
    return NOT_FINITE if peak >= INFINITE else OK


@kernel
def fp32_check(source: NDArray[np.uint32]) -> tuple[int, float]:
    """(OK, Σ x² in float64: 64 interleaved partial sums, then their sum in order), or (NOT_FINITE, 0)."""
    n = source.size
    values = source.view(np.float32)
    sums = np.zeros(LANES, np.float64)
    peak = np.uint32(0)
    whole = n - n % LANES
    for i in range(0, whole, LANES):
        for j in range(LANES):
            peak = max(peak, np.uint32(source[i + j] & MAGNITUDE))
            x = np.float64(values[i + j])
            sums[j] += x * x
    for j in range(n - whole):
        peak = max(peak, np.uint32(source[whole + j] & MAGNITUDE))
        x = np.float64(values[whole + j])
        sums[j] += x * x
    if peak >= INFINITE:
        return NOT_FINITE, 0.0
    total = 0.0
    for j in range(LANES):
        total += sums[j]
    return OK, total


@kernel
def fp32_mean(addresses: NDArray[np.uint64], shares: NDArray[np.float64], out: NDArray[np.float32]) -> None:
    """out = float32(Σ share·x): float64, one peer after the other in the order given."""
    n = out.size
    sums = np.empty(TILE, np.float64)
    for start in range(0, n, TILE):
        stop = min(start + TILE, n)
        sums[: stop - start] = 0.0
        for p in range(addresses.size):
            values = carray(_pointer(addresses[p]), (4 * n,)).view(np.float32)
            share = shares[p]
            source = values[start:stop]
            for i in range(source.size):
                sums[i] += share * np.float64(source[i])
        result = out[start:stop]
        for i in range(result.size):
            result[i] = np.float32(sums[i])


@kernel
def sgd_step(
    theta: NDArray[np.float32],
    momentum: NDArray[np.float32],
    delta: NDArray[np.float32],
    lr: np.float32,
    mu: np.float32,
    nesterov: bool,
) -> None:
    """In place: b ← μ·b + Δ; θ ← θ − η·(Δ + μ·b), or without nesterov θ ← θ − η·b. Every operation rounds to float32."""
    if nesterov:
        for i in range(theta.size):
            b = mu * momentum[i] + delta[i]
            momentum[i] = b
            theta[i] = theta[i] - lr * (delta[i] + mu * b)
    else:
        for i in range(theta.size):
            b = mu * momentum[i] + delta[i]
            momentum[i] = b
            theta[i] = theta[i] - lr * b


def outer_step(
    theta: NDArray[np.float32],
    momentum: NDArray[np.float32],
    delta: NDArray[np.float32],
    lr: float,
    mu: float,
    nesterov: bool = True,
) -> None:
    """One step of SGD with momentum on the pseudo-gradient delta, in place on theta and momentum (flat float32, equal sizes).

    Momentum starts at zero, which makes the first step that of torch.optim.SGD. lr and mu are rounded to float32 first; see
    `sgd_step` for the order of operations. Raises ValueError when the arrays do not fit together. DiLoCo, arXiv 2311.08105.
    """
    for array in (theta, momentum, delta):
        if array.dtype != np.float32 or array.shape != (theta.size,) or not array.flags.c_contiguous:
            raise ValueError(f"outer step on {array.dtype}{array.shape}, expected flat float32 of {theta.size}")
    sgd_step(theta, momentum, delta, np.float32(lr), np.float32(mu), bool(nesterov))


def warm_up() -> None:
    """Compile every kernel, or load it from the disk cache, for writable and read-only inputs; call before serving."""
    x, y = np.zeros(8, np.float32), np.zeros(8, np.float32)
    payload, one = np.zeros(10, np.uint8), np.ones(1, np.float64)
    for frozen in (False, True):
        source, packed = x.copy(), payload.copy()
        source.flags.writeable = packed.flags.writeable = not frozen
        int8_encode(source, payload, 8)
        int8_decode(packed, y, 8)
        int8_check(packed, 8, 8)
        fp32_decode(source.view(np.uint32), y.view(np.uint32))
        fp32_check(source.view(np.uint32))
        sgd_step(y, x, source, np.float32(0.0), np.float32(0.0), True)
    int8_mean(np.array([payload.ctypes.data], np.uint64), one, y, 8)
    fp32_mean(np.array([x.ctypes.data], np.uint64), one, y)
