"""What a peer that was let in can say, and what must not come of it. In virtual time, with real sessions."""

from __future__ import annotations

import asyncio

import numpy as np
import pytest
from thinwire.collectives.statesync import IN_FLIGHT
from thinwire.sims import clock
from thinwire.swarm.frame import Frame
from thinwire.swarm.protocol import Ballot, Behind, Chunk, Fetch, Open, Prepare, Promise, StateAsk


async def _with_stranger(swarm, say, *, rounds=6, seed=0):
    """Three members; a fourth peer that is linked to all of them does nothing but `say` things to each, every 50 ms."""
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
        Frame(Open(number, 0, Ballot(6, liar.id), group, group, (), (), None, ())),
        Frame(Open(number, 0, Ballot(0, liar.id), group, group, (), (), None, ())),
    ]


def _promise(node, liar):
    number, agreement = node.session.current.round, node.session.current.agreement
    leading = agreement._candidate.ballot or Ballot(1, node.id)
    empty = Open(number, 0, leading, (), (), (), (), None, ())
    return [Frame(Promise(number, 0, leading, empty, bytes(32))), Frame(Promise(number, 0, leading, empty, None))]


@pytest.mark.parametrize("say", [_behind, _lead, _promise])
def test_a_stranger_stops_nothing_and_replaces_nothing(swarm, say):
    async def main():
        s = await _with_stranger(swarm, say)
        for index in (0, 1, 2):
            assert all(name != "synced" for _, name, _ in s.nodes[index].log)
            assert np.abs(s.nodes[index].replica.theta).max() < 10

    clock.run(main(), seed=3)


def test_a_result_that_cannot_be_decoded_is_never_applied(swarm):
    """An owner signs for a result with a NaN in it: nobody votes for it, the round goes on without that owner."""

    async def main():
        s = swarm(4, codec="fp32", rounds=4)
        liar = s.nodes[1]
        codec = liar.session.codec

        class Poisoned(type(codec)):
            def encode(self, x, out):
                super().encode(x, out)
                if liar.session.current.round == 3 and liar.session.current.agreement.opened is not None:
                    out[:4] = 255

        liar.session.current.exchange.codec = poisoned = Poisoned()
        liar.session.codec = poisoned
        s.start()
        await s.finish([0, 2, 3])
        s.check([0, 2, 3])
        for index in (0, 2, 3):
            assert np.isfinite(s.nodes[index].replica.theta).all()

    clock.run(main(), seed=5)


def test_who_asks_and_does_not_read_piles_up_little(swarm):
    """Two thousand requests for results and for the state from a peer whose link takes nothing: one answer's worth waits."""

    async def main():
        s = swarm(3, rounds=40, size=400_000)
        s.start()
        liar = s.join(9)
        await asyncio.sleep(4.0)
        liar.tasks[1].cancel()
        victim = s.nodes[0]
        s.net.cut(victim.id, liar.id, one_way=True)
        past = victim.session._history.get(victim.replica.round)
        for _ in range(1000):
            everything = tuple(range(len(past.grid)))
            for message in (Fetch(past.round, 0, past.exchange.results.digest, everything), StateAsk()):
                await liar.transport.send(victim.id, Frame(message))
            await asyncio.sleep(0.001)
        lane = victim.session._outbox._bulk[liar.id]
        assert len(lane._urgent) + len(lane._later) <= len(past.grid) + 2 * IN_FLIGHT + 2
        assert len(victim.session._outbox._control[liar.id]._urgent) < 100

    clock.run(main(), seed=3)
