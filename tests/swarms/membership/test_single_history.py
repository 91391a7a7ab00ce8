"""A swarm has one history: cut-off or wrong peers return to it, and no stranger replaces it."""

from __future__ import annotations

import asyncio
from dataclasses import replace

import blake3
import numpy as np
import pytest
from thinwire.collectives.state_sync.state_offers import state_digest
from thinwire.sims.engine import virtual_loop
from thinwire.sims.scenario.faults import Fault
from thinwire.sims.simulation.world import simulate
from thinwire.sims.trials.trial import PACE, STALL, trial
from thinwire.swarm.frame import Frame
from thinwire.swarm.messages.registry import (
    CHUNK_BYTES,
    Ack,
    Ask,
    Ballot,
    Behind,
    Commit,
    Ping,
    Prepare,
    StateAsk,
    StateChunk,
    StateFetch,
    StateOffer,
)


def synced(node):
    return [fields["round"] for _, name, fields in node.log if name == "synced"]


@pytest.mark.parametrize("seconds", [6, 12])
def test_cut_off_peers_follow_last_survivor_that_has_proofs(swarm, seconds):
    """Two of the three that continued die. The third has the votes as proof; its claim alone is no majority."""

    async def main():
        s = swarm(5, rounds=40, size=20_000)
        s.start()
        await asyncio.sleep(5.0)
        ids = [node.id for node in s.nodes.values()]
        s.net.partition([ids[:3], ids[3:]])
        await asyncio.sleep(seconds)
        frozen = s.nodes[3].replica.round
        assert s.nodes[0].replica.round > frozen + 2
        s.nodes[1].kill()
        s.nodes[2].kill()
        s.net.heal()
        await s.finish([0, 3, 4])
        s.check([0, 3, 4])
        assert not synced(s.nodes[0])
        for index in (3, 4):
            assert frozen + 1 not in s.nodes[index].digests, "nobody decides a round that is decided"
            assert s.nodes[index].id in s.nodes[0].contributors[40]

    virtual_loop.run(main(), seed=1)


def test_peer_that_asks_about_an_old_round_gets_its_verdict(swarm):
    async def main():
        s = swarm(3, rounds=9, size=20_000)
        s.start()
        answerer, asker = s.nodes[0], s.nodes[2]
        while answerer.replica.round < 8:
            await asyncio.sleep(0.1)
        assert answerer.session.history.get(3) is None, "its results are gone"
        heard = []
        routed = asker.session.on_frame

        def listen(peer, frame):
            heard.append(frame.message)
            routed(peer, frame)

        asker.session.on_frame = listen
        for message in (Ask(3, 0), Prepare(3, 0, Ballot(9, asker.id)), Ask(100, 0)):
            await asker.transport.send(answerer.id, Frame(message))
        await s.finish()
        verdicts = [one for one in heard if isinstance(one, Commit) and one.proposal.round == 3]
        assert verdicts == 2 * [answerer.session.history.commit_of(3, asker.id)]
        assert sum(isinstance(one, Behind) for one in heard) == 2

    virtual_loop.run(main(), seed=2)


def test_lone_founder_keeps_its_model_against_a_stranger(swarm):
    """Only the stranger is present, and inner steps take many patiences."""

    async def main():
        s = swarm(1, rounds=300, size=20_000)
        founder = s.nodes[0]
        founder.pace = 10.0
        s.start()
        await asyncio.sleep(16.0)
        began = founder.replica.round
        liar = s.join(9)
        for task in liar.tasks:
            task.cancel()
        raw = np.full(2 * s.size, 666.0, np.float32).view(np.uint8).data
        hashes = [blake3.blake3(raw[at : at + CHUNK_BYTES]).digest() for at in range(0, len(raw), CHUNK_BYTES)]
        layout, members = founder.replica.layout, (liar.id,)
        digest = state_digest(10**6, layout, members, hashes)
        offer = Frame(StateOffer(10**6, digest, layout, len(raw), members), b"".join(hashes))
        asked = []

        async def serve():
            while True:
                arrival = await liar.transport.recv()
                message = arrival.frame.message if arrival.frame is not None else None
                if isinstance(message, StateAsk):
                    asked.append(message)
                    await liar.transport.send(arrival.peer, offer)
                elif isinstance(message, StateFetch):
                    chunk = raw[message.index * CHUNK_BYTES : (message.index + 1) * CHUNK_BYTES]
                    await liar.transport.send(arrival.peer, Frame(StateChunk(10**6, message.index), chunk))
                elif isinstance(message, Ping):
                    await liar.transport.send(arrival.peer, Frame(Ack(message.sequence, 0, ())))

        async def talk():
            liar.transport.learn(founder.record)
            founder.transport.learn(liar.record)
            founder.session.roster.learn(liar.record, virtual_loop.current().time())
            while True:
                await liar.transport.send(founder.id, Frame(Behind(10**6)))
                await asyncio.sleep(0.5)

        tasks = [asyncio.create_task(serve()), asyncio.create_task(talk())]
        await asyncio.sleep(35.0)
        assert liar.id in founder.session.live and not asked and not synced(founder)
        assert began + 3 <= founder.replica.round < 100 and np.abs(founder.replica.theta).max() < 10
        for task in tasks:
            task.cancel()

    virtual_loop.run(main(), seed=1)


def test_peer_that_fetched_previous_state_announces_anew_and_votes_with_its_memory(swarm):
    """Its next announcement is a later one, so that peers accept it; its promises are in its store."""

    async def main():
        s = swarm(4, rounds=8, size=20_000)
        wrong = s.nodes[1]
        made = []
        begin = wrong.round_factory.begin

        def watch(terms, *args, **named):
            made.append((terms.round, named["store"], named["attempt"]))
            return begin(terms, *args, **named)

        wrong.round_factory.begin = watch

        def spoil(node):
            node.replica.state[0] += 1
            node.replica.seal()
            node.session.current = node.session.starter.start(node.session.current.attempt, node.session.current)

        s.fail_at(1, 3, "applied", lambda node: node.rounds.call_when_settled(lambda: spoil(node)))
        s.start()
        await s.finish()
        assert synced(wrong) == [3]
        assert [attempt for round, _, attempt in made if round == 4] == [3, 3, 4]
        assert {id(store) for _, store, _ in made} == {id(wrong.session.votes)}
        assert wrong.id in s.nodes[0].contributors[6]
        assert {node.replica.digest for node in s.nodes.values()} == {wrong.replica.digest}

    virtual_loop.run(main(), seed=1)


@pytest.mark.parametrize("cut", ["isolate", pytest.param("partition", marks=pytest.mark.trial)])
def test_restarted_founder_cut_off_does_not_restart_the_run(cut):
    faults = (Fault(6.0, cut, (0,), seconds=24.0), Fault(7.0, "restart", (0,), seconds=2.0))
    run = simulate(replace(trial(1, 6), faults=faults, duration=50.0), preset=PACE, stall=STALL)
    assert run.violations == ()
    back = [
        event.fields["round"]
        for event in run.journal.events
        if event.peer == 0 and event.at > 30.0 and event.name == "round"
    ]
    there = [event.fields["round"] for event in run.journal.events if event.peer == 1 and event.name == "round"]
    assert back and back[-1] >= there[-1] - 1
