"""Gossip group: time to wait for a partner that never completes its data."""

from __future__ import annotations

from types import SimpleNamespace

import blake3
import numpy as np
import pytest
from thinwire.collectives.gossip.group import GossipGroup
from thinwire.collectives.gossip.pair import PairTerms
from thinwire.collectives.gossip.pair_codec import parse_pair_codec
from thinwire.collectives.gossip.partner_patience import RATE
from thinwire.collectives.timing import GIVE_UP
from thinwire.collectives.topology.shards import Grid, grid
from thinwire.swarm.frame import Frame
from thinwire.swarm.messages.registry import Chunk, Ready

OTHERS = [bytes([index]) * 32 for index in range(1, 8)]
PLAN, PATIENCE, SIZE = bytes(32), 2.0, 1000


class Table:
    """Group of eight (or `size`) with scripted partners and this number of `chunks`."""

    def __init__(self, size=8, chunks=1, total=SIZE):
        self.now = 1.0
        codec = parse_pair_codec("fp32", lr=0.7, gamma=0.7)
        cut = Grid(total, total // chunks) if chunks > 1 else grid(total, codec)
        self.chunk = np.ones(codec.nbytes(cut.size(0)) // 4, np.float32).tobytes()
        self.hashes = blake3.blake3(self.chunk).digest() * chunks
        send_queue = SimpleNamespace(
            control=lambda to, message: None,
            bulk=lambda to, frame: None,
            drop_data=lambda *of: None,
            received_over_relay=lambda peer: None,
            note_debtor=lambda peer, before: None,
        )
        self.group = GossipGroup(
            PairTerms(1, PLAN, cut, codec, 10**9, send_queue, lambda: self.now, PATIENCE), size=size
        )
        self.group.choose(OTHERS, OTHERS)
        self.group.announce([self.chunk] * chunks, self.hashes, weight=1, loss=0.0, speed=0.0, deadline=10.0)

    def announces(self, peer, attempt=1):
        self.group.on_frame(peer, Frame(Ready(1, 0, attempt, bytes(32), PLAN, 1, self.hashes, True, 0.0, 0.0)))

    def sends(self, peer, index=0):
        self.group.on_frame(peer, Frame(Chunk(1, 0, 1, index), self.chunk))


@pytest.mark.parametrize("present", [0, 6])
def test_partner_that_announces_repeatedly_is_given_up(present):
    table = Table()
    for peer in OTHERS[:present]:
        table.announces(peer)
        table.sends(peer)
    began, attempt = table.now, 0
    while table.group.outstanding and table.now < 1000:
        attempt += 1
        table.announces(OTHERS[-1], attempt)
        table.now += 1.0
        table.group.tick()
    assert table.now - began <= (GIVE_UP + 1) * PATIENCE + 1


def test_partner_slower_than_all_others_is_given_up():
    """Each chunk is in time, but never all of them; the other partners show how long that should take."""
    table = Table(chunks=100, total=2_000_000)
    for peer in OTHERS:
        table.announces(peer)
    for index in range(100):
        for peer in OTHERS[:-1]:
            table.sends(peer, index)
    assert len(table.chunk) > 2 * RATE, "alone it would have time for all of them"
    for index in range(100):
        table.sends(OTHERS[-1], index)
        table.now += 1.0
        table.group.tick()
        if not table.group.outstanding:
            break
    assert table.now < 1.0 + (GIVE_UP + 1) * PATIENCE + 1
    assert table.group.exchanged(OTHERS[0]) and not table.group.exchanged(OTHERS[-1])


@pytest.mark.parametrize("seconds", [4.0, 9.0])
def test_partner_that_trickles_chunks_is_given_up(seconds):
    """A thousand chunks, each in time; without other partners it is given up for its rate per patience."""
    table = Table(size=2, chunks=1000)
    table.announces(OTHERS[0])
    for index in range(1000):
        if not table.group.outstanding:
            break
        table.sends(OTHERS[0], index)
        table.now += seconds
        table.group.tick()
    assert not table.group.exchanged(OTHERS[0]) and table.now < 1.0 + (GIVE_UP + 5) * PATIENCE


def test_slow_but_steady_partner_is_waited_for():
    table = Table(size=2, chunks=100, total=2_000_000)
    table.announces(OTHERS[0])
    for index in range(100):
        table.now += 0.9 * len(table.chunk) / RATE
        table.group.tick()
        table.sends(OTHERS[0], index)
    assert table.group.exchanged(OTHERS[0]) and table.now > 10 * GIVE_UP * PATIENCE


def test_member_that_was_dropped_is_chosen_again():
    table = Table(size=3, total=SIZE)
    table.group.ours = None  # before we are ready
    drawn = tuple(OTHERS[:2])
    for _ in range(2):
        table.group.choose(drawn, OTHERS)
        pairs = dict(table.group.pairs)
        table.group.choose(drawn, OTHERS)
        assert tuple(pairs) == drawn and table.group.pairs == pairs, "pairs of the same members stay"
        table.group.drop(drawn[0], "gone")
        assert tuple(table.group.pairs) == drawn[1:]
    table.group.choose(tuple(OTHERS[2:4]), OTHERS)
    assert tuple(table.group.pairs) == tuple(OTHERS[2:4])
