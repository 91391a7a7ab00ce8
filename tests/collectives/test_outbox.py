"""Lanes: one slow peer delays nobody else, urgent goes first, and a broken link leaves nothing behind."""

from __future__ import annotations

import asyncio

import pytest
from thinwire.collectives.outbox import LONGEST, WORDS, Outbox
from thinwire.collectives.precedence import SHARE, STUCK
from thinwire.sims import clock
from thinwire.swarm.frame import Frame
from thinwire.swarm.protocol import Ballot, Behind, Chunk, Gossip, Partial, Result, StateChunk

A, B = bytes([1]) * 32, bytes([2]) * 32


class Wire:
    """Takes `seconds[peer]` for a frame; False for the dead."""

    def __init__(self):
        self.sent, self.seconds, self.dead = [], {A: 0.0, B: 0.0}, set()
        self.error, self.quick = None, set()

    async def send(self, to, frame):
        await asyncio.sleep(self.seconds[to])
        if self.error is not None:
            raise self.error
        if to in self.dead:
            return False
        self.sent.append((clock.current().time(), to, frame.message))
        return True

    def offer(self, to, frame):
        if to not in self.quick:
            return False
        self.sent.append((clock.current().time(), to, frame.message))
        return True

    def heard(self, peer):
        return [message for _, to, message in self.sent if to == peer]


def chunk(index):
    return Frame(Chunk(1, 0, 1, index), b"x")


def play(story):
    async def main():
        wire, lost = Wire(), []
        outbox = Outbox(wire, lost.append)
        await story(wire, outbox, lost)
        await outbox.close()

    clock.run(main(), seed=1)


def test_order_is_kept_and_urgent_goes_before_later():
    async def story(wire, outbox, lost):
        wire.seconds[A] = 1.0
        for index in range(3):
            outbox.bulk(A, chunk(index), later=True)
        await asyncio.sleep(0.5)  # the first is on its way
        for index in range(10, 13):
            outbox.bulk(A, chunk(index))
        await asyncio.sleep(10)
        assert [message.index for message in wire.heard(A)] == [0, 10, 11, 12, 1, 2]

    play(story)


def test_what_a_transport_takes_at_once_does_not_overtake_what_waits():
    async def story(wire, outbox, lost):
        wire.quick.add(A)
        outbox.control(A, Behind(1))
        assert wire.heard(A) == [Behind(1)], "at once"
        wire.quick.clear()
        wire.seconds[A] = 1.0
        outbox.control(A, Behind(2))
        wire.quick.add(A)
        outbox.control(A, Behind(3))
        await asyncio.sleep(5)
        assert wire.heard(A) == [Behind(1), Behind(2), Behind(3)]

    play(story)


def test_slow_peer_and_slow_bulk_delay_nobody_else():
    async def story(wire, outbox, lost):
        wire.seconds[A] = 5.0
        outbox.bulk(A, chunk(0))
        outbox.bulk(B, chunk(1))
        outbox.control(A, Behind(1))
        await asyncio.sleep(1.0)
        assert wire.heard(B) and not wire.heard(A)
        await asyncio.sleep(4.5)
        # Control does not wait for bulk: both took their five seconds side by side.
        assert {type(message) for message in wire.heard(A)} == {Behind, Chunk}

    play(story)


def test_unreachable_peer_is_told_of_and_its_queue_is_gone():
    async def story(wire, outbox, lost):
        wire.dead.add(A)
        for index in range(5):
            outbox.bulk(A, chunk(index))
        await asyncio.sleep(1)
        assert lost == [A]
        wire.dead.clear()
        outbox.bulk(A, chunk(9))
        await asyncio.sleep(1)
        assert [message.index for message in wire.heard(A)] == [9]

    play(story)


def test_drop_forgets_what_waits():
    async def story(wire, outbox, lost):
        wire.seconds[A] = 1.0
        for index in range(5):
            outbox.bulk(A, chunk(index))
            outbox.control(A, Behind(index))
        await asyncio.sleep(0.5)
        outbox.drop(A)
        await asyncio.sleep(10)
        assert len(wire.heard(A)) == 2 and lost == []

    play(story)


@pytest.mark.parametrize("longest", [WORDS, LONGEST])
def test_who_lets_too_much_pile_up_is_unreachable(longest):
    async def story(wire, outbox, lost):
        wire.seconds[A] = 1e6
        for index in range(longest + 2):
            assert lost == ([A] if index > longest else [])
            if longest == WORDS:
                outbox.control(A, Behind(1))
            else:
                outbox.bulk(A, chunk(0))
        assert lost == [A]

    play(story)


def test_rounds_that_are_over_wait_no_more():
    async def story(wire, outbox, lost):
        wire.seconds[A] = 1.0
        outbox.bulk(A, Frame(StateChunk(1, 7), b"x"), later=True)
        for round in (1, 2, 3, 4):
            outbox.bulk(A, Frame(Chunk(round, 0, 1, 0), b"x"))
            outbox.bulk(A, Frame(Result(round, 0, Ballot(1, A), 0), b"x"))
        outbox.begin(4)
        await asyncio.sleep(10)
        assert [(type(message), message.round) for message in wire.heard(A)] == [
            *((kind, round) for round in (3, 4) for kind in (Chunk, Result)),
            (StateChunk, 1),
        ]

    play(story)


def test_a_ring_that_came_to_nothing_waits_no_more_and_all_else_does():
    async def story(wire, outbox, lost):
        wire.seconds[A] = 1.0
        ballot = Ballot(1, B)
        kept = [Chunk(2, 0, 1, 0), Partial(1, 0, ballot, 0), Partial(2, 1, ballot, 0), Result(2, 0, ballot, 7)]
        gone = [Partial(2, 0, ballot, 1), Result(2, 0, ballot, 1)]
        outbox.bulk(A, chunk(0))
        outbox.bulk(A, Frame(kept[3], b"x"), later=True)
        await asyncio.sleep(0.5)  # the first is on its way
        for message in (*kept[:3], *gone):
            outbox.bulk(A, Frame(message, b"x"))
        outbox.recall(2, 0)
        await asyncio.sleep(10)
        assert wire.heard(A)[1:] == kept, "what was asked for is no part of the ring"

    play(story)


def state(index):
    return Frame(StateChunk(1, index), b"x")


def kinds(wire, since=0.0):
    """S for a frame of state, R for one of a round, as they left."""
    return "".join("S" if type(message) is StateChunk else "R" for at, _, message in wire.sent if at >= since)


class Uplink(Wire):
    """One frame at a time leaves, each takes a second, whoever it is for."""

    def __init__(self):
        super().__init__()
        self.way = asyncio.Lock()

    async def send(self, to, frame):
        async with self.way:
            await asyncio.sleep(1.0)
            self.sent.append((clock.current().time(), to, frame.message))
        return True


def test_state_for_one_peer_goes_after_rounds_with_others_but_gets_its_share():
    async def main():
        wire = Uplink()
        outbox = Outbox(wire)
        for index in range(20):
            outbox.bulk(A, chunk(index))
        for index in range(5):
            outbox.bulk(B, state(index), later=True)
        await asyncio.sleep(100)
        sent = kinds(wire)
        assert len(sent) == 25 and sent[:4] == "RRRR"
        assert sent.count("S") == 5 and "SS" not in sent[: sent.rindex("R")]
        assert all(sent[: at + 1].count("S") <= (at + 1) / SHARE for at in range(sent.rindex("R")))
        assert sent[:20].count("S") >= 3, "it gets on, too"
        await outbox.close()

    clock.run(main(), seed=1)


def test_state_does_not_wait_for_a_peer_that_takes_nothing():
    async def story(wire, outbox, lost):
        wire.seconds[A] = 1e6
        outbox.bulk(A, chunk(0))
        for index in range(3):
            outbox.bulk(B, state(index), later=True)
        await asyncio.sleep(3 * STUCK + 1)
        assert kinds(wire) == "SSS"

    play(story)


def test_state_waits_for_nothing_when_rounds_have_nothing_to_send():
    async def story(wire, outbox, lost):
        wire.quick |= {A, B}
        outbox.bulk(A, chunk(0))
        outbox.bulk(B, state(0), later=True)
        assert kinds(wire) == "RS", "at once"
        wire.quick.clear()
        wire.seconds[A] = 10.0
        outbox.bulk(A, chunk(1))
        outbox.bulk(A, chunk(2))
        outbox.drop(A)
        outbox.bulk(B, state(1), later=True)
        await asyncio.sleep(STUCK + 0.1)
        assert kinds(wire) == "RSS", "what was dropped is not waited for"

    play(story)


def test_what_a_transport_would_take_at_once_waits_too_when_it_is_state():
    async def story(wire, outbox, lost):
        wire.seconds[A] = 1.0
        outbox.bulk(A, chunk(0))
        wire.quick.add(B)
        outbox.bulk(B, state(0), later=True)
        assert kinds(wire) == ""
        await asyncio.sleep(1.5)
        assert kinds(wire) == "RS"

    play(story)


def test_news_of_members_go_when_nothing_else_waits():
    async def story(wire, outbox, lost):
        wire.seconds[A] = 1.0
        outbox.control(A, Behind(1))
        outbox.control(A, Gossip(()))
        outbox.control(A, Behind(2))
        await asyncio.sleep(5)
        assert wire.heard(A) == [Behind(1), Behind(2), Gossip(())]

    play(story)


def test_mistake_of_ours_is_not_swallowed():
    async def story(wire, outbox, lost):
        wire.error = TypeError("not a message")
        outbox.control(A, Behind(1))
        with pytest.raises(TypeError, match="not a message"):
            await outbox.failure
        assert lost == []

    play(story)


def test_nothing_is_sent_after_close():
    async def story(wire, outbox, lost):
        wire.seconds[A] = 1.0
        outbox.bulk(A, chunk(0))
        await asyncio.sleep(0.1)
        await outbox.close()
        await asyncio.sleep(5)
        assert wire.sent == []

    play(story)


def test_a_lane_is_kept_only_while_something_waits():
    """Peers come and go; what was used to reach them must not stay. Order holds from one lane to the next."""

    async def work():
        wire = Wire()
        outbox = Outbox(wire)
        for turn in range(3):
            for number in range(20):
                for peer in (A, B):
                    outbox.control(peer, Behind(100 * turn + number))
                if number % 7 == 0:
                    await asyncio.sleep(0)
            while outbox._control:
                await asyncio.sleep(0)
        for peer in (A, B):
            told = [message.round for message in wire.heard(peer)]
            assert told == [100 * turn + number for turn in range(3) for number in range(20)]
        await outbox.close()

    clock.run(work(), seed=0)


def test_several_newcomers_share_what_one_gets():
    async def main():
        wire = Uplink()
        outbox = Outbox(wire)
        for index in range(20):
            outbox.bulk(A, chunk(index))
        for newcomer in range(3):
            wire.seconds[bytes([9 + newcomer]) * 32] = 0.0
            for index in range(4):
                outbox.bulk(bytes([9 + newcomer]) * 32, state(index), later=True)
        await asyncio.sleep(100)
        sent = kinds(wire)
        last = sent.rindex("R")
        assert all(sent[: at + 1].count("S") <= (at + 1) / SHARE for at in range(last)), sent
        assert sent[:last].count("S") >= 3, "and they get on"
        await outbox.close()

    clock.run(main(), seed=1)


def test_slow_frames_are_not_taken_for_stuck_ones():
    async def story(wire, outbox, lost):
        wire.seconds[A] = 2 * STUCK
        for index in range(3 * SHARE):
            outbox.bulk(A, chunk(index))
        await asyncio.sleep(2 * STUCK + 0.1)
        for index in range(8):
            outbox.bulk(B, state(index), later=True)
        await asyncio.sleep(200)
        sent = kinds(wire)
        assert sent.startswith("RRRR") and sent[: sent.rindex("R")].count("S") <= 3, sent

    play(story)


def test_what_a_round_sends_to_a_peer_does_not_wait_behind_its_state():
    async def story(wire, outbox, lost):
        wire.seconds[A] = 1e6
        outbox.bulk(A, chunk(0))
        outbox.bulk(B, state(0), later=True)
        await asyncio.sleep(0.5)
        outbox.bulk(B, chunk(1))
        await asyncio.sleep(0.1)
        assert kinds(wire) == "R"
        await asyncio.sleep(2 * STUCK)
        assert kinds(wire) == "RS"

    play(story)
