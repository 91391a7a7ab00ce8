"""Serving states to joiners, and its memory."""

import asyncio
from types import SimpleNamespace

import msgspec
import numpy as np
import pytest
from thinwire.collectives.consensus.chain import encode
from thinwire.collectives.state_sync.chunk_transfer import IN_FLIGHT
from thinwire.collectives.state_sync.state_offers import ReceivedChains, unchecked, vouched
from thinwire.node.outer.state_transfer.state_server import (
    REFILL_SECONDS,
    SIDE_BY_SIDE,
    SNAPSHOT_SECONDS,
    STORED,
    WHOLE,
    StateServer,
)
from thinwire.node.runtime.asyncio_extra import at_once
from thinwire.node.state.replica import Replica
from thinwire.swarm.frame import Frame
from thinwire.swarm.lineage import lineage_of, name_of_fork
from thinwire.swarm.messages.registry import (
    CHAIN_BYTES,
    CHUNK_BYTES,
    LIFE,
    ChainEntry,
    Fork,
    StateAsk,
    StateChunk,
    StateFetch,
    StateOffer,
)

ANN, BEN, CAT = (name * 32 for name in (b"a", b"b", b"c"))


class Outbox:
    """Stores sent frames; `waiting`: reported bytes that wait for a peer."""

    def __init__(self):
        self.sent, self.waiting, self.hurried, self.deferred = [], 0, set(), []

    def bulk(self, to, frame, *, requested=False):
        assert requested
        self.sent.append((to, frame))

    def control(self, to, message):
        self.sent.append((to, Frame(message)))

    def requested(self, to, kind, fragment=None):
        return self.waiting

    def withdraw(self, to, kind, fragment):
        found, self.deferred = self.deferred, []
        return found

    def hurry(self, reader, hurried):
        (self.hurried.add if hurried else self.hurried.remove)(reader)


class Server:
    """StateServer of a replica of a little more than one chunk, with a separate clock."""

    def __init__(self, *, paced=True):
        self.now = self.spent = 0.0
        self.replica = Replica(bytes(32), np.arange(140_000, dtype=np.float32), (ANN,))
        self.send_queue = Outbox()
        self.told = []
        self.server = StateServer(
            self.replica,
            self.send_queue,
            lambda: self.now,
            entered=True,
            report=lambda name, detail: self.told.append(name),
            history=SimpleNamespace(replay=(0, 0), used_part=lambda round: self.spent * (self.replica.round - round)),
            paced=paced,
        )

    def ask(self, peer):
        self.server.on_frame(peer, Frame(StateAsk()))
        return self.send_queue.sent[-1][1].message

    def fetch(self, peer, round, index=0):
        before = len(self.send_queue.sent)
        self.server.on_frame(peer, Frame(StateFetch(round, index)))
        if len(self.send_queue.sent) == before:
            return None
        to, frame = self.send_queue.sent[-1]
        assert to == peer and frame.message == StateChunk(round, index)
        return frame.payload

    def step(self):
        """A round commits."""
        change(self.server, self.apply_round)
        self.server.resume()

    def apply_round(self):
        self.replica.state += 1.0
        self.replica.round += 1
        self.replica.seal()


def change(server, how):
    with pytest.raises(StopIteration):
        server.change(at_once, how).send(None)


def run(work):
    async def main():
        work()

    asyncio.run(main())


def test_state_is_copied_only_when_it_changes_under_a_reader():
    def work():
        here = Server()
        offer = here.ask(ANN)
        assert isinstance(offer, StateOffer) and offer.digest == here.replica.digest
        first = here.fetch(ANN, 0)
        assert bytes(first) == bytes(here.replica.chunk(0)) and here.server.copied == 0
        kept, last = bytes(first), bytes(here.replica.chunk(1))
        here.step()
        assert here.server.copied == here.replica.state.nbytes
        # Frames that were sent, and new requests, still have that round's state.
        assert bytes(first) == kept and bytes(here.fetch(ANN, 0, 1)) == last != bytes(here.replica.chunk(1))
        here.server.done(ANN)
        assert here.server.copied == 0 and bytes(here.fetch(ANN, 0)) == b""

    run(work)


def test_reader_and_checkpoint_have_one_array_of_the_state():
    def work():
        here = Server()
        here.ask(ANN)
        twin, first = here.replica.twin(), here.replica.state
        before = bytes(twin.chunk(0))
        here.step()
        assert twin.state is first is not here.replica.state and bytes(here.fetch(ANN, 0)) == before
        second = here.replica.state
        here.step()
        assert here.replica.state is second, "nobody reads this round"
        assert bytes(twin.chunk(0)) == before and here.server.copied == first.nbytes

    run(work)


def test_finished_reader_costs_nothing_and_slow_reader_one_copy():
    def work():
        here = Server()
        here.ask(ANN)
        here.server.done(ANN)
        here.step()
        assert here.server.copied == 0
        here.ask(ANN)
        old = bytes(here.replica.chunk(0))
        here.step()
        assert here.ask(BEN).round == 2 and here.server.copied == here.replica.state.nbytes
        assert bytes(here.fetch(ANN, 1)) == old and bytes(here.fetch(BEN, 2)) == bytes(here.replica.chunk(0))
        here.now += SNAPSHOT_SECONDS + 1
        here.server.on_tick()
        assert here.server.copied == 0 and bytes(here.fetch(ANN, 1)) == b""

    run(work)


def test_request_for_too_many_chunks_is_not_answered():
    def work():
        here = Server()
        here.ask(ANN)
        here.send_queue.waiting = SIDE_BY_SIDE * IN_FLIGHT
        assert len(here.fetch(ANN, 0)) == CHUNK_BYTES
        here.send_queue.waiting += 1
        assert here.fetch(ANN, 0) is None

    run(work)


def test_peer_that_only_asks_does_not_displace_a_reader():
    def work():
        here = Server()
        here.ask(ANN)
        first = bytes(here.fetch(ANN, 0))
        for _ in range(4):
            here.step()
            here.ask(BEN)
        assert bytes(here.fetch(ANN, 0)) == first
        assert here.server.copied <= 2 * here.replica.state.nbytes

    run(work)


def test_newcomer_gets_the_newest_state_and_the_latest_readers_of_too_many_learn_that_theirs_is_gone():
    """An offer of an older state would let a liar offer a false newest one that no honest peer contradicts."""

    def work():
        here = Server()
        for round in range(STORED):
            reader = bytes([round]) * 32
            assert here.ask(reader).round == round and here.fetch(reader, round)
            here.step()
        waiting = [Frame(StateChunk(STORED - 1, index), b"chunk") for index in (1, 0)]
        here.send_queue.deferred, before = waiting, len(here.send_queue.sent)
        assert here.ask(ANN).round == STORED and here.fetch(ANN, STORED)
        assert here.send_queue.sent[before : before + 2] == [(reader, Frame(one.message)) for one in waiting]
        assert here.fetch(reader, STORED - 1) == b""
        assert all(here.fetch(bytes([round]) * 32, round) for round in range(STORED - 1))
        assert here.server.copied == (STORED - 1) * here.replica.state.nbytes

    run(work)


def test_reader_that_has_had_its_allowance_has_pauses_and_its_state_is_dropped_first():
    def work():
        here = Server()
        here.ask(BEN)
        here.spent = 0.6  # Readers of the last round's state have no pauses.
        here.step()
        for _ in range(2 * WHOLE):  # a state of two chunks
            here.fetch(BEN, 0)
        assert here.send_queue.hurried == {(BEN, 0)}
        here.fetch(BEN, 0)
        assert here.send_queue.hurried == set()
        here.spent = 0.0
        for round in range(1, STORED):
            here.ask(bytes([round]) * 32)
            here.fetch(bytes([round]) * 32, round)
            here.step()
        assert here.ask(CAT).round == STORED and here.fetch(BEN, 0) == b""
        assert all(here.fetch(bytes([round]) * 32, round) for round in range(1, STORED))
        here.now += REFILL_SECONDS / 2
        here.server.done(bytes([1]) * 32)
        here.ask(BEN)
        here.spent = 0.6
        here.step()
        here.fetch(BEN, STORED)
        assert (BEN, 0) in here.send_queue.hurried

    run(work)


def test_reader_that_joins_a_later_round_is_done():
    def work():
        here = Server()
        here.ask(ANN)
        here.fetch(ANN, 0)
        here.server.done(ANN, 0)
        assert here.server.read
        here.server.done(ANN, 1)
        assert not here.server.read

    run(work)


def test_repeated_requests_are_not_answered_while_answers_wait():
    def work():
        here = Server()
        here.send_queue.waiting = 2 * IN_FLIGHT
        here.ask(ANN)
        here.send_queue.waiting += 1
        here.server.on_frame(ANN, Frame(StateAsk()))
        assert len(here.send_queue.sent) == 1

    run(work)


class Scarce(np.ndarray):
    """An array on a machine without memory for a copy of it."""

    def copy(self, *arguments):
        raise MemoryError


def test_round_commits_without_memory_for_a_copy_and_readers_ask_for_the_next_state():
    def work():
        here = Server()
        here.replica.state = here.replica.state.view(Scarce)
        here.ask(ANN)
        assert here.fetch(ANN, 0)
        served = []

        def apply_round():
            here.replica.state += 1.0
            served.append(here.fetch(ANN, 0))  # while the state changes
            here.replica.round += 1
            here.replica.seal()

        change(here.server, apply_round)
        here.server.resume()
        served.append(here.fetch(ANN, 0))
        assert [bytes(one) for one in served] == [b"", b""] and not here.server.held
        offer = here.ask(ANN)
        assert offer.round == 1 and bytes(here.fetch(ANN, 1)) == bytes(here.replica.chunk(0))

    run(work)


def test_replica_is_torn_during_a_change_and_after_one_that_failed():
    def work():
        here = Server()

        def fail():
            assert here.replica.torn
            raise MemoryError

        with pytest.raises(MemoryError):
            change(here.server, fail)
        assert here.replica.torn and not here.replica.twin().torn
        change(here.server, lambda: None)
        assert not here.replica.torn

    run(work)


def test_no_state_is_offered_while_the_replica_changes():
    def work():
        here = Server()
        change(here.server, lambda: here.server.on_frame(ANN, Frame(StateAsk())))
        assert not here.send_queue.sent
        here.server.resume()
        assert [to for to, _ in here.send_queue.sent] == [ANN]

    run(work)


def test_state_copy_is_made_in_the_executor():
    def work():
        here = Server()
        here.ask(ANN)
        jobs = []

        async def later(job):
            jobs.append(job)

        with pytest.raises(StopIteration):
            here.server.change(later, here.apply_round).send(None)
        assert here.server.copied == 0
        before = bytes(here.replica.chunk(0))
        jobs[0]()
        assert here.server.copied == here.replica.state.nbytes and bytes(here.fetch(ANN, 0)) == before

    run(work)


def test_offer_names_the_lineage_although_the_values_are_those_of_its_parent():
    def work():
        here = Server()
        here.replica.lives = b"l" * LIFE
        here.replica.seal()
        first, before = here.ask(ANN), here.replica.chain
        fork = Fork(0, here.replica.digest, (ANN,), (BEN,), b"m" * LIFE, (b"s" * 64,))
        change(here.server, lambda: here.replica.found(fork))
        here.server.resume()
        second = here.ask(BEN)
        assert first.lineage == lineage_of(before) and first.lives == b"l" * LIFE
        assert (second.lineage, second.members, second.lives) == (name_of_fork(fork), (BEN,), b"m" * LIFE)
        assert second.digest == here.replica.digest != first.digest
        payload = b"".join(here.replica.hashes) + encode(here.replica.chain)
        chains = ReceivedChains(unchecked)
        offered = vouched(second, payload, chains)
        assert (offered.offer, offered.hashes) == (second, tuple(here.replica.hashes))
        assert offered.chain == (*before, ChainEntry(fork))
        assert vouched(msgspec.structs.replace(second, lineage=first.lineage), payload, chains) is None
        assert vouched(second, payload[:-1], chains) is None and vouched(second, payload + b"x", chains) is None

    run(work)


def test_chain_that_is_too_long_for_a_message_is_left_out_and_the_owner_is_told_once():
    """A frame beyond its limit would end this peer."""

    def work():
        here = Server()
        signature = b"s" * 64
        fork = Fork(0, bytes(32), (), (ANN,) * 4, b"m" * LIFE * 4, (signature,) * 4)
        here.replica.chain = (ChainEntry(fork),) * (CHAIN_BYTES // len(encode((ChainEntry(fork),))) + 100)
        here.replica.seal()
        for peer in (ANN, BEN):
            here.ask(peer)
            assert bytes(here.send_queue.sent[-1][1].payload) == b"".join(here.replica.hashes)
        assert here.told == ["alarm"]

    run(work)


def test_only_joiners_have_pauses_and_only_while_stored_rounds_can_follow():
    def work():
        here, member, joiner = Server(), ANN, BEN
        for peer in (member, joiner):
            here.ask(peer)
            here.fetch(peer, 0)
        assert here.send_queue.hurried == {(member, 0)}, "rounds may wait for a member"
        here.server.done(member)
        here.server.on_tick()
        assert here.send_queue.hurried == set()
        here.spent = 0.3
        here.step()
        here.server.on_tick()
        assert here.send_queue.hurried == set()
        here.step()
        here.server.on_tick()
        assert here.send_queue.hurried == {(joiner, 0)}, "0.6 of what can be stored"
        assert len(here.fetch(joiner, 0, 0)) == CHUNK_BYTES
        here.step()
        here.step()
        here.server.on_tick()
        assert here.send_queue.hurried == set()
        assert len(here.fetch(joiner, 0, 0)) == 0 and here.server.copied == 0, "no stored rounds continue this state"

    run(work)


def test_unpaced_server_never_pauses():
    def work():
        here = Server(paced=False)
        here.ask(BEN)
        for _ in range(4 * WHOLE):
            here.fetch(BEN, 0)
        assert here.send_queue.hurried == {(BEN, 0)}

    run(work)


def test_member_never_has_pauses():
    def work():
        here = Server()
        here.ask(ANN)
        for _ in range(4 * WHOLE):
            here.fetch(ANN, 0)
        assert here.send_queue.hurried == {(ANN, 0)}

    run(work)


def test_state_is_stored_while_its_chunks_wait_for_their_pause():
    def work():
        here = Server()
        here.ask(BEN)
        here.fetch(BEN, 0)
        here.step()
        here.send_queue.waiting, here.now = 3, SNAPSHOT_SECONDS + 1
        here.server.on_tick()
        here.send_queue.waiting = 0
        assert len(here.fetch(BEN, 0)) == CHUNK_BYTES
        here.now += SNAPSHOT_SECONDS + 1
        here.server.on_tick()
        assert len(here.fetch(BEN, 0)) == 0

    run(work)
