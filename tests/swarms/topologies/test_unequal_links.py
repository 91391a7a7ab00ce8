"""Unequal links: peers measure their bandwidth, and chunk ownership follows it."""

from __future__ import annotations

from collections import Counter
from dataclasses import replace
from statistics import mean

import pytest
from thinwire.sims.engine import virtual_loop

FAST, SLOW = 2.5e6, 2.5e5
ROUNDS, SIZE = 6, 400_000


def played(swarm, rates, *, shards="bandwidth", change=lambda s: None, seed=3):
    """Return a swarm with these links after its rounds."""

    async def main():
        s = swarm(len(rates), rounds=ROUNDS, size=SIZE, chunk_assignment=shards, patience=2.0, seed=seed)
        for node, rate in zip(s.nodes.values(), rates, strict=True):
            node.transport.uplink.rate = node.transport.downlink.rate = rate
        change(s)
        s.start()
        await s.finish()
        s.check()
        return s

    return virtual_loop.run(main(), seed=seed)


def seconds(s, first=4):
    """From the last announcement to the commit, the mean from the fourth round on."""
    took = []
    for number in range(first, ROUNDS + 1):
        announced = max(
            at
            for node in s.nodes.values()
            for at, name, fields in node.log
            if (name, fields) == ("phase", {"round": number, "phase": "announce"})
        )
        took.append(mean(node.committed_at[number] for node in s.nodes.values()) - announced)
    return mean(took)


def owned(s):
    """Return the chunks that each node owned in the last round, by the view of each."""
    found = [Counter(node.session.history.get(ROUNDS).data_plane.owners) for node in s.nodes.values()]
    assert all(one == found[0] for one in found)
    return [found[0][node.id] for node in s.nodes.values()]


@pytest.mark.trial
def test_rounds_are_faster_when_slow_link_owns_fewer_chunks(swarm):
    rates = [FAST, FAST, FAST, SLOW]
    sized, equal = (played(swarm, rates, shards=shards) for shards in ("bandwidth", "equal"))
    print(f"{seconds(sized):.3f} s by bandwidth {owned(sized)}, {seconds(equal):.3f} s with equal parts {owned(equal)}")
    assert owned(sized)[3] == 0 and max(owned(equal)) - min(owned(equal)) <= 1
    for node, rate in zip(sized.nodes.values(), rates, strict=True):
        link = node.presence.send_queue.bandwidth
        assert 0.5 * rate < link.up < 1.5 * rate and 0.5 * rate < link.down < 1.5 * rate
    # (1 + s (N - 2)) P / bandwidth with s = 1/4 and with s = 0.
    assert seconds(equal) / seconds(sized) > 1.25


@pytest.mark.trial
def test_equal_links_own_equal_shares(swarm):
    for rate in (FAST, SLOW):
        parts = owned(played(swarm, [rate] * 4))
        assert max(parts) - min(parts) <= 1


def test_shares_follow_changing_links(swarm):
    """The second peer's link becomes slow during the run, and the last one's fast."""

    def change(s):
        def swap(node):
            for index, rate in ((1, SLOW), (3, FAST)):
                transport = s.nodes[index].transport
                transport.uplink.rate = transport.downlink.rate = rate

        s.rounds = ROUNDS
        s.fail_at(0, 2, "applied", swap)

    parts = owned(played(swarm, [FAST, FAST, FAST, SLOW], change=change))
    assert parts[1] < 5 < parts[3]


def test_liar_about_its_link_owns_at_most_the_bound_and_soon_nothing(swarm):
    """It announces the fastest link and has the slowest: patience is not exceeded, but all lose time."""
    shares = []

    def change(s):
        factory = s.nodes[3].round_factory
        factory.links = replace(factory.links, rates=lambda: (2**50, 2**50))
        for node in s.nodes.values():
            node.log = Watched(node, shares)

    s = played(swarm, [FAST, FAST, FAST, SLOW / 2], change=change)
    liar, cut = s.nodes[3].id, len(s.nodes[0].session.grid)
    led = {o.round: o for o in shares if o.shares and o.ballot.leader != liar}
    taken = {number: dict(zip(o.group, o.shares, strict=True)).get(liar) for number, o in led.items()}
    print(taken)
    assert max(taken.values()) <= -(-3 * cut // 4)
    bad = [number for number, own in taken.items() if own]
    assert bad and all(taken.get(number + 1, 0) == taken.get(number + 2, 0) == 0 for number in bad)


class Watched(list):
    """Log that records opened ballots."""

    def __init__(self, node, shares):
        super().__init__(node.log)
        self.node, self.shares = node, shares

    def append(self, entry):
        super().append(entry)
        if entry[1] == "phase" and entry[2]["phase"] == "open":
            self.shares.append(self.node.session.current.agreement.proposal)


@pytest.mark.trial
@pytest.mark.parametrize(("victim", "phase"), [(0, "open"), (0, "record"), (0, "vote"), (3, "open"), (3, "vote")])
def test_rounds_survive_death_of_owner_with_many_or_no_chunks(swarm, victim, phase):
    async def main():
        s = swarm(5, rounds=ROUNDS, size=SIZE, patience=2.0, seed=victim)
        for node, rate in zip(s.nodes.values(), [FAST, FAST, FAST, SLOW, FAST], strict=True):
            node.transport.uplink.rate = node.transport.downlink.rate = rate
        s.fail_at(victim, 5, phase)
        s.start()
        rest = [index for index in range(5) if index != victim]
        await s.finish(rest)
        s.check(rest)
        assert not s.scripts

    virtual_loop.run(main(), seed=victim)
