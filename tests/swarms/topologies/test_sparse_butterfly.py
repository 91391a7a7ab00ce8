"""Swarms whose sparse payloads go to owners that sum them and send a part of the sum."""

from __future__ import annotations

import asyncio

import blake3
import numpy as np
import pytest
from kit import scenes
from thinwire.collectives.blocking_work import at_once
from thinwire.collectives.rounds.data_planes.sparse_butterfly import steady
from thinwire.collectives.rounds.round_factory import round_of
from thinwire.compression.sparse import mean as sparsemean
from thinwire.compression.sparse.error_feedback import ErrorFeedback, stored
from thinwire.compression.sparse.portions import PortionCodecs, portion_chunks
from thinwire.sims.engine import virtual_loop
from thinwire.swarm.frame import Frame
from thinwire.swarm.messages.registry import Chunk, Commit, CompactCommit, Result
from thinwire.swarm.rendezvous_hash import leader_order

RUN = bytes(range(32))
TOPK = "topk(k=16,chunk=256)|2bit|rice"
SIZE = 6_000
PHASES = ["announce", "open", "record", "vote", "commit"]


@pytest.fixture
def sparse_swarm(swarm):
    def make(founders, *, outer="", size=SIZE, codec=TOPK, **rest):
        more = f'method = "sparseloco"\n{outer}'
        return swarm(founders, codec=codec, outer=more, size=size, collective="sparse-butterfly", **rest)

    return make


def kept(s, indices=None):
    """Return the sum of the residuals of all owners."""
    whole = np.zeros(s.size)
    for index in s.nodes if indices is None else indices:
        for chunk, rest in rests(s.nodes[index]).items():
            whole[slice(*s.nodes[index].session.grid.span(chunk))] += rest
    return whole


def rests(node):
    """Return the residuals of one owner by chunk."""
    return {chunk: rest.copy() for chunk, rest in node.replica.owner_residuals.all().items()}


def holders(s, indices):
    """Return for each chunk the owners with a residual."""
    indices = list(indices)
    count = len(s.nodes[indices[0]].session.grid)
    return [[i for i in indices if s.nodes[i].replica.owner_residuals.of(chunk) is not None] for chunk in range(count)]


def expected(s, rounds):
    """Return θ, residual and sum of means after rounds without faults, computed on the whole vector."""
    portions, cut, outer = s.nodes[0].replica.codec.portions, s.nodes[0].session.grid, s.manifest.outer
    keep = np.float32(s.manifest.exchange.owner_residual_decay)
    chunks = portion_chunks(s.size, cut.chunk, portions.codec.chunk)
    theta = np.random.default_rng(7).standard_normal(s.size).astype(np.float32)
    order = sorted(s.nodes.values(), key=lambda node: node.id)
    memory = {node.index: ErrorFeedback(portions.codec, chunks, outer.residual_decay) for node in order}
    rest, means = np.zeros(s.size, np.float32), np.zeros(s.size)
    for number in range(1, rounds + 1):
        said = []
        for node in order:
            local = theta.copy()
            local -= (np.random.default_rng((node.index, number)).standard_normal(s.size) * 0.01).astype(np.float32)
            said.append(portions.codec.decode(memory[node.index].prepare(stored(theta - local)), chunks))
            memory[node.index].commit()
        mean = sparsemean.mean(said, [100.0] * len(said), chunks, outer.denominator)
        means += mean
        rest = mean + keep * rest
        sent = portions.wide.select(rest, chunks)
        sent.scatter(rest, -1.0)
        moved = np.zeros_like(theta)
        sent.scatter(moved)
        theta -= np.float32(outer.lr) * moved
    return theta, rest, means


@pytest.mark.parametrize(
    "outer, exchange", [("", {}), ('lr = 0.9\ndenominator = "mean"\n', {"owner_residual_decay": 1.0})]
)
def test_applied_and_retained_values_sum_to_the_means(sparse_swarm, outer, exchange):
    async def main():
        s = sparse_swarm(5, rounds=4, outer=outer, **exchange)
        s.start()
        await s.finish()
        s.check()
        theta, rest, means = expected(s, 4)
        for node in s.nodes.values():
            np.testing.assert_array_equal(node.replica.theta, theta)
            assert not any(node.missing.values()) and node.replica.state.size == SIZE
            assert 0 < len(rests(node)) <= len(node.session.grid) // 5 + 1
        np.testing.assert_array_equal(kept(s), rest)
        if exchange:
            first = np.random.default_rng(7).standard_normal(s.size).astype(np.float32)
            np.testing.assert_allclose((first - theta) / 0.9 + kept(s), means, atol=2e-6)
            assert np.linalg.norm(rest) > 0.1 * np.linalg.norm(means)  # residuals are not empty

    virtual_loop.run(main(), seed=1)


@pytest.mark.parametrize("phase", PHASES)
@pytest.mark.parametrize("victim", [0, pytest.param(1, marks=pytest.mark.trial)])
def test_sparse_butterfly_survives_kill_of_one_of_six(sparse_swarm, phase, victim, monkeypatch):
    monkeypatch.setattr("thinwire.collectives.rounds.data_planes.sparse_butterfly.HOLD", 1)

    async def main():
        s = sparse_swarm(6, seed=victim)
        rest = await scenes.lose(s, {victim: phase})
        scenes.soon(s, rest)
        # Each chunk has one owner with a residual; new owners of the dead peer's chunks start without one.
        assert [len(found) for found in holders(s, rest)] == [1] * len(s.nodes[rest[0]].session.grid)

    virtual_loop.run(main(), seed=victim)


@pytest.mark.parametrize("seed", [0, *(pytest.param(seed, marks=pytest.mark.trial) for seed in range(1, 6))])
def test_sparse_butterfly_survives_kill_of_two_of_six(sparse_swarm, seed):
    first, second = seed % 6, (seed + 1) % 6

    async def main():
        await scenes.lose(sparse_swarm(6, seed=seed), {first: PHASES[seed % 5], second: PHASES[(seed // 2) % 5]})

    virtual_loop.run(main(), seed=seed)


def test_sparse_butterfly_last_survivor_continues_without_loss(sparse_swarm):
    async def main():
        s = sparse_swarm(4)
        await scenes.lose(s, dict.fromkeys((1, 2, 3), "open"))
        assert holders(s, [0]) == [[0]] * len(s.nodes[0].session.grid)

    virtual_loop.run(main(), seed=2)


@pytest.mark.parametrize("phase", ["announce", "vote"])
def test_joiner_takes_chunks_over_and_their_owner_residuals_are_dropped(sparse_swarm, phase, monkeypatch):
    monkeypatch.setattr("thinwire.collectives.rounds.data_planes.sparse_butterfly.HOLD", 1)

    async def main():
        s = sparse_swarm(3, rounds=8)
        joined = await scenes.join(s, phase)
        assert joined.id in s.nodes[0].contributors[8]
        found, count = holders(s, s.nodes), len(joined.session.grid)
        assert all(len(one) == 1 for one in found) and {7} < {one[0] for one in found}
        said = [fields for node in s.nodes.values() for _, name, fields in node.log if name == "residual_lost"]
        # A quarter of the chunks went to the newcomer, and few others elsewhere.
        moved = sum(int(str(fields["detail"]).split()[2]) for fields in said)
        assert count // 4 <= moved <= count // 2

    virtual_loop.run(main(), seed=3)


OTHERS = [pytest.param(phase, marks=pytest.mark.trial) for phase in PHASES if phase != "record"]


@pytest.mark.parametrize("phase", ["record", *OTHERS])
def test_killed_peer_rejoins_sparse_butterfly(sparse_swarm, phase):
    async def main():
        await scenes.come_back(sparse_swarm(4, rounds=10), phase)

    virtual_loop.run(main(), seed=5)


def test_sparse_butterfly_round_without_verdict_changes_nothing(sparse_swarm):
    """A minority alone: residuals of contributions and of sums are unchanged."""

    async def main():
        s = sparse_swarm(3, rounds=8)
        before = []

        def state():
            assert kept(s, [0]).any()
            return s.nodes[0].replica.digest, s.nodes[0].replica.feedback.residual.tobytes(), kept(s, [0]).tobytes()

        def look():
            assert state() == before[0]

        await scenes.part(s, [[0], [1, 2]], 9.0, lambda: before.append(state()), look)
        assert before

    virtual_loop.run(main(), seed=6, limit=4000)


def test_adopted_results_commit_with_owner_residuals(sparse_swarm):
    """The leader dies before it sends the commit: the next ballot adopts the results and residuals."""

    async def main():
        s = sparse_swarm(5, rounds=3)
        adopted, dead, before = {}, [], {}

        def dying(node):
            control = node.presence.send_queue.control

            def say(to, message):
                if isinstance(message, (Commit, CompactCommit)) and round_of(message) == 3 and not dead:
                    dead.append(node.index)
                    node.kill()
                if node.index not in dead:
                    control(to, message)

            node.presence.send_queue.control = say

        def watched(node):
            reached = s.reached

            def look(one, round, phase):
                if phase == "announce" and round == 3:
                    before.setdefault(one.index, rests(one))
                if phase == "commit" and round == 3:
                    adopted[one.index] = one.session.current.agreement.commit.proposal.adopted
                reached(one, round, phase)

            s.reached = look

        watched(s)
        for node in s.nodes.values():
            dying(node)
        s.start()
        while not dead:
            await asyncio.sleep(0.05)
        rest = [index for index in s.nodes if index != dead[0]]
        await s.finish(rest)
        s.check(rest)
        assert any(adopted[index] is not None for index in rest)
        # The residuals went into the sums of round 3, so they are empty.
        compared = 0
        for index in rest:
            after = rests(s.nodes[index])
            for chunk in before[index].keys() & after.keys():
                assert not np.array_equal(before[index][chunk], after[chunk])
                compared += 1
        assert compared

    virtual_loop.run(main(), seed=2)


def _levels(value):
    return lambda piece: scenes.levels(piece, value)


@pytest.mark.parametrize(
    ("change", "reasons"),
    [
        (_levels(np.nan), ("encoding", "not finite")),
        (_levels(60000.0), ("norm",)),
        (lambda piece: piece[:-1], ("length", "encoding")),
        (lambda piece: memoryview(bytes(piece) + bytes(4000)), ("length",)),
    ],
    ids=["not a number", "absurd", "short", "long"],
)
def test_bad_sparse_payload_is_excluded_with_reason(sparse_swarm, change, reasons):
    async def main():
        s = sparse_swarm(5)
        liar = s.nodes[1]
        owners = steady(len(liar.session.grid), tuple(sorted(node.id for node in s.nodes.values())), RUN)
        at = next(index for index, owner in enumerate(owners) if owner != liar.id)
        liar.forge(3, lambda pieces: [*pieces[:at], change(pieces[at]), *pieces[at + 1 :]])
        s.start()
        await s.finish()
        s.check()
        for node in s.nodes.values():
            assert list(node.missing[3]) == [liar.id] and node.missing[3][liar.id] in reasons
            assert node.missing[4] == {}

    virtual_loop.run(main(), seed=4)


def test_equivocating_owner_does_not_split_the_swarm(sparse_swarm):
    async def main():
        s = sparse_swarm(5, rounds=6)
        liar = s.nodes[4]
        bulk, told = liar.presence.send_queue.bulk, []

        def lying(to, frame, **rest):
            if isinstance(frame.message, Result) and frame.message.round == 3 and to[0] % 2:
                payload = bytearray(frame.payload)
                payload[-1] ^= 1
                frame = Frame(frame.message, bytes(payload))
                told.append(to)
            bulk(to, frame, **rest)

        liar.presence.send_queue.bulk = lying
        s.start()
        honest = [node.index for node in s.nodes.values() if node is not liar]
        await s.finish(honest)
        s.check(honest)
        assert told

    virtual_loop.run(main(), seed=4)


def test_leader_that_owns_all_chunks_makes_nobody_lose_residuals(sparse_swarm):
    """Sent values and residuals together are complete, although chunks went to the liar and back."""

    async def main():
        s = sparse_swarm(5, rounds=8, outer='lr = 0.9\ndenominator = "mean"\n', owner_residual_decay=1.0)
        seed = blake3.blake3(RUN + (4).to_bytes(8, "big")).digest()
        first = leader_order(seed, tuple(sorted(node.id for node in s.nodes.values())), 4, 0)[0]
        liar = next(node for node in s.nodes.values() if node.id == first)
        others = [node for node in s.nodes.values() if node is not liar]
        liar.round_factory.standing.slow_peers = lambda: [node.id for node in others]
        before = {}

        def look(node):
            before["kept"] = kept(s, [one.index for one in others])
            assert s.nodes[others[0].index].session.current.agreement.commit.proposal.idle

        s.fail_at(others[0].index, 4, "commit", look)
        s.start()
        await s.finish()
        s.check()
        assert before["kept"].any()
        assert not any(name == "residual_lost" for node in s.nodes.values() for _, name, _ in node.log)
        _, _, means = expected(s, 8)
        first = np.random.default_rng(7).standard_normal(s.size).astype(np.float32)
        np.testing.assert_allclose((first - liar.replica.theta) / 0.9 + kept(s), means, atol=1e-5)

    virtual_loop.run(main(), seed=4)


def test_sums_computed_in_executor_block_nothing_and_match(sparse_swarm, monkeypatch):
    """Each takes a while, in which an owner dies and chunks move: results equal those of immediate sums."""
    reduce, depth = PortionCodecs.reduce, []

    def watched(self, *rest):
        assert depth, "on the loop's time"
        return reduce(self, *rest)

    async def slowly(function):
        await asyncio.sleep(0.05)
        depth.append(1)
        try:
            return function()
        finally:
            depth.pop()

    def digests(aside, victim=None):
        async def main():
            s = sparse_swarm(5, rounds=3, aside=aside)
            if victim is not None:
                s.fail_at(victim, 3, "open")
            s.start()
            rest = [index for index in s.nodes if index != victim]
            await s.finish(rest)
            s.check(rest)
            return s.nodes[1].digests

        return virtual_loop.run(main(), seed=2)

    with monkeypatch.context() as patch:
        patch.setattr(PortionCodecs, "reduce", watched)
        slow = digests(slowly)
        assert len(digests(slowly, 4)) == 3
    assert slow == digests(at_once)


def test_pending_sum_of_abandoned_round_does_not_vote(sparse_swarm):
    """A peer that begins a round again has promised nothing: a pending sum must not lead to a vote."""
    seen = {}

    async def slowly(function):
        await asyncio.sleep(0.2)
        return function()

    def leave(node):
        current = seen["current"] = node.session.current
        seen["due"] = current.data_plane.due
        seen["before"] = list(current.results)
        node.session.advance()

    async def main():
        s = sparse_swarm(3, aside=slowly)
        s.fail_at(0, 3, "open", lambda node: virtual_loop.current().call_later(0.15, leave, node))
        s.start()
        while not seen:
            await asyncio.sleep(0.1)
        await asyncio.sleep(2.0)
        assert seen["due"] and list(seen["current"].results) == seen["before"]
        assert not seen["current"].data_plane.due

    virtual_loop.run(main(), seed=1)


def test_failed_sum_is_raised_as_own_error(sparse_swarm, monkeypatch):
    def broken(self, *rest):
        raise RuntimeError("no such sum")

    monkeypatch.setattr(PortionCodecs, "reduce", broken)

    async def main():
        s = sparse_swarm(2)
        s.start()
        ends = await asyncio.gather(*(node.tasks[0] for node in s.nodes.values()), return_exceptions=True)
        assert [str(one.exceptions[0]) for one in ends] == ["no such sum"] * 2

    virtual_loop.run(main(), seed=1)


@pytest.mark.parametrize("missed", [False, True])
def test_restarted_owner_restores_residual_if_state_is_unchanged(sparse_swarm, missed):
    """From its checkpoint; it reports the loss if the others have continued."""

    async def main():
        s = sparse_swarm(3, rounds=9)
        seen = {}

        def crash(node):
            seen["kept"], old, own = rests(node), node.replica, node.replica.private_state(s.layout)
            node.kill()
            virtual_loop.current().call_later(2.5 if missed else 0.01, back, node.index, old, own)

        def back(index, old, own):
            again = s.join(index, 1)
            replica, enter = again.replica, again.rounds.enter
            replica.state[:], replica.round, replica.members = old.state, old.round, old.members
            replica.lives, replica.chain = old.lives, old.chain
            replica.seal()
            assert replica.digest == old.digest and replica.load_private(own, s.layout) == ""

            async def entered():
                await enter()
                seen["after"] = rests(again)

            again.rounds.enter = entered

        s.fail_at(1, 3, "applied", crash)
        s.start()
        await s.finish([0, 2])
        await s.finish([1])
        s.check()
        assert len(seen["kept"]) >= len(s.nodes[0].session.grid) // 3
        if missed:
            assert not seen["after"] and any(name == "residual_lost" for _, name, _ in s.nodes[1].log)
        else:
            assert seen["after"].keys() == seen["kept"].keys()
            assert all(np.array_equal(seen["after"][chunk], rest) for chunk, rest in seen["kept"].items())
            assert not any(name == "residual_lost" for _, name, _ in s.nodes[1].log)

    virtual_loop.run(main(), seed=3)


def test_restarted_owner_does_not_resend_committed_residual(sparse_swarm):
    """All sums of a round are there, and only the leader knows of its end; then an owner restarts.

    It starts from the checkpoint of the previous round, and applies the round like all others.
    """

    async def main():
        s = sparse_swarm(4, rounds=7)
        seed = blake3.blake3(RUN + (4).to_bytes(8, "big")).digest()
        first = leader_order(seed, tuple(sorted(node.id for node in s.nodes.values())), 4, 0)[0]
        leader = next(node for node in s.nodes.values() if node.id == first)
        owner, control, seen = (leader.index + 1) % 4, leader.presence.send_queue.control, {}

        def say(to, message):
            if isinstance(message, (Commit, CompactCommit)) and round_of(message) == 4:
                virtual_loop.current().call_later(1.2, control, to, message)
            else:
                control(to, message)

        def crash(_):
            old = s.nodes[owner].replica
            seen["kept"], own = rests(s.nodes[owner]), old.private_state(s.layout)
            s.nodes[owner].kill()
            replica = s.join(owner, 1).replica
            replica.state[:], replica.round, replica.members = old.state, old.round, old.members
            replica.lives, replica.chain = old.lives, old.chain
            replica.seal()
            assert replica.round == 3 and replica.load_private(own, s.layout) == ""

        leader.presence.send_queue.control = say
        leader.session.states.on_frame = lambda peer, frame: None  # The others have the state of round 3.
        s.fail_at(leader.index, 4, "commit", crash)
        s.fail_at(owner, 4, "applied", lambda node: seen.update(after=rests(node)))
        s.start()
        await s.finish()
        s.check()
        again = s.nodes[owner]
        assert seen["kept"] and [fields["round"] for _, name, fields in again.log if name == "synced"] == [3]
        assert not seen["after"] and any(name == "residual_lost" for _, name, _ in again.log)
        assert rests(again)  # of later rounds

    virtual_loop.run(main(), seed=3)


def test_owner_that_fetches_state_drops_its_residuals(sparse_swarm):
    async def main():
        s = sparse_swarm(4, rounds=7)
        assert len(await scenes.differ(s, 2, 123)) == 1
        assert any(name == "residual_lost" for _, name, _ in s.nodes[2].log)
        assert s.nodes[2].digests[7] == s.nodes[1].digests[7]

    virtual_loop.run(main(), seed=4)


@pytest.mark.trial
@pytest.mark.timeout(600)
def test_sparse_butterfly_bytes_do_not_grow_with_peers(swarm):
    """Payloads of a round without announcements: they grow with the peers in an all-gather, but not here."""

    def moved(collective, peers):
        async def main():
            s = swarm(
                peers, codec="topk(k=64,chunk=4096)|2bit|rice", outer='method = "sparseloco"\n', rounds=1,
                size=131_072, collective=collective, bandwidth=None,
            )  # fmt: skip
            got = dict.fromkeys(s.nodes, 0)
            for node in s.nodes.values():
                count(node, got)
            s.start()
            await s.finish()
            s.check()
            return sum(got.values()) / peers

        return virtual_loop.run(main(), seed=1)

    def count(node, got):
        routed = node.session.on_frame

        def counted(peer, frame):
            if isinstance(frame.message, (Chunk, Result)):
                got[node.index] += memoryview(frame.payload).nbytes
            routed(peer, frame)

        node.session.on_frame = counted

    few, many = (moved("sparse-butterfly", peers) for peers in (8, 32))
    everybody = [moved("all-gather", peers) for peers in (8, 32)]
    print(few, many, everybody)
    # A peer keeps its own part, so it sends (n - 1) / n of the two phases, and to each of n - 1 peers in an all-gather.
    assert many < 1.05 * (31 / 32) / (7 / 8) * few
    assert everybody[1] > 0.9 * 31 / 7 * everybody[0] and many < everybody[1] / 4
