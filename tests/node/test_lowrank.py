"""A replica of thin factors: what its state says is believed, whatever it says, and what it sent is what it loses."""

from __future__ import annotations

import asyncio
import random

import numpy as np
import pytest
from thinwire.node.checkpoint import CheckpointStore
from thinwire.node.disk import RealDisk
from thinwire.node.doors import Doors
from thinwire.node.fragments import Layout, Piece
from thinwire.node.keep import Keep
from thinwire.node.methods import METHODS
from thinwire.node.waiting import at_once
from thinwire.swarm.identity import Identity
from thinwire.swarm.manifest import parse
from thinwire.swarm.protocol import Contribution

LAYOUT = Layout((Piece("a", (90, 70), "float32", 0, 6300), Piece("b", (33,), "float32", 6300, 6333)), 6333, b"l" * 32)
ME = Identity.generate(b"1" * 32)
MANIFEST = '[outer]\nmethod = "powersgd"\nlr = 1.0\nmomentum = 0.0\nnesterov = false\n'


def made():
    manifest = parse(MANIFEST)
    method = METHODS["powersgd"]
    codec = method.codec(manifest, LAYOUT)
    return method.replica.begin(manifest, LAYOUT, codec, np.zeros(LAYOUT.total, np.float32), (ME.peer_id,)), codec


def trained(seed):
    return np.random.default_rng(seed).standard_normal(LAYOUT.total).astype(np.float32)


def reader(values):
    def read(start, stop, out):
        out[:] = values[start:stop]

    return read


def commit(replica, codec, vector, *, attempt=1, since=None):
    cut, payloads = replica.cut(replica.cuts[0]), []
    for index in range(len(cut)):
        start, stop = cut.span(index)
        payloads.append(np.empty(codec.nbytes(stop - start), np.uint8))
        codec.encode(np.ascontiguousarray(vector[start:stop]), payloads[-1])
    return replica.commit(
        [one.data for one in payloads],
        [Contribution(ME.peer_id, attempt, 5)],
        codec,
        me=ME.peer_id,
        members=(ME.peer_id,),
        lr=1.0,
        momentum=0.0,
        nesterov=False,
        since=since,
    )


def stepped(replica, codec, model):
    commit(replica, codec, replica.offer(reader(model), 1))
    assert commit(replica, codec, replica.offer(reader(model)))
    return replica


@pytest.mark.parametrize("turn", [7.0, -1.0, 0.4, 1e30])
def test_a_state_with_an_absurd_turn_is_one_before_a_step(turn):
    replica, _ = made()
    replica.extra[0] = turn
    assert replica.turn == 0 and replica.cut(replica.cuts[1]) == replica.cuts[0]


@pytest.mark.parametrize("own", ["gone", "unreadable"])
def test_the_shared_factor_comes_from_the_state_when_the_private_part_of_a_checkpoint_is_lost(
    tmp_path, own, monkeypatch
):
    replica, codec = made()
    stepped(replica, codec, trained(1))
    said = []
    doors = Doors(lambda: 0.0, lambda: 1e9, random.Random(1), RealDisk())
    keep = Keep(
        CheckpointStore(tmp_path, RealDisk(), ME), b"r" * 32, doors, lambda kind, fields: said.append((kind, fields))
    )
    monkeypatch.setattr(replica, "private", lambda layout: {"other": np.ones(3, np.float32)} if own != "gone" else {})
    keep.save(replica, LAYOUT, None)
    other, _ = made()
    asyncio.run(keep.restore(other, LAYOUT, at_once))
    assert other.digest == replica.digest and [kind for kind, _ in said].count("checkpoint") == (own != "gone")
    replica.memory.load(np.zeros(LAYOUT.total, np.float32), replica.q)
    np.testing.assert_array_equal(other.offer(reader(trained(2)), 1), replica.offer(reader(trained(2)), 1))


@pytest.mark.parametrize("named", [1, 2])
def test_a_step_and_the_residual_are_what_was_trained_whichever_announcement_counts(named):
    replica, codec = made()
    model = trained(1) + trained(2)
    offers = {1: replica.offer(reader(trained(1)), 1), 2: replica.offer(reader(model), 2)}
    commit(replica, codec, offers[named], attempt=named)
    assert commit(replica, codec, replica.offer(reader(model)), attempt=9)
    assert not replica.sent and replica.theta.any()
    np.testing.assert_allclose(replica.theta - replica.memory.residual, model, rtol=0, atol=1e-4)


def test_an_announcement_of_an_earlier_life_is_not_ours():
    replica, codec = made()
    vector = replica.offer(reader(trained(1)), 7)
    commit(replica, codec, vector, attempt=3)
    assert replica.turn == 1 and replica.offer(reader(trained(1))) is None


def test_what_was_trained_after_the_first_round_is_left_for_the_next_step():
    replica, codec = made()
    commit(replica, codec, replica.offer(reader(trained(1)), 1))
    model = trained(1) + trained(2)
    assert commit(replica, codec, replica.offer(reader(model)), since=reader(model))
    np.testing.assert_allclose(replica.theta - replica.memory.residual, model, rtol=0, atol=1e-4)
    other, codec = made()
    commit(other, codec, other.offer(reader(trained(1)), 1))
    model[5] = np.inf
    assert commit(other, codec, other.offer(reader(model)), since=reader(model))
    np.testing.assert_allclose(other.theta - other.memory.residual, trained(1), rtol=0, atol=1e-4)
