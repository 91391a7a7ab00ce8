"""Presence between a fake transport and a real roster, in virtual time: links, routing, bans, duplicate keys, its tasks."""

from __future__ import annotations

import asyncio
import math
from contextlib import asynccontextmanager
from functools import partial, wraps

import pytest
from kit.roster_world import EPOCH, IDENTITIES, RUN, RosterWorld, record
from thinwire.collectives.allreduce.service import OPERATIONS
from thinwire.collectives.timing import TICK
from thinwire.collectives.transport.interface import REFUSED, RELAY_STUCK, RESET, Arrival
from thinwire.node.membership.handler import Handler, Topic, topic_of
from thinwire.node.membership.peer_diagnosis import CLOCK_SECONDS
from thinwire.node.membership.presence import STOPPED_SECONDS, Presence
from thinwire.node.membership.relay_watch import RELAY_SECONDS
from thinwire.sims.engine import virtual_loop
from thinwire.swarm.frame import Frame, sign_message
from thinwire.swarm.identity.admission_token import AdmissionPolicy
from thinwire.swarm.membership import gossip_items
from thinwire.swarm.membership.peer_table import MembershipEvent
from thinwire.swarm.membership.presets import WAN
from thinwire.swarm.messages.announcement import SPAN_PREFIX
from thinwire.swarm.messages.registry import (
    LIFE,
    Ack,
    Ballot,
    Behind,
    Close,
    Evidence,
    Gossip,
    GradientSummary,
    Nack,
    NextNumber,
    Ping,
    PingRequest,
    PushPull,
    RecoveryRequest,
    Verdict,
    Vote,
    WallClock,
)

ME, ANN, BEN, CAT, DAN = (identity.peer_id for identity in IDENTITIES[:5])
assert DAN < ME < min(ANN, BEN, CAT)
MOMENT = 0.001
"""Seconds until all that an arrival causes has happened; shorter than the roster's tick."""


class FakeTransport:
    """Transport that logs the calls. `full`: peers to which `offer` fails; `unreachable`: to which `send` fails."""

    peer_id, up_limit = ME, 0

    def __init__(self):
        self.arrivals: asyncio.Queue[Arrival] = asyncio.Queue()
        self.sent, self.learned, self.dropped, self.allowed, self.left_relays = [], [], [], [], []
        self.full, self.unreachable, self.broken, self.closed = set(), set(), False, False
        self.received, self.left_circuits = {}, []

    async def recv(self):
        return await self.arrivals.get()

    def pauses(self):
        return {}

    def offer(self, to, frame):
        if to in self.full:
            return False
        self.sent.append((to, frame.message))
        return True

    def delivered(self, peer):
        return 0, 0

    async def send(self, to, frame):
        if self.broken:
            raise OSError("no descriptors")
        self.sent.append((to, frame.message))
        await asyncio.sleep(2 * MOMENT)
        return to not in self.unreachable

    def learn(self, known):
        self.learned.append(known)

    def drop(self, peer, reason, *, ban=False):
        self.dropped.append((peer, reason, ban))

    def leave_relay(self, relay):
        self.left_relays.append(relay)

    def leave_circuit(self, peer):
        self.left_circuits.append(peer)

    def bulk_received(self, peer):
        return self.received.get(peer, 0)

    def allow(self, peer):
        self.allowed.append(peer)

    async def close(self):
        self.closed = True


class Log(Handler):
    """Handler that logs all events; `calls` may be shared by several, which then have a name."""

    def __init__(self, name="", calls=None):
        self.name, self.calls, self.ticks = name, [] if calls is None else calls, 0

    def on_link_up(self, peer):
        self.calls.append((f"{self.name}up", peer))

    def on_link_down(self, peer, *, gone):
        self.calls.append((f"{self.name}down", peer, gone))

    def on_frame(self, peer, frame):
        self.calls.append((f"{self.name}frame", peer, frame.message))

    def on_tick(self):
        self.ticks += 1


class FakeMonitor:
    """Health monitor that logs the calls; it keeps messages of the type WallClock."""

    def __init__(self):
        self.calls, self.ticks = [], 0

    def saw(self, peer, frame):
        self.calls.append(("saw", peer, type(frame.message)))
        return isinstance(frame.message, WallClock)

    def on_link_up(self, peer):
        self.calls.append(("up", peer))

    def on_link_down(self, peer):
        self.calls.append(("down", peer))

    def on_tick(self):
        self.ticks += 1


class Scene:
    """One peer, which knows the first `others` of Ann, Ben and Cat, without links.

    `handled`: it has a handler of rounds. `lost`: seconds by which its clock is ahead of its event loop.
    """

    def __init__(self, others=3, *, wall=None, handled=True, lost=(0.0,)):
        self.transport, self.events, self.times, self.log = FakeTransport(), [], {}, Log()
        world = RosterWorld()
        self.roster = world.add(0)
        for index in range(1, 1 + others):
            self.roster.learn(record(index), 0.0)
        self.roster.events.clear()
        loop = virtual_loop.current()
        self.presence = Presence(
            self.transport,
            self.roster,
            now=lambda: loop.time() + lost[0],
            emit=self._emit,
            wall=wall,
        )
        if handled:
            self.presence.attach(Topic.ROUNDS, self.log)

    def _emit(self, kind, fields):
        self.events.append((kind, fields))
        self.times[kind] = virtual_loop.current().time()

    @asynccontextmanager
    async def running(self, *beside):
        """Run the peer. All that it has logged so far is cleared."""
        task = asyncio.create_task(self.presence.run(*beside))
        await asyncio.sleep(WAN.tick + MOMENT)
        self.clear()
        yield task
        task.cancel()
        await asyncio.gather(task, return_exceptions=True)

    def clear(self):
        for one in (self.transport.sent, self.transport.learned, self.events, self.log.calls):
            one.clear()
        self.log.ticks = 0

    async def come(self, peer, *messages):
        """Let frames arrive, and let the peer process them."""
        for message in messages:
            self.transport.arrivals.put_nowait(Arrival(peer, Frame(message)))
        await asyncio.sleep(MOMENT)

    async def lose(self, peer, reason=RESET):
        self.transport.arrivals.put_nowait(Arrival(peer, None, reason))
        await asyncio.sleep(MOMENT)

    async def happen(self, *events):
        """Let the roster have events; the next tick passes them on."""
        self.roster.events.extend(events)
        self.roster.due = -math.inf  # as after any input that causes events
        await asyncio.sleep(WAN.tick + MOMENT)

    def sent(self, peer, kind):
        return [message for to, message in self.transport.sent if to == peer and isinstance(message, kind)]

    def kinds(self):
        return [(kind, fields.get("peer")) for kind, fields in self.events]


def simulated(main):
    """Run a test in virtual time."""

    @wraps(main)
    def run(**given):
        virtual_loop.run(main(**given), seed=1, explore=False)

    return run


def evidence():
    ballot = Ballot(1, ANN)
    votes = [Vote(7, 0, ballot, b"o" * 32, digest * 32, b"l" * LIFE) for digest in (b"a", b"b")]
    return Evidence(
        IDENTITIES[1].public_key, *votes, tuple(sign_message(one, b"", IDENTITIES[1], RUN) for one in votes)
    )


VERDICT = Verdict(7, 0, 3, ANN, b"l" * LIFE)


# --- links


@simulated
async def test_relay_is_left_if_a_peer_that_owes_data_sends_control_messages_and_no_byte_of_it():
    scene = Scene()
    async with scene.running():
        await scene.come(ANN, Behind(1))
        await scene.come(BEN, Behind(1))
        scene.transport.received = {ANN: 7, BEN: 8}
        scene.presence.send_queue.debtors |= {ANN: 7, BEN: 7, CAT: 0}
        assert not scene.transport.left_circuits, "the peers may have stopped"
        for _ in range(2):
            await scene.come(ANN, Behind(2))
            await scene.come(BEN, Behind(2))
            assert not scene.transport.left_circuits, "the data may be late, after an outage"
            await asyncio.sleep(RELAY_SECONDS / 2)
        await scene.come(ANN, Behind(2))
        assert scene.transport.left_circuits == [ANN] and scene.presence.send_queue.debtors == {CAT: 0}
        await scene.come(CAT, Behind(1))
        scene.transport.arrivals.put_nowait(Arrival(CAT, None, RELAY_STUCK, BEN))
        await asyncio.sleep(MOMENT)
        assert scene.events[-1] == ("link_lost", {"peer": CAT.hex(), "reason": RELAY_STUCK, "relay": BEN.hex()})


@simulated
async def test_first_frame_of_a_peer_opens_its_link_and_the_others_do_not():
    scene = Scene()
    async with scene.running():
        await scene.come(ANN, Behind(1), Behind(2))
        assert scene.log.calls == [("up", ANN), ("frame", ANN, Behind(1)), ("frame", ANN, Behind(2))]
        assert scene.presence.live == {ANN}


@pytest.mark.parametrize("peer", [ANN, DAN])
@simulated
async def test_peer_without_handlers_answers_probes(peer):
    scene = Scene(handled=False)
    async with scene.running():
        await scene.come(peer, Ping(1, 0, ()), Behind(1))
        assert scene.sent(peer, Ack) and scene.presence.live == {peer}
        await scene.lose(peer)
        assert not scene.presence.live


@simulated
async def test_peer_that_joins_has_a_link_and_its_record_is_passed_to_the_transport():
    scene = Scene(others=1)
    async with scene.running():
        await scene.come(ANN, Gossip((record(2).item,)))
        assert scene.log.calls == [("up", ANN), ("up", BEN)] and scene.presence.live == {ANN, BEN}
        assert scene.transport.learned == [record(2)] and ("joined", BEN.hex()) in scene.kinds()


@simulated
async def test_peer_with_a_link_has_no_second_one_when_it_joins():
    scene = Scene(others=1)
    async with scene.running():
        await scene.come(BEN, Behind(1), Gossip((record(2).item,)))
        assert [call for call in scene.log.calls if call[0] == "up"] == [("up", BEN)]


@simulated
async def test_new_record_is_passed_to_the_transport_but_opens_no_link():
    scene = Scene()
    async with scene.running():
        moved = record(2, sequence=2, port=5000)
        scene.roster.learn(moved, 0.2)
        await scene.happen(MembershipEvent("refuted", CAT, "why"))
        assert scene.transport.learned == [moved] and not scene.presence.live and not scene.log.calls
        assert scene.events == [
            ("updated", {"peer": BEN.hex(), "detail": moved.addresses[0]}),
            ("refuted", {"peer": CAT.hex(), "detail": "why"}),
        ]
        await scene.happen()
        assert len(scene.events) == 2, "each event is passed on once"


@simulated
async def test_peer_without_a_record_and_this_peer_itself_have_no_link():
    scene = Scene(others=1)
    async with scene.running():
        await scene.happen(MembershipEvent("joined", BEN))
        await scene.come(ME, Behind(1))
        assert not scene.transport.learned and not scene.presence.live
        assert [call[0] for call in scene.log.calls] == ["frame"]


@simulated
async def test_lost_link_is_reported_and_its_peer_probed_at_once():
    scene = Scene()
    async with scene.running():
        await scene.come(ANN, Behind(1))
        scene.clear()
        await scene.lose(ANN)
        assert scene.events == [("link_lost", {"peer": ANN.hex(), "reason": RESET})]
        assert scene.log.calls == [("down", ANN, False)] and not scene.presence.live
        assert len(scene.sent(ANN, Ping)) == 1
        await scene.lose(ANN)
        assert len(scene.events) == len(scene.log.calls) == 1, "the link is down already"


@simulated
async def test_handlers_learn_of_a_dead_process_even_without_a_link():
    scene = Scene()
    async with scene.running():
        await scene.lose(ANN, REFUSED)
        assert scene.log.calls == [("down", ANN, True)] and not scene.events


@simulated
async def test_lost_links_are_not_reported_after_the_goodbye():
    scene = Scene()
    async with scene.running():
        await scene.come(ANN, Behind(1))
        await scene.presence.leave()
        scene.clear()
        await scene.lose(ANN)
        assert not scene.events and scene.log.calls == [("down", ANN, False)]


@simulated
async def test_peer_that_the_transport_cannot_reach_loses_its_link_and_its_waiting_messages():
    scene = Scene()
    async with scene.running():
        await scene.come(ANN, Behind(1))
        scene.clear()
        scene.transport.full, scene.transport.unreachable = {ANN}, {ANN}
        scene.presence.send_queue.control(ANN, Behind(1))
        await asyncio.sleep(3 * MOMENT)
        assert scene.log.calls == [("down", ANN, False)] and not scene.presence.live


@simulated
async def test_messages_that_wait_for_a_lost_peer_are_dropped():
    scene = Scene()
    async with scene.running():
        await scene.come(ANN, Behind(1))
        scene.transport.full = {ANN, BEN}
        for peer in (ANN, BEN):
            for round in range(1, 4):
                scene.presence.send_queue.control(peer, Behind(round))
        await scene.lose(ANN)
        await asyncio.sleep(10 * MOMENT)
        taken = [(to, message.round) for to, message in scene.transport.sent if isinstance(message, Behind)]
        assert [round for to, round in taken if to == ANN] == [1], "one was on its way"
        assert [round for to, round in taken if to == BEN] == [1, 2, 3]


@pytest.mark.parametrize(("kind", "gone"), [("dead", False), ("left", True), ("banned", False)])
@simulated
async def test_peer_that_dies_leaves_or_is_banned_has_no_link(kind, gone):
    scene = Scene()
    async with scene.running():
        await scene.come(ANN, Behind(1))
        scene.clear()
        await scene.happen(MembershipEvent(kind, ANN))
        assert scene.log.calls == [("down", ANN, gone)] and not scene.presence.live
        assert scene.transport.left_relays == [ANN], "links that it relays are of no use"
        await scene.come(ANN, Behind(2))
        assert (ANN in scene.presence.live) == (kind != "banned")


@simulated
async def test_suspicion_and_its_end_leave_the_link_as_it_is():
    scene = Scene()
    async with scene.running():
        await scene.come(ANN, Behind(1))
        scene.clear()
        await scene.happen(
            MembershipEvent("suspect", ANN), MembershipEvent("refuted", ANN), MembershipEvent("revoked", ANN)
        )
        assert scene.presence.live == {ANN} and not scene.log.calls and not scene.transport.learned
        assert not scene.presence.duplicate.is_set() and not scene.presence.banned.is_set()
        assert [kind for kind, _ in scene.events] == ["suspect", "refuted", "revoked"]


@simulated
async def test_silence_is_the_time_since_the_last_message():
    scene = Scene()
    async with scene.running():
        assert scene.presence.silence_of(ANN) == 0.0
        await scene.come(ANN, Behind(1))
        await asyncio.sleep(0.5)
        assert scene.presence.silence_of(ANN) == pytest.approx(0.5, abs=2 * MOMENT)
        await scene.lose(ANN)
        assert scene.presence.silence_of(ANN) > 0.5, "a peer without a link counts, too"


@simulated
async def test_times_of_absent_peers_are_forgotten_when_there_are_too_many(monkeypatch):
    monkeypatch.setattr("thinwire.node.membership.presence.MAX_PEERS", 3)
    scene = Scene()
    async with scene.running():
        for peer in (ANN, BEN):
            await scene.come(peer, Behind(1))
        await scene.lose(ANN)
        await asyncio.sleep(0.5)
        await scene.come(CAT, Behind(1))
        await scene.come(BEN, Behind(2))
        assert scene.presence.silence_of(ANN) > 0.5, "there is room for all so far"
        await scene.come(DAN, Behind(1))
        assert scene.presence.silence_of(ANN) == 0.0 and scene.presence.silence_of(BEN) > 0.0
        assert scene.presence.live == {BEN, CAT, DAN}
        await scene.come(ANN, Behind(3))
        await scene.lose(ANN)
        await scene.come(IDENTITIES[5].peer_id, Behind(1))
        assert scene.presence.silence_of(ANN) == 0.0, "those with a link all count, however many they are"
        assert scene.presence.silence_of(BEN) > 0.0


# --- routing


def test_each_message_beyond_membership_has_one_family():
    ballot = Ballot(1, ANN)
    votes = {fragment: Vote(1, fragment, ballot, bytes(32), bytes(32)) for fragment in (0, OPERATIONS)}
    topics = [
        topic_of(one)
        for one in (votes[0], votes[OPERATIONS], NextNumber("", 1, False), Close(1, ()), RecoveryRequest(0))
    ]
    assert topics == [Topic.ROUNDS, Topic.OPERATIONS, Topic.OPERATIONS, Topic.STAGES, Topic.RECOVERY]


@simulated
async def test_message_goes_to_the_handler_of_its_family_and_is_dropped_without_one():
    scene, stages = Scene(), Log()
    async with scene.running():
        await scene.come(ANN, GradientSummary(1, 1.0, 1, ""))
        scene.presence.attach(Topic.STAGES, stages)
        await scene.come(ANN, GradientSummary(2, 1.0, 1, ""), RecoveryRequest(0))
        assert stages.calls == [("frame", ANN, GradientSummary(2, 1.0, 1, ""))] and scene.log.calls == [("up", ANN)]


@simulated
async def test_handlers_learn_of_links_and_time_in_the_order_of_the_families():
    scene, calls = Scene(), []
    logs = {topic: Log(f"{topic.value} ", calls) for topic in reversed(Topic)}
    for topic, log in logs.items():
        scene.presence.attach(topic, Log("old ", calls))
        scene.presence.attach(topic, log)
    async with scene.running():
        before = logs[Topic.STAGES].ticks
        await scene.come(ANN, Behind(1))
        await scene.lose(ANN)
        await asyncio.sleep(3 * WAN.tick)
        assert logs[Topic.STAGES].ticks == before + 3
    order = [topic.value for topic in Topic]
    expected = [(f"{name} up", ANN) for name in order]
    expected += [("rounds frame", ANN, Behind(1)), *((f"{name} down", ANN, False) for name in order)]
    assert calls == expected


@simulated
async def test_handler_may_ignore_links_and_time():
    class Frames(Handler):
        def on_frame(self, peer, frame):
            frames.append(frame.message)

    scene, frames = Scene(), []
    scene.presence.attach(Topic.ROUNDS, Frames())
    async with scene.running():
        await scene.come(ANN, Behind(1))
        await scene.lose(ANN)
        await asyncio.sleep(2 * WAN.tick)
    assert frames == [Behind(1)]


@simulated
async def test_messages_about_membership_are_answered_and_go_to_no_handler():
    scene = Scene()
    async with scene.running():
        messages = [Ping(1, 5, ()), PingRequest(2, ME, ()), Ack(9, 0, ()), Nack(9), Gossip(()), PushPull(False, ())]
        await scene.come(ANN, *messages)
        assert scene.log.calls == [("up", ANN)]
        assert [ack.sequence for ack in scene.sent(ANN, Ack)] == [1, 2] and scene.sent(ANN, PushPull)
        assert scene.roster.peers.progress_of(ANN) == 5


@simulated
async def test_ticks_let_the_roster_probe_its_peers():
    scene = Scene()
    async with scene.running():
        await asyncio.sleep(2 * WAN.probe_period)
        assert any(isinstance(message, Ping) for _, message in scene.transport.sent)


@simulated
async def test_own_new_record_is_passed_to_the_transport_once():
    scene = Scene()
    async with scene.running():
        scene.roster.update(("10.9.9.9:1",), 0.2)
        await asyncio.sleep(3 * WAN.tick)
        assert scene.transport.learned == [scene.roster.record]
        assert scene.roster.record.addresses == ("10.9.9.9:1",)


# --- health


@simulated
async def test_peer_without_a_wall_clock_has_no_health_monitor():
    assert Scene().presence.watch is None


@simulated
async def test_health_monitor_observes_other_frames_and_lost_links_and_keeps_its_messages():
    scene = Scene(wall=lambda: float(EPOCH))
    scene.presence.watch = FakeMonitor()
    async with scene.running():
        before = scene.presence.watch.ticks
        await scene.come(ANN, WallClock(EPOCH), Behind(1), Ping(1, 0, ()))
        await scene.lose(ANN)
        assert scene.log.calls == [("up", ANN), ("frame", ANN, Behind(1)), ("down", ANN, False)]
        seen = [("saw", ANN, kind) for kind in (WallClock, Behind)]  # no messages of the membership
        assert scene.presence.watch.calls == [("up", ANN), *seen, ("down", ANN)]
        await asyncio.sleep(2 * WAN.tick)
        assert scene.presence.watch.ticks == before + 2


@simulated
async def test_health_monitor_tells_our_clock_to_peers_with_a_link():
    scene = Scene(wall=lambda: float(EPOCH))
    async with scene.running():
        await scene.come(ANN, Behind(1))
        await asyncio.sleep(CLOCK_SECONDS)
        assert scene.sent(ANN, WallClock) == [WallClock(EPOCH)] and not scene.sent(BEN, WallClock)


# --- stalls


@simulated
async def test_time_in_which_the_event_loop_stood_still_is_reported_to_the_roster():
    lost = [0.0]
    scene = Scene(lost=lost)
    async with scene.running():
        await asyncio.sleep(1.0)
        assert scene.roster.awareness.score == 0
        lost[0] += WAN.lag_limit / 2
        await asyncio.sleep(1.0)
        assert scene.roster.awareness.score == 0
        lost[0] += 3.0
        await asyncio.sleep(WAN.tick + MOMENT)
        assert scene.roster.awareness.score == 1


@simulated
async def test_time_in_which_the_process_was_suspended_is_reported_to_people():
    lost = [0.0]
    scene = Scene(lost=lost)
    async with scene.running():
        lost[0] += STOPPED_SECONDS / 2
        await asyncio.sleep(1.0)
        assert not scene.events
        lost[0] += 112.0
        await asyncio.sleep(1.0)
    text = "for 112 s: the process was suspended, or the machine was overloaded"
    assert scene.events == [("suspended", {"detail": text})]


# --- deadlines


class Patient(Log):
    """Handler that has nothing to do before a deadline."""

    until = math.inf

    def deadline(self):
        return self.until


@simulated
async def test_handler_with_a_deadline_gets_ticks_from_then_on_and_one_after_each_event():
    scene, patient, tick = Scene(), Patient(), WAN.tick
    scene.presence.attach(Topic.ROUNDS, patient)
    async with scene.running():
        await asyncio.sleep(5.5 * tick)
        assert patient.ticks == 1  # after `attach`
        await scene.come(ANN, Behind(1))
        await asyncio.sleep(5 * tick)
        assert patient.ticks == 2
        scene.presence.wake()
        patient.until = virtual_loop.current().time() + 3 * tick
        await asyncio.sleep(5 * tick)
        assert patient.ticks == 5
        scene.presence.attach(Topic.OPERATIONS, Log())  # has no deadline
        patient.until = math.inf
        before = patient.ticks
        await asyncio.sleep(5 * tick)
        assert patient.ticks == before + 5


# --- bans


@simulated
async def test_peer_that_is_convicted_by_evidence_gets_it_and_then_its_link_is_closed():
    scene, loop = Scene(), virtual_loop.current()
    async with scene.running():
        await scene.come(ANN, Behind(1))
        scene.clear()
        scene.presence.convict(evidence())
        await scene.happen()
        assert ("banned", ANN.hex()) in scene.kinds() and scene.log.calls == [("down", ANN, False)]
        scene.clear()
        # The peer gets 5 seconds from its ban on. The times are exact: they are those of timers in virtual time.
        for message, seconds in ((Behind(2), 4.999), (Behind(3), 5.0), (Behind(4), 5.5)):
            arrival = Arrival(ANN, Frame(message))
            loop.call_at(scene.times["banned"] + seconds, scene.transport.arrivals.put_nowait, arrival)
        await asyncio.sleep(6.0)
        assert scene.sent(ANN, Gossip) == [Gossip((gossip_items.evidence_item(evidence()),))]
        assert scene.transport.dropped == 2 * [(ANN, "two votes in round 7", True)]
        assert not scene.log.calls and not scene.presence.live


@simulated
async def test_peer_with_a_verdict_gets_it_and_may_come_back_after_a_pardon():
    scene = Scene()
    async with scene.running():
        await scene.come(ANN, Behind(1))
        scene.presence.expel(VERDICT, b"l" * LIFE, 8)
        assert scene.roster.ban_items == (gossip_items.verdict_item(VERDICT, b"l" * LIFE, 8),)
        await scene.happen()
        scene.clear()
        await scene.come(ANN, Behind(2))
        assert scene.sent(ANN, Verdict) == [VERDICT] and not scene.sent(ANN, Gossip) and not scene.log.calls
        scene.presence.lift_verdict(ANN)
        assert not scene.transport.allowed
        await scene.happen()
        assert scene.transport.allowed == [ANN] and scene.kinds() == [("pardoned", ANN.hex())]
        await scene.come(ANN, Behind(3))
        assert scene.log.calls == [("up", ANN), ("frame", ANN, Behind(3))]


@simulated
async def test_pardon_of_a_peer_that_was_never_seen_allows_its_keys():
    scene = Scene(others=0)
    async with scene.running():
        await scene.happen(MembershipEvent("pardoned", ANN))
        assert scene.transport.allowed == [ANN]


@simulated
async def test_link_of_a_peer_with_two_records_is_closed_at_once_since_there_is_nothing_to_show():
    scene = Scene()
    async with scene.running():
        proof = gossip_items.proof_item(record(1), record(1, port=4001))
        await scene.come(BEN, Gossip((proof,)))
        await scene.come(ANN, Behind(1))
        reason = scene.roster.peers.ban_reason(ANN)
        assert reason and scene.transport.dropped == [(ANN, reason, True)]
        assert not scene.sent(ANN, (Verdict, Gossip))


@simulated
async def test_relay_that_passes_on_late_data_is_not_left():
    scene = Scene()
    async with scene.running():
        await scene.come(ANN, Behind(1))
        scene.transport.received, scene.presence.send_queue.debtors = {ANN: 7}, {ANN: 7}
        await scene.come(ANN, Behind(2))
        await asyncio.sleep(RELAY_SECONDS * 2)
        scene.transport.received[ANN] = scene.presence.send_queue.debtors[ANN] = 8  # of a later round
        await scene.come(ANN, Behind(2))
        assert not scene.transport.left_circuits
        scene.transport.received[ANN] = 9
        await asyncio.sleep(RELAY_SECONDS * 2)
        await scene.come(ANN, Behind(2))
        assert not scene.transport.left_circuits and not scene.presence.send_queue.debtors


@simulated
async def test_link_of_a_peer_whose_place_another_one_has_taken_is_closed():
    """A peer that is only dead keeps its link: over this it may refute."""
    scene = Scene(others=2)
    async with scene.running():
        await scene.come(ANN, Behind(1))
        await scene.happen(
            MembershipEvent("dead", ANN, "own probe failed"),
            MembershipEvent("dead", CAT, "forgotten: it has failed on trial"),
        )
        assert scene.transport.dropped == [(CAT, "forgotten: it has failed on trial", False)]
        assert scene.transport.allowed == [CAT], "nothing more is stored about it"


@simulated
async def test_peer_that_is_banned_itself_learns_the_reason():
    scene = Scene()
    async with scene.running():
        await scene.happen(*(MembershipEvent("banned", peer, "another reason") for peer in (ANN, DAN)))
        assert not scene.presence.banned.is_set() and scene.presence.ban_reason == ""
        scene.clear()
        await scene.happen(MembershipEvent("banned", ME, "two votes"))
        assert scene.presence.banned.is_set() and scene.presence.ban_reason == "two votes"
        assert scene.log.calls == [], "nothing is lost yet"


@pytest.mark.parametrize(("kind", "stops"), [("duplicate", True), ("yielded", False)])
@simulated
async def test_another_process_with_our_key_is_an_alarm(kind, stops):
    scene = Scene()
    async with scene.running():
        await scene.happen(MembershipEvent(kind, ME, "a detail"))
        assert scene.events == [(kind, {"peer": ME.hex(), "detail": "a detail"}), ("alarm", {"detail": "a detail"})]
        assert scene.presence.duplicate.is_set() == stops and not scene.log.calls


# --- tasks and the goodbye


@simulated
async def test_tasks_beside_run_and_end_with_the_peer():
    ended = []

    async def work(name):
        try:
            await asyncio.sleep(1e6)
        finally:
            ended.append(name)

    scene = Scene()
    async with scene.running(partial(work, "beside")):
        scene.presence.attend(work("attended"))
        await asyncio.sleep(MOMENT)
        assert not ended
    assert sorted(ended) == ["attended", "beside"]


@pytest.mark.parametrize("how", ["attend", "beside"])
@simulated
async def test_exception_of_a_task_ends_the_peer(how):
    async def fail():
        await asyncio.sleep(2 * WAN.tick)
        raise LookupError

    scene = Scene()
    beside = [fail] if how == "beside" else []
    async with scene.running(*beside) as task:
        if how == "attend":
            scene.presence.attend(fail())
        await asyncio.sleep(3 * WAN.tick)
        assert task.done() and isinstance(task.exception().exceptions[0], LookupError)


@simulated
async def test_local_failure_of_a_send_ends_the_peer():
    scene = Scene()
    async with scene.running() as task:
        scene.transport.full, scene.transport.broken = {ANN}, True
        scene.presence.send_queue.control(ANN, Behind(1))
        await asyncio.sleep(MOMENT)
        assert isinstance(task.exception().exceptions[0], OSError)


@simulated
async def test_goodbye_goes_to_all_peers_and_has_a_moment_to_leave():
    scene, began = Scene(), virtual_loop.current().time()
    await scene.presence.leave()
    assert virtual_loop.current().time() == began + TICK
    assert sorted(to for to, message in scene.transport.sent if isinstance(message, Gossip)) == sorted((ANN, BEN, CAT))
    assert not scene.transport.closed
    await scene.presence.close()
    assert scene.transport.closed and scene.presence.send_queue.failure.cancelled()


@simulated
async def test_measured_links_are_those_to_peers_in_the_view():
    scene = Scene(others=1)
    assert scene.presence.spans() == ()
    for peer in (ANN, BEN):
        scene.roster.distances.add(peer, 0.05)
    assert [span.peer for span in scene.presence.spans()] == [ANN[:SPAN_PREFIX]]
    assert scene.presence.spans()[0].rtt > 0 == scene.presence.spans()[0].rate
    scene.presence.send_queue.link_rates.wait(ANN, 0.0)
    scene.presence.send_queue.link_rates.sent(ANN, 10**7, 1.0)
    await asyncio.sleep(2.0)
    scene.presence.send_queue.link_rates.over(ANN, 2.0)
    assert scene.presence.spans()[0].rate > 0


@simulated
async def test_only_a_peer_whose_link_works_holds_a_place_on_trial():
    """The event of its admission is no link: a stranger that only knocks gives its place to the next one."""
    scene = Scene(others=0)
    scene.roster.set_policy(AdmissionPolicy(RUN, IDENTITIES[5].public_key, 0, 8, 1))
    async with scene.running():
        for index in (1, 2):
            scene.roster.learn(record(index), 0.0, authenticated=True, source="192.0.2.1")
            await asyncio.sleep(WAN.tick + MOMENT)
        assert scene.roster.peers.others == [BEN]
        await scene.come(BEN, WallClock(EPOCH))
        await scene.come(BEN, Ping(1, 0, ()))
        scene.roster.learn(record(3), 0.0, authenticated=True, source="192.0.2.1")
        assert scene.roster.peers.others == [BEN]
