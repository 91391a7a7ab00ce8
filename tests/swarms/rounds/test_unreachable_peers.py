"""Peers without a link between them: rounds take other routes, and no peer is excluded."""

from __future__ import annotations

import asyncio

import blake3
import pytest
from thinwire.sims.engine import virtual_loop
from thinwire.swarm.rendezvous_hash import leader_order


@pytest.mark.parametrize("seed", range(3))
def test_two_peers_without_link_both_contribute(swarm, seed):
    async def main():
        s = swarm(5, rounds=6, seed=seed)
        run, members = s.nodes[0].session.run_id, sorted(node.id for node in s.nodes.values())
        leaders = {
            leader_order(blake3.blake3(run + number.to_bytes(8, "big")).digest(), members, number, 0)[0]
            for number in range(3, 7)
        }
        a, b = [node for node in s.nodes.values() if node.id not in leaders][:2]
        s.fail_at(0, 3, "announce", lambda node: s.net.cut(a.id, b.id))
        s.start()
        await s.finish()
        s.check()
        for node in s.nodes.values():
            assert all(not node.missing[number] for number in range(2, 7))

    virtual_loop.run(main(), seed=seed)


@pytest.mark.trial
@pytest.mark.parametrize("count", [3, 4, 6])
@pytest.mark.parametrize("reason", ["hash", "chunk missing", "result"])
def test_liar_that_blames_everybody_excludes_nobody(swarm, count, reason):
    async def main():
        s = swarm(count)
        liar = s.nodes[count - 1]

        def slander(node):
            agreement = node.session.current.agreement
            for other in s.nodes.values():
                if other is not node and agreement.proposal.ballot.leader != node.id:  # a leader needs no pretext
                    agreement.accuse(other.id, reason, virtual_loop.current().time())

        for number in range(2, 7):
            s.fail_at(liar.index, number, "open", slander)
        s.start()
        await s.finish()
        s.check()
        for node in s.nodes.values():
            assert all(not node.missing[number] for number in range(2, 7))
        times = s.nodes[0].committed_at
        assert max(times[r] - times[r - 1] for r in range(2, 7)) < 2.0, "and it holds nobody up"

    virtual_loop.run(main(), seed=count)


@pytest.mark.parametrize("count", [2, 3])
@pytest.mark.parametrize("one_way", [True, False])
def test_group_of_two_or_three_survives_a_cut(swarm, count, one_way):
    """Of three peers, two continue; of two, rounds continue at the end of the cut at the latest."""

    async def main():
        s = swarm(count, rounds=12)

        def cut(node):
            s.net.cut(s.nodes[0].id, s.nodes[1].id, one_way=one_way)
            virtual_loop.current().call_later(30.0, s.net.heal)

        s.fail_at(0, 3, "announce", cut)
        s.start()
        await asyncio.sleep(30.0)
        if count == 3:
            assert max(node.replica.round for node in s.nodes.values()) >= 8
        await s.finish()
        s.check()

    virtual_loop.run(main(), seed=count)
