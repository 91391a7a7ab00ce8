"""How much of a signal a dense codec keeps: `python -m thinwire.compression.fidelity` prints the signal-to-noise table."""

from __future__ import annotations

import math
import sys
from collections.abc import Callable
from functools import partial

import numpy as np
from thinwire.compression.codec import Codec, Floats
from thinwire.compression.minifloat import E3M0
from thinwire.compression.quantize import Integers

DISTRIBUTIONS = ("gaussian", "laplace", "t3")
BLOCKS = (64, 256, 4096)
ROWS: dict[str, Callable[[int], Codec]] = {
    f"int{bits} {'asymmetric' if asymmetric else 'symmetric'}": partial(Integers, bits, asymmetric=asymmetric)
    for bits in (8, 4, 3)
    for asymmetric in (False, True)
} | {"e3m0": E3M0}
"""Name -> the codec for a block."""


def sample(name: str, n: int, seed: int) -> Floats:
    """n values of a distribution: "gaussian", "laplace", or "t3", Student's with three degrees of freedom."""
    rng = np.random.default_rng(seed)
    drawn = {
        "gaussian": lambda: rng.standard_normal(n),
        "laplace": lambda: rng.laplace(size=n),
        "t3": lambda: rng.standard_t(3, n),
    }[name]()
    return drawn.astype(np.float32)


def snr(codec: Codec, x: Floats) -> float:
    """Signal by noise in dB: 10·log10(Σ x² / Σ (x − decoded)²); infinite when nothing is lost."""
    payload, back = np.empty(codec.nbytes(x.size), np.uint8), np.empty_like(x)
    codec.encode(x, payload)
    codec.decode(payload.data, back)
    signal, noise = np.sum(np.square(x, dtype=np.float64)), np.sum(np.square(x - back, dtype=np.float64))
    return 10 * math.log10(signal / noise) if noise else math.inf


def table(n: int, seed: int) -> dict[tuple[str, str, int], float]:
    """SNR by row, distribution and block."""
    found = {}
    for name in DISTRIBUTIONS:
        x = sample(name, n, seed)
        for row, codec in ROWS.items():
            for block in BLOCKS:
                found[row, name, block] = snr(codec(block), x)
    return found


def main() -> None:
    """Print the table of four million values each."""
    found = table(1 << 22, 0)
    lines = [f"| SNR in dB, block {' / '.join(map(str, BLOCKS))} | {' | '.join(DISTRIBUTIONS)} |", "|---|---|---|---|"]
    for row in ROWS:
        cells = (" / ".join(f"{found[row, name, block]:.1f}" for block in BLOCKS) for name in DISTRIBUTIONS)
        lines.append(f"| {row} | {' | '.join(cells)} |")
    sys.stdout.write("\n".join(lines) + "\n")


if __name__ == "__main__":
    main()
