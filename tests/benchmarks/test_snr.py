"""Signal-to-noise ratios of the formats in dB, measured with 4 million values for the specification."""

from __future__ import annotations

import pytest
from thinwire.compression.dense.blockint import Integers
from thinwire.compression.dense.floats import Fp32, bf16, fp16

from benchmarks.compression.snr import BLOCKS, DISTRIBUTIONS, ROWS, sample, snr, table

PROMISED = {
    (8, False): {"gaussian": (44.5, 43.2, 41.3), "laplace": (42.1, 40.0, 36.8), "t3": (39.3, 35.2, 27.1)},
    (4, False): {"gaussian": (19.4, 18.0, 16.1), "laplace": (17.0, 14.9, 11.9), "t3": (14.9, 11.3, 5.5)},
    (4, True): {"gaussian": (20.9, 19.3, 17.1), "laplace": (19.1, 16.5, 13.0), "t3": (17.6, 13.3, 5.1)},
}


@pytest.mark.parametrize("name", DISTRIBUTIONS)
def test_snr_matches_measured_values(name: str) -> None:
    # The far tail of t3 decides its largest blocks: a smaller sample would be luck.
    x = sample(name, 1 << (22 if name == "t3" else 20), 0)
    for (bits, asymmetric), rows in PROMISED.items():
        for block, promised in zip(BLOCKS, rows[name], strict=True):
            found = snr(Integers(bits, block, asymmetric), x)
            # Of t3 in asymmetric blocks of 4096, samples of this size differ by half a dB; 5.1 is the least of them.
            above = 0.6 if (asymmetric, name, block) == (True, "t3", 4096) else 0.3
            assert promised - 0.3 <= found <= promised + above, (bits, asymmetric, block)


@pytest.mark.trial
def test_snr_grows_with_bits_and_smaller_blocks() -> None:
    found = table(1 << 16, 3)
    assert len(found) == len(ROWS) * len(BLOCKS) * len(DISTRIBUTIONS)
    for (row, name, block), value in found.items():
        fewer = row.replace("int4", "int3").replace("int8", "int4")
        if fewer != row:
            assert value > found[fewer, name, block]
        if block > BLOCKS[0]:
            assert value < found[row, name, BLOCKS[BLOCKS.index(block) - 1]]


@pytest.mark.trial
def test_snr_of_floats_follows_their_precision() -> None:
    x = sample("gaussian", 1 << 16, 0)
    assert snr(Fp32(), x) == float("inf")
    assert snr(fp16(), x) > 70 and 50 < snr(bf16(), x) < 60


def test_stochastic_rounding_costs_three_decibels() -> None:
    """Its error has twice the variance of rounding to the nearest: 3 dB."""
    x = sample("gaussian", 1 << 18, 1)
    assert snr(Integers(4), x) - snr(Integers(4, stochastic=True), x) == pytest.approx(3.0, abs=0.2)
