"""Swarms whose sparse payloads go to every peer."""

from __future__ import annotations

import blake3
import msgspec
import numba
import numpy as np
import pytest
import torch
from kit import scenes
from thinwire.compression.sparse import mean as sparsemean
from thinwire.compression.sparse.error_feedback import ErrorFeedback, stored
from thinwire.node.methods.sparse.replica import chunks_of
from thinwire.sims.engine import virtual_loop
from thinwire.swarm.frame import Frame
from thinwire.swarm.messages.registry import Chunk, Ready

TOPK = "topk(k=64,chunk=4096)|2bit|rice"
SIZE = 20_000
PHASES = ["announce", "open", "vote", "commit"]


@pytest.fixture
def sparse(swarm):
    def make(founders, *, outer="", size=SIZE, codec=TOPK, **rest):
        return swarm(founders, codec=codec, outer=f'method = "sparseloco"\n{outer}', size=size, **rest)

    return make


def expected(s, rounds, *, denominator="bounded_contributor_mean"):
    """Return the outcome of rounds without faults by codec and rule alone, and each peer's residual."""
    codec = s.nodes[0].replica.codec.codec
    chunks = chunks_of(s.layout, codec.chunk)
    theta = np.random.default_rng(7).standard_normal(s.size).astype(np.float32)
    order = sorted(s.nodes.values(), key=lambda node: node.id)
    memory = {node.index: ErrorFeedback(codec, chunks, s.manifest.outer.residual_decay) for node in order}
    for number in range(1, rounds + 1):
        selected = []
        for node in order:
            local = theta.copy()
            local -= (np.random.default_rng((node.index, number)).standard_normal(s.size) * 0.01).astype(np.float32)
            payload = memory[node.index].prepare(stored(theta - local))
            memory[node.index].commit()
            selected.append(codec.decode(payload, chunks))
        mean = sparsemean.mean(selected, [100.0] * len(selected), chunks, denominator)
        theta -= np.float32(s.manifest.outer.lr) * mean
    return theta, {index: one.residual for index, one in memory.items()}


@pytest.mark.parametrize("denominator", sparsemean.DENOMINATORS)
def test_sparse_round_equals_reference_on_sent_payloads(sparse, denominator):
    async def main():
        s = sparse(4, rounds=3, outer=f'lr = 0.9\ndenominator = "{denominator}"\n')
        s.start()
        await s.finish()
        s.check()
        theta, residuals = expected(s, 3, denominator=denominator)
        for node in s.nodes.values():
            np.testing.assert_array_equal(node.replica.theta, theta)
            np.testing.assert_array_equal(node.replica.feedback.residual, residuals[node.index])
            assert not any(node.missing.values()) and node.replica.state.size == SIZE

    virtual_loop.run(main(), seed=1)


def test_sparse_round_is_equal_for_any_thread_count_and_many_pieces(sparse):
    def digests(threads):
        torch.set_num_threads(threads)
        numba.set_num_threads(min(threads, numba.config.NUMBA_NUM_THREADS))

        async def main():
            s = sparse(3, rounds=3, size=100_000, piece=300)
            s.start()
            await s.finish()
            s.check()
            sent = len(s.nodes[0].session.history.get(3).agreement.ready[s.nodes[1].id].hashes) // 32
            assert 1 < sent <= len(s.nodes[0].session.grid)
            return s.nodes[0].digests

        return virtual_loop.run(main(), seed=1)

    before = torch.get_num_threads(), numba.get_num_threads()
    try:
        assert digests(1) == digests(2)
    finally:
        torch.set_num_threads(before[0])
        numba.set_num_threads(before[1])


@pytest.mark.parametrize("phase", PHASES)
@pytest.mark.parametrize("victim", range(2))
def test_allgather_survives_kill_of_one_of_six(sparse, phase, victim):
    async def main():
        s = sparse(6, seed=victim, piece=300)
        scenes.soon(s, await scenes.lose(s, {victim: phase}))

    virtual_loop.run(main(), seed=victim)


@pytest.mark.parametrize("seed", range(5))
def test_allgather_survives_kill_of_two_of_six(sparse, seed):
    first, second = seed % 6, (seed + 1 + seed // 6) % 6

    async def main():
        await scenes.lose(sparse(6, seed=seed), {first: PHASES[seed % 4], second: PHASES[(seed // 2) % 4]})

    virtual_loop.run(main(), seed=seed)


def test_allgather_last_survivor_continues(sparse):
    async def main():
        await scenes.lose(sparse(4), dict.fromkeys((1, 2, 3), "open"))

    virtual_loop.run(main(), seed=2)


@pytest.mark.parametrize("phase", PHASES)
def test_allgather_joiner_during_a_round_takes_part_in_the_next(sparse, phase):
    async def main():
        s = sparse(3, rounds=8)
        joined = await scenes.join(s, phase)
        assert min(joined.digests) <= 6 and joined.id in s.nodes[0].contributors[8]

    virtual_loop.run(main(), seed=3)


@pytest.mark.parametrize("phase", PHASES)
def test_killed_peer_rejoins_allgather(sparse, phase):
    async def main():
        await scenes.come_back(sparse(4, rounds=10), phase)

    virtual_loop.run(main(), seed=5)


def _levels(value):
    """The levels of the first section are `value`."""

    def change(pieces):
        return [scenes.levels(b"".join(pieces), value)]

    return change


def _short(pieces):
    return [*pieces[:-1], pieces[-1][:-4]]


def _long(pieces):
    return [*pieces, *[memoryview(b"x" * 300)] * 100]


def _holes(pieces):
    return [pieces[0], memoryview(b""), *pieces[1:]]


def _ragged(pieces):
    return [pieces[0][:100], pieces[0][100:], *pieces[1:]]


@pytest.mark.parametrize("liar", range(2))
@pytest.mark.parametrize(
    ("change", "reasons"),
    [
        (_levels(np.nan), ("encoding", "not finite")),
        (_levels(60000.0), ("norm",)),
        (_short, ("length", "encoding")),
        (_long, ("length",)),
        (_holes, ("length",)),
        (_ragged, ("length",)),
    ],
)
def test_bad_allgather_payload_is_excluded_with_reason(sparse, change, reasons, liar):
    async def main():
        s = sparse(4, piece=0 if change.__name__ == "change" else 300)
        s.nodes[liar].forge(3, change)
        s.start()
        await s.finish()
        s.check()
        for node in s.nodes.values():
            assert list(node.missing[3]) == [s.nodes[liar].id] and node.missing[3][s.nodes[liar].id] in reasons
            assert node.missing[4] == {}

    virtual_loop.run(main(), seed=4)


@pytest.mark.parametrize("liar", range(2))
def test_peer_that_announces_without_sending_is_excluded(sparse, liar):
    async def main():
        s = sparse(5)  # Of four, two that have the payload are a quorum if one of them is the most senior.
        bulk = s.nodes[liar].presence.send_queue.bulk

        def silent(to, frame, **rest):
            if not (isinstance(frame.message, Chunk) and frame.message.round == 3):
                bulk(to, frame, **rest)

        s.nodes[liar].presence.send_queue.bulk = silent
        s.start()
        await s.finish()
        s.check()
        for node in s.nodes.values():
            assert s.nodes[liar].id in node.missing[3] and s.nodes[liar].id in node.contributors[5]

    virtual_loop.run(main(), seed=4)


@pytest.mark.parametrize("told", [1, 2])
def test_equivocating_announcements_do_not_split_the_swarm(sparse, told):
    """Two of five peers get other announcements and chunks; all commits are equal."""

    async def main():
        s = sparse(5, rounds=6)
        liar = s.nodes[4]
        others = [node.id for node in s.nodes.values() if node is not liar]
        fooled, send_queue = set(others[:told]), liar.presence.send_queue
        control, bulk = send_queue.control, send_queue.bulk
        stands_for = {}

        def say(to, message):
            if isinstance(message, Ready) and message.round == 3 and to in fooled:
                piece = _levels(0.25)(liar.session.current.data_plane.source)[0]
                stands_for[0] = piece
                message = msgspec.structs.replace(message, hashes=blake3.blake3(piece).digest())
            control(to, message)

        def send(to, frame, **rest):
            if isinstance(frame.message, Chunk) and frame.message.round == 3 and to in fooled:
                frame = Frame(frame.message, stands_for[0])
            bulk(to, frame, **rest)

        send_queue.control, send_queue.bulk = say, send
        s.start()
        honest = [node.index for node in s.nodes.values() if node is not liar]
        await s.finish(honest)
        s.check(honest)
        assert stands_for, "nobody was told anything else"

    virtual_loop.run(main(), seed=4)


def test_allgather_frames_of_other_rounds_are_dropped_and_counted(sparse):
    async def main():
        await scenes.replay(sparse(3), stored=True)

    virtual_loop.run(main(), seed=4)


def test_allgather_peer_does_not_send_its_own_nan(sparse):
    async def main():
        s = sparse(4)
        await scenes.spoil(s)
        assert np.isfinite(s.nodes[1].replica.feedback.residual).all()

    virtual_loop.run(main(), seed=4)


@pytest.mark.parametrize("policy", ["drop", "restore"])
def test_excluded_contribution_follows_on_exclusion_policy(sparse, policy):
    async def main():
        s = sparse(4, outer=f'on_exclusion = "{policy}"\n', rounds=3)
        out = s.nodes[1]
        out.forge(3, _short)  # with this announcement, so that it is excluded
        seen = {}
        prepare = out.replica.feedback.prepare

        def noted(difference):
            a = np.empty(SIZE, np.float32)
            difference(0, SIZE, a)
            a += np.float32(0.95) * out.replica.feedback.residual
            payload = prepare(difference)
            if out.replica.round == 2:
                seen["a"], seen["payload"] = a, payload
            return payload

        out.replica.feedback.prepare = noted
        s.start()
        await s.finish()
        s.check()
        assert out.id in s.nodes[0].missing[3]
        left = seen["a"].copy()
        if policy == "drop":
            out.replica.codec.decode(seen["payload"]).scatter(left, -1.0)
        np.testing.assert_array_equal(out.replica.feedback.residual, left)

    virtual_loop.run(main(), seed=4)


def test_allgather_round_without_verdict_changes_nothing(sparse):
    """A minority alone: training stays in the model, and residuals are unchanged."""

    async def main():
        s = sparse(3, rounds=8)
        before = []

        def state(node):
            return node.replica.digest, node.replica.feedback.residual.tobytes()

        def look():
            assert state(s.nodes[0]) == before[0]

        await scenes.part(s, [[0], [1, 2]], 9.0, lambda: before.append(state(s.nodes[0])), look)
        assert before

    virtual_loop.run(main(), seed=6, limit=4000)


def test_allgather_peers_without_link_both_contribute(sparse):
    """Other peers relay between the two, without a long wait."""

    async def main():
        s = sparse(5, rounds=6)
        s.fail_at(0, 3, "announce", lambda node: s.net.cut(s.nodes[1].id, s.nodes[2].id))
        s.start()
        await s.finish()
        s.check()
        for node in s.nodes.values():
            assert all(len(node.contributors[number]) == 5 for number in (3, 4, 5, 6)), node.missing
            times = node.committed_at
            assert max(times[r] - times[r - 1] for r in range(3, 7)) < 2.5

    virtual_loop.run(main(), seed=0)


def test_differing_sparse_replica_fetches_state_and_drops_residual(sparse):
    async def main():
        s = sparse(4, size=600_000, rounds=7)
        synced = await scenes.differ(s, 2, 12345)
        assert synced and synced[0]["bytes"] == 2**20
        assert s.nodes[2].id not in s.nodes[1].contributors[4] and s.nodes[2].id in s.nodes[1].contributors[6]
        assert s.nodes[2].digests[7] == s.nodes[1].digests[7]

    virtual_loop.run(main(), seed=4)
