"""Concurrent rounds of fragments: turns, late fragments, checkpoints."""

from __future__ import annotations

import asyncio
import random
from types import SimpleNamespace

import blake3
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from thinwire.collectives.outcome import Outcome
from thinwire.node.methods.fragments.fragment_replicas import FragmentReplicas, rounds_of, turn_of
from thinwire.node.methods.fragments.fragment_schedule import ModelLock
from thinwire.node.methods.registry import fitted
from thinwire.node.runtime.asyncio_extra import at_once
from thinwire.node.runtime.disk import RealDisk
from thinwire.node.runtime.environment import Environment
from thinwire.node.state.checkpoint_store import CheckpointStore, Saved
from thinwire.node.state.checkpointer import Checkpointer
from thinwire.node.state.fragments import joined, layout_of_part, parts_of
from thinwire.node.state.layout import Layout, Piece
from thinwire.node.state.snapshot import PrivateState
from thinwire.sims.engine import virtual_loop
from thinwire.swarm.identity.identity import Identity
from thinwire.swarm.manifest.manifest import ManifestError, ManifestMismatch
from thinwire.swarm.manifest.parser import parse

from benchmarks.training.round_table import RoundTable

SIZE = 9_000
PIECES = [("emb", (30, 100)), ("l.0.w", (2_000,)), ("l.1.w", (25, 100)), ("l.2.w", (1_500,))]


def layout():
    pieces, at = [], 0
    for name, shape in PIECES:
        size = int(np.prod(shape))
        pieces.append(Piece(name, shape, "float32", at, at + size))
        at += size
    return Layout(tuple(pieces), at, b"l" * 32)


LAYOUT = layout()


def manifest(text, codec="fp32"):
    rule = "clip" if codec.startswith("topk") else "mean"
    return parse(f'[exchange]\ncodec = "{codec}"\naggregation = "{rule}"\n[outer]\n{text}')


def streaming(fragments, overlap, alpha=0.5, steps=6):
    mixed = "" if alpha is None else f"local_mix = {alpha}\n"
    return f'method = "streaming"\nfragments = {fragments}\nsync_every = {steps}\noverlap = {overlap}\n{mixed}'


class Model:
    """Parameters with random training steps."""

    def __init__(self, index):
        self.theta = np.random.default_rng(7).standard_normal(SIZE).astype(np.float32)
        self.rng = np.random.default_rng(index)
        self.trains = False

    def read(self, start, stop, out):
        assert not self.trains
        out[:] = self.theta[start:stop]

    def write(self, theta, start=0, keep=0.0):
        assert not self.trains
        part = self.theta[start : start + theta.size]
        part[:] = np.float32(keep) * part + np.float32(1 - keep) * theta if keep else theta

    def step(self):
        self.theta -= (self.rng.standard_normal(SIZE) * 0.01).astype(np.float32)


def drive(text, rounds, *, count=3, codec="fp32", look=lambda table, models: None, change=lambda table: None):
    """Play turns of replicas with random training, in virtual time; a step is a token."""

    async def main():
        models = [Model(index) for index in range(count)]
        table = RoundTable(manifest(text, codec), LAYOUT, [(one.theta.copy(), one.read, one.write) for one in models])
        change(table)

        def train(index, steps):
            for _ in range(steps):
                models[index].step()
            return steps

        await table.play(rounds, train, lambda: look(table, models))
        for slot in table.slots:
            await slot.rounds.rest()
        return table, models

    return virtual_loop.run(main(), seed=1)


@pytest.mark.parametrize("codec", ["fp32", "int8(block=256)"])
def test_one_fragment_without_overlap_equals_diloco_bit_for_bit(codec):
    seen = {}
    for text in ("sync_every = 6\nlr = 0.4", streaming(1, 0, 0.0)):
        found = seen.setdefault(text, [])

        def look(table, models, found=found):
            replicas = [one for slot in table.slots for _, one, _ in slot.replica.each(LAYOUT)]
            found.append([(one.round, one.digest, one.state.tobytes()) for one in replicas])
            found.append([model.theta.tobytes() for model in models])

        drive(text, 5, codec=codec, look=look)
    assert len(seen) == 2 and len({repr(found) for found in seen.values()}) == 1


STATES = {
    ("fp32", 1, 0): "19d9232f45b128fc",
    ("fp32", 2, 0): "c7537fd3c0f4e21c",
    ("fp32", 3, 1): "7e61b0b836a21df2",
    ("fp32", 2, 3): "5660b83b552233d6",
    ("fp32", 3, 2): "f0335af131ec7ae4",
    ("int8(block=256)", 3, 1): "dea310319633d783",
    ("int8(block=256)", 2, 3): "489a5f499712c3e1",
}
"""Codec, fragments, overlap -> hash of outer parameters and models after seven turns.

The values are those of protocol version 1, where all fragments shared one sequence of rounds.
"""


@pytest.mark.parametrize(("codec", "fragments", "overlap"), STATES)
def test_with_one_fragment_under_way_the_states_are_those_of_one_sequence_of_rounds(codec, fragments, overlap):
    table, models = drive(streaming(fragments, overlap), 7, codec=codec)
    thetas = [*(slot.replica.theta for slot in table.slots), *(model.theta for model in models)]
    assert (
        blake3.blake3(b"".join(theta.tobytes() for theta in thetas)).hexdigest()[:16]
        == STATES[codec, fragments, overlap]
    )
    assert table.slots[0].replica.round == 7


@pytest.mark.parametrize("overlap", [3, 4, 5, 6])
def test_concurrent_fragments_match_the_formulas(overlap):
    """The model follows a fragment this number of steps after it was sent, in any number of turns."""
    text, count, turns = streaming(3, overlap), 3, 9
    outer, twins = manifest(text).outer, [Model(index) for index in range(2)]
    assert manifest(text).lag == (overlap - 1) // 2 and manifest(text).fragmented
    parts = parts_of(LAYOUT, count)
    theta = twins[0].theta.astype(np.float64)
    local = [twin.theta.astype(np.float64) for twin in twins]
    momentum, waiting = np.zeros(SIZE), {}

    def put(vector, part, values):
        for start, stop in part.spans:
            at = sum(high - low for low, high in part.spans if high <= start)
            vector[start:stop] = values[at : at + stop - start]

    for step in range(1, 2 * turns + manifest(text).overlap + 1):
        for twin, mine in zip(twins, local, strict=True):
            mine -= (twin.rng.standard_normal(SIZE) * 0.01).astype(np.float32)
        for at in [at for at in waiting if at + overlap == step]:
            part, mean = waiting.pop(at)
            moved = outer.momentum * part.take(momentum) + mean
            put(momentum, part, moved)
            put(theta, part, part.take(theta) - outer.lr * (mean + outer.momentum * moved))
            for mine in local:
                put(mine, part, 0.5 * part.take(mine) + 0.5 * part.take(theta))
        if step % 2 == 0 and step <= 2 * turns:
            part = parts[(step // 2 - 1) % count]
            waiting[step] = part, np.mean([part.take(theta) - part.take(mine) for mine in local], axis=0)
    under_way = []
    table, models = drive(
        text, turns, count=2, look=lambda table, models: under_way.append(table.slots[0].rounds.in_progress)
    )
    assert max(under_way) == len(waiting) == (overlap - 1) // 2
    for model, mine in zip(models, local, strict=True):
        np.testing.assert_allclose(model.theta, mine, rtol=0, atol=1e-5)


@given(st.integers(1, 7), st.integers(0, 60))
def test_turns_are_divided_among_fragments(count, turns):
    assert sum(rounds_of(number, turns, count) for number in range(count)) == turns
    for number in range(count):
        last = rounds_of(number, turns, count)
        assert turn_of(number, last, count) >= turns and (not last or turn_of(number, last - 1, count) < turns)


@pytest.mark.parametrize("overlap", [3, 5])
def test_run_ends_when_every_fragment_had_its_rounds(overlap):
    """The model equals the outer parameters, in spite of training after a fragment's last round."""
    last = []

    def look(table, models):
        last.append([one.round for _, one, _ in table.slots[0].replica.each(LAYOUT)])

    table, models = drive(streaming(3, overlap) + "\n[run]\nrounds = 7", 7, look=look)
    assert last[-1] == [3, 2, 2] and table.slots[0].replica.round == 7
    assert all(np.array_equal(model.theta, table.slots[0].replica.theta) for model in models)


@pytest.mark.parametrize("codec", ["fp32", pytest.param("topk(k=64,chunk=4096)|2bit|rice", marks=pytest.mark.trial)])
def test_late_fragment_does_not_delay_others(codec):
    """It commits when the others have had five more rounds; then the model follows, and it is sent again."""
    free, at = [], []

    def change(table):
        for slot in table.slots:
            session = slot.session.sessions[1]
            average = session.average

            async def slow(*given, average=average, session=session, **named):
                if not session.replica.round:
                    free.append(asyncio.Event())
                    await free[-1].wait()
                return await average(*given, **named)

            session.average = slow

    def look(table, models):
        rounds = [one.round for _, one, _ in table.slots[0].replica.each(LAYOUT)]
        at.append((rounds, asyncio.get_running_loop().time()))
        if rounds[0] == 6:
            for one in free:
                one.set()

    table, _ = drive(streaming(3, 4, None if codec[0] == "t" else 0.5), 24, codec=codec, look=look, change=change)
    held = [(rounds, time) for rounds, time in at if rounds[1] == 0]
    assert len(free) == 3 and max(rounds[0] for rounds, _ in held) == 6 and max(rounds[2] for rounds, _ in held) >= 5
    # At most one patience, of a second, in each of its turns.
    assert held[-1][1] < 10
    assert at[-1][0][1] >= 2 and at[-1][0][0] == 8
    assert len({slot.replica.digest for slot in table.slots}) == 1


def test_fragment_with_missing_results_does_not_delay_others():
    """Its results are missing: the turns of the others continue after a patience, of a second."""
    at = []

    def change(table):
        session = table.slots[0].session.sessions[1]
        session.current.agreement.commit = SimpleNamespace(proposal=None)

        async def lacking(*, give_up):
            await asyncio.sleep(give_up)
            return Outcome()

        session.outcome = lacking

    def look(table, models):
        rounds = [one.round for _, one, _ in table.slots[0].replica.each(LAYOUT)]
        at.append((rounds, asyncio.get_running_loop().time()))

    drive(streaming(3, 4), 9, count=1, look=look, change=change)
    assert at[-1][0] == [3, 0, 3] and at[-1][1] < 8


@pytest.mark.parametrize("proves", [True, False])
def test_peer_follows_all_missed_rounds_of_a_fragment_in_one_turn(proves):
    """The others make one round in each turn, too. It waits a patience, of a second, for the proof of a claim."""
    missed, turns, at = [3], [], []

    def change(table):
        slot = table.slots[0]
        slot.session.now = asyncio.get_running_loop().time
        schedule, session = slot.rounds.schedules[1], slot.session.sessions[1]

        async def follow(*, weight, loss, speed):
            schedule.begun_without_us = True
            schedule.was_read.set()
            missed[0] -= 1
            turns.append(len(at))
            session.catch_up.claimed_over, session.overtaken = bool(missed[0]), proves and bool(missed[0])
            return Outcome(commit=SimpleNamespace(proposal=None))

        schedule.loop.sync = follow

    def look(table, models):
        at.append(asyncio.get_running_loop().time())

    drive(streaming(3, 4), 3, count=1, look=look, change=change)
    assert turns == ([1, 1, 1] if proves else [1])
    assert at[1] - at[0] == pytest.approx(0.0 if proves else 1.0, abs=0.2)


def test_turn_ends_if_the_state_of_a_missed_round_cannot_be_fetched():
    """Training continues: the next turn of the fragment tries again."""
    turns = []

    def change(table):
        seat = table.slots[0]
        schedule, session = seat.rounds.schedules[1], seat.session.sessions[1]
        session.overtaken = True

        async def fail(*, weight, loss, speed):
            schedule.begun_without_us = True
            schedule.was_read.set()
            turns.append(weight)
            return Outcome()

        schedule.loop.sync = fail

    drive(streaming(3, 4), 7, count=1, change=change)
    assert len(turns) == 2


def test_error_in_a_fragment_is_raised():
    def change(table):
        async def broken(*given, **named):
            raise ZeroDivisionError

        table.slots[0].session.sessions[2].average = broken

    with pytest.raises((ZeroDivisionError, virtual_loop.SimFailure)):
        drive(streaming(3, 4), 8, change=change)


def test_fragment_weight_counts_steps_since_it_was_sent():
    """A fragment counts the steps since it was last sent: H, and at first those before its turn."""
    table, _ = drive(streaming(3, 4) + "\n[inner]\nbatch = 1\n[model]\ncontext = 100", 8)
    assert [weights[0] for weights in table.weights][:6] == [2, 4, 6, 6, 6, 6]


def test_model_is_changed_only_between_steps():
    async def main():
        floor, seen = ModelLock(), []

        async def work():
            seen.append("in")
            await asyncio.sleep(1)
            seen.append("out")

        await floor.take()
        visit = asyncio.create_task(floor.visit(work))
        await asyncio.sleep(5)
        assert not seen
        floor.leave()
        await asyncio.sleep(0.5)
        await floor.take()  # waits for visitors
        assert seen == ["in", "out"] and visit.done()

    virtual_loop.run(main(), seed=1)


def test_split_parameters_are_named_by_range_and_joined():
    whole = Layout((Piece("w", (4, 5), "float32", 0, 20),), 20, b"w" * 32)
    inner = [layout_of_part(whole, part, at, 3) for at, part in enumerate(parts_of(whole, 3))]
    assert [piece.name for one in inner for piece in one.pieces] == [
        "w[0:6 of 4x5]",
        "w[6:13 of 4x5]",
        "w[13:20 of 4x5]",
    ]
    flat = np.arange(20, dtype=np.float32)
    parts = {one.pieces[0].name: part.take(flat) for one, part in zip(inner, parts_of(whole, 3), strict=True)}
    np.testing.assert_array_equal(joined(parts | {"b": flat})["w"], flat.reshape(4, 5))
    for name in parts:
        with pytest.raises(ValueError, match="a part of w is missing"):
            joined({one: values for one, values in parts.items() if one != name})
    assert len({one.digest for one in inner}) == 3 and [one.total for one in inner] == [6, 7, 7]
    assert layout_of_part(whole, parts_of(whole, 1)[0], 0, 1) is whole
    cut = [layout_of_part(LAYOUT, part, at, 2) for at, part in enumerate(parts_of(LAYOUT, 2))]
    assert [(piece.name, piece.shape) for piece in cut[1].pieces] == [("emb", (30, 100)), ("l.1.w", (25, 100))]


@pytest.mark.parametrize("codec", ["int8(block=256)", "topk(k=64,chunk=4096)|2bit|rice"])
def test_checkpoint_has_every_fragment_with_its_round(tmp_path, codec):
    run = manifest(streaming(3, 4, None), codec)
    table, _ = drive(streaming(3, 4, None), 7, codec=codec)
    replica, identity, events = table.slots[0].replica, Identity.generate(bytes(32)), []
    rounds = [one.round for _, one, _ in replica.each(LAYOUT)]
    assert len(set(rounds)) > 1

    def keep():
        environment = Environment(now=lambda: 0.0, wall=lambda: 1e9, rng=random.Random(1), disk=RealDisk())
        return Checkpointer(
            CheckpointStore(tmp_path / "c", RealDisk(), identity),
            bytes(32),
            environment,
            lambda *told: events.append(told),
        )

    def fresh(held=None):
        made, cut = fitted(run, LAYOUT)
        return FragmentReplicas.begin(run, LAYOUT, made, cut, np.zeros(SIZE, np.float32), (), held)

    assert not hasattr(keep().save(replica, LAYOUT, None), "reason")
    again = fresh()
    asyncio.run(keep().restore(again, LAYOUT, at_once))
    assert again.digest == replica.digest and again.round == replica.round and again.members == replica.members
    for (_, one, inner), (_, other, _) in zip(again.each(LAYOUT), replica.each(LAYOUT), strict=True):
        assert one.round == other.round and one.state.tobytes() == other.state.tobytes()
        for name, tensor in other.private_state(inner).items():
            assert np.array_equal(tensor, one.private_state(inner)[name])
    some = fresh((1,))
    asyncio.run(keep().restore(some, LAYOUT, at_once))
    assert some.fragments[1].replica.digest == replica.fragments[1].replica.digest and set(some.fragments) == {1}
    # A peer with fewer fragments has no whole state.
    assert not hasattr(keep().save(some, LAYOUT, None), "reason")
    untouched = fresh()
    before = untouched.digest
    with pytest.raises(ManifestMismatch, match="does not fit this model: it has no fragment 0"):
        asyncio.run(keep().restore(untouched, LAYOUT, at_once))
    assert untouched.digest == before


@pytest.mark.parametrize("codec", ["int8(block=256)", "topk(k=64,chunk=4096)|2bit|rice"])
def test_checkpoint_has_every_fragment_as_it_was_although_rounds_are_committed(tmp_path, codec):
    run = manifest(streaming(3, 4, None), codec)
    replica = drive(streaming(3, 4, None), 7, codec=codec)[0].slots[0].replica
    environment = Environment(lambda: 0.0, lambda: 1e9, random.Random(1), RealDisk())
    store = CheckpointStore(tmp_path / "c", RealDisk(), Identity.generate(bytes(32)))
    keep = Checkpointer(store, bytes(32), environment, lambda *told: None)
    expected = [
        (one.round, one.state.copy(), {name: tensor.copy() for name, tensor in one.private_state(inner).items()})
        for _, one, inner in replica.each(LAYOUT)
    ]
    assert keep.begin(replica, LAYOUT, PrivateState({"moment": np.ones(3, np.float32)}, {}))
    for one in replica.fragments.values():  # a round of every fragment
        one.replica.move_from_twins()
        one.replica.state += 1.0
        one.replica.advance(one.replica.members)
    saved = asyncio.run(keep.write(LAYOUT))
    assert isinstance(saved, Saved)
    made, cut = fitted(run, LAYOUT)
    again = FragmentReplicas.begin(run, LAYOUT, made, cut, np.zeros(SIZE, np.float32), ())
    private = asyncio.run(keep.restore(again, LAYOUT, at_once))
    assert again.digest == store.load().snapshot.digest and list(private.tensors) == ["moment"]
    for (_, one, inner), (round, state, own) in zip(again.each(LAYOUT), expected, strict=True):
        assert one.round == round and one.state.tobytes() == state.tobytes()
        assert all(np.array_equal(tensor, one.private_state(inner)[name]) for name, tensor in own.items())


@pytest.mark.parametrize(
    ("text", "codec", "found"),
    [
        (streaming(3, 7), "fp32", "outer.overlap = 7 is more than outer.sync_every = 6"),
        (streaming(3, 1, 0.5), "topk(k=64,chunk=4096)|2bit|rice", "takes the place of momentum"),
        (streaming(65, 3, steps=65), "fp32", "outer.fragments = 65, but at most 64 fragments can have separate rounds"),
        ("sync_every = 6", "topk(k=64,chunk=4096)|2bit|rice", "is not for the method 'diloco'"),
    ],
)
def test_concurrent_fragments_refuse_invalid_settings(text, codec, found):
    with pytest.raises(ManifestError, match=found):
        manifest(text, codec)


def test_number_of_concurrent_rounds_follows_from_manifest():
    found = [
        (run.lag, run.overlap, run.fragmented) for run in (manifest(streaming(3, overlap)) for overlap in range(7))
    ]
    assert found == [
        (0, 0, True),
        (0, 1, True),
        (0, 2, True),
        (1, 1, True),
        (1, 2, True),
        (2, 1, True),
        (2, 2, True),
    ]
    run = manifest(streaming(3, 1, None), "topk(k=64,chunk=4096)|2bit|rice")
    assert run.fragmented and run.exchange.collective == "all-gather"
    assert (run.outer.lr, run.outer.momentum, run.outer.local_mix) == (1.0, 0.0, 0.0)
