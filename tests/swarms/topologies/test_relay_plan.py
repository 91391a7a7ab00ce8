"""Sparse swarms with one weak uplink, which sends its payload once while other peers relay it."""

from __future__ import annotations

import pytest
from thinwire.collectives.timing import TICK
from thinwire.sims.engine import virtual_loop
from thinwire.swarm.membership.presets import WAN
from thinwire.swarm.messages.registry import Result

TOPK = "topk(k=1024,chunk=4096)|2bit|rice"
FAST, SLOW, PEERS, WEAK = 100_000.0, 10_000.0, 8, 3
"""Uplink rates in bytes/s, number of peers, and index of the slow one."""

PIECE = 1250

LATENCY = 0.02
"""Mean seconds of a trip between two peers: that of the fixture's swarms."""

EXTRA = (PEERS - 2) * PIECE / FAST + 6 * 2 * LATENCY + 2 * TICK
"""Most seconds that a round takes beyond `level`.

The last piece of the weak peer is sent on to all others. There are six trips: of the proposal, the piece, its copy, the
result, the vote and the commit. A tenth of a trip's time is exponentially distributed, so that it takes more than twice
the mean with a probability of exp(-11), which is 2e-5. Peers that wait for results, and for votes, look at the clock
once in a tick.
"""


@pytest.fixture
def uneven(swarm):
    """Return peers that know the capacity of their uplinks, as after some rounds."""

    def make(*, slow=SLOW, rounds=3):
        s = swarm(
            PEERS,
            codec=TOPK,
            outer='method = "sparseloco"\n',
            size=100_000,
            piece=PIECE,
            rounds=rounds,
            preset=WAN,
            patience=4.0,
        )
        for node in s.nodes.values():
            rate = node.transport.uplink.rate = slow if node.index == WEAK else FAST
            node.transport.downlink.rate = 100 * FAST
            node.presence.send_queue.bandwidth.up = int(rate)
            node.up, node.source = {}, {}
            for number in range(1, rounds + 1):
                s.fail_at(node.index, number, "open", lambda node, number=number: mark(node, number))
        return s

    return make


def mark(node, number):
    node.up[number] = node.transport.traffic.bulk_up
    node.source[number] = sum(memoryview(piece).nbytes for piece in node.session.current.data_plane.source)


def payload(s, number):
    """Bytes of the longest payload; the others are hardly shorter."""
    return max(node.source[number] for node in s.nodes.values())


def seconds(s, number, but=None):
    """Return the time from the first opening of a round to its last commit, without the peer `but`."""
    proposal = [at for node in s.nodes.values() for at, name, fields in node.log if is_open(name, fields, number)]
    ended = [
        node.committed_at[number] for node in s.nodes.values() if number in node.committed_at and node.index != but
    ]
    return max(ended) - min(proposal)


def is_open(name, fields, number):
    return name == "phase" and (fields["round"], fields["phase"]) == (number, "open")


def level(nbytes, slow=SLOW):
    """Return the least time that uplinks allow: for the weak payload, and for all copies over all uplinks."""
    return max(nbytes / slow, PEERS * (PEERS - 1) * nbytes / ((PEERS - 1) * FAST + slow))


@pytest.mark.parametrize("slow", [SLOW, pytest.param(FAST / 4, marks=pytest.mark.trial)])
def test_weak_uplink_sends_its_payload_about_once(uneven, slow):
    async def main():
        s = uneven(slow=slow)
        s.start()
        await s.finish()
        s.check()
        nbytes, weak = payload(s, 2), s.nodes[WEAK]
        assert level(nbytes, slow) <= seconds(s, 2) < level(nbytes, slow) + EXTRA
        if slow == SLOW:
            assert weak.up[3] - weak.up[2] < nbytes + PIECE, "it sends no piece twice"
        assert not any(resting(s, 4)) and not any(node.missing[2] for node in s.nodes.values())

    virtual_loop.run(main(), seed=1)


def resting(s, number):
    """Return the peers that each live peer has found to be no helper."""
    return [node.round_factory.peer_backoff.resting(number) for node in s.nodes.values() if node.transport.alive]


@pytest.mark.trial
def test_equal_uplinks_send_to_everybody(uneven):
    async def main():
        s = uneven(slow=0.9 * FAST)
        s.start()
        await s.finish()
        s.check()
        for node in s.nodes.values():
            sent = node.up[3] - node.up[2]
            assert sent == pytest.approx((PEERS - 1) * payload(s, 2), abs=(PEERS - 1) * PIECE), "each piece once"

    virtual_loop.run(main(), seed=1)


@pytest.mark.parametrize("after", [pytest.param(0.3, marks=pytest.mark.trial), 1.2])
def test_killed_helper_is_replaced(uneven, after):
    async def main():
        s = uneven()
        s.fail_at(5, 2, "open", lambda node: virtual_loop.current().call_later(after, node.kill))
        s.nodes[5].up = {2: 0}
        s.nodes[5].source = {2: 0}
        s.start()
        rest = [i for i in range(PEERS) if i != 5]
        await s.finish(rest)
        s.check(rest)
        assert seconds(s, 2) < 2 * level(payload(s, 2)), "only the pieces of the dead helper are sent again"
        for i in rest:
            assert s.nodes[WEAK].id in s.nodes[i].contributors[2]

    virtual_loop.run(main(), seed=2)


def lies(node, kind):
    """A node sends no more such frames."""
    bulk = node.presence.send_queue.bulk

    def send(to, frame, **how):
        if not isinstance(frame.message, kind):
            bulk(to, frame, **how)

    node.presence.send_queue.bulk = send


def test_helper_that_forwards_nothing_delays_one_round(uneven):
    async def main():
        s = uneven()
        s.nodes[5].presence.send_queue.bandwidth.up = 10**9
        lies(s.nodes[5], Result)
        s.start()
        await s.finish()
        s.check()
        assert all(s.nodes[5].id in found for found in resting(s, 2)[:5] + resting(s, 2)[6:])
        least = level(payload(s, 1))
        ticks = 2 * TICK  # the patience ends at one, and so does the wait for the results
        assert seconds(s, 1) < 2 * least + s.patience + ticks, (
            "those who stand in get the same bytes of it a second time"
        )
        assert max(seconds(s, 2), seconds(s, 3)) < least + EXTRA
        for node in s.nodes.values():
            assert all(len(node.contributors[number]) == PEERS for number in (1, 2, 3))

    virtual_loop.run(main(), seed=1)


@pytest.mark.trial
def test_contributor_that_sends_helpers_nothing_is_excluded(uneven):
    async def main():
        s = uneven()
        weak = s.nodes[WEAK]
        bulk = weak.presence.send_queue.bulk

        def silent(to, frame, **rest):
            if getattr(frame.message, "round", 0) != 2:
                bulk(to, frame, **rest)

        weak.presence.send_queue.bulk = silent
        s.start()
        await s.finish()
        s.check()
        for node in s.nodes.values():
            assert weak.id in node.missing[2]
        assert not any(set(found) - {weak.id} for found in resting(s, 3)[:WEAK] + resting(s, 3)[WEAK + 1 :])

    virtual_loop.run(main(), seed=1)


@pytest.mark.trial
def test_contributor_without_link_to_helper_still_contributes(uneven):
    async def main():
        s = uneven()
        s.fail_at(0, 2, "announce", lambda node: s.net.cut(s.nodes[WEAK].id, s.nodes[5].id))
        s.start()
        await s.finish()
        s.check()
        for node in s.nodes.values():
            assert len(node.contributors[2]) == PEERS
        # It lacks the other's announcement, so it learns about it from the commit.
        assert seconds(s, 2, but=WEAK) < 2 * level(payload(s, 2)) + s.patience / 2

    virtual_loop.run(main(), seed=3)
