"""Ring rounds under scripted faults."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest
from kit import scenes
from kit.swarm import committed_ballots
from thinwire.sims.engine import virtual_loop
from thinwire.swarm.frame import Frame
from thinwire.swarm.messages.announcement import SPAN_PREFIX, Span
from thinwire.swarm.messages.registry import Ballot, Chunk, Partial, Result
from thinwire.swarm.quantized_links import LEAST_RATE, step

PHASES = ["announce", "open", "record", "vote", "commit"]


def more(values):
    """Cases for `make trial`."""
    return [pytest.param(value, marks=pytest.mark.trial) for value in sorted(values)]


def tapped(s, seen=lambda node, to, message: None):
    """Record bulk frames of all peers from now on: (sender, receiver, message, bytes). `seen` runs before each."""
    sent = []
    for node in s.nodes.values():
        send_queue = node.presence.send_queue
        bulk = send_queue.bulk

        def noted(to, frame, *, bulk=bulk, node=node, **how):
            seen(node, to, frame.message)
            if node.transport.alive:
                sent.append((node.id, to, frame.message, memoryview(frame.payload).nbytes))
                bulk(to, frame, **how)

        send_queue.bulk = noted
    return sent


def powers(s):
    """Let each peer contribute 2 to the power of its index. Round -> [(results × contributors, contributors)]."""
    sums = {}
    for node in s.nodes.values():
        node.spoil = lambda round, delta, node=node: np.full_like(delta, 2.0**node.index)
        outcome = node.session.outcome

        async def noted(*, outcome=outcome, **rest):
            found = await outcome(**rest)
            if found.commit is not None:
                values = np.concatenate([np.frombuffer(chunk, np.float32) for chunk in found.results])
                total = np.unique(np.round(values.astype(np.float64) * len(found.contributors), 2))
                sums.setdefault(found.commit.proposal.round, []).append((tuple(total), tuple(found.contributors)))
            return found

        node.session.outcome = noted
    return sums


def whole(s, sums):
    """Check that each committed result is the sum of its recorded contributors."""
    power = {node.id: 2.0**node.index for node in s.nodes.values()}
    for found in sums.values():
        for total, contributors in found:
            assert total == (sum(power[peer] for peer in contributors),)


@pytest.mark.parametrize("codec", ["fp32", "fp16", "int8(block=256)", "int4(block=256,stochastic=1)"])
def test_ring_replicas_stay_identical(swarm, codec):
    async def main():
        s = swarm(4, codec=codec, topology="ring")
        found = committed_ballots(s)
        s.start()
        await s.finish()
        s.check()
        assert not any(missing for node in s.nodes.values() for missing in node.missing.values())
        assert all(len(proposal.order) == 4 for round in found for proposal in found[round])

    virtual_loop.run(main(), seed=1)


@pytest.mark.parametrize("phase", PHASES)
@pytest.mark.parametrize("victim", [0, *more([3]), *(pytest.param(at, marks=pytest.mark.soak) for at in (1, 2, 4, 5))])
def test_ring_survives_kill_of_one_of_six(swarm, phase, victim):
    """The next ballot has a ring of the remaining peers at once, with each contribution once."""

    async def main():
        s = swarm(6, seed=victim, codec="fp32", size=30_000, topology="ring")
        sums, found = powers(s), committed_ballots(s)
        rest = await scenes.lose(s, {victim: phase})
        whole(s, sums)
        scenes.soon(s, rest)
        assert all(len(proposal.order) == 5 for proposal in found[5])

    virtual_loop.run(main(), seed=victim)


LAST = 9
"""Index of the last of ten peers: with a chunk for each of six, a peer forwards five sums and five results."""


@pytest.mark.parametrize("step", [0, 5, LAST, *more(set(range(LAST)) - {0, 5})])
def test_ring_death_in_transit_loses_no_other_contribution(swarm, step):
    """Killed before any frame that it forwards: contributions of the others are in the sums or results."""

    async def main():
        s = swarm(6, seed=step, codec="fp32", size=6 * 4096, rounds=5, topology="ring")
        victim, passed = s.nodes[step % 6], []

        def count(node, to, message):
            if node is victim and isinstance(message, (Partial, Result)) and message.round == 3:
                passed.append(message)
                if len(passed) == step + 1:
                    node.kill()

        tapped(s, count)
        sums = powers(s)
        s.start()
        rest = [i for i in range(6) if i != victim.index]
        await s.finish(rest)
        s.check(rest)
        whole(s, sums)
        assert len(passed) == step + 1 and not victim.transport.alive
        assert {len(contributors) for _, contributors in sums[3]} <= {5, 6} and len(sums[3]) >= 5
        assert len(set(sums[3])) == 1

    virtual_loop.run(main(), seed=step)


@pytest.mark.parametrize("seed", [0, *more(range(1, 6))])
def test_ring_survives_kill_of_two_of_six(swarm, seed):
    first, second = seed % 6, (seed + 1 + seed // 2) % 6

    async def main():
        s = swarm(6, seed=seed, size=30_000, topology="ring")
        s.fail_at(first, 3, PHASES[seed % 5])
        s.fail_at(second, 3, PHASES[(seed * 2) % 5])
        s.start()
        rest = [i for i in range(6) if i not in (first, second)]
        await s.finish(rest)
        s.check(rest)
        assert not s.scripts

    virtual_loop.run(main(), seed=seed)


def test_stalled_peer_interrupts_the_ring_for_two_rounds(swarm):
    """SIGSTOP for 9 s: one patience, then a ballot without a ring that shows it; after two rounds a ring again."""

    async def main():
        s = swarm(5, rounds=20, size=30_000, codec="fp32", topology="ring")
        victim = s.nodes[2]

        def pause(node):
            s.net.pause(victim.id)
            virtual_loop.current().call_later(9.0, s.net.resume, victim.id)

        s.fail_at(2, 4, "open", pause)
        sums, found = powers(s), committed_ballots(s)
        s.start()
        rest = [0, 1, 3, 4]
        await s.finish(rest, limit=400)
        s.check(rest)
        whole(s, sums)
        times = s.nodes[0].committed_at
        assert victim.id in s.nodes[0].missing[4]
        assert times[4] - times[3] < 12.0, "some patiences"
        rings = [len(found[round][0].order) for round in range(3, 9)]
        assert rings == [5, 0, 0, 0, 4, 4]
        await s.finish([2], limit=400)
        s.check()

    virtual_loop.run(main(), seed=3, limit=4000)


def test_ring_neighbours_without_link_cost_a_ring_but_no_contribution(swarm):
    async def main():
        s = swarm(5, rounds=6, size=30_000, codec="fp32", topology="ring")
        found, sums = committed_ballots(s), powers(s)

        def cut(node):
            proposal = node.session.current.agreement.proposal
            peers = [proposal.alive[at] for at in proposal.order]
            far = [at for at in range(5) if proposal.ballot.leader not in (peers[at], peers[(at + 1) % 5])]
            pair = peers[far[0]], peers[(far[0] + 1) % 5]
            s.net.cut(*pair)
            virtual_loop.current().call_later(6.0, s.net.mend, *pair)

        s.fail_at(0, 3, "open", cut)
        s.start()
        await s.finish()
        s.check()
        whole(s, sums)
        assert not found[3][0].order and len(found[3][0].contributors) == 5
        assert not any(missing for node in s.nodes.values() for missing in node.missing.values())
        assert [bool(found[round][0].order) for round in (1, 2, 4, 5, 6)] == [True, True, False, False, True]

    virtual_loop.run(main(), seed=4)


def test_peer_that_corrupts_partial_sums_suspends_the_ring(swarm):
    """Changed sums that are numbers stay unnoticed; other values are refused, and rings pause."""

    async def main():
        s = swarm(4, rounds=8, size=30_000, codec="fp32", topology="ring")
        liar, found, sums = s.nodes[1], committed_ballots(s), powers(s)
        bulk = liar.presence.send_queue.bulk

        def lying(to, frame, **how):
            if isinstance(frame.message, Partial) and frame.message.round == 2:
                frame = Frame(frame.message, b"\xff" * memoryview(frame.payload).nbytes)
            bulk(to, frame, **how)

        liar.presence.send_queue.bulk = lying
        s.start()
        await s.finish()
        s.check()
        whole(s, sums)
        assert [bool(found[round][0].order) for round in range(1, 9)] == [
            True,
            False,
            False,
            False,
            True,
            True,
            True,
            True,
        ]
        assert not any(missing for node in s.nodes.values() for missing in node.missing.values())

    virtual_loop.run(main(), seed=4)


@pytest.mark.parametrize(("change", "reason"), scenes.BAD)
@pytest.mark.parametrize("liar", range(2))
def test_bad_ring_payload_is_excluded_with_reason(swarm, change, reason, liar):
    async def main():
        await scenes.send_bad(swarm(4, codec="fp32", size=30_000, topology="ring"), liar, change, reason)

    virtual_loop.run(main(), seed=4)


def test_ring_uses_only_the_links_of_its_order(swarm):
    """Links of one ring are fast, others slow: bytes use only the n links of the ring."""

    async def main():
        s = swarm(6, rounds=3, size=6 * 8192, codec="fp32", topology="ring")
        wanted = [s.nodes[i].id for i in (0, 3, 1, 5, 2, 4)]
        links = {(wanted[at], wanted[(at + 1) % 6]) for at in range(6)}
        for node in s.nodes.values():
            rates = [(peer, 1e6 if (node.id, peer) in links else 1e5) for peer in wanted if peer != node.id]
            spans = tuple(Span(peer[:SPAN_PREFIX], 0, step(rate, LEAST_RATE)) for peer, rate in rates)
            node.round_factory.links = replace(node.round_factory.links, spans=lambda spans=spans: spans)
        sent = tapped(s)
        s.start()
        await s.finish()
        s.check()
        carried = {}
        for sender, receiver, message, size in sent:
            assert isinstance(message, (Partial, Result)), message
            if message.round > 1:  # the first round began before the links were known
                carried[sender, receiver] = carried.get((sender, receiver), 0) + size
        assert set(carried) == links
        each = 2 * 2 * 5 * 4 * 8192  # rounds, there and back, hops, a sixth of the model
        assert set(carried.values()) == {each}

    virtual_loop.run(main(), seed=2)


def test_newcomer_is_outside_the_ring_in_its_first_round(swarm):
    async def main():
        s = swarm(3, rounds=8, codec="fp32", size=30_000, topology="ring")
        s.fail_at(1, 3, "announce", lambda node: s.join(7))
        found = committed_ballots(s)
        s.start()
        await s.finish([0, 1, 2])
        await s.finish([7])
        s.check()
        new = s.nodes[7].id
        first = next(round for round in sorted(found) if new in found[round][0].alive)
        proposal, later = found[first][0], found[8][0]
        assert proposal.idle == (new,) and len(proposal.order) == 3
        assert later.idle == () and len(later.order) == 4 == len(later.contributors)

    virtual_loop.run(main(), seed=3)


def test_peer_without_chunks_contributes_from_outside_the_ring(swarm):
    """It sends only to the peers at which chunks begin, and gets the results from their owners."""

    async def main():
        s = swarm(5, rounds=4, codec="fp32", size=5 * 4096, topology="ring")
        out = s.nodes[3].id
        for node in s.nodes.values():
            node.round_factory.standing.slow_peers = lambda: {out}
        sent, sums = tapped(s), powers(s)
        found = committed_ballots(s)
        s.start()
        await s.finish()
        s.check()
        whole(s, sums)
        later = [proposal for round in (2, 3, 4) for proposal in found[round]]
        assert all(proposal.idle == (out,) and len(proposal.contributors) == 5 for proposal in later)
        bulk = [(sender, type(message)) for sender, _, message, _ in sent if message.round > 1]
        assert {sender for sender, kind in bulk if kind is Chunk} == {out}
        assert [kind for sender, kind in bulk if sender == out] == [Chunk] * (3 * 5)

    virtual_loop.run(main(), seed=3)


@pytest.mark.parametrize("phase", ["open", "vote"])
def test_killed_peer_rejoins_ring(swarm, phase):
    async def main():
        s = swarm(4, rounds=10, size=30_000, topology="ring")

        def crash(node):
            node.kill()
            virtual_loop.current().call_later(1.5, s.join, node.index, 1)

        s.fail_at(2, 3, phase, crash)
        s.start()
        await s.finish([0, 1, 3])
        await s.finish([2])
        s.check()

    virtual_loop.run(main(), seed=5)


@pytest.mark.parametrize("size", [1, 2, 3, 4099, 203_531])
@pytest.mark.parametrize("peers", [2, 5])
def test_ring_works_for_any_size_and_number_of_chunks(swarm, size, peers):
    """Fewer elements than peers, fewer chunks than peers, and a prime that no grid divides."""

    async def main():
        s = swarm(peers, rounds=2, size=size, codec="fp32", topology="ring")
        sums = powers(s)
        s.start()
        await s.finish()
        s.check()
        whole(s, sums)
        assert all(len(contributors) == peers for found in sums.values() for _, contributors in found)

    virtual_loop.run(main(), seed=1)


def test_ring_averages_powersgd_factors(swarm):
    async def main():
        s = swarm(3, rounds=4, size=30_000, codec="powersgd(rank=4)", outer='method = "powersgd"', topology="ring")
        found = committed_ballots(s)
        s.start()
        await s.finish()
        s.check()
        assert all(proposal.order for round in found for proposal in found[round])

    virtual_loop.run(main(), seed=1)


def test_ring_frames_of_other_rounds_are_dropped_and_counted(swarm):
    async def main():
        s = swarm(3, size=30_000, topology="ring")
        liar, victim = s.nodes[2], s.nodes[0]

        def replay(node):
            async def send():
                for message in (
                    kind(round, 0, Ballot(1, liar.id), 0) for round in (1, 99) for kind in (Partial, Result)
                ):
                    await liar.transport.send(victim.id, Frame(message, b"x"))

            virtual_loop.current().create_task(send())

        s.fail_at(2, 4, "announce", replay)
        s.start()
        await s.finish()
        s.check()
        assert victim.session.dropped_frames == 4 and s.nodes[1].session.dropped_frames == 0

    virtual_loop.run(main(), seed=4)


def test_ring_trace_is_equal_for_equal_seeds(swarm):
    def once(seed):
        async def main():
            s = swarm(4, seed=seed, size=30_000, topology="ring")
            s.fail_at(2, 2, "open")
            s.start()
            await s.finish([0, 1, 3])
            return virtual_loop.current().trace

        return virtual_loop.run(main(), seed=seed)

    assert once(1) == once(1)
    assert once(1) != once(2)


def test_ring_order_leaves_each_site_once(swarm):
    async def main():
        s = swarm(6, rounds=2, size=6 * 8192, codec="fp32", topology="ring", sites=("north", "south"))
        site = {node.id: s.site(node.index) for node in s.nodes.values()}
        sent = tapped(s)
        s.start()
        await s.finish()
        s.check()
        for round in (1, 2):
            went = {(a, b) for a, b, message, _ in sent if isinstance(message, Partial) and message.round == round}
            assert len(went) == 6 and sum(site[a] != site[b] for a, b in went) == 2

    virtual_loop.run(main(), seed=2)
