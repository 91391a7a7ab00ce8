"""One side of a pair whose slow weights travel while both peers train."""

from __future__ import annotations

import blake3
import numpy as np
import pytest
from thinwire.collectives.gossip.group import GossipGroup
from thinwire.collectives.gossip.pair import Pair, PairTerms
from thinwire.collectives.gossip.pair_codec import parse_pair_codec
from thinwire.collectives.gossip.transfer import digest_of
from thinwire.collectives.timing import GIVE_UP
from thinwire.collectives.topology.shards import Grid
from thinwire.swarm.frame import Frame
from thinwire.swarm.messages.registry import Base, Chunk, Decline, Fetch, Ready

PARTNER, OTHER = bytes([1]) * 32, bytes([2]) * 32
PLAN, PATIENCE, COUNT = bytes(32), 2.0, 4
CODEC = parse_pair_codec("int4(block=256)", lr=0.7, gamma=0.7)


def vector(codec, value, count=COUNT):
    """So many encoded chunks, and their hashes."""
    payload = np.empty(codec.nbytes(256), np.uint8)
    codec.encode(np.full(256, value, np.float32), payload)
    chunks = [payload.tobytes()] * count
    return chunks, b"".join(blake3.blake3(chunk).digest() for chunk in chunks)


class Bench:
    """Pair with its sent messages. `partner`: vectors of the other side, first of the steps, then slow weights."""

    def __init__(self, count=COUNT):
        self.now, self.words, self.sent, self.withdrawn, self.count = 1.0, [], [], [], count
        self.debtors = []
        cut = Grid(256 * count, 256)
        self.terms = PairTerms(1, PLAN, cut, CODEC, 10**9, self, lambda: self.now, PATIENCE)
        self.step, self.slow = vector(CODEC.fast, 1.0, count), vector(CODEC.slow, 2.0, count)
        self.partner_step, self.partner_slow = vector(CODEC.fast, 3.0, count), vector(CODEC.slow, 4.0, count)
        self.pair = Pair(PARTNER, self.terms, lambda: None)

    # --- inputs of the pair

    def control(self, to, message):
        self.words.append(message)

    def bulk(self, to, frame):
        self.sent.append(frame)

    def drop_data(self, peer, round, fragment):
        self.withdrawn.append(peer)

    def received_over_relay(self, peer):
        return 700

    def note_debtor(self, peer, before):
        self.debtors.append((peer, before))

    def asked(self):
        """Return the chunks that were requested since the last call."""
        found = [number for word in self.words if isinstance(word, Fetch) for number in word.indices]
        self.words = [word for word in self.words if not isinstance(word, Fetch)]
        return found

    # --- messages of both sides

    def post(self):
        self.pair.post(Base(1, 0, 0, PLAN, self.slow[1]), self.slow[0])

    def announce(self):
        ready = Ready(1, 0, 1, digest_of(self.slow[1], self.count), PLAN, 1, self.step[1], True, 0.0, 0.0)
        self.pair.announce(ready, self.step[0], deadline=10.0)

    def on_message(self, message, payload=b""):
        self.pair.on_frame(Frame(message, payload))

    def its_base(self, attempt=0, plan=PLAN, hashes=None):
        self.on_message(Base(1, 0, attempt, plan, self.partner_slow[1] if hashes is None else hashes))

    def its_ready(self, base=None):
        base = digest_of(self.partner_slow[1], self.count) if base is None else base
        self.on_message(Ready(1, 0, 1, base, PLAN, 1, self.partner_step[1], True, 0.0, 0.0))

    def its_slow(self, indices=None, attempt=0):
        for index in range(self.count) if indices is None else indices:
            self.on_message(Chunk(1, 0, attempt, self.count + index), self.partner_slow[0][index])

    def its_step(self, indices=None):
        for index in range(self.count) if indices is None else indices:
            self.on_message(Chunk(1, 0, 1, index), self.partner_step[0][index])


SLOW, STEP = [4, 5, 6, 7], [0, 1, 2, 3]


def test_slow_weights_travel_during_training_and_steps_after_it():
    bench = Bench()
    bench.post()
    bench.its_base()
    assert bench.asked() == SLOW
    bench.its_slow()
    bench.announce()
    bench.its_ready()
    assert bench.asked() == STEP and bench.pair.result is None
    bench.its_step()
    assert list(bench.pair.result.theirs) == bench.partner_step[0] + bench.partner_slow[0]


@pytest.mark.parametrize("order", ["late base", "slow last", "not at all"])
def test_pair_does_not_finish_without_partner_slow_weights(order):
    bench = Bench()
    bench.post()
    if order == "slow last":
        bench.its_base()
    bench.announce()
    bench.its_ready()
    bench.its_step()
    assert bench.pair.result is None
    if order == "late base":
        bench.its_base()
    if order != "not at all":
        assert sorted(bench.asked()) == STEP + SLOW
        bench.its_slow()
        assert bench.pair.exchanged
    else:
        while bench.pair.result is None and bench.now < 100:
            bench.now += 0.5
            bench.pair.tick()
        assert bench.pair.result.reason == "stalled" and bench.now < 1 + 6 * PATIENCE


def test_pair_uses_slow_weights_named_in_ready():
    """Slow weights of an earlier process, or of a lie, are ignored; those that the Ready names are used."""
    bench = Bench()
    bench.post()
    other = vector(CODEC.slow, 9.0)
    bench.its_base(hashes=other[1])
    for index in range(COUNT):
        bench.on_message(Chunk(1, 0, 0, COUNT + index), other[0][index])
    bench.announce()
    bench.its_ready()
    bench.its_step()
    assert bench.pair.result is None
    bench.asked()
    bench.its_base(attempt=5, hashes=vector(CODEC.slow, 8.0)[1])
    assert bench.asked() == []
    bench.its_base(attempt=1)
    assert bench.asked() == SLOW
    bench.its_slow(attempt=1)
    assert list(bench.pair.result.theirs) == bench.partner_step[0] + bench.partner_slow[0]


def test_own_slow_weights_are_served_once_before_ready():
    bench = Bench()
    bench.post()
    assert [type(word) for word in bench.words] == [Base]
    ask = Fetch(1, 0, digest_of(bench.slow[1], COUNT), (4, 5, 0, 9))
    bench.on_message(ask)
    bench.on_message(ask)
    assert [frame.message.index for frame in bench.sent] == [4, 5]
    bench.announce()
    assert [type(word) for word in bench.words] == [Base, Ready]  # its Fetch shows that it knows them
    bench.pair.on_link_down()
    bench.pair.on_link_up()
    assert [type(word) for word in bench.words[2:]] == [Base, Ready]
    bench.on_message(ask)
    assert [frame.message.index for frame in bench.sent] == [4, 5, 4, 5]
    bench.on_message(Fetch(1, 0, digest_of(bench.step[1], 0), (1, 4)))
    assert [frame.message.index for frame in bench.sent[4:]] == [1]


def test_base_is_announced_again_with_ready():
    bench = Bench()
    bench.post()
    bench.announce()
    assert [type(word) for word in bench.words] == [Base, Base, Ready]
    bench.its_base()
    assert [type(word) for word in bench.words if not isinstance(word, Fetch)] == [Base, Base, Ready, Base, Ready]
    bench.its_ready()
    assert sum(isinstance(word, Ready) for word in bench.words) == 2


@pytest.mark.parametrize("fault", ["hash", "plan", "announcement", "length"])
def test_wrong_slow_weights_end_the_pair_at_ready(fault):
    bench = Bench()
    bench.post()
    if fault == "plan":
        bench.its_base(plan=bytes([7]) * 32)
    elif fault == "announcement":
        bench.its_base(hashes=bytes(32))
    elif fault == "hash":
        bench.its_base()
        bench.on_message(Chunk(1, 0, 0, COUNT), b"else")
    else:
        bench.its_base(hashes=blake3.blake3(b"else").digest() * COUNT)
        bench.on_message(Chunk(1, 0, 0, COUNT), b"else")
    assert bench.pair.result is None and isinstance(bench.words[-1], Decline) and bench.withdrawn
    bench.announce()
    assert bench.pair.result.reason == fault


def test_decline_of_slow_weights_does_not_end_the_pair():
    bench = Bench()
    bench.post()
    bench.on_message(Decline(1, 0, "late"))
    bench.its_base()
    bench.its_slow()
    bench.announce()
    bench.its_ready()
    bench.its_step()
    assert bench.pair.exchanged


@pytest.mark.parametrize("early", [False, True], ids=["slow weights trickle", "then the steps"])
def test_partner_that_trickles_is_given_up_despite_early_slow_weights(early):
    """Slow weights that came early give no extra time later."""
    bench = Bench(count=1000)
    bench.post()
    bench.its_base()
    bench.now += 500.0  # we train
    if early:
        bench.its_slow()
    bench.announce()
    bench.its_ready()
    began = bench.now
    for index in range(1000):
        if bench.pair.result is not None:
            break
        (bench.its_step if early else bench.its_slow)([index])
        bench.now += 4.0
        bench.pair.tick()
    assert bench.pair.result.reason == "stalled" and bench.now < began + (GIVE_UP + 5) * PATIENCE


def test_changed_partner_gets_slow_weights_and_the_former_is_withdrawn():
    bench = Bench()
    group = GossipGroup(bench.terms, size=2)
    group.post(*bench.slow)
    group.choose([PARTNER], [PARTNER, OTHER])
    group.on_frame(PARTNER, Frame(Base(1, 0, 0, PLAN, bench.partner_slow[1])))
    assert bench.asked() == SLOW and not bench.withdrawn
    group.choose([OTHER], [PARTNER, OTHER])
    assert bench.withdrawn == [PARTNER] and list(group.pairs) == [OTHER]
    assert [type(word) for word in bench.words] == [Base, Base]
    group.drop(OTHER, "gone")
    assert bench.withdrawn == [PARTNER, OTHER] and not group.pairs


def test_partner_that_repeats_its_base_is_told_ours_once():
    """It has drawn another partner and then us again, and cannot ask for unknown slow weights."""
    bench = Bench()
    bench.post()
    bench.its_base()
    bench.on_message(Fetch(1, 0, digest_of(bench.slow[1], COUNT), tuple(range(COUNT, 2 * COUNT))))
    bench.words.clear()
    bench.its_base()
    assert [type(word) for word in bench.words] == [Base]
    bench.its_base()
    assert len(bench.words) == 1, "two that do so do not go on for ever"


@pytest.mark.parametrize("ready", [False, True])
def test_partner_whose_announced_data_does_not_come_is_noted_as_debtor(ready):
    """A relay may swallow it. One that is late owes no data."""
    bench = Bench()
    bench.announce()
    if ready:
        bench.its_ready()
    while bench.pair.result is None:
        bench.now += 0.5
        bench.pair.tick()
    assert bench.debtors == ([(PARTNER, 700)] if ready else [])
