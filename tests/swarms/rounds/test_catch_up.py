"""Late peers follow round by round, starting from a state that they have read."""

from __future__ import annotations

import asyncio
from functools import partial

import pytest
from thinwire.sims.engine import virtual_loop


def synced(node):
    return [fields["round"] for _, name, fields in node.log if name == "synced"]


@pytest.mark.trial
@pytest.mark.parametrize("seed", [0, *(pytest.param(seed, marks=pytest.mark.soak) for seed in (1, 2))])
def test_joiner_catches_up_when_transfer_takes_several_rounds(swarm, seed):
    """8 MB of state at 1.5 MB/s are four rounds; the results of a round are 1 MB."""

    async def main():
        s = swarm(3, rounds=24, size=1_000_000, seed=seed)
        s.start()
        await asyncio.sleep(4.0)
        joiner = s.join(7)
        joiner.transport.downlink.rate = 1.5e6
        began = s.nodes[0].replica.round
        await s.finish()
        s.check()
        assert len(synced(joiner)) == 1, "one transfer is enough"
        arrived = next(time for time, name, _ in joiner.log if name == "synced")
        passed = sum(arrived > time for time in s.nodes[0].committed_at.values()) - synced(joiner)[0]
        assert passed >= 3
        first = min(number for number, peers in s.nodes[0].contributors.items() if joiner.id in peers)
        assert first <= began + 14
        assert all(joiner.id in s.nodes[0].contributors[number] for number in range(first + 2, 25))
        for node in s.nodes.values():
            assert len(node.session.history) <= 1, "and then nobody keeps more than the last round"

    virtual_loop.run(main(), seed=seed)


def test_peer_unreachable_for_leader_follows_without_fetching_state(swarm):
    async def main():
        s = swarm(4, rounds=14)
        s.fail_at(0, 4, "announce", lambda node: s.net.cut(s.nodes[0].id, s.nodes[1].id))
        s.start()
        await s.finish()
        s.check()
        assert not any(synced(node) for node in s.nodes.values())
        for a, b in ((0, 1), (1, 0)):
            assert sum(s.nodes[b].id in peers for peers in s.nodes[a].contributors.values()) >= 10
        times = s.nodes[2].committed_at
        assert max(times[number] - times[number - 1] for number in range(4, 15)) < 6.0, (
            "patience does not grow by waiting"
        )

    virtual_loop.run(main(), seed=1)


@pytest.mark.parametrize("seed", range(2))
def test_joiner_is_not_delayed_by_a_simultaneous_death(swarm, seed):
    """Transfer of the state, at most the rest of one round, and the first round of the joiner."""

    async def main():
        s = swarm(6, rounds=9, size=100_000, seed=seed, bandwidth=5e6)
        s.start()
        await asyncio.sleep(4.0 + 0.6 * seed)
        joiner = s.join(7)
        await asyncio.sleep(0.51)  # it has just asked for offers
        began = asyncio.get_running_loop().time()
        s.nodes[2].kill()
        left = [0, 1, 3, 4, 5, 7]
        await s.finish(left)
        s.check(left)
        came = next(time for time, name, _ in joiner.log if name == "synced") - began
        first = min(number for number, peers in joiner.contributors.items() if joiner.id in peers)
        took = joiner.committed_at[first] - began
        assert came < 0.5 and took < came + 2 * 1.5  # rounds of 1.25 s and an exchange

    virtual_loop.run(main(), seed=seed)


def test_restarted_members_do_not_follow_one_survivor(swarm):
    """They look for a state, but each has a checkpoint, so they still count in the majority."""

    async def main():
        s = swarm(5, rounds=3)
        s.start()
        await s.finish()
        before, liar = {index: s.nodes[index].replica for index in range(4)}, s.nodes[4]
        forged = liar.replica
        forged.state[:] += 1.0
        forged.round = 4
        forged.seal()
        s.rounds = 7
        for index in before:
            s.nodes[index].kill()
        await asyncio.sleep(0.5)
        for index, old in before.items():
            node = s.nodes[index] = type(liar)(s, index, 1)
            node.replica.state[:], node.replica.round, node.replica.members = old.state, old.round, old.members
            node.replica.lives = old.lives
            node.replica.seal()
            node.rounds.enter = partial(node.rounds.enter, tries=5)
            node.start(joins=True)
        await asyncio.sleep(10.0)
        for index in before:
            assert forged.digest.hex() not in [
                fields["digest"] for _, kind, fields in s.nodes[index].log if kind == "synced"
            ]

    virtual_loop.run(main(), seed=1)
