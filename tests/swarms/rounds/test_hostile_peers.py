"""Hostile messages of admitted peers, with real sessions."""

from __future__ import annotations

import asyncio
from collections import Counter

import blake3
import msgspec
import numpy as np
import pytest
from thinwire.collectives.state_sync.chunk_transfer import IN_FLIGHT
from thinwire.collectives.topology.peer_backoff import Backoff
from thinwire.collectives.transport.frame_limit import FrameLimits
from thinwire.sims.engine import virtual_loop
from thinwire.sims.network import inbox
from thinwire.swarm.frame import Frame
from thinwire.swarm.messages.registry import (
    Ballot,
    Behind,
    Chunk,
    Fetch,
    Prepare,
    Promise,
    Proposal,
    Propose,
    Ready,
    Result,
    ResultRecord,
    StateAsk,
    StateChunk,
    StateOffer,
    Vote,
)


async def _with_stranger(swarm, say, *, rounds=6, seed=0):
    """Three members, and a peer with links to all of them that only calls `say` for each, every 50 ms."""
    s = swarm(3, seed=seed, rounds=rounds)
    s.start()
    liar = s.join(9)
    await asyncio.sleep(1.0)
    liar.tasks[1].cancel()

    async def talk():
        while True:
            for node in list(s.nodes.values()):
                if node is not liar:
                    for frame in say(node, liar):
                        await liar.transport.send(node.id, frame)
            await asyncio.sleep(0.05)

    mouth = asyncio.get_running_loop().create_task(talk())
    await s.finish([0, 1, 2])
    mouth.cancel()
    s.check([0, 1, 2])
    return s


def _behind(node, liar):
    return [Frame(Behind(10**6)), Frame(Chunk(10**6, 0, 1, 0), b"x")]


def _lead(node, liar):
    number = node.session.current.round
    group = (liar.id,)
    return [
        Frame(Prepare(number, 0, Ballot(2**32 - 1, liar.id))),
        Frame(Prepare(number, 0, Ballot(5, liar.id))),
        Frame(Propose(Proposal(number, 0, Ballot(6, liar.id), group, group, (), (), None, ()))),
        Frame(Propose(Proposal(number, 0, Ballot(0, liar.id), group, group, (), (), None, ()))),
    ]


def _promise(node, liar):
    number, agreement = node.session.current.round, node.session.current.agreement
    promised = agreement.acceptor.promised
    leading = promised if promised.leader == node.id else Ballot(1, node.id)
    empty = Proposal(number, 0, leading, (), (), (), (), None, ())
    return [Frame(Promise(number, 0, leading, empty, bytes(32))), Frame(Promise(number, 0, leading, empty, None))]


@pytest.mark.parametrize("say", [_behind, _lead, _promise])
def test_stranger_cannot_stop_rounds_or_replace_state(swarm, say):
    async def main():
        s = await _with_stranger(swarm, say)
        for index in (0, 1, 2):
            assert all(name != "synced" for _, name, _ in s.nodes[index].log)
            assert np.abs(s.nodes[index].replica.theta).max() < 10

    virtual_loop.run(main(), seed=3)


def test_flood_of_past_announcements_is_limited_and_rounds_continue(swarm, monkeypatch):
    """Four thousand small valid frames a second: after a burst only a few are handled, the sender waits with the others."""
    limits = FrameLimits(burst=300, rate=20.0)
    monkeypatch.setattr(inbox, "FRAMES", limits)
    stale = Frame(Ready(1, 0, 1, bytes(32), bytes(32), 1, b"", True, 0.0, 0.0))
    handled = Counter()

    async def main():
        s = swarm(3, rounds=6)
        s.start()
        liar = s.join(9)
        await asyncio.sleep(1.0)
        liar.tasks[1].cancel()
        for node in (s.nodes[index] for index in (0, 1, 2)):

            def on_frame(peer, frame, before=node.session.on_frame, node=node):
                handled[node.index] += peer == liar.id
                before(peer, frame)

            monkeypatch.setattr(node.session, "on_frame", on_frame)

        async def talk(node):
            while True:
                for _ in range(40):
                    await liar.transport.send(node.id, stale)
                await asyncio.sleep(0.01)

        began = asyncio.get_running_loop().time()
        talking = [asyncio.create_task(talk(s.nodes[index])) for index in (0, 1, 2)]
        await s.finish([0, 1, 2])
        seconds = asyncio.get_running_loop().time() - began
        for task in talking:
            task.cancel()
        s.check([0, 1, 2], floods={liar.id})
        for index in (0, 1, 2):
            assert s.nodes[index].transport.pauses()[liar.id] > 1
            assert handled[index] < limits.burst + limits.rate * seconds + limits.round * 8

    virtual_loop.run(main(), seed=4)


def test_undecodable_result_is_never_applied(swarm):
    """An owner signs a result with a NaN: no peer votes for it, and the round continues without that owner."""

    async def main():
        s = swarm(4, codec="fp32", rounds=4)
        liar = s.nodes[1]
        codec = liar.session.codec

        class Poisoned(type(codec)):
            def encode(self, x, out, seed=0):
                super().encode(x, out, seed)
                if liar.session.current.round == 3 and liar.session.current.agreement.proposal is not None:
                    out[:4] = 255

        liar.session.current.data_plane.codec = poisoned = Poisoned()
        liar.replica.codec = poisoned
        s.start()
        await s.finish([0, 2, 3])
        s.check([0, 2, 3])
        for index in (0, 2, 3):
            assert np.isfinite(s.nodes[index].replica.theta).all()

    virtual_loop.run(main(), seed=5)


def test_unread_answers_to_one_peer_are_bounded(swarm):
    """Two thousand requests from a peer whose link takes no data: only one answer's worth waits."""

    async def main():
        s = swarm(3, rounds=40, size=400_000)
        s.start()
        liar = s.join(9)
        await asyncio.sleep(4.0)
        liar.tasks[1].cancel()
        victim = s.nodes[0]
        s.net.cut(victim.id, liar.id, one_way=True)
        past = victim.session.history.get(victim.replica.round)
        control, told = victim.presence.send_queue.control, []

        def counted(to, message):
            told.extend([message] * (to == liar.id))
            control(to, message)

        victim.presence.send_queue.control = counted
        for _ in range(1000):
            everything = tuple(range(len(past.data_plane.results)))
            for message in (Fetch(past.round, 0, past.data_plane.results.digest, everything), StateAsk()):
                await liar.transport.send(victim.id, Frame(message))
            await asyncio.sleep(0.001)
        waiting = sum(victim.presence.send_queue.requested(liar.id, kind) for kind in (Result, StateChunk, StateOffer))
        assert 0 < waiting <= len(past.data_plane.results) + 2 * IN_FLIGHT + 2
        assert len(told) < 100

    virtual_loop.run(main(), seed=3)


def _zeros(session, index):
    """A chunk of nothing, validly encoded."""
    size = session.grid.size(index)
    out = np.zeros(session.codec.nbytes(size), np.uint8)
    session.codec.encode(np.zeros(size, np.float32), out)
    return out.data


def _miserly(session):
    """Send no chunks."""
    bulk = session.presence.send_queue.bulk
    session.presence.send_queue.bulk = lambda to, frame, **more: (
        None if isinstance(frame.message, Chunk) else bulk(to, frame, **more)
    )


def _announces_anew(s, liar):
    """Send no chunk, and announce again at every ballot."""
    session = liar.session
    _miserly(session)
    routed = session.on_frame

    def on_frame(peer, frame):
        current = session.current
        if isinstance(frame.message, Prepare) and frame.message.round == current.round and current.data_plane.source:
            current.announce(current.data_plane.source, weight=100, loss=1.0, speed=1.0)
        routed(peer, frame)

    session.on_frame = on_frame


def _trickles(s, liar):
    """Send no chunk of the present announcement, but twice a second one of an old announcement."""
    session = liar.session
    _miserly(session)
    payload = _zeros(session, 0)

    async def talk():
        attempt = 10**6 + session.current.attempt
        while True:
            await asyncio.sleep(0.5)
            attempt += 1
            current = session.current
            terms, hashes = current.agreement.terms, blake3.blake3(payload).digest() * len(session.grid)
            ready = Ready(current.round, 0, attempt, terms.base, terms.plan, 100, hashes, True, 1.0, 1.0)
            for index in (0, 1, 2, 3) if current.agreement.proposal is not None else ():
                await liar.transport.send(s.nodes[index].id, Frame(ready))
                await liar.transport.send(s.nodes[index].id, Frame(Chunk(current.round, 0, attempt, 0), payload))

    liar.tasks.append(asyncio.get_running_loop().create_task(talk()))


def _asks_for_ever(s, liar):
    """Ask all peers for promises with growing ballots, three times a second, and lead nothing."""

    async def talk():
        while True:
            await asyncio.sleep(0.3)
            for index in (0, 1, 2, 3):
                current = s.nodes[index].session.current
                ballot = Ballot(current.agreement.acceptor.promised.term + 1, liar.id)
                await liar.transport.send(s.nodes[index].id, Frame(Prepare(current.round, 0, ballot)))

    liar.tasks.append(asyncio.get_running_loop().create_task(talk()))


def _equivocates(s, liar):
    """Send different signed results of its chunks to half of the peers, and do not vote."""
    session, box = liar.session, liar.presence.send_queue
    bulk, control = box.bulk, box.control
    half = {s.nodes[0].id, s.nodes[2].id}

    def lie_bulk(to, frame, **how):
        if isinstance(frame.message, Result) and to in half:
            frame = Frame(frame.message, _zeros(session, frame.message.index))
        bulk(to, frame, **how)

    def lie_control(to, message):
        if isinstance(message, ResultRecord) and to in half:
            hashes = b"".join(blake3.blake3(_zeros(session, index)).digest() for index in message.indices)
            message = msgspec.structs.replace(message, hashes=hashes)
        if isinstance(message, Promise):
            message = msgspec.structs.replace(message, voted=None, digest=None)
        if not isinstance(message, Vote):
            control(to, message)

    box.bulk, box.control = lie_bulk, lie_control


@pytest.mark.parametrize("lie", [_announces_anew, _trickles, _asks_for_ever, _equivocates])
def test_one_liar_among_five_does_not_stop_rounds(swarm, lie):
    async def main():
        s = swarm(5, rounds=4)
        lie(s, s.nodes[4])
        s.start()
        await s.finish([0, 1, 2, 3])
        s.check([0, 1, 2, 3])

    virtual_loop.run(main(), seed=1)


@pytest.mark.trial
def test_early_chunks_of_strangers_do_not_displace_honest_ones(swarm):
    """Two strangers send all they have to all peers before the round opens; no other peer is excluded for it."""

    async def main():
        s = swarm(6, rounds=8, latency=0.15)
        s.start()
        liars = [s.join(9), s.join(10)]
        await asyncio.sleep(1.0)
        for liar in liars:
            liar.tasks[1].cancel()
        session = liars[0].session
        payloads = [_zeros(session, index) for index in range(len(session.grid))]
        hashes = b"".join(blake3.blake3(payload).digest() for payload in payloads)

        async def talk(liar):
            told = set()
            while True:
                await asyncio.sleep(0.05)
                for index in range(6):
                    current = s.nodes[index].session.current
                    terms, to = current.agreement.terms, s.nodes[index].id
                    if (index, current.round) in told or current.agreement.proposal is not None:
                        continue
                    told.add((index, current.round))
                    ready = Ready(current.round, 0, 1, terms.base, terms.plan, 0, hashes, True, 1.0, 1.0)
                    await liar.transport.send(to, Frame(ready))
                    for number, payload in enumerate(payloads):
                        await liar.transport.send(to, Frame(Chunk(current.round, 0, 1, number), payload))

        mouths = [asyncio.get_running_loop().create_task(talk(liar)) for liar in liars]
        await s.finish(list(range(6)))
        for mouth in mouths:
            mouth.cancel()
        s.check(list(range(6)))
        for index in range(6):
            for missing in s.nodes[index].missing.values():
                assert "chunk missing" not in missing.values()

    virtual_loop.run(main(), seed=1)


@pytest.mark.trial
def test_peer_that_only_announces_delays_few_rounds(swarm):
    """It is admitted, does not contribute, owns chunks and sends nothing: soon it owns no chunk."""

    async def main():
        s = swarm(4, rounds=20, patience=1.0)
        s.start()
        liar = s.join(9)
        await asyncio.sleep(1.0)
        liar.tasks[1].cancel()
        told = set()

        async def talk():
            while True:
                await asyncio.sleep(0.05)
                for index in range(4):
                    current = s.nodes[index].session.current
                    terms = current.agreement.terms
                    if (index, current.round) not in told and current.agreement.proposal is None:
                        told.add((index, current.round))
                        ready = Ready(
                            current.round, 0, 1, terms.base, terms.plan, 0, b"", True, 1.0, 1.0, life=b"l" * 16
                        )
                        await liar.transport.send(s.nodes[index].id, Frame(ready))

        mouth = asyncio.get_running_loop().create_task(talk())
        await s.finish([0, 1, 2, 3])
        mouth.cancel()
        s.check([0, 1, 2, 3])
        proposal = [
            fields["round"] for _, name, fields in s.nodes[0].log if name == "phase" and fields["phase"] == "open"
        ]
        again = {number for number in proposal if proposal.count(number) > 1}
        # Each failure of an owner begins a pause of 2, then 4, then 8 rounds: at most four failures fit into twenty rounds.
        costly, backoff = sorted(again), Backoff()
        assert costly
        for number in costly:
            assert number > backoff.until
            backoff.fail(number)

    virtual_loop.run(main(), seed=1)
