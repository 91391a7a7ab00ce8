"""The sparse replica: its residual across round outcomes and checkpoints."""

from __future__ import annotations

import asyncio
import random
import tracemalloc

import numpy as np
import pytest
from thinwire.collectives.outcome import Outcome
from thinwire.collectives.rounds.data_planes.allgather.payload_pieces import payloads_of, piece_grid, pieces_of
from thinwire.collectives.state_sync.state_offers import state_digest
from thinwire.collectives.state_sync.state_sync import FetchedState
from thinwire.collectives.topology.shards import Grid
from thinwire.compression.core.codec import CodecError
from thinwire.node.methods.registry import METHODS, check_codec
from thinwire.node.methods.sparse.replica import MOST_SENT
from thinwire.node.runtime.asyncio_extra import at_once
from thinwire.node.runtime.disk import RealDisk
from thinwire.node.runtime.environment import Environment
from thinwire.node.state.checkpoint_store import CheckpointStore, SaveFailed
from thinwire.node.state.checkpointer import Checkpointer
from thinwire.node.state.layout import Layout, Piece
from thinwire.node.state.replica import Replica
from thinwire.node.state.snapshot import PrivateState
from thinwire.swarm.identity.identity import Identity
from thinwire.swarm.manifest.manifest import ManifestError, ManifestMismatch
from thinwire.swarm.manifest.parser import parse
from thinwire.swarm.messages.registry import Ballot, Commit, Contribution, Proposal, StateOffer

LAYOUT = Layout((Piece("a", (90, 70), "float32", 0, 6300), Piece("b", (33,), "float32", 6300, 6333)), 6333, b"l" * 32)
ME = Identity.generate(b"1" * 32)


def made(more="", theta=None, *, method="sparseloco", layout=LAYOUT):
    manifest = parse(f'[outer]\nmethod = "{method}"\n{more}')
    method = METHODS[method]
    codec = method.codec(manifest, layout)
    theta = np.zeros(layout.total, np.float32) if theta is None else theta
    cut = method.cut(manifest, layout, codec)
    return method.replica.begin(manifest, layout, codec, cut, theta, (ME.peer_id,)), cut


def contribute(replica, read, attempt):
    """The payload of an announcement, put together."""
    return b"".join(replica.contribution(read, attempt=attempt, peers=1))


def reader(values):
    def read(start, stop, out):
        out[:] = values[start:stop]

    return read


def trained(seed):
    return np.random.default_rng(seed).standard_normal(LAYOUT.total).astype(np.float32)


def sent(replica, cut, payload):
    parts = pieces_of(payload, cut)
    return [*parts, *[b""] * (len(cut) - len(parts))]


def outcome_of(results, entries):
    """The outcome of a round in which this peer is alone."""
    me = (ME.peer_id,)
    proposal = Proposal(1, 0, Ballot(1, ME.peer_id), me, me, tuple(entries), (), None, ())
    return Outcome(tuple(results), Commit(proposal, bytes(32), ()))


def commit(replica, cut, payload, attempt=1):
    entries = [Contribution(ME.peer_id, attempt, 5)]
    replica.commit(outcome_of(sent(replica, cut, payload), entries), ME.peer_id)


def test_sparse_lone_step_and_residual_sum_to_training():
    replica, cut = made()
    model = trained(1)
    payload = contribute(replica, reader(model), 1)
    commit(replica, cut, payload)
    assert replica.round == 1
    np.testing.assert_allclose(replica.theta - replica.feedback.residual, model, rtol=0, atol=1e-6)
    assert 0 < np.count_nonzero(replica.theta) == sum(part.indices.size for part in replica.codec.decode(payload).parts)


@pytest.mark.parametrize("method", ["sparseloco", "demo"])
def test_sparse_round_needs_no_vector_beside_parameters_and_residual(method):
    layout = Layout(
        tuple(Piece(f"{n:02}", (512, 128), "float32", n << 16, n + 1 << 16) for n in range(32)), 1 << 21, b""
    )
    replica, cut = made(method=method, layout=layout)
    payload = contribute(replica, reader(np.ones(layout.total, np.float32)), 1)
    commit(replica, cut, payload)
    theta, residual = replica.state, replica.feedback.memory
    tracemalloc.start()
    try:
        commit(replica, cut, contribute(replica, reader(np.ones(layout.total, np.float32)), 2), 2)
        _, peak = tracemalloc.get_traced_memory()
    finally:
        tracemalloc.stop()
    assert peak < 0.5 * theta.nbytes + theta.nbytes  # the model of this test, and no more than half a vector
    assert replica.state is theta and replica.feedback.memory is residual


class Scarce(np.ndarray):
    """An array on a machine without memory for a copy of it."""

    def copy(self, *arguments):
        raise MemoryError


@pytest.mark.parametrize("scarce", [False, True])
def test_round_leaves_the_residual_to_a_checkpoint_unless_there_is_no_memory_for_a_copy(tmp_path, scarce):
    said = []
    replica, cut = made()
    commit(replica, cut, contribute(replica, reader(trained(1)), 1))
    before, digest, keeper = replica.feedback.residual.copy(), replica.digest, keep(tmp_path, said)
    if scarce:
        replica.feedback.memory = replica.feedback.memory.view(Scarce)
    memory = replica.feedback.memory
    assert keeper.begin(replica, LAYOUT, None)
    payload = contribute(replica, reader(trained(2)), 2)
    replica.move_from_twins()
    commit(replica, cut, payload, 2)
    outcome = asyncio.run(keeper.write(LAYOUT))
    assert (replica.feedback.memory is memory) == scarce == isinstance(outcome, SaveFailed)
    other, _ = made()
    asyncio.run(keep(tmp_path, said).restore(other, LAYOUT, at_once))
    if scarce:
        assert "no memory" in outcome.reason and other.round == 0
    else:
        assert other.digest == digest
        np.testing.assert_array_equal(other.feedback.residual, before)
    memory = replica.feedback.memory
    payload = contribute(replica, reader(trained(3)), 3)
    replica.move_from_twins()
    commit(replica, cut, payload, 3)
    assert replica.feedback.memory is memory, "the checkpoint has ended"


@pytest.mark.parametrize("collective", ["all-gather", "sparse-butterfly"])
def test_values_of_a_contribution_are_those_that_all_receivers_decode(collective):
    replica, cut = made(f"[exchange]\ncollective = '{collective}'")
    chunks = [bytes(chunk) for chunk in replica.contribution(reader(trained(1)), attempt=1, peers=1)]
    model = np.zeros(LAYOUT.total, np.float32)
    replica.feedback.choice.scatter(model)
    np.testing.assert_array_equal(replica.values_of(chunks), model)
    assert np.count_nonzero(model) > 50
    assert replica.fits(len(chunks)) and not replica.fits(0) and not replica.fits(len(cut) + 1)
    for wrong in (chunks[0][:-1], b"", bytes(40)):
        with pytest.raises(CodecError):
            replica.values_of([wrong, *chunks[1:]])


def test_sparse_later_payload_replaces_failed_one():
    replica, cut = made()
    first = contribute(replica, reader(trained(1)), 9)
    second = contribute(replica, reader(trained(2)), 9)
    assert first != second and replica.feedback.pending
    replica.rollback()
    replica.rollback()
    assert not replica.feedback.residual.any() and contribute(replica, reader(trained(1)), 9) == first


def test_sparse_learning_rate_changes_from_given_round():
    plain, cut = made()
    replica, _ = made("lr_change_round = 3\nlr_after = 0.5\n")
    for number in (1, 2, 3, 4):
        moved = []
        for one in (plain, replica):
            before = one.theta.copy()
            commit(
                one,
                cut,
                contribute(one, lambda start, stop, out, one=one: np.subtract(one.theta[start:stop], 1.0, out=out), 1),
            )
            moved.append(one.theta - before)
        np.testing.assert_allclose(moved[1], moved[0] * (0.5 if number >= 3 else 1.0), rtol=1e-5, atol=1e-6)
        assert moved[0].any()


@pytest.mark.parametrize("rule", ["drop", "restore"])
@pytest.mark.parametrize(("named", "late"), [(1, False), (2, False), (1, True)])
def test_sparse_residual_loses_only_the_committed_payload(rule, named, late):
    """A commit may name an announcement of a round that was given up, also after a newer announcement."""
    replica, cut = made(f'residual_decay = 1.0\non_exclusion = "{rule}"\n')
    payloads = {1: contribute(replica, reader(trained(1)), 1)}
    replica.rollback()
    model = trained(1) + trained(2)
    if late:
        replica.forfeit(reader(model))
    else:
        payloads[2] = contribute(replica, reader(model), 2)
        assert payloads[1] != payloads[2]
    commit(replica, cut, payloads[named], named)
    np.testing.assert_allclose(replica.theta - replica.feedback.residual, model, rtol=0, atol=1e-5)
    assert not replica.sent


@pytest.mark.parametrize(("rule", "left"), [("drop", False), ("restore", True)])
def test_sparse_announcement_before_restart_is_not_ours(rule, left):
    replica, cut = made(f'residual_decay = 1.0\non_exclusion = "{rule}"\n')
    foreign = contribute(made()[0], reader(trained(9)), 9)
    contribute(replica, reader(trained(1)), 7)
    commit(replica, cut, foreign, 3)
    assert np.allclose(replica.feedback.residual, -trained(1)) == left


def test_sparse_announcements_remembered_are_bounded():
    replica, _ = made()
    for attempt in range(1, 20):
        contribute(replica, reader(trained(1)), attempt)
    assert sorted(replica.sent) == list(range(20 - MOST_SENT, 20))


def test_sparse_replica_does_not_send_non_finite_values():
    replica, _ = made()
    model = trained(1)
    model[17] = np.nan
    with pytest.raises(FloatingPointError, match="not finite"):
        contribute(replica, reader(model), 9)
    assert not replica.feedback.pending


def test_sparse_fetched_state_drops_residual_unless_equal():
    replica, cut = made()
    commit(replica, cut, contribute(replica, reader(trained(1)), 1))
    residual = replica.feedback.residual.copy()
    hashes = tuple(replica.hashes)
    same = StateOffer(replica.round, replica.digest, LAYOUT.digest, replica.state.nbytes, replica.members)
    replica.install(FetchedState(same, hashes, {}, ()))
    np.testing.assert_array_equal(replica.feedback.residual, residual)
    digest = state_digest(2, LAYOUT.digest, replica.members, hashes)
    replica.install(
        FetchedState(StateOffer(2, digest, LAYOUT.digest, replica.state.nbytes, replica.members), hashes, {}, ())
    )
    assert not replica.feedback.residual.any() and replica.round == 2


def keep(path, said):
    environment = Environment(lambda: 0.0, lambda: 1e9, random.Random(1), RealDisk())
    return Checkpointer(
        CheckpointStore(path, RealDisk(), ME), b"r" * 32, environment, lambda kind, fields: said.append((kind, fields))
    )


@pytest.mark.parametrize("private", [None, PrivateState({"moment": np.ones(3, np.float32)}, {"step": 7})])
def test_sparse_residual_survives_in_checkpoint(tmp_path, private):
    said = []
    replica, cut = made()
    commit(replica, cut, contribute(replica, reader(trained(1)), 1))
    keep(tmp_path, said).save(replica, LAYOUT, private)
    other, _ = made()
    found = asyncio.run(keep(tmp_path, said).restore(other, LAYOUT, at_once))
    assert other.digest == replica.digest and [kind for kind, _ in said] == ["restored"]
    np.testing.assert_array_equal(other.feedback.residual, replica.feedback.residual)
    if private is None:
        assert found is None
    else:
        assert found.values == {"step": 7} and list(found.tensors) == ["moment"]
    dense = Replica(LAYOUT.digest, np.zeros(LAYOUT.total, np.float32), ())
    with pytest.raises(ManifestMismatch, match="does not fit"):
        asyncio.run(keep(tmp_path, said).restore(dense, LAYOUT, at_once))


OWNED = '[exchange]\ncodec = "topk(k=16,chunk=256)|2bit|rice"\ncollective = "sparse-butterfly"\n'


def owner(rests):
    """Return a replica after a round that has left these residuals of owned sums."""
    replica, cut = made(OWNED)
    replica.owner_residuals.prepare(1, rests)
    commit_sums(replica, cut)
    return replica, cut


def commit_sums(replica, cut):
    runs = enumerate(replica.contribution(reader(trained(1)), attempt=1, peers=1))
    sums = [replica.codec.reduce([run], [1.0], None, cut.size(index))[0] for index, run in runs]
    replica.commit(outcome_of(sums, [Contribution(ME.peer_id, 1, 5)]), ME.peer_id)


def test_owner_residual_survives_in_checkpoint(tmp_path):
    said = []
    cut = made(OWNED)[1]
    rests = {0: np.full(cut.size(0), 2.5, np.float32), len(cut) - 1: np.ones(cut.size(len(cut) - 1), np.float32)}
    replica, _ = owner(rests)
    keep(tmp_path, said).save(replica, LAYOUT, None)
    other, _ = made(OWNED)
    assert asyncio.run(keep(tmp_path, said).restore(other, LAYOUT, at_once)) is None
    assert other.digest == replica.digest and [kind for kind, _ in said] == ["restored"]
    np.testing.assert_array_equal(other.feedback.residual, replica.feedback.residual)
    assert other.owner_residuals.all().keys() == rests.keys()
    for index, rest in rests.items():
        np.testing.assert_array_equal(other.owner_residuals.of(index), rest)


def test_misfit_owner_residual_is_dropped_and_reported(tmp_path):
    said = []
    cut = made(OWNED)[1]
    replica, _ = owner({0: np.ones(cut.size(0), np.float32), 1: np.ones(7, np.float32)})
    keep(tmp_path, said).save(replica, LAYOUT, None)
    other, _ = made(OWNED)
    asyncio.run(keep(tmp_path, said).restore(other, LAYOUT, at_once))
    assert [kind for kind, _ in said] == ["restored", "checkpoint"] and "of 2 sums" in said[1][1]["detail"]
    assert list(other.owner_residuals.all()) == [0] and other.feedback.residual.any()
    own = replica.private_state(LAYOUT)
    with pytest.raises(ValueError, match="nonsense"):
        other.load_private(own | {"kept/nonsense": np.ones(7, np.float32)}, LAYOUT)
    assert list(other.owner_residuals.all()) == [0]


def test_checkpoint_without_owner_residual_is_accepted():
    replica, cut = owner({0: np.ones(256, np.float32)})
    old = {name: one for name, one in replica.private_state(LAYOUT).items() if name.startswith("residual/")}
    other, _ = made(OWNED)
    assert other.load_private(old, LAYOUT) == "" and not other.owner_residuals.all()
    np.testing.assert_array_equal(other.feedback.residual, replica.feedback.residual)


def test_fetched_state_drops_owner_residual_unless_equal():
    replica, cut = owner({0: np.full(256, 2.0, np.float32)})
    hashes = tuple(replica.hashes)
    same = StateOffer(replica.round, replica.digest, LAYOUT.digest, replica.state.nbytes, replica.members)
    replica.install(FetchedState(same, hashes, {}, ()))
    assert list(replica.owner_residuals.all()) == [0] and replica.owner_residuals.lost == (0, 0.0)
    digest = state_digest(2, LAYOUT.digest, replica.members, hashes)
    offer = StateOffer(2, digest, LAYOUT.digest, replica.state.nbytes, replica.members)
    replica.install(FetchedState(offer, hashes, {}, ()))
    assert not replica.owner_residuals.all() and replica.owner_residuals.lost == (1, 1024.0)


def test_sparse_payloads_are_cut_and_joined():
    cut = Grid(1000, 300)
    payloads = [bytes(700), bytes([1]) * 299, bytes([2]) * 1000]
    slots = []
    for payload in payloads:
        parts = pieces_of(payload, cut)
        assert all(len(part) == 300 for part in parts[:-1])
        slots += [*parts, *[b""] * (len(cut) - len(parts))]
    assert [bytes(one) for one in payloads_of(slots, cut)] == payloads
    with pytest.raises(ValueError, match="too large for an all-gather"):
        piece_grid(600 << 20)


def test_sparse_screen_checks_length_before_content():
    replica, cut = made()
    payload = contribute(replica, reader(trained(3)), 9)
    assert 0 < len(payload) <= replica.codec.bound == cut.total
    square = replica.codec.check(payload, cut.total)
    values = np.zeros(LAYOUT.total, np.float32)
    replica.codec.decode(payload).scatter(values)
    assert square == pytest.approx(float(np.dot(values, values)), rel=1e-5)
    with pytest.raises(CodecError):
        replica.codec.check(payload + bytes(cut.total), cut.total)


@pytest.mark.parametrize(
    "codec", ["topk(k=0,chunk=4096)|2bit|rice", "topk(k=64,chunk=4000)|2bit|rice", "topk(k=64)|3bit", "topk(block=64)"]
)
def test_sparse_method_refuses_invalid_codec_parameters(codec):
    manifest = parse(f'[outer]\nmethod = "sparseloco"\n[exchange]\ncodec = "{codec}"')
    with pytest.raises(ManifestError, match="^mine.toml: exchange.codec"):
        check_codec(manifest, "mine.toml")
