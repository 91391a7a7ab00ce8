"""DiLoCo rounds with every dense codec: one state everywhere, equal to the reference."""

from __future__ import annotations

import blake3
import numpy as np
import pytest
from kit.reference import dense as reference
from thinwire.compression.dense.e3m0 import E3M0
from thinwire.compression.dense.floats import Half
from thinwire.compression.registry import dense
from thinwire.sims.engine import virtual_loop

ROUNDS = 3
SPECS = [
    "fp16",
    "bf16",
    "int8(block=256,asymmetric=1)",
    "int4(block=256)",
    "int4(block=256,asymmetric=1)",
    "int4(block=256,stochastic=1)",
    "int3(block=128)",
    "e3m0(block=256)",
]


def through(codec, x):
    """Return x after encoding and decoding by the reference."""
    if isinstance(codec, Half):
        return reference.halves_decode(reference.halves_encode(x, codec.brain), codec.brain)
    if isinstance(codec, E3M0):
        return reference.e3m0_decode(reference.e3m0_encode(x, codec.block), x.size, codec.block)
    seed = int.from_bytes(blake3.blake3(x.tobytes()).digest()[:8], "little")
    payload = reference.integers_encode(x, codec.bits, codec.block, codec.asymmetric, codec.stochastic, seed)
    return reference.integers_decode(payload, x.size, codec.bits, codec.block, codec.asymmetric)


def expected(node, peers):
    """Return the final parameters: float64 means of decoded values, encoded again, then the outer step."""
    s, outer = node.swarm, node.swarm.manifest.outer
    codec, cut = node.session.codec, node.session.grid
    theta = np.random.default_rng(7).standard_normal(s.size).astype(np.float32)
    momentum = np.zeros_like(theta)
    for number in range(1, ROUNDS + 1):
        steps = [np.random.default_rng((i, number)).standard_normal(s.size) * 0.01 for i in peers]
        deltas = [theta - (theta - step.astype(np.float32)) for step in steps]
        for start, stop in (cut.span(index) for index in range(len(cut))):
            rows = [through(codec, delta[start:stop]) for delta in deltas]
            norms = [np.linalg.norm(row.astype(np.float64)) for row in rows]
            limit = sorted(norms)[(len(norms) - 1) // 2]  # docs/design/aggregation.md
            shares = [100.0 * min(1.0, limit / norm) / (100.0 * len(rows)) for norm in norms]
            sums = sum(share * row.astype(np.float64) for share, row in zip(shares, rows, strict=True))
            result = through(codec, sums.astype(np.float32))
            theta[start:stop], momentum[start:stop] = reference.outer_step(
                theta[start:stop], momentum[start:stop], result, outer.lr, outer.momentum, outer.nesterov
            )
    return theta


@pytest.mark.parametrize("spec", SPECS)
def test_rounds_with_every_dense_codec_match_the_reference(swarm, spec):
    async def main():
        s = swarm(3, codec=spec, rounds=ROUNDS, size=30_000, aggregation="clip")
        s.start()
        await s.finish()
        s.check()
        order = sorted(s.nodes, key=lambda index: s.nodes[index].id)
        for node in s.nodes.values():
            assert all(len(found) == 3 for found in node.contributors.values()) and not any(node.missing.values())
        assert s.nodes[0].replica.theta.tobytes() == expected(s.nodes[0], order).tobytes()
        return s.nodes[0].replica.digest

    assert virtual_loop.run(main(), seed=1) == virtual_loop.run(main(), seed=1)


def test_four_bit_rounds_survive_death_and_join(swarm):
    async def main():
        s = swarm(4, codec="int4(block=256)", rounds=8, size=30_000)
        s.start()
        s.fail_at(3, 3, "announce")
        joiner = s.join(4)
        await s.finish([0, 1, 2, 4])
        s.check([0, 1, 2, 4])
        assert joiner.replica.digest == s.nodes[0].replica.digest

    virtual_loop.run(main(), seed=2)


@pytest.mark.parametrize(
    "spec", ["int4(block=256)", "int4(block=256,asymmetric=1)", "int3(block=128)", "fp16", "e3m0(block=256)"]
)
def test_sender_of_invalid_encoding_is_left_out(swarm, spec):
    codec = dense(spec)

    def spoil(chunks):
        first = bytearray(chunks[0])
        if spec == "fp16":
            first[:2] = b"\x00\x7c"
        elif spec.startswith("e3m0"):
            first[-1] = 0x80
        elif codec.asymmetric:
            first[-(len(first) // 2) :] = b"\xff" * (len(first) // 2)
            first[:2] = b"\x00\x00"
        else:
            first[-1] = 0x88 if codec.bits == 4 else 0b10010010
        return [memoryview(bytes(first)), *chunks[1:]]

    async def main():
        s = swarm(3, codec=spec, rounds=4, size=20_480)
        s.nodes[1].forge(2, spoil)
        s.start()
        await s.finish()
        s.check()
        honest, liar = s.nodes[0], s.nodes[1].id
        assert liar in honest.missing[2] and liar not in honest.contributors[2]
        assert liar in honest.contributors[1] and liar in honest.contributors[4]

    virtual_loop.run(main(), seed=3)
