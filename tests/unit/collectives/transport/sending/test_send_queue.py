"""Send queue: a slow peer delays no other, urgent frames go first, broken links leave nothing behind."""

from __future__ import annotations

import asyncio

import pytest
from thinwire.collectives.transport.sending.send_priority import PART, STUCK
from thinwire.collectives.transport.sending.send_queue import MAX_BULK, MAX_CONTROL, SendQueue
from thinwire.sims.engine import virtual_loop
from thinwire.swarm.frame import Frame
from thinwire.swarm.messages.registry import Ballot, Behind, Chunk, Gossip, Partial, Result, StateChunk, StateOffer

A, B = bytes([1]) * 32, bytes([2]) * 32


class Wire:
    """Takes `seconds[peer]` for a frame; False for the dead."""

    up_limit = 0

    def __init__(self):
        self.sent, self.seconds, self.dead = [], {A: 0.0, B: 0.0}, set()
        self.error, self.quick = None, set()
        self.lag, self.looks, self.rests = 0.0, 0, 0

    async def send(self, to, frame):
        await asyncio.sleep(self.seconds[to])
        if self.error is not None:
            raise self.error
        if to in self.dead:
            return False
        self.sent.append((virtual_loop.current().time(), to, frame.message))
        return True

    def offer(self, to, frame):
        if to not in self.quick:
            return False
        self.sent.append((virtual_loop.current().time(), to, frame.message))
        return True

    def totals(self):
        return 0, 0

    def rest(self):
        self.rests += 1

    def delivered(self, peer):
        """Each frame counts 10 bytes, and arrives `lag` seconds after it was sent."""
        self.looks += 1
        times = [at for at, to, _ in self.sent if to == peer]
        return 10 * len(times), 10 * sum(at + self.lag <= virtual_loop.current().time() for at in times)

    def heard(self, peer):
        return [message for _, to, message in self.sent if to == peer]


def chunk(index):
    return Frame(Chunk(1, 0, 1, index), b"x")


def play(story):
    async def main():
        wire, lost = Wire(), []
        send_queue = SendQueue(wire, lost.append)
        await story(wire, send_queue, lost)
        await send_queue.close()

    virtual_loop.run(main(), seed=1)


def test_urgent_frames_go_first_in_order():
    async def story(wire, send_queue, lost):
        wire.seconds[A] = 1.0
        for index in range(3):
            send_queue.bulk(A, chunk(index), requested=True)
        await asyncio.sleep(0.5)  # the first one is being sent
        for index in range(10, 13):
            send_queue.bulk(A, chunk(index))
        await asyncio.sleep(10)
        assert [message.index for message in wire.heard(A)] == [0, 10, 11, 12, 1, 2]

    play(story)


def test_data_of_a_round_that_leaves_is_not_requested_data_nor_state_nor_of_another_round():
    async def story(wire, send_queue, lost):
        wire.seconds[A] = 2.0
        result = Frame(Result(1, 0, Ballot(1, A), 0, b""), b"x")
        send_queue.begin(1)
        assert send_queue.last_sent(1, 0) == 0.0 and not send_queue.uplink_limits(1, 0)
        for frame, requested in (
            (chunk(0), False),
            (result, False),
            (result, True),
            (Frame(StateChunk(1, 0), b"x"), False),
        ):
            send_queue.bulk(A, frame, requested=requested)
        await asyncio.sleep(3.0)
        assert send_queue.uplink_limits(1, 0)  # the last one
        assert not send_queue.uplink_limits(2, 0) and not send_queue.uplink_limits(1, 1)
        await asyncio.sleep(2.0)
        assert not send_queue.uplink_limits(1, 0)
        await asyncio.sleep(15.0)
        assert len(wire.sent) == 4 and send_queue.last_sent(1, 0) == 4.0 and not send_queue.uplink_limits(1, 0)
        assert send_queue.last_sent(1, 1) == send_queue.last_sent(2, 0) == 0.0
        send_queue.begin(2)
        send_queue.bulk(A, result)
        await asyncio.sleep(10.0)
        assert send_queue.last_sent(2, 0) == 0.0 and not send_queue.uplink_limits(2, 0)
        wire.quick, wire.lag = {B}, 1.0
        send_queue.begin(1)
        send_queue.bulk(B, result, requested=True)
        assert send_queue.last_sent(1, 0) == 0.0 and not send_queue.uplink_limits(1, 0)
        send_queue.bulk(B, result)
        assert send_queue.last_sent(1, 0) == 30.0 and send_queue.uplink_limits(1, 0)
        await asyncio.sleep(1.5)
        assert not send_queue.uplink_limits(1, 0)

    play(story)


def test_data_that_has_left_is_being_sent_until_it_has_arrived():
    async def story(wire, send_queue, lost):
        wire.lag, wire.quick = 5.0, {A}
        send_queue.begin(1)
        send_queue.bulk(A, chunk(0))
        await asyncio.sleep(2.0)
        assert send_queue.uplink_limits(1, 0)
        for _ in range(3):
            send_queue.bulk(A, chunk(0), requested=True)  # what the peer requests after that does not delay it
        await asyncio.sleep(3.5)
        assert not send_queue.uplink_limits(1, 0)
        looks = wire.looks
        assert not send_queue.uplink_limits(1, 0) and wire.looks == looks
        send_queue.bulk(A, chunk(1))
        await asyncio.sleep(1.0)
        assert send_queue.uplink_limits(1, 0)
        send_queue.drop(A)  # the link broke: what was in transit is lost
        assert not send_queue.uplink_limits(1, 0)

    play(story)


def test_data_arrives_at_most_receivers_or_at_all_but_few_slow_ones():
    async def story(wire, send_queue, lost):
        c = bytes([3]) * 32
        wire.seconds = {A: 1.0, B: 1.0, c: 9.0}
        send_queue.begin(1)
        for peer in (A, B, c):
            send_queue.bulk(peer, chunk(0))
        await asyncio.sleep(0.5)
        assert send_queue.uplink_limits(1, 0)
        await asyncio.sleep(1.0)
        assert not send_queue.uplink_limits(1, 0)  # one of three has not got it

    play(story)


def test_immediate_send_does_not_overtake_waiting_frames():
    async def story(wire, send_queue, lost):
        wire.quick.add(A)
        send_queue.control(A, Behind(1))
        assert wire.heard(A) == [Behind(1)], "at once"
        wire.quick.clear()
        wire.seconds[A] = 1.0
        send_queue.control(A, Behind(2))
        wire.quick.add(A)
        send_queue.control(A, Behind(3))
        await asyncio.sleep(5)
        assert wire.heard(A) == [Behind(1), Behind(2), Behind(3)]

    play(story)


def test_slow_peer_and_slow_bulk_delay_no_other_lane():
    async def story(wire, send_queue, lost):
        wire.seconds[A] = 5.0
        send_queue.bulk(A, chunk(0))
        send_queue.bulk(B, chunk(1))
        send_queue.control(A, Behind(1))
        await asyncio.sleep(1.0)
        assert wire.heard(B) and not wire.heard(A)
        await asyncio.sleep(4.5)
        # Control does not wait for bulk: both took their five seconds side by side.
        assert {type(message) for message in wire.heard(A)} == {Behind, Chunk}

    play(story)


def test_unreachable_peer_is_reported_and_its_queue_dropped():
    async def story(wire, send_queue, lost):
        wire.dead.add(A)
        for index in range(5):
            send_queue.bulk(A, chunk(index))
        await asyncio.sleep(1)
        assert lost == [A]
        wire.dead.clear()
        send_queue.bulk(A, chunk(9))
        await asyncio.sleep(1)
        assert [message.index for message in wire.heard(A)] == [9]

    play(story)


def test_drop_discards_waiting_frames():
    async def story(wire, send_queue, lost):
        wire.seconds[A] = 1.0
        for index in range(5):
            send_queue.bulk(A, chunk(index))
            send_queue.control(A, Behind(index))
        await asyncio.sleep(0.5)
        send_queue.drop(A)
        await asyncio.sleep(10)
        assert len(wire.heard(A)) == 2 and lost == []

    play(story)


@pytest.mark.parametrize("longest", [MAX_CONTROL, MAX_BULK])
def test_overfull_lane_makes_peer_unreachable(longest):
    async def story(wire, send_queue, lost):
        wire.seconds[A] = 1e6
        for index in range(longest + 2):
            assert lost == ([A] if index > longest else [])
            if longest == MAX_CONTROL:
                send_queue.control(A, Behind(1))
            else:
                send_queue.bulk(A, chunk(0))
        assert lost == [A]

    play(story)


def test_frames_of_finished_rounds_are_recalled():
    async def story(wire, send_queue, lost):
        wire.seconds[A] = 1.0
        send_queue.bulk(A, Frame(StateChunk(1, 7), b"x"), requested=True)
        for round in (1, 2, 3, 4):
            send_queue.bulk(A, Frame(Chunk(round, 0, 1, 0), b"x"))
            send_queue.bulk(A, Frame(Result(round, 0, Ballot(1, A), 0), b"x"))
        send_queue.begin(4)
        await asyncio.sleep(10)
        assert [(type(message), message.round) for message in wire.heard(A)] == [
            *((kind, round) for round in (3, 4) for kind in (Chunk, Result)),
            (StateChunk, 1),
        ]

    play(story)


def test_drop_of_the_data_of_a_round_keeps_other_frames():
    async def story(wire, send_queue, lost):
        wire.seconds[A] = wire.seconds[B] = 1.0
        ballot = Ballot(1, B)
        send_queue.bulk(A, chunk(0))
        await asyncio.sleep(0.5)  # it is being sent
        kept = [Chunk(1, 0, 1, 1), Chunk(2, 1, 1, 1), Result(2, 0, ballot, 7)]
        for message in (*kept[:2], Chunk(2, 0, 1, 1), Partial(2, 0, ballot, 1), Result(2, 0, ballot, 1)):
            send_queue.bulk(A, Frame(message, b"x"))
        send_queue.bulk(A, Frame(kept[2], b"x"), requested=True)
        send_queue.bulk(B, Frame(Chunk(2, 0, 1, 1), b"x"))
        send_queue.drop_data(A, 2, 0)
        await asyncio.sleep(10)
        assert wire.heard(A)[1:] == kept and len(wire.heard(B)) == 1

    play(story)


def test_recall_of_failed_ring_keeps_other_frames():
    async def story(wire, send_queue, lost):
        wire.seconds[A] = 1.0
        ballot = Ballot(1, B)
        kept = [Chunk(2, 0, 1, 0), Partial(1, 0, ballot, 0), Partial(2, 1, ballot, 0), Result(2, 0, ballot, 7)]
        gone = [Partial(2, 0, ballot, 1), Result(2, 0, ballot, 1)]
        send_queue.bulk(A, chunk(0))
        send_queue.bulk(A, Frame(kept[3], b"x"), requested=True)
        await asyncio.sleep(0.5)  # the first one is being sent
        for message in (*kept[:3], *gone):
            send_queue.bulk(A, Frame(message, b"x"))
        send_queue.drop_ring_frames(2, 0)
        await asyncio.sleep(10)
        assert wire.heard(A)[1:] == kept, "what was asked for is no part of the ring"

    play(story)


def state(index):
    return Frame(StateChunk(1, index), b"x")


def kinds(wire, since=0.0):
    """Return the sent frames in order: S for state, R for rounds."""
    return "".join("S" if type(message) is StateChunk else "R" for at, _, message in wire.sent if at >= since)


class Uplink(Wire):
    """Transport that sends one frame a second, for all peers together."""

    def __init__(self):
        super().__init__()
        self.way = asyncio.Lock()

    async def send(self, to, frame):
        async with self.way:
            await asyncio.sleep(1.0)
            self.sent.append((virtual_loop.current().time(), to, frame.message))
        return True


def test_state_transfer_yields_to_rounds_but_gets_its_share():
    async def main():
        wire = Uplink()
        send_queue = SendQueue(wire)
        for index in range(5 * PART):
            send_queue.bulk(A, chunk(index))
        for index in range(5):
            send_queue.bulk(B, state(index), requested=True)
        await asyncio.sleep(100)
        sent = kinds(wire)
        assert len(sent) == 5 * PART + 5 and sent[:4] == "RRRR"
        assert sent.count("S") == 5 and "SS" not in sent[: sent.rindex("R")]
        assert all(sent[: at + 1].count("S") <= (at + 1) / PART for at in range(sent.rindex("R")))
        assert sent[: 5 * PART].count("S") >= 3, "it gets on, too"
        await send_queue.close()

    virtual_loop.run(main(), seed=1)


def test_state_transfer_does_not_wait_for_stuck_peer():
    async def story(wire, send_queue, lost):
        wire.seconds[A] = 1e6
        send_queue.bulk(A, chunk(0))
        for index in range(3):
            send_queue.bulk(B, state(index), requested=True)
        await asyncio.sleep(3 * STUCK + 1)
        assert kinds(wire) == "SSS"

    play(story)


def test_state_transfer_uses_idle_uplink():
    async def story(wire, send_queue, lost):
        wire.quick |= {A, B}
        send_queue.bulk(A, chunk(0))
        send_queue.bulk(B, state(0), requested=True)
        assert kinds(wire) == "RS", "at once"
        wire.quick.clear()
        wire.seconds[A] = 10.0
        send_queue.bulk(A, chunk(1))
        send_queue.bulk(A, chunk(2))
        send_queue.drop(A)
        send_queue.bulk(B, state(1), requested=True)
        await asyncio.sleep(STUCK + 0.1)
        assert kinds(wire) == "RSS", "what was dropped is not waited for"

    play(story)


def test_state_transfer_is_queued_even_if_transport_is_free():
    async def story(wire, send_queue, lost):
        wire.seconds[A] = 1.0
        send_queue.bulk(A, chunk(0))
        wire.quick.add(B)
        send_queue.bulk(B, state(0), requested=True)
        assert kinds(wire) == ""
        await asyncio.sleep(1.5)
        assert kinds(wire) == "RS"

    play(story)


def test_membership_gossip_is_sent_when_nothing_else_waits():
    async def story(wire, send_queue, lost):
        wire.seconds[A] = 1.0
        send_queue.control(A, Behind(1))
        send_queue.control(A, Gossip(()))
        send_queue.control(A, Behind(2))
        await asyncio.sleep(5)
        assert wire.heard(A) == [Behind(1), Behind(2), Gossip(())]

    play(story)


def test_error_in_sending_is_raised():
    async def story(wire, send_queue, lost):
        wire.error = TypeError("not a message")
        send_queue.control(A, Behind(1))
        with pytest.raises(TypeError, match="not a message"):
            await send_queue.failure
        assert lost == []

    play(story)


def test_nothing_is_sent_after_close():
    async def story(wire, send_queue, lost):
        wire.seconds[A] = 1.0
        send_queue.bulk(A, chunk(0))
        await asyncio.sleep(0.1)
        await send_queue.close()
        await asyncio.sleep(5)
        assert wire.sent == []

    play(story)


def test_lane_exists_only_while_frames_wait():
    """Peers come and go, and their queues must not accumulate. Frames stay in order from one queue to the next."""

    async def work():
        wire = Wire()
        send_queue = SendQueue(wire)
        for turn in range(3):
            for number in range(20):
                for peer in (A, B):
                    send_queue.control(peer, Behind(100 * turn + number))
                if number % 7 == 0:
                    await asyncio.sleep(0)
            while not send_queue.idle:
                await asyncio.sleep(0)
        for peer in (A, B):
            told = [message.round for message in wire.heard(peer)]
            assert told == [100 * turn + number for turn in range(3) for number in range(20)]
        await send_queue.close()

    virtual_loop.run(work(), seed=0)


def test_state_transfers_to_several_joiners_share_the_uplink():
    async def main():
        wire = Uplink()
        send_queue = SendQueue(wire)
        for index in range(5 * PART):
            send_queue.bulk(A, chunk(index))
        for newcomer in range(3):
            wire.seconds[bytes([9 + newcomer]) * 32] = 0.0
            for index in range(4):
                send_queue.bulk(bytes([9 + newcomer]) * 32, state(index), requested=True)
        await asyncio.sleep(100)
        sent = kinds(wire)
        last = sent.rindex("R")
        assert all(sent[: at + 1].count("S") <= (at + 1) / PART for at in range(last)), sent
        assert sent[:last].count("S") >= 3, "and they get on"
        await send_queue.close()

    virtual_loop.run(main(), seed=1)


def test_slow_frames_are_not_mistaken_for_stuck_ones():
    async def story(wire, send_queue, lost):
        wire.seconds[A] = 2 * STUCK
        for index in range(2 * PART):
            send_queue.bulk(A, chunk(index))
        await asyncio.sleep(2 * STUCK + 0.1)
        for index in range(8):
            send_queue.bulk(B, state(index), requested=True)
        await asyncio.sleep(200)
        sent = kinds(wire)
        assert sent.startswith("RRRR") and sent[: sent.rindex("R")].count("S") <= 3, sent

    play(story)


def test_round_frames_do_not_wait_behind_state_transfer():
    async def story(wire, send_queue, lost):
        wire.seconds[A] = 1e6
        send_queue.bulk(A, chunk(0))
        send_queue.bulk(B, state(0), requested=True)
        await asyncio.sleep(0.5)
        send_queue.bulk(B, chunk(1))
        await asyncio.sleep(0.1)
        assert kinds(wire) == "R"
        await asyncio.sleep(2 * STUCK)
        assert kinds(wire) == "RS"

    play(story)


class Link(Wire):
    """Transport over a link of `rate` bytes/s: `totals` counts what has left."""

    def __init__(self, rate):
        super().__init__()
        self.rate, self.way, self.left, self.began = rate, asyncio.Lock(), 0, None

    async def send(self, to, frame):
        async with self.way:
            self.began = virtual_loop.current().time()
            await asyncio.sleep(len(frame.payload) / self.rate)
            self.left, self.began = self.left + len(frame.payload), None
            self.sent.append((virtual_loop.current().time(), to, frame.message))
        return True

    def totals(self):
        going = 0.0 if self.began is None else (virtual_loop.current().time() - self.began) * self.rate
        return self.left + int(going), 0


MIB = 1 << 20


def play_link(story, rate=2.5e6):
    """Play with a link that a first exchange has measured."""

    async def main():
        wire = Link(rate)
        send_queue = SendQueue(wire)
        for index in range(16):
            send_queue.bulk(A, Frame(Chunk(1, 0, 1, index), bytes(MIB // 16)))
        await asyncio.sleep(1.0)
        assert send_queue.bandwidth.end_round()[0] == pytest.approx(rate, rel=0.1)
        await story(wire, send_queue)
        await send_queue.close()

    virtual_loop.run(main(), seed=1)


def test_state_has_its_part_of_a_known_uplink_whatever_the_number_of_joiners():
    """In each minute at most 1/PART of the uplink, and one frame more, is state; the estimate of the uplink stays."""
    rate = 2.5e6

    async def story(wire, send_queue):
        begun = virtual_loop.current().time()
        for newcomer in range(3):
            for index in range(8):
                send_queue.bulk(bytes([9 + newcomer]) * 32, Frame(StateChunk(1, index), bytes(MIB)), requested=True)
        for _ in range(2):
            await asyncio.sleep(60.0)
            known = send_queue.bandwidth.end_round()[0]
            assert known == pytest.approx(rate, rel=0.1), "pauses are no slow link"
        paths = send_queue.link_rates.rates(virtual_loop.current().time())
        assert all(found >= 0.9 * rate for found in paths.values()), "nor a slow path to a joiner"
        sent = [at for at, _, message in wire.sent if isinstance(message, StateChunk)]
        most = 60.0 * rate / PART / MIB
        assert all(sum(at <= other < at + 60.0 for other in sent) <= most + 1 for at in sent)
        assert len(sent) == 24 and sent[-1] - begun <= 25 * MIB * PART / rate * 1.1, "and no less"

    play_link(story, rate)


def test_results_for_a_joiner_share_the_part_of_state_and_wait_only_once():
    """A joiner reads the state and another one replays: together they have less than a tenth of the uplink."""
    rate = 2.5e6

    async def story(wire, send_queue):
        begun = virtual_loop.current().time()
        for _ in range(3):  # A joiner asks again.
            for index in range(8):
                send_queue.bulk(A, Frame(Result(1, 0, Ballot(1, A), index), bytes(MIB)), paced=True)
        assert send_queue.requested(A, Result, 0) in (7, 8) and send_queue.requested(A) == 0 and send_queue.idle
        for index in range(8):
            send_queue.bulk(B, Frame(StateChunk(1, index), bytes(MIB)), requested=True)
        send_queue.bulk(B, Frame(Chunk(2, 0, 1, 0), bytes(MIB)))
        await asyncio.sleep(130.0)
        assert isinstance(wire.sent[-1][2], Result | StateChunk)
        assert send_queue.bandwidth.end_round()[0] == pytest.approx(rate, rel=0.1), "pauses are no slow link"
        sent = [at for at, _, message in wire.sent if isinstance(message, Result | StateChunk)]
        most = 60.0 * rate / PART / MIB
        assert all(sum(at <= other < at + 60.0 for other in sent) <= most + 1 for at in sent)
        assert most * MIB < 0.1 * 60.0 * rate
        assert len(sent) == 16 and sent[-1] - begun <= 18 * MIB * PART / rate, "and no less"
        assert send_queue.requested(A, Result, 0) == 0

    play_link(story, rate)


def test_released_results_leave_at_once_and_state_keeps_its_pauses():
    async def story(wire, send_queue):
        for index in range(4):
            send_queue.bulk(B, Frame(Result(1, 7, Ballot(1, A), index), bytes(MIB)), paced=True)
        send_queue.bulk(B, Frame(StateChunk(1, 0), bytes(MIB)), requested=True)
        await asyncio.sleep(1.0)
        begun = virtual_loop.current().time()
        assert send_queue.requested(B, Result) == 3
        send_queue.end_pauses(B, 0)
        assert send_queue.requested(B, Result) == 3, "those of another fragment"
        send_queue.end_pauses(B, 7)
        await asyncio.sleep(3.1 * MIB / 2.5e6)
        assert kinds(wire, begun) == "RRR" and send_queue.requested(B) == 0
        await asyncio.sleep(2 * PART * MIB / 2.5e6)
        assert kinds(wire, begun) == "RRRS"

    play_link(story)


def test_hurried_state_has_no_pauses_but_waits_for_rounds():
    async def story(wire, send_queue):
        for index in range(4):
            send_queue.bulk(B, Frame(StateChunk(1, index, 7), bytes(MIB)), requested=True)
        await asyncio.sleep(1.0)
        begun = virtual_loop.current().time()
        assert len(kinds(wire, begun - 1.0)) == 1
        send_queue.hurry((B, 7), True)
        await asyncio.sleep(3.1 * MIB / 2.5e6)
        assert kinds(wire, begun) == "SSS"
        send_queue.hurry((B, 7), False)
        for index in range(2):
            send_queue.bulk(B, Frame(StateChunk(1, index, 7), bytes(MIB)), requested=True)
        await asyncio.sleep(4.0)
        assert kinds(wire, begun)[3:] == "S", "the pauses are back"

    play_link(story)


def test_offer_does_not_wait_for_the_pause_of_other_joiners():
    async def story(wire, send_queue):
        for index in range(2):
            send_queue.bulk(B, Frame(StateChunk(1, index), bytes(MIB)), requested=True)
        await asyncio.sleep(0.5)
        send_queue.bulk(A, Frame(StateOffer(1, bytes(32), bytes(32), 1, ()), b"x"), requested=True)
        await asyncio.sleep(0.5)
        assert isinstance(wire.sent[-1][2], StateOffer)

    play_link(story)


def test_state_is_sent_while_the_peer_trains_and_not_before_its_contribution():
    """Rounds of 4 s of training and 1 s of exchange: nothing is being sent when a contribution is."""

    async def story(wire, send_queue):
        now = virtual_loop.current().time
        late = []
        for round in range(2, 12):
            send_queue.begin(round)
            if round == 4:
                for index in range(8):
                    send_queue.bulk(B, Frame(StateChunk(1, index), bytes(MIB)), requested=True)
            await asyncio.sleep(4.0)
            begun = now()
            send_queue.bulk(A, Frame(Chunk(round, 0, 1, 0), bytes(MIB)))
            await asyncio.sleep(1.0)
            late += [at - begun - MIB / 2.5e6 for at, _, message in wire.sent if message == Chunk(round, 0, 1, 0)]
        assert late == pytest.approx([0.0] * 10, abs=1e-6)
        assert kinds(wire).count("S") >= 5

    play_link(story)


def test_transport_keeps_memory_from_round_to_round_unless_inner_steps_begin():
    """Averages that follow each other need it at once."""

    async def story(wire, send_queue):
        for round in range(1, 4):
            send_queue.begin(round)
        assert wire.rests == 0
        send_queue.rest()
        assert wire.rests == 1

    play_link(story)


def test_state_is_not_held_back_when_training_takes_longer_than_before():
    async def story(wire, send_queue):
        send_queue.begin(2)
        await asyncio.sleep(0.5)
        send_queue.bulk(A, Frame(Chunk(2, 0, 1, 0), bytes(MIB)))
        send_queue.begin(3)
        for index in range(3):
            send_queue.bulk(B, Frame(StateChunk(1, index), bytes(MIB)), requested=True)
        await asyncio.sleep(3 * 2 * 12 * MIB / 2.5e6 + 1.0)
        assert kinds(wire).count("S") == 3

    play_link(story)
