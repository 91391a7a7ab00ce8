"""Sparse swarms in which one uplink is weak: it carries its payload once, and others hand it on; in virtual time."""

from __future__ import annotations

import pytest
from thinwire.sims import clock
from thinwire.swarm.protocol import Chunk, Fetch, Result

TOPK = "topk(k=1024,chunk=4096)|2bit|rice"
FAST, SLOW, PEERS, WEAK = 200_000.0, 20_000.0, 8, 3
"""Bytes/s up, and who of how many is the slow one."""

PIECE = 2500


@pytest.fixture
def uneven(swarm):
    """Peers that know what their uplinks carry, as they do after some rounds."""

    def make(*, slow=SLOW, rounds=4, **rest):
        s = swarm(PEERS, codec=TOPK, outer='method = "sparseloco"\n', size=200_000, piece=PIECE, rounds=rounds, **rest)
        for node in s.nodes.values():
            rate = node.transport.uplink.rate = slow if node.index == WEAK else FAST
            node.transport.downlink.rate = 100 * FAST
            node.session._series.bandwidth.up = int(rate)
            node.up, node.source = {}, {}
            for number in range(1, rounds + 1):
                s.fail_at(node.index, number, "open", lambda node, number=number: mark(node, number))
        return s

    return make


def mark(node, number):
    node.up[number] = node.transport.traffic.bulk_up
    node.source[number] = sum(memoryview(piece).nbytes for piece in node.session.current.exchange._source)


def payload(s, number):
    """Bytes of the longest payload; the others are hardly shorter."""
    return max(node.source[number] for node in s.nodes.values())


def seconds(s, number):
    """From the first peer in whom a round opened to the last that committed it."""
    opened = [at for node in s.nodes.values() for at, name, fields in node.log if is_open(name, fields, number)]
    return max(node.committed_at[number] for node in s.nodes.values() if number in node.committed_at) - min(opened)


def is_open(name, fields, number):
    return name == "phase" and (fields["round"], fields["phase"]) == (number, "open")


def level(nbytes, slow=SLOW):
    """The least time that uplinks allow: of the weak one's payload, and of all copies over all uplinks."""
    return max(nbytes / slow, PEERS * (PEERS - 1) * nbytes / ((PEERS - 1) * FAST + slow))


@pytest.mark.parametrize("slow", [SLOW, FAST / 4])
def test_a_weak_uplink_carries_little_more_than_its_payload(uneven, slow):
    async def main():
        s = uneven(slow=slow)
        s.start()
        await s.finish()
        s.check()
        for number in (2, 3):
            nbytes = payload(s, number)
            took, weak = seconds(s, number), s.nodes[WEAK]
            print(number, nbytes, took, level(nbytes, slow), (weak.up[number + 1] - weak.up[number]) / nbytes)
            assert took < 1.3 * level(nbytes, slow)
            if slow == SLOW:
                assert weak.up[number + 1] - weak.up[number] < 1.2 * nbytes
                assert took < 0.25 * (PEERS - 1) * nbytes / slow, "directly it takes seven times as long as one payload"
        assert not any(node.session._series._standing.resting(4) for node in s.nodes.values())

    clock.run(main(), seed=1)
