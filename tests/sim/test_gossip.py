"""Swarms whose peers average with one random partner a round, in virtual time."""

from __future__ import annotations

import asyncio
from collections import Counter

import numpy as np
import pytest
from thinwire.sims import clock

NOLOCO = 'method = "noloco"\n'


def met(node) -> Counter[int]:
    """How many of its rounds had a partner: {1: alone, 2: a pair}."""
    return Counter(len(found) for found in node.contributors.values())


def reasons(swarm) -> Counter[str]:
    return Counter(why for node in swarm.nodes.values() for missing in node.missing.values() for why in missing.values())


@pytest.mark.parametrize("codec", ["fp32", "int8(block=256)"])
def test_the_mean_of_all_replicas_makes_the_step_of_diloco(swarm, codec):
    async def main():
        s = swarm(8, codec=codec, outer=NOLOCO, rounds=8, size=20_000)
        for node in s.nodes.values():
            node.pace = 1.0 + 0.02 * node.index
        s.start()
        await s.finish()
        assert all(met(node) == {2: 8} for node in s.nodes.values()) and not reasons(s)
        outer = s.manifest.outer
        first = np.random.default_rng(7).standard_normal(s.size).astype(np.float32).astype(np.float64)
        phi, delta = first, np.zeros(s.size)
        for number in range(1, 9):
            steps = [
                -(np.random.default_rng((index, number)).standard_normal(s.size) * 0.01).astype(np.float32)
                for index in range(8)
            ]
            delta = outer.momentum * delta + outer.lr * np.mean(steps, axis=0, dtype=np.float64)
            phi = phi + delta
        found = np.mean([node.replica.theta.astype(np.float64) for node in s.nodes.values()], axis=0)
        # What a codec left out is at most half a step of it, of the last round.
        assert np.abs(found - phi).max() < (1e-6 if codec == "fp32" else 1e-3)
        states = {node.replica.digest for node in s.nodes.values()}
        assert len(states) == 8
        apart = max(float(np.abs(node.replica.theta - found).max()) for node in s.nodes.values())
        assert 0 < apart < 0.1

    clock.run(main(), seed=1)
