"""CO2: one round of delay, equal replicas, and a penalty for late steps."""

from __future__ import annotations

import asyncio

import msgspec
import numpy as np
import pytest
from thinwire.collectives.outcome import Outcome
from thinwire.collectives.state_sync.state_sync import FetchedState
from thinwire.node.methods.overlapped.co2 import length
from thinwire.node.state.layout import Layout, Piece
from thinwire.swarm.manifest.manifest import ManifestError
from thinwire.swarm.manifest.parser import parse
from thinwire.swarm.messages.registry import Ballot, Commit, Proposal, StateOffer

from benchmarks.training.round_table import RoundTable

SIZE, PEERS, STEPS = 5_000, 3, 4
LAYOUT = Layout((Piece("w", (SIZE,), "float32", 0, SIZE),), SIZE, b"l" * 32)


def first():
    return np.random.default_rng(7).standard_normal(SIZE).astype(np.float32)


class Peers:
    """Models with random steps; values that were written to them, and those after each round's steps."""

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
        manifest = parse(
            f'{run}[exchange]\ncodec = "{codec}"\naggregation = "mean"\n[outer]\nmethod = "co2"\nsync_every = {STEPS}\n{outer}'
        )
        peers, digests = Peers(count), []
        table = RoundTable(manifest, LAYOUT, [peers.learner(index) for index in range(count)], fail)
        await table.play(rounds, peers.train, lambda: digests.append({slot.replica.digest for slot in table.slots}))
        assert all(len(found) == 1 for found in digests)
        return table, peers

    return asyncio.run(main())


@pytest.mark.parametrize("clip", [0.0, 0.04])
def test_co2_replica_makes_the_published_step(clip):
    """Compared with the published algorithm with x_t, x̄_t and m, which has no θ̄ that is ahead."""
    table, peers = play(f"lr = 0.3\nmomentum = 0.8\nmomentum_clip = {clip}", 7)
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
    # The common state is one round ahead of the start of training.
    assert np.abs(table.slots[0].replica.theta - x[7]).max() > 1e-3


def test_co2_failed_round_is_sent_again_with_later_steps():
    """One peer without momentum, with η so that the penalty is known: θ̄ makes steps of all training."""
    table, peers = play("lr = 1e-9\nmomentum = 0.0", 5, fail=[2, 3], count=1)
    replica = table.slots[0].replica
    assert replica.round == 3 and table.weights == [[STEPS], [2 * STEPS], [2 * STEPS]]
    # The last momentum is the change of the last round: it has the steps of the two failed attempts.
    moved = 2 * STEPS * 0.005
    assert abs(float(replica.momentum.mean()) - moved) < 0.1 * moved


def test_co2_joiner_continues_from_fetched_state():
    """θ̄ and the momentum are the whole state: a joiner makes the same steps from the next round on."""
    table, _ = play("", 3)
    replica, other = (table.slots[index].replica for index in (0, 1))
    replica.theta[:], replica.momentum[:] = 0.0, 0.0
    size, lineage = other.state.nbytes, other.lineage
    offer = StateOffer(other.round, other.digest, LAYOUT.digest, size, other.members, lineage=lineage)
    chunks = {index: bytes(other.chunk(index)) for index in range(len(other))}
    replica.install(FetchedState(offer, tuple(other.hashes), chunks, (), other.chain))
    assert np.array_equal(replica.start, other.theta) and not replica.sent.any()
    results = [bytes(one) for one in other.contribution(lambda start, stop, out: out.fill(0), attempt=1, peers=2)]
    proposal = Proposal(other.round + 1, 0, Ballot(1, bytes(32)), table.members, table.members, (), (), None, ())
    for one in (replica, other):
        one.commit(Outcome(tuple(results), Commit(proposal, bytes(32), ())), bytes(32))
    assert replica.digest == other.digest


def test_co2_clip_length_is_that_of_the_whole_vector():
    parts = np.split(first(), [1, 70, 4_000])
    assert length(parts) == pytest.approx(float(np.linalg.norm(first().astype(np.float64))), rel=1e-12)


def test_co2_model_equals_state_after_last_round():
    table, peers = play("", 3, run="[run]\nrounds = 3\n", codec="int8(block=256)")
    assert all(np.array_equal(theta, table.slots[0].replica.theta) for theta in peers.thetas)


@pytest.mark.parametrize(
    ("line", "message"),
    [
        ("overlap = 2", "outer.overlap does not apply"),
        ('step_balancing = "by-speed"', "outer.step_balancing does not apply"),
        ("nesterov = true", "outer.nesterov does not apply"),
        ("[data]\nexactly_once = true", "data.exactly_once does not work with the method 'co2'"),
    ],
)
def test_co2_refuses_invalid_settings(line, message):
    with pytest.raises(ManifestError, match=message) as caught:
        parse(f'[outer]\nmethod = "co2"\n{line}')
    assert caught.value.hint


def test_co2_has_defaults():
    run = parse('[outer]\nmethod = "co2"')
    assert (run.outer.sync_every, run.outer.momentum_clip, run.pace, run.overlap) == (30, 0.0, 30, 30)
    said, usual = (msgspec.msgpack.decode(one.canonical())["outer"] for one in (run, parse("")))
    assert "momentum_clip" in said and "staleness" not in said and "momentum_clip" not in usual
