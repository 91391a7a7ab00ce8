"""Shared parts of the CPU kernels: numba functions that release the GIL and are bit-reproducible.

`fastmath` is off, so the compiler neither reassociates sums nor fuses a multiplication with an addition: each kernel is
exactly the sequence of IEEE operations that its docstring states. Kernels trust their arguments; the codecs check
lengths first. The payloads of several peers are passed as addresses, because numba would compile a kernel that takes a
list of arrays again for each number of peers. `tests/kit/reference/dense.py` has the same arithmetic in numpy; tests
check that the two are equal bit for bit.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, TypeVar

import numpy as np
from numba import carray, njit, types
from numba.core import cgutils
from numba.extending import intrinsic
from numpy.typing import NDArray

F = TypeVar("F", bound=Callable[..., Any])

TILE = 1024
"""Elements per tile. The float64 sums of a tile (8 KiB) and the payloads fit in the first-level cache."""

LANES = 64
"""Number of independent float64 partial sums of a squared norm.

Fixed, because it determines the rounding.
"""

MAGNITUDE, INFINITE = np.uint32(0x7FFFFFFF), np.uint32(0x7F800000)
"""Bit masks of a float32: all bits but the sign, and infinity (larger magnitudes are NaN)."""

OK, BAD_SCALE, BAD_CODE, NOT_FINITE = 0, 1, 2, 3


def kernel(function: F) -> F:
    """Compile on first use, cache the machine code on disk, and release the GIL."""
    compiled: F = njit(nogil=True, cache=True, error_model="numpy")(function)
    return compiled


def inline(function: F) -> F:
    """Compile a scalar helper into its callers."""
    compiled: F = njit(inline="always", error_model="numpy")(function)
    return compiled


@intrinsic  # type: ignore[untyped-decorator]
def _pointer(typing_context: Any, address: Any) -> Any:
    """Convert an address to a pointer to bytes."""
    pointer = types.CPointer(types.uint8)

    def codegen(context: Any, builder: Any, signature: Any, arguments: Any) -> Any:
        return builder.inttoptr(arguments[0], context.get_value_type(pointer))

    return pointer(types.uint64), codegen


@intrinsic  # type: ignore[untyped-decorator]
def uncounted(typing_context: Any, array: Any) -> Any:
    """Return the same array without a reference count, which each slice of it would change atomically.

    The array must be an argument of the kernel, whose caller holds it until the kernel returns.
    """

    def codegen(context: Any, builder: Any, signature: Any, arguments: Any) -> Any:
        found = context.make_array(signature.args[0])(context, builder, arguments[0])
        found.meminfo = cgutils.get_null_value(found.meminfo.type)
        found.parent = cgutils.get_null_value(found.parent.type)
        return found._getvalue()

    return array(array), codegen


@inline
def half_to_float(half: np.int64) -> np.float32:
    """Convert a non-negative finite fp16, given by its bits, to float32 (exact)."""
    if half < 0x400:
        return np.float32(half) * np.float32(2.0**-24)
    return np.uint32((half << 13) + 0x38000000).view(np.float32)


@inline
def half_above(peak: np.float32, top: np.float32) -> np.int64:
    """Return the bits of the smallest fp16 s with top·s ≥ peak, at most the largest finite fp16.

    peak is finite and ≥ 0; top < 2**13. Because s is rounded up, no code is ever clipped, not even in the subnormal
    range. top·s is exact in float32.
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
def fp32_decode(source: NDArray[np.uint32], out: NDArray[np.uint32]) -> int:
    """Copy the values. Returns OK, or NOT_FINITE if any value is not finite."""
    peak = np.uint32(0)
    for i in range(out.size):
        peak = max(peak, np.uint32(source[i] & MAGNITUDE))
        out[i] = source[i]
    return NOT_FINITE if peak >= INFINITE else OK


@inline
def add(source: NDArray[np.float32], share: np.float64, begin: bool, sums: NDArray[np.float64]) -> None:
    """Add share·x to sums; with `begin`, write 0 + share·x, which saves a pass of writing zeros."""
    if begin:
        for i in range(source.size):
            sums[i] = 0.0 + share * np.float64(source[i])
    else:
        for i in range(source.size):
            sums[i] += share * np.float64(source[i])


@kernel
def fp32_check(source: NDArray[np.uint32]) -> tuple[int, float]:
    """Return (OK, Σ x²), or (NOT_FINITE, 0).

    The sum is in float64: 64 interleaved partial sums, then their sum in order.
    """
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
    """Write float32(0 + Σ share·x) to out, accumulated in float64, peer after peer in the given order."""
    n = out.size
    sums = np.empty(TILE, np.float64)
    for start in range(0, n, TILE):
        stop = min(start + TILE, n)
        for p in range(addresses.size):
            values = carray(_pointer(addresses[p]), (4 * n,)).view(np.float32)
            add(values[start:stop], shares[p], p == 0, sums)
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
    """Update in place: b ← μ·b + Δ; θ ← θ − η·(Δ + μ·b), or without nesterov θ ← θ − η·b.

    Every operation rounds to float32.
    """
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
    """Apply one step of SGD with momentum on the pseudo-gradient delta, in place on theta and momentum.

    All arrays are flat float32 of equal size. Momentum starts at zero, which makes the first step equal to that of
    torch.optim.SGD. lr and mu are rounded to float32 first; `sgd_step` states the order of operations. Raises
    ValueError if the arrays do not fit together. DiLoCo, arXiv 2311.08105.
    """
    for array in (theta, momentum, delta):
        if array.dtype != np.float32 or array.shape != (theta.size,) or not array.flags.c_contiguous:
            raise ValueError(f"outer step on {array.dtype}{array.shape}, expected flat float32 of {theta.size}")
    sgd_step(theta, momentum, delta, np.float32(lr), np.float32(mu), bool(nesterov))
