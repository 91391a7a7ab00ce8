"""Signal-to-noise ratio of the dense codecs: `python -m benchmarks.compression.snr` prints a table in ten seconds."""

from __future__ import annotations

import math
import sys
from collections.abc import Callable
from functools import partial

import numpy as np
from thinwire.compression.core.codec import Codec
from thinwire.compression.core.types import Floats
from thinwire.compression.dense.blockint import Integers
from thinwire.compression.dense.e3m0 import E3M0

DISTRIBUTIONS = ("gaussian", "laplace", "t3")
BLOCKS = (64, 256, 4096)
ROWS: dict[str, Callable[[int], Codec]] = {
    f"int{bits} {'asymmetric' if asymmetric else 'symmetric'}": partial(Integers, bits, asymmetric=asymmetric)
    for bits in (8, 4, 3)
    for asymmetric in (False, True)
} | {"e3m0": E3M0}
"""Maps a row's name to the constructor of the codec for a block size."""


def sample(name: str, n: int, seed: int) -> Floats:
    """Return n values of a distribution: "gaussian", "laplace", or "t3" (Student's t with 3 degrees)."""
    rng = np.random.default_rng(seed)
    drawn = {
        "gaussian": lambda: rng.standard_normal(n),
        "laplace": lambda: rng.laplace(size=n),
        "t3": lambda: rng.standard_t(3, n),
    }[name]()
    return drawn.astype(np.float32)


def snr(codec: Codec, x: Floats) -> float:
    """Return the signal-to-noise ratio in dB: 10·log10(Σ x² / Σ (x − decoded)²), or infinity without loss."""
    payload, back = np.empty(codec.nbytes(x.size), np.uint8), np.empty_like(x)
    codec.encode(x, payload)
    codec.decode(payload.data, back)
    signal, noise = np.sum(np.square(x, dtype=np.float64)), np.sum(np.square(x - back, dtype=np.float64))
    return 10 * math.log10(signal / noise) if noise else math.inf


def table(n: int, seed: int) -> dict[tuple[str, str, int], float]:
    """Return the SNR by row, distribution and block."""
    found = {}
    for name in DISTRIBUTIONS:
        x = sample(name, n, seed)
        for row, codec in ROWS.items():
            for block in BLOCKS:
                found[row, name, block] = snr(codec(block), x)
    return found


def main() -> None:
    """Print the table for 2²² (four million) values of each distribution."""
    found = table(1 << 22, 0)
    lines = [f"| SNR in dB, block {' / '.join(map(str, BLOCKS))} | {' | '.join(DISTRIBUTIONS)} |", "|---|---|---|---|"]
    for row in ROWS:
        cells = (" / ".join(f"{found[row, name, block]:.1f}" for block in BLOCKS) for name in DISTRIBUTIONS)
        lines.append(f"| {row} | {' | '.join(cells)} |")
    sys.stdout.write("\n".join(lines) + "\n")


if __name__ == "__main__":
    main()
