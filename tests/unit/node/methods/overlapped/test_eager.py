"""Eager updates: a round runs during all steps of the next one, and own work counts at once."""

from __future__ import annotations

import asyncio

import numpy as np
import pytest
from thinwire.collectives.state_sync.state_sync import FetchedState
from thinwire.node.state.layout import Layout, Piece
from thinwire.swarm.manifest.manifest import ManifestError
from thinwire.swarm.manifest.parser import parse
from thinwire.swarm.messages.registry import StateOffer

from benchmarks.training.round_table import RoundTable

SIZE, PEERS, STEPS = 5_000, 3, 4
LAYOUT = Layout((Piece("w", (SIZE,), "float32", 0, SIZE),), SIZE, b"l" * 32)


class Peers:
    """Models with random steps, and the values that were written to them."""

    def __init__(self, count=PEERS):
        first = np.random.default_rng(7).standard_normal(SIZE).astype(np.float32)
        self.thetas = [first.copy() for _ in range(count)]
        self.rngs = [np.random.default_rng(index) for index in range(count)]
        self.starts = [[] for _ in range(count)]
        self.moves = [[] for _ in range(count)]

    def learner(self, index):
        theta = self.thetas[index]

        def read(start, stop, out):
            out[:] = theta[start:stop]

        def write(values, start=0, keep=0.0):
            assert not start and not keep
            theta[:] = values
            self.starts[index].append(values.copy())

        return theta.copy(), read, write

    def train(self, index, steps):
        for _ in range(steps):
            move = (self.rngs[index].standard_normal(SIZE) * 0.01 + 0.005 * index).astype(np.float32)
            self.thetas[index] -= move
            self.moves[index].append(move)
        return steps


def play(outer, rounds, *, fail=(), look=lambda table, peers: None, run="", count=PEERS):
    async def main():
        manifest = parse(
            f'{run}[exchange]\ncodec = "fp32"\naggregation = "mean"\n[outer]\nmethod = "eager"\nsync_every = {STEPS}\n{outer}'
        )
        peers = Peers(count)
        table = RoundTable(manifest, LAYOUT, [peers.learner(index) for index in range(count)], fail)
        await table.play(rounds, peers.train, lambda: look(table, peers))
        return table, peers

    return asyncio.run(main())


@pytest.mark.parametrize(("momentum", "nesterov"), [(0.9, "true"), (0.9, "false"), (0.0, "false")])
def test_eager_replica_makes_the_published_step(momentum, nesterov):
    """Compared with the published algorithm: each replica has an outer optimizer on the eager gradient."""
    _, peers = play(f"lr = 0.3\nmomentum = {momentum}\nnesterov = {nesterov}", 6)
    theta = [np.random.default_rng(7).standard_normal(SIZE) for _ in range(PEERS)]
    theta = [one.astype(np.float32).astype(np.float64) for one in theta]
    buffers, before = np.zeros((PEERS, SIZE)), np.zeros((PEERS, SIZE))
    for number in range(6):
        deltas = np.stack(
            [np.sum(moves[STEPS * number : STEPS * number + STEPS], axis=0, dtype=np.float64) for moves in peers.moves]
        )
        for index in range(PEERS):
            gradient = before.mean(axis=0) + (deltas[index] - before[index]) / PEERS
            buffers[index] = momentum * buffers[index] + gradient
            step = gradient + momentum * buffers[index] if nesterov == "true" else buffers[index]
            theta[index] = theta[index] - 0.3 * step
            np.testing.assert_allclose(peers.starts[index][number], theta[index], rtol=0, atol=2e-5)
        before = deltas


def test_eager_outer_replicas_are_equal_and_local_ones_differ_by_own_share():
    """At μ = 0 by −(η / M)(Δ_i − Δ_j), exactly as in the specification."""
    seen = []

    def look(table, peers):
        assert len({slot.replica.digest for slot in table.slots}) == 1
        number = len(seen)
        deltas = [np.sum(moves[STEPS * number : STEPS * number + STEPS], axis=0) for moves in peers.moves]
        for i in range(PEERS):
            for j in range(i):
                apart = peers.starts[i][number] - peers.starts[j][number]
                expected = -(0.5 / PEERS) * (deltas[i] - deltas[j])
                np.testing.assert_allclose(apart, expected, rtol=0, atol=1e-5)
                assert np.abs(apart).max() > 1e-3
        seen.append(number)

    play("lr = 0.5\nmomentum = 0.0", 5, look=look)
    assert len(seen) == 5


def test_eager_outer_parameters_equal_diloco_on_sent_deltas():
    seen = []
    table, peers = play("lr = 0.5\nmomentum = 0.9", 4, look=lambda table, peers: seen.append(1))
    theta = np.random.default_rng(7).standard_normal(SIZE).astype(np.float32).astype(np.float64)
    momentum = np.zeros(SIZE)
    for number in range(4):
        mean = np.mean([np.sum(m[STEPS * number : STEPS * number + STEPS], axis=0) for m in peers.moves], axis=0)
        momentum = 0.9 * momentum + mean
        theta -= 0.5 * (mean + 0.9 * momentum)
    np.testing.assert_allclose(table.slots[0].replica.theta, theta, rtol=0, atol=2e-5)
    assert table.weights == [[STEPS] * PEERS] * 4


def test_eager_failed_round_is_sent_again_with_later_steps():
    """With η = 1, one peer and no momentum, θ̄ is the sum of all training: nothing is lost or counted twice."""
    table, peers = play("lr = 1.0\nmomentum = 0.0", 5, fail=[2, 3], count=1)
    assert table.slots[0].replica.round == 3
    assert table.weights == [[STEPS], [2 * STEPS], [2 * STEPS]]
    first = np.random.default_rng(7).standard_normal(SIZE).astype(np.float32)
    expected = first - np.sum(peers.moves[0][: 5 * STEPS], axis=0)
    np.testing.assert_allclose(table.slots[0].replica.theta, expected, rtol=0, atol=1e-5)
    # The share of a single peer is 1: it starts each time from its own parameters.
    np.testing.assert_allclose(peers.thetas[0], first - np.sum(peers.moves[0], axis=0), rtol=0, atol=1e-5)


def test_eager_fetched_state_drops_pending_delta():
    table, _ = play("momentum = 0.9", 3)
    replica, other = table.slots[0].replica, table.slots[1].replica
    assert np.abs(replica.ahead).max() > 0 and np.abs(replica.drift).max() > 0
    offer = StateOffer(other.round, other.digest, LAYOUT.digest, other.state.nbytes, other.members)
    replica.install(FetchedState(offer, tuple(other.hashes), {0: bytes(other.chunk(0))}, ()))
    assert not replica.ahead.any() and not replica.drift.any() and not replica.sent.any()
    assert np.array_equal(replica.start, replica.theta)


def test_eager_model_equals_state_after_last_round():
    table, peers = play("", 3, run="[run]\nrounds = 3\n")
    assert all(np.array_equal(theta, table.slots[0].replica.theta) for theta in peers.thetas)
    # Training that would be lost is not made.
    assert [len(moves) for moves in peers.moves] == [3 * STEPS] * PEERS


def test_eager_has_defaults():
    run = parse('[outer]\nmethod = "eager"')
    assert (run.outer.sync_every, run.outer.lr, run.outer.momentum, run.pace, run.overlap) == (30, 0.2, 0.9, 30, 30)
    assert run.steps_after(3) == 90 and b"local_mix" not in run.canonical()
    with pytest.raises(ManifestError, match="outer.overlap does not apply to this method"):
        parse('[outer]\nmethod = "eager"\noverlap = 2')
