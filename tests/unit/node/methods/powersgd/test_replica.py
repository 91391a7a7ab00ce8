"""The powersgd replica: its step, its residual, and any fetched state."""

from __future__ import annotations

import asyncio
import random

import numpy as np
import pytest
from thinwire.collectives.outcome import Outcome
from thinwire.node.methods.registry import METHODS
from thinwire.node.runtime.asyncio_extra import at_once
from thinwire.node.runtime.disk import RealDisk
from thinwire.node.runtime.environment import Environment
from thinwire.node.state.checkpoint_store import CheckpointStore
from thinwire.node.state.checkpointer import Checkpointer
from thinwire.node.state.layout import Layout, Piece
from thinwire.swarm.identity.identity import Identity
from thinwire.swarm.manifest.parser import parse
from thinwire.swarm.messages.registry import Ballot, Commit, Contribution, Proposal

LAYOUT = Layout((Piece("a", (90, 70), "float32", 0, 6300), Piece("b", (33,), "float32", 6300, 6333)), 6333, b"l" * 32)
ME = Identity.generate(b"1" * 32)
MANIFEST = '[outer]\nmethod = "powersgd"\nlr = 1.0\nmomentum = 0.0\nnesterov = false\n'


def made():
    manifest = parse(MANIFEST)
    method = METHODS["powersgd"]
    codec = method.codec(manifest, LAYOUT)
    cut = method.cut(manifest, LAYOUT, codec)
    return method.replica.begin(manifest, LAYOUT, codec, cut, np.zeros(LAYOUT.total, np.float32), (ME.peer_id,)), codec


def trained(seed):
    return np.random.default_rng(seed).standard_normal(LAYOUT.total).astype(np.float32)


def reader(values):
    def read(start, stop, out):
        out[:] = values[start:stop]

    return read


def offered(replica, read, attempt=9):
    """The payloads of an announcement."""
    return list(replica.contribution(read, attempt=attempt, peers=1))


def commit(replica, payloads, *, attempt=1, since=None):
    me = (ME.peer_id,)
    proposal = Proposal(1, 0, Ballot(1, ME.peer_id), me, me, (Contribution(ME.peer_id, attempt, 5),), (), None, ())
    return replica.commit(Outcome(tuple(payloads), Commit(proposal, bytes(32), ())), ME.peer_id, since)


def stepped(replica, model):
    commit(replica, offered(replica, reader(model), 1))
    assert commit(replica, offered(replica, reader(model)))
    return replica


@pytest.mark.parametrize("turn", [7.0, -1.0, 0.4, 1e30])
def test_absurd_turn_in_state_counts_as_before_a_step(turn):
    replica, _ = made()
    replica.extra[0] = turn
    assert replica.phase == 0 and replica.grid == replica.cuts[0]


@pytest.mark.parametrize("own", ["gone", "unreadable"])
def test_shared_factor_is_restored_from_state_without_private_part(tmp_path, own, monkeypatch):
    replica, _ = made()
    stepped(replica, trained(1))
    said = []
    environment = Environment(lambda: 0.0, lambda: 1e9, random.Random(1), RealDisk())
    keep = Checkpointer(
        CheckpointStore(tmp_path, RealDisk(), ME),
        b"r" * 32,
        environment,
        lambda kind, fields: said.append((kind, fields)),
    )
    monkeypatch.setattr(
        replica, "private_state", lambda layout: {"other": np.ones(3, np.float32)} if own != "gone" else {}
    )
    keep.save(replica, LAYOUT, None)
    other, _ = made()
    asyncio.run(keep.restore(other, LAYOUT, at_once))
    assert other.digest == replica.digest and [kind for kind, _ in said].count("checkpoint") == (own != "gone")
    replica.memory.load(np.zeros(LAYOUT.total, np.float32), replica.q)
    assert offered(other, reader(trained(2)), 1) == offered(replica, reader(trained(2)), 1)


@pytest.mark.parametrize("named", [1, 2])
def test_powersgd_step_and_residual_sum_to_training_for_any_announcement(named):
    replica, _ = made()
    model = trained(1) + trained(2)
    offers = {1: offered(replica, reader(trained(1)), 1), 2: offered(replica, reader(model), 2)}
    commit(replica, offers[named], attempt=named)
    assert commit(replica, offered(replica, reader(model)), attempt=9)
    assert not replica.sent and replica.theta.any()
    np.testing.assert_allclose(replica.theta - replica.memory.residual, model, rtol=0, atol=1e-4)


def test_powersgd_announcement_before_restart_is_not_ours():
    replica, _ = made()
    vector = offered(replica, reader(trained(1)), 7)
    commit(replica, vector, attempt=3)
    assert replica.phase == 1 and offered(replica, reader(trained(1))) == []


def test_training_after_first_round_is_left_for_next_step():
    replica, _ = made()
    commit(replica, offered(replica, reader(trained(1)), 1))
    model = trained(1) + trained(2)
    assert commit(replica, offered(replica, reader(model)), since=reader(model))
    np.testing.assert_allclose(replica.theta - replica.memory.residual, model, rtol=0, atol=1e-4)
    other, _ = made()
    commit(other, offered(other, reader(trained(1)), 1))
    model[5] = np.inf
    assert commit(other, offered(other, reader(model)), since=reader(model))
    np.testing.assert_allclose(other.theta - other.memory.residual, trained(1), rtol=0, atol=1e-4)
