"""Checkpoints of a state that is written while the replica moves on."""

from __future__ import annotations

import asyncio
import random
import weakref
from pathlib import Path

import blake3
import numpy as np
import pytest
from thinwire.node.runtime.asyncio_extra import at_once
from thinwire.node.runtime.environment import Environment
from thinwire.node.state.checkpoint_store import CheckpointStore, Saved, SaveFailed
from thinwire.node.state.checkpointer import Checkpointer
from thinwire.node.state.layout import Layout, Piece
from thinwire.node.state.replica import Replica
from thinwire.node.state.snapshot import PRIVATE, PrivateState
from thinwire.sims.engine.disk import SimDisk
from thinwire.swarm.identity.identity import Identity
from thinwire.swarm.messages.registry import LIFE, Fork

SIZE = 3000
LAYOUT = Layout((Piece("w", (SIZE,), "float32", 0, SIZE),), SIZE, blake3.blake3(b"w").digest())
ME = Identity.generate(b"k" * 32)


class Crash(BaseException):
    """The power is gone."""


class Peer:
    """A replica and a private state that change with every round, and a checkpointer on a simulated disk."""

    def __init__(self, disk: SimDisk, write=at_once, spare=lambda: 1 << 40):
        self.replica = Replica(LAYOUT.digest, np.zeros(SIZE, np.float32), (ME.peer_id,))
        self.moment = np.zeros(SIZE, np.float32)
        environment = Environment(lambda: 0.0, lambda: 1e9, random.Random(1), disk, write=write, spare=spare)
        store = CheckpointStore(Path("/run/checkpoints"), disk, ME)
        self.keep = Checkpointer(store, bytes(32), environment, lambda kind, fields: None)

    def commit(self):
        """Commit a round. As in a run, the digest is not computed at once."""
        self.replica.move_from_twins()
        self.replica.state += 1.0
        self.moment += 1.0
        self.replica.advance((ME.peer_id,), bytes([self.replica.round]) * 16)

    def private(self):
        return PrivateState({"moment": self.moment}, {"step": self.replica.round})

    def begin(self):
        return self.keep.begin(self.replica, LAYOUT, self.private())

    def checkpoint(self, meanwhile=lambda: None):
        self.begin()
        meanwhile()
        return asyncio.run(self.keep.write(LAYOUT))


def loaded(disk: SimDisk):
    """Return the restored peer; check that all its parts belong to one round."""
    found = Peer(disk)
    private = asyncio.run(found.keep.restore(found.replica, LAYOUT, at_once))
    number, same = found.replica.round, Peer(SimDisk(random.Random(1)))
    if number:
        for _ in range(number):
            same.commit()
        assert found.replica.digest == same.replica.digest and found.replica.lives == same.replica.lives
        np.testing.assert_array_equal(private.tensors["moment"], np.full(SIZE, number, np.float32))
        assert private.values == {"step": number}
    return found


def test_checkpoint_has_the_state_at_its_begin_although_the_replica_moves_on():
    disk = SimDisk(random.Random(1))
    peer = Peer(disk)
    for _ in range(3):
        peer.commit()
    digest = peer.replica.twin().digest
    saved = peer.checkpoint(meanwhile=peer.commit)
    assert isinstance(saved, Saved) and saved.path.name == "step-00000003"
    assert peer.keep.digest == digest != peer.replica.digest
    assert loaded(disk).replica.round == 3


def test_state_is_copied_only_if_a_round_commits_before_it_is_written(monkeypatch):
    disk, create = SimDisk(random.Random(1)), SimDisk.create
    peer, commits = Peer(disk), []
    peer.commit()
    first = peer.replica.state

    def committing(self, path):  # when the state is written, and the private state is not
        if path.name == PRIVATE:
            commits.append(peer.replica.round)
            peer.commit()
        return create(self, path)

    with monkeypatch.context() as patch:
        patch.setattr(SimDisk, "create", committing)
        assert isinstance(peer.checkpoint(), Saved) and len(commits) == 1
        assert peer.replica.state is first, "the state was written by then"
        peer.begin()
        peer.commit()
        assert peer.replica.state is not first
        left = weakref.ref(first)
        del first
        held = {}

        def looking(self, path):
            held[path.name] = left() is not None
            return create(self, path)

        patch.setattr(SimDisk, "create", looking)
        assert isinstance(asyncio.run(peer.keep.write(LAYOUT)), Saved)
    assert held["fragment-00000.safetensors"], "the state of the checkpoint is left to it"
    assert not held[PRIVATE], "not longer than its file takes"
    assert loaded(disk).replica.round == 2


class Scarce(np.ndarray):
    """An array on a machine without memory for a copy of it."""

    def copy(self, *arguments):
        raise MemoryError


@pytest.mark.parametrize("late", [False, True])
def test_round_commits_without_memory_for_a_copy_and_the_checkpoint_is_written_later(monkeypatch, late):
    disk, create = SimDisk(random.Random(1)), SimDisk.create
    peer = Peer(disk)
    peer.commit()
    assert isinstance(peer.checkpoint(), Saved)
    peer.commit()
    peer.replica.state = state = peer.replica.state.view(Scarce)

    def committing(self, path):  # when the writer has begun: before the file of the state, or after it
        if path.name == (PRIVATE if late else "fragment-00000.safetensors") and peer.replica.round == 2:
            peer.commit()
        return create(self, path)

    monkeypatch.setattr(SimDisk, "create", committing)
    outcome = peer.checkpoint()
    assert peer.replica.round == 3 and peer.replica.state is state, "it commits in place"
    assert isinstance(outcome, Saved) == late and loaded(disk).replica.round == (2 if late else 1)
    if not late:
        assert "no memory" in outcome.reason
        assert not [name for name in disk.names(Path("/run/checkpoints")) if ".tmp" in name]
        assert not peer.begin(), "training waits for the next one, so that there is one at all"
        assert (
            isinstance(peer.keep.save(peer.replica, LAYOUT, peer.private()), Saved) and loaded(disk).replica.round == 3
        )
    assert isinstance(peer.checkpoint(), Saved) and loaded(disk).replica.round == 3


def test_state_that_a_failed_change_has_left_is_not_saved():
    disk = SimDisk(random.Random(1))
    peer = Peer(disk)
    peer.commit()
    assert isinstance(peer.checkpoint(), Saved)
    peer.replica.torn = True
    assert not peer.begin()
    outcome = peer.keep.save(peer.replica, LAYOUT, None)
    assert isinstance(outcome, SaveFailed) and "half-way" in outcome.reason and loaded(disk).replica.round == 1


def test_lost_twin_causes_no_more_copies():
    peer = Peer(SimDisk(random.Random(1)))
    peer.commit()
    peer.replica.state = peer.replica.state.view(Scarce)
    twin = peer.replica.twin()
    peer.commit()
    assert twin.lost
    peer.replica.state = twin.state = state = peer.replica.state.view(np.ndarray)
    peer.commit()
    assert peer.replica.state is state


def test_private_state_is_not_held_after_the_checkpoint(monkeypatch):
    peer, copies = Peer(SimDisk(random.Random(1))), []
    real = np.array

    def array(*arguments):
        made = real(*arguments)
        copies.append(weakref.ref(made))
        return made

    with monkeypatch.context() as patch:
        patch.setattr(np, "array", array)
        peer.commit()
        assert peer.begin()
    assert copies[0]() is not None
    asyncio.run(peer.keep.write(LAYOUT))
    assert copies[0]() is None


def test_nothing_is_copied_that_would_take_more_than_half_of_the_memory_left():
    left = [0]
    peer = Peer(SimDisk(random.Random(1)), spare=lambda: left[0])
    peer.commit()
    shared, size = peer.replica.state.nbytes, peer.replica.state.nbytes + peer.moment.nbytes
    for left[0], begins, waits in (
        (2 * size, True, False),
        (2 * size - 1, True, True),
        (2 * shared, True, True),
        (2 * shared - 1, False, None),
        (0, False, None),
    ):
        assert peer.begin() == begins
        assert waits is None or peer.keep.waits == waits


def test_private_state_is_written_first_if_training_waits_for_it():
    disk, changed = SimDisk(random.Random(1)), []
    peer = Peer(disk, spare=lambda: 4 * SIZE * 4)
    peer.commit()
    state = peer.replica.state
    assert peer.begin() and peer.keep.waits

    def going_on():  # training, and a round
        (draft,) = disk.names(Path("/run/checkpoints"))
        changed.append(disk.names(Path("/run/checkpoints") / draft))
        peer.commit()

    assert isinstance(asyncio.run(peer.keep.write(LAYOUT, going_on)), Saved)
    assert changed == [[PRIVATE]] and peer.replica.state is not state
    assert loaded(disk).replica.round == 1
    plain = Peer(SimDisk(random.Random(1)))
    plain.begin()
    asyncio.run(plain.keep.write(LAYOUT, going_on))
    assert len(changed) == 1, "a copied one delays nothing"


def test_private_state_is_written_first_if_the_memory_ends_while_it_is_copied(monkeypatch):
    peer = Peer(SimDisk(random.Random(1)))
    peer.commit()

    def array(*arguments):
        raise MemoryError

    with monkeypatch.context() as patch:
        patch.setattr(np, "array", array)
        assert peer.begin() and peer.keep.waits
    assert isinstance(peer.checkpoint(), Saved) and not peer.keep.waits, "the next checkpoint begins anew"


def test_saved_digest_is_that_of_the_written_state(monkeypatch):
    disk = SimDisk(random.Random(1))
    peer = Peer(disk)
    peer.commit()
    digest, create = peer.replica.digest, SimDisk.create

    def late(self, path):
        peer.replica.members, peer.replica.lives = (b"x" * 32,), b"y" * 16  # a lineage founded meanwhile
        peer.replica.advance((ME.peer_id,), b"z" * 16)
        return create(self, path)

    with monkeypatch.context() as patch:
        patch.setattr(SimDisk, "create", late)
        assert isinstance(peer.keep.save(peer.replica, LAYOUT, None), Saved)
    assert peer.keep.digest == digest != peer.replica.digest


def test_crash_at_any_operation_of_the_writer_leaves_a_loadable_checkpoint():
    def play(at):
        disk, count = SimDisk(random.Random(at)), 0
        peer = Peer(disk)
        for _ in range(2):
            peer.commit()
            peer.checkpoint()

        def before(operation):
            nonlocal count
            if count == at:
                raise Crash
            count += 1
            peer.commit()

        peer.commit()
        disk.before = before
        try:
            peer.checkpoint()
            done = True
        except Crash:
            done = False
        disk.before = lambda operation: None
        disk.crash()
        number = loaded(disk).replica.round
        assert number == 3 if done else number in (2, 3)
        return done

    at = 0
    while not play(at):
        at += 1
    assert at > 10


def test_failed_write_leaves_the_old_checkpoint_and_the_next_one_succeeds():
    disk = SimDisk(random.Random(1))
    peer = Peer(disk)
    peer.commit()
    peer.checkpoint()
    digest = peer.keep.digest
    peer.commit()
    disk.capacity = disk.used() + 5000
    saved = peer.checkpoint(meanwhile=peer.commit)
    assert isinstance(saved, SaveFailed) and "space" in saved.reason and peer.keep.digest == digest
    assert loaded(disk).replica.round == 1
    disk.capacity = None
    assert isinstance(peer.checkpoint(), Saved) and loaded(disk).replica.round == 3


def test_twin_made_while_a_thread_computes_the_digest_has_the_digest_of_its_state():
    peer = Peer(SimDisk(random.Random(1)))
    peer.commit()
    replica = peer.replica

    class Interrupted(dict):
        """Attributes; the thread ends after a read of the digest."""

        def __getitem__(self, name):
            value = super().__getitem__(name)
            if name == "_named":
                replica.compute_digest()
            return value

    replica.__dict__ = Interrupted(replica.__dict__)
    twin = replica.twin()
    replica.compute_digest()
    assert twin.digest == replica.digest


@pytest.mark.parametrize("known", [False, True], ids=["digest unknown", "digest known"])
def test_twin_has_the_digest_of_its_state(known):
    peer = Peer(SimDisk(random.Random(1)))
    peer.commit()
    if known:
        peer.replica.compute_digest()
    twin = peer.replica.twin()
    digest = twin.digest
    assert peer.replica.digest == digest
    peer.commit()
    assert twin.digest == digest != peer.replica.digest and (twin.round, peer.replica.round) == (1, 2)


def fork_of(replica):
    return Fork(replica.round, replica.digest, replica.members, (ME.peer_id,), b"l" * LIFE, (b"s" * 64,))


def test_checkpoint_has_the_chain_of_the_lineage():
    disk = SimDisk(random.Random(1))
    peer = Peer(disk)
    for _ in range(2):
        peer.commit()
        peer.replica.found(fork_of(peer.replica))
    digest, chain = peer.replica.digest, peer.replica.chain
    assert isinstance(peer.checkpoint(meanwhile=peer.commit), Saved)
    found = Peer(disk)
    asyncio.run(found.keep.restore(found.replica, LAYOUT, at_once))
    assert len(chain) == 3 and found.replica.chain == chain and found.replica.digest == digest
    assert found.replica.members == (ME.peer_id,) and found.replica.lives == b"l" * LIFE


def test_checkpoint_of_an_earlier_lineage_returns_to_it():
    """The lineage founded since is not stored: then the peer is in the one that its state belongs to."""
    disk = SimDisk(random.Random(1))
    peer = Peer(disk)
    peer.commit()
    digest, lineage = peer.replica.digest, peer.replica.lineage
    peer.checkpoint(meanwhile=lambda: peer.replica.found(fork_of(peer.replica)))
    found = Peer(disk)
    asyncio.run(found.keep.restore(found.replica, LAYOUT, at_once))
    assert peer.replica.lineage != found.replica.lineage == lineage and found.replica.digest == digest
