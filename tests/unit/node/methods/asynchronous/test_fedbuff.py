"""Asynchronous methods: partial rounds, the weight of age, and following other rounds while training."""

from __future__ import annotations

import asyncio
from types import SimpleNamespace

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from thinwire.collectives.outcome import Outcome
from thinwire.collectives.rounds.data_planes.contributions import summarize
from thinwire.collectives.topology.shards import grid
from thinwire.compression import registry
from thinwire.node.methods.asynchronous.delayed_nesterov import DelayedNesterovReplica, dealt
from thinwire.node.methods.asynchronous.fedbuff import FedBuffReplica
from thinwire.node.methods.registry import METHODS
from thinwire.node.runtime.asyncio_extra import at_once
from thinwire.node.state.layout import Layout, Piece
from thinwire.node.state.replica import Replica
from thinwire.swarm.manifest.manifest import ManifestError
from thinwire.swarm.manifest.parser import parse
from thinwire.swarm.messages.registry import Ballot, Commit, Contribution, Exclusion, Proposal

SIZE = 3_000
LAYOUT = Layout((Piece("w", (SIZE,), "float32", 0, SIZE),), SIZE, b"l" * 32)
PEERS = tuple(bytes([index]) * 32 for index in range(4))
CODEC = registry.dense("fp32")
CUT = grid(SIZE, CODEC)


def replica_of(method, outer="", kind=None):
    manifest = parse(f'[outer]\nmethod = "{method}"\n{outer}')
    kind = kind or {"buffered-async": FedBuffReplica, "delayed-nesterov": DelayedNesterovReplica}[method]
    return kind.begin(manifest, LAYOUT, CODEC, CUT, np.zeros(SIZE, np.float32), PEERS)


def vector(seed):
    return np.random.default_rng(seed).standard_normal(SIZE).astype(np.float32)


def sent(mean):
    """Return results that decode to this."""
    return [mean[slice(*CUT.span(index))].tobytes() for index in range(len(CUT))]


def outcome_of(number, mean, contributors, excluded=()):
    """The outcome of a round with these contributors."""
    entries = tuple(Contribution(peer, 1, 10) for peer in contributors)
    out = tuple(Exclusion(peer, reason) for peer, reason in excluded)
    proposal = Proposal(number, 0, Ballot(1, PEERS[1]), PEERS, PEERS, entries, out, None, ())
    return Outcome(tuple(sent(mean)), Commit(proposal, bytes(32), ()), dict(excluded))


def arrive(replica, mean, contributors=1):
    replica.commit(outcome_of(1, mean, PEERS[:contributors]), PEERS[0])


def test_delayed_momentum_does_not_add_up_over_arrivals():
    """Four equal pseudo-gradients: 12.14 times their length with one Nesterov step each, 1.9 with one for all."""
    g = vector(1)
    naive = replica_of("buffered-async", "lr = 1.0\nmomentum = 0.9\nnesterov = true\nbuffer_size = 1")
    delayed = replica_of("delayed-nesterov", "lr = 1.0\nmomentum = 0.9\nbuffer_size = 4")
    for _ in range(4):
        arrive(naive, g)
        arrive(delayed, g)
    np.testing.assert_allclose(naive.theta, -12.1441 * g, rtol=1e-5)
    np.testing.assert_allclose(delayed.theta, -1.9 * g, rtol=1e-5)
    assert delayed.arrived == 0 and not delayed.waiting.any()


@given(st.lists(st.integers(1, 4), min_size=1, max_size=8), st.sampled_from([0, 2, 3, 4, 7]))
def test_delayed_nesterov_rounds_equal_single_arrivals(sizes, arrivals):
    """Compared with the published algorithm, which has one arrival at a time."""
    replica = replica_of("delayed-nesterov", f"lr = 0.5\nmomentum = 0.8\nbuffer_size = {arrivals}")
    whole = arrivals or 4
    theta, m, waiting, count = np.zeros(SIZE), np.zeros(SIZE), np.zeros(SIZE), 0
    for number, size in enumerate(sizes):
        g = vector(number)
        arrive(replica, g, size)
        for _ in range(size):
            waiting, count = waiting + g, count + 1
            if count == whole:
                m = 0.8 * m + waiting / whole
                theta = theta - 0.5 * (0.8 * m + g / whole)
                waiting, count = np.zeros(SIZE), 0
            else:
                theta = theta - 0.5 * g / whole
        assert replica.arrived == count and replica.round == number + 1
    np.testing.assert_allclose(replica.theta, theta, rtol=0, atol=1e-4)
    np.testing.assert_allclose(replica.momentum, m, rtol=0, atol=1e-4)
    np.testing.assert_allclose(replica.waiting, waiting, rtol=0, atol=1e-4)


@given(st.integers(0, 300), st.integers(1, 300), st.integers(1, 300))
def test_every_arrival_is_applied_once(before, arrivals, whole):
    *full, rest = dealt(before, arrivals, whole)
    assert sum(full) + rest == arrivals and all(0 <= new <= whole for new in full)
    assert (rest if full else before + rest) < whole


def test_invalid_arrival_count_is_clamped():
    replica = replica_of("delayed-nesterov")
    for strange, meant in ((np.nan, 0), (-3.0, 0), (np.inf, 256), (2.0, 2)):
        replica.extra[-1] = strange
        assert replica.arrived == meant


@pytest.mark.parametrize("momentum", [0.0, 0.9])
def test_fedbuff_with_all_peers_equals_diloco_bit_for_bit(momentum):
    outer = f"lr = 0.7\nmomentum = {momentum}\nnesterov = true"
    replica, plain = replica_of("buffered-async", outer), replica_of("diloco", outer, Replica)
    for number in range(4):
        arrive(replica, vector(number), 4)
        arrive(plain, vector(number), 4)
        assert replica.digest == plain.digest


def test_fedbuff_step_scales_with_part_of_contributors():
    replica = replica_of("buffered-async", "lr = 0.5")
    arrive(replica, vector(1), 3)
    np.testing.assert_allclose(replica.theta, -0.5 * 0.75 * vector(1), rtol=1e-6)


def test_stale_contribution_counts_less():
    replica = replica_of("buffered-async", "staleness_exponent = 0.5")
    model = replica.theta - vector(1)

    def read(start, stop, out):
        out[:] = model[start:stop]

    def contribution():
        return np.concatenate(
            [np.frombuffer(one, np.float32) for one in replica.contribution(read, attempt=1, peers=4)]
        )

    np.testing.assert_array_equal(contribution(), vector(1))
    for age, share in ((1, 2**-0.5), (2, 3**-0.5), (3, 0.5)):
        for count in (1, 3):  # steps are counted, not rounds
            arrive(replica, vector(age + 7), count)
        assert replica.age == age
        # Measured from its start, wherever the others are.
        np.testing.assert_allclose(contribution(), np.float32(share) * vector(1), rtol=1e-6)
    replica.reset()
    assert replica.age == 0 and np.array_equal(replica.start, replica.theta)
    model[5] = np.nan
    with pytest.raises(FloatingPointError):
        contribution()


class Rounds:
    """Session whose rounds end on command of the test."""

    def __init__(self, method="buffered-async", outer="", run=""):
        manifest = parse(f'{run}[exchange]\ncodec = "fp32"\n[outer]\nmethod = "{method}"\n{outer}')
        self.me, self.ready = PEERS[0], PEERS
        self.replica = replica_of(method, outer)
        self.model = self.replica.theta.copy()
        self.catch_up, self.patience, self.grace = SimpleNamespace(behind=asyncio.Event()), 1.0, 2.0
        self.current = SimpleNamespace(
            agreement=SimpleNamespace(commit=None), attempt=0, data_plane=SimpleNamespace(summarize=summarize)
        )
        self.trials = SimpleNamespace(holds=False, on_trial=lambda peer: False)
        self.verdicts, self.announced, self.advanced, self.reports = [], [], 0, []
        self.rounds = METHODS[method].rounds(self, manifest, read=self.read, write=self.write, work=at_once)

    def read(self, start, stop, out):
        out[:] = self.model[start:stop]

    def write(self, theta, start=0, keep=0.0):
        self.model[start : start + theta.size] = theta

    def make_room(self):
        pass

    async def average(self, source, *, weight, **told):
        self.announced.append((weight, b"".join(source)))
        return await self.outcome()

    async def outcome(self, *, give_up=None):
        while not self.verdicts:
            await asyncio.sleep(0)
        verdict = self.verdicts[0]
        return verdict if verdict.commit is not None else self.verdicts.pop(0)

    async def change(self, work, how, *, settled=True):
        found = await work(how)
        self.replica.compute_digest()
        return found

    def advance(self):
        self.advanced += 1
        self.verdicts.pop(0)

    def report(self, name, detail):
        self.reports.append((name, detail))

    def commit(self, mean, *contributors, excluded=()):
        """End the next round, with these contributors."""
        number = self.replica.round + len(self.verdicts) + 1
        self.verdicts.append(outcome_of(number, mean, contributors, excluded))


async def settled():
    for _ in range(200):
        await asyncio.sleep(0)


def play(main):
    asyncio.run(asyncio.wait_for(main(), 20))


def test_rounds_of_others_are_followed_without_touching_the_model():
    async def main():
        table, told = Rounds(outer="lr = 1.0"), []
        table.rounds.follow(told.append)
        table.model -= vector(1)
        table.commit(vector(2), PEERS[1])
        table.commit(vector(3), PEERS[2], PEERS[3])
        await settled()
        replica = table.replica
        assert replica.round == 2 and [one.commit.proposal.round for one in told] == [1, 2] and table.advanced == 2
        np.testing.assert_allclose(replica.theta, -0.25 * vector(2) - 0.5 * vector(3), rtol=0, atol=1e-6)
        np.testing.assert_array_equal(table.model, -vector(1))
        table.commit(vector(4), PEERS[0])
        job = asyncio.ensure_future(table.rounds.sync(weight=7, loss=1.0, speed=2.0))
        outcome = await job
        weight, payload = table.announced[0]
        assert weight == 7 and replica.round == 3 and outcome.commit is not None and outcome.kept == 0
        expected = np.float32((1 + 3 / 4) ** -0.5) * vector(1)
        np.testing.assert_allclose(np.frombuffer(payload, np.float32), expected, rtol=1e-5)
        assert np.array_equal(table.model, replica.theta) and replica.age == 0
        await table.rounds.rest()

    play(main)


def test_late_contribution_is_sent_in_the_next_round():
    async def main():
        table, told = Rounds(outer="lr = 1.0\nstaleness_exponent = 0.0"), []
        table.rounds.follow(told.append)
        table.model -= vector(1)
        await settled()
        table.commit(vector(2), PEERS[1], excluded=[(PEERS[0], "late")])
        table.commit(vector(3), PEERS[0], PEERS[1])
        outcome = await table.rounds.sync(weight=7, loss=1.0, speed=2.0)
        assert outcome.commit.proposal.round == 2 and [one.commit.proposal.round for one in told] == [1]
        assert table.announced[0] == table.announced[1] and np.array_equal(table.model, table.replica.theta)
        await table.rounds.rest()

    play(main)


def test_refused_contribution_is_not_sent_again():
    async def main():
        table = Rounds()
        table.rounds.follow(lambda outcome: None)
        table.model -= vector(1)
        await settled()
        table.commit(vector(2), PEERS[1], excluded=[(PEERS[0], "norm")])
        outcome = await table.rounds.sync(weight=7, loss=1.0, speed=2.0)
        assert outcome.commit is not None and outcome.kept == 0 and len(table.announced) == 1
        assert np.array_equal(table.model, table.replica.theta)
        await table.rounds.rest()

    play(main)


def test_contribution_beyond_staleness_is_dropped():
    async def main():
        table = Rounds(outer="staleness = 2")
        table.rounds.follow(lambda outcome: None)
        for number in range(2 * len(PEERS) + 1):  # each is one of several contributions to a step
            table.commit(vector(number), PEERS[1])
        table.model -= vector(1)
        await settled()
        outcome = await table.rounds.sync(weight=7, loss=1.0, speed=2.0)
        assert outcome.dropped and outcome.commit is None and not table.announced
        assert np.array_equal(table.model, table.replica.theta) and table.replica.age == 0
        assert table.reports[0][0] == "unsent"
        await table.rounds.rest()

    play(main)


def test_contribution_after_each_other_peer_is_not_stale():
    """Peers that arrive one by one make one step in as many rounds as there are peers."""

    async def main():
        table = Rounds(outer="staleness = 1")
        table.rounds.follow(lambda outcome: None)
        for peer in PEERS[1:]:
            table.commit(vector(1), peer)
        await settled()
        assert 0 < table.replica.age < 1
        table.model -= vector(1)
        table.commit(vector(2), PEERS[0])
        outcome = await table.rounds.sync(weight=7, loss=1.0, speed=2.0)
        assert outcome.commit is not None and not outcome.dropped and table.replica.age == 0
        await table.rounds.rest()

    play(main)


def test_sync_during_round_of_others_waits_for_its_commit():
    async def main():
        table, told, gate = Rounds(outer="lr = 1.0"), [], asyncio.Event()

        async def change(work, how, *, settled=True):
            await gate.wait()
            return await work(how)

        table.change = change
        table.rounds.follow(told.append)
        table.commit(vector(2), PEERS[1])
        await settled()
        assert not table.replica.round
        table.commit(vector(3), PEERS[0])
        job = asyncio.ensure_future(table.rounds.sync(weight=7, loss=1.0, speed=2.0))
        await settled()
        gate.set()
        outcome = await job
        assert [one.commit.proposal.round for one in told] == [1] and outcome.commit.proposal.round == 2
        await table.rounds.rest()

    play(main)


def test_verdict_on_own_contribution_waits_for_sync():
    async def main():
        unfit = [(PEERS[0], "norm")]
        for run, who, out in (("", PEERS[0], ()), ("", PEERS[1], unfit), ("[run]\nrounds = 1\n", PEERS[1], ())):
            table = Rounds(run=run)
            table.rounds.follow(lambda outcome: None)
            table.model -= vector(1)
            table.commit(vector(2), who, excluded=out)
            await settled()
            assert table.replica.round == 0 and not table.advanced
            np.testing.assert_array_equal(table.model, -vector(1))
            await table.rounds.rest()

    play(main)


def test_non_finite_model_is_reset_and_contributes_nothing():
    async def main():
        table = Rounds()
        table.model[3] = np.inf
        table.commit(vector(2), PEERS[1])
        outcome = await table.rounds.sync(weight=7, loss=1.0, speed=2.0)
        assert outcome.commit is not None and table.announced == [(0, b"")] and table.replica.age == 0
        assert np.array_equal(table.model, table.replica.theta)
        table.model[3] = np.inf
        table.verdicts.append(Outcome())
        outcome = await table.rounds.sync(weight=7, loss=1.0, speed=2.0)
        assert outcome.commit is None and outcome.dropped
        assert np.array_equal(table.model, table.replica.theta)

    play(main)


def test_error_while_following_is_raised_by_next_sync():
    async def main():
        table = Rounds()

        def broken(outcome):
            raise OSError("disk")

        table.rounds.follow(broken)
        table.commit(vector(2), PEERS[1])
        await settled()
        with pytest.raises(OSError, match="disk"):
            await table.rounds.sync(weight=7, loss=1.0, speed=2.0)

    play(main)


@pytest.mark.parametrize("method", ["buffered-async", "delayed-nesterov"])
@pytest.mark.parametrize(
    ("line", "message"),
    [
        ("overlap = 2", "outer.overlap does not apply"),
        ("momentum_clip = 0.1", "outer.momentum_clip does not apply"),
        ("[data]\nexactly_once = true", "data.exactly_once does not work with the method"),
    ],
)
def test_asynchronous_methods_refuse_invalid_settings(method, line, message):
    with pytest.raises(ManifestError, match=message) as caught:
        parse(f'[outer]\nmethod = "{method}"\n{line}')
    assert caught.value.hint


def test_asynchronous_methods_have_defaults():
    run = parse('[outer]\nmethod = "delayed-nesterov"\nstep_balancing = "by-speed"')
    assert (run.outer.sync_every, run.exchange.straggler_timeout, run.overlap, run.asynchronous) == (30, 2.0, 0, True)
    assert not parse("").asynchronous
    with pytest.raises(ManifestError, match="exchange.aggregation = 'rda' does not apply to the method 'noloco'"):
        parse('[outer]\nmethod = "noloco"\n[exchange]\naggregation = "rda"')
    with pytest.raises(ManifestError, match="'rda' does not apply to the method 'sparseloco'"):
        parse('[outer]\nmethod = "sparseloco"\n[exchange]\naggregation = "rda"')
    with pytest.raises(ManifestError, match="'rda' needs all contributions in one place"):
        parse('[exchange]\naggregation = "rda"\ntopology = "hierarchy"')
    assert parse('[exchange]\naggregation = "rda"').canonical() != parse("").canonical()
