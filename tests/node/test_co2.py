"""CO2: as far behind as eager, all replicas the same, and a step that comes late counts less."""

from __future__ import annotations

import asyncio

import msgspec
import numpy as np
import pytest
from thinwire.collectives.statesync import Fetched
from thinwire.node.co2 import length
from thinwire.node.fragments import Layout, Piece
from thinwire.sims.table import Table
from thinwire.swarm.manifest import ManifestError, parse
from thinwire.swarm.protocol import StateOffer

SIZE, PEERS, STEPS = 5_000, 3, 4
LAYOUT = Layout((Piece("w", (SIZE,), "float32", 0, SIZE),), SIZE, b"l" * 32)


def first():
    return np.random.default_rng(7).standard_normal(SIZE).astype(np.float32)


class Peers:
    """Models that go where chance takes them; what was written to them, and where they were after each round's steps."""

    def __init__(self, count):
        self.thetas = [first() for _ in range(count)]
        self.rngs = [np.random.default_rng(index) for index in range(count)]
        self.starts = [[] for _ in range(count)]
        self.steps = [[] for _ in range(count)]

    def learner(self, index):
        theta = self.thetas[index]

        def read(start, stop, out):
            out[:] = theta[start:stop]

        def write(values, start=0, keep=0.0):
            theta[:] = values
            self.starts[index].append(values.copy())

        return theta.copy(), read, write

    def train(self, index, steps):
        for _ in range(steps):
            self.thetas[index] -= (self.rngs[index].standard_normal(SIZE) * 0.01 + 0.005).astype(np.float32)
            self.steps[index].append(self.thetas[index].copy())
        return steps


def play(outer, rounds, *, fail=(), run="", count=PEERS, codec="fp32"):
    async def main():
        manifest = parse(f'{run}[exchange]\ncodec = "{codec}"\n[outer]\nmethod = "co2"\nsteps = {STEPS}\n{outer}')
        peers, digests = Peers(count), []
        table = Table(manifest, LAYOUT, [peers.learner(index) for index in range(count)], fail)
        await table.play(rounds, peers.train, lambda: digests.append({seat.replica.digest for seat in table.seats}))
        assert all(len(found) == 1 for found in digests)
        return table, peers

    return asyncio.run(main())


@pytest.mark.parametrize("clip", [0.0, 0.04])
def test_every_replica_makes_the_step_that_the_paper_writes(clip):
    """Against the algorithm as it is published, with its x_t, x̄_t and m, which knows nothing of a θ̄ that runs ahead."""
    table, peers = play(f"lr = 0.3\nmomentum = 0.8\nclip = {clip}", 7)
    x, means, momentum = [first().astype(np.float64)], [], np.zeros(SIZE)
    clipped = 0
    for number in range(7):
        # Steps of round t are made from x_t on every replica; the first two rounds begin at the same place.
        starts = (
            {peers.starts[index][number - 1].tobytes() for index in range(PEERS)} if number else {first().tobytes()}
        )
        assert len(starts) == 1
        np.testing.assert_allclose(np.frombuffer(starts.pop(), np.float32), x[number], rtol=0, atol=2e-5)
        ends = [peers.steps[index][STEPS * (number + 1) - 1].astype(np.float64) for index in range(PEERS)]
        means.append(np.mean(ends, axis=0))
        if not number:
            x.append(x[0].copy())
            continue
        t = number
        gap = np.linalg.norm(x[t] - x[t - 1])
        penalty = 1 + gap / (np.linalg.norm(x[t - 1] - means[t - 1]) + 1e-12)
        momentum = 0.8 * momentum + (x[t - 1] - means[t - 1]) / penalty
        if clip:
            clipped += np.sum(np.abs(momentum) > clip)
            momentum = np.clip(momentum, -clip, clip)
        x.append(x[t] - 0.3 * momentum)
    assert penalty > 1.2 and (clipped > 0) == bool(clip)
    # What all agree on is a round ahead of what was trained from.
    assert np.abs(table.seats[0].replica.theta - x[7]).max() > 1e-3


def test_a_round_that_comes_to_nothing_is_sent_again_with_what_came_after():
    """Alone, without momentum, and with η so that the penalty is known: θ̄ makes whole steps of all that was trained."""
    table, peers = play("lr = 1e-9\nmomentum = 0.0", 5, fail=[2, 3], count=1)
    replica = table.seats[0].replica
    assert replica.round == 3 and table.weights == [[STEPS], [2 * STEPS], [2 * STEPS]]
    # The last momentum is what the last round brought: the steps of the two tries that came to nothing are in it.
    moved = 2 * STEPS * 0.005
    assert abs(float(replica.momentum.mean()) - moved) < 0.1 * moved


def test_a_joiner_has_what_all_have():
    """θ̄ and the momentum are the whole state: who takes it over makes the same steps from the next round on."""
    table, _ = play("", 3)
    replica, other = (table.seats[index].replica for index in (0, 1))
    replica.theta[:], replica.momentum[:] = 0.0, 0.0
    offer = StateOffer(other.round, other.digest, LAYOUT.digest, other.state.nbytes, other.members)
    chunks = {index: bytes(other.chunk(index)) for index in range(len(other))}
    replica.install(Fetched(offer, tuple(other.hashes), chunks, ()))
    assert np.array_equal(replica.start, other.theta) and not replica.sent.any()
    grid, codec = table.seats[0].session.grid, table.seats[0].session.codec
    results = [bytes(one) for one in other.encode(lambda *_: None, grid, codec)]
    for one in (replica, other):
        one.apply(results, grid, codec, members=table.members, lr=0.7, momentum=0.9, nesterov=False)
    assert replica.digest == other.digest


def test_a_length_is_that_of_the_whole():
    parts = np.split(first(), [1, 70, 4_000])
    assert length(parts) == pytest.approx(float(np.linalg.norm(first().astype(np.float64))), rel=1e-12)


def test_after_the_last_round_the_model_is_what_all_have():
    table, peers = play("", 3, run="[run]\nrounds = 3\n", codec="int8(block=256)")
    assert all(np.array_equal(theta, table.seats[0].replica.theta) for theta in peers.thetas)


@pytest.mark.parametrize(
    ("line", "message"),
    [
        ("overlap = 2", "outer.overlap says nothing with the method 'co2'"),
        ('work = "by-power"', "outer.work says nothing with the method 'co2'"),
        ("nesterov = true", "outer.nesterov says nothing"),
        ("[data]\nonce = true", "data.once is not for the method 'co2'"),
    ],
)
def test_what_it_cannot_have_is_refused(line, message):
    with pytest.raises(ManifestError, match=message) as caught:
        parse(f'[outer]\nmethod = "co2"\n{line}')
    assert caught.value.hint


def test_defaults():
    run = parse('[outer]\nmethod = "co2"')
    assert (run.outer.steps, run.outer.clip, run.pace, run.overlap) == (30, 0.0, 30, 30)
    said, usual = (msgspec.msgpack.decode(one.canonical())["outer"] for one in (run, parse("")))
    assert "clip" in said and "staleness" not in said and "clip" not in usual
