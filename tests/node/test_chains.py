"""A chain of rounds for each fragment: turns, several under way, one that is late, and what a checkpoint keeps."""

from __future__ import annotations

import asyncio
import random
from types import SimpleNamespace

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from thinwire.collectives.outcome import Outcome
from thinwire.node.chainrounds import Floor
from thinwire.node.chains import ChainedReplica, joined, layout_of_part, rounds_of, turn_of
from thinwire.node.checkpoint import CheckpointStore
from thinwire.node.disk import RealDisk
from thinwire.node.doors import Doors
from thinwire.node.fragments import Layout, Piece
from thinwire.node.keep import Keep
from thinwire.node.methods import fitted
from thinwire.node.parts import parts_of
from thinwire.node.waiting import at_once
from thinwire.sims import clock
from thinwire.sims.table import Table
from thinwire.swarm.identity import Identity
from thinwire.swarm.manifest import Manifest, ManifestError, parse

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
    return parse(f'[exchange]\ncodec = "{codec}"\n[outer]\n{text}')


def streaming(fragments, overlap, alpha=0.5, steps=6):
    mixed = "" if alpha is None else f"alpha = {alpha}\n"
    return f'method = "streaming"\nfragments = {fragments}\nsteps = {steps}\noverlap = {overlap}\n{mixed}'


class Model:
    """Parameters that go where chance takes them."""

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
    """Turns of replicas that train by chance, in virtual time; a step is a token."""

    async def main():
        models = [Model(index) for index in range(count)]
        table = Table(manifest(text, codec), LAYOUT, [(one.theta.copy(), one.read, one.write) for one in models])
        change(table)

        def train(index, steps):
            for _ in range(steps):
                models[index].step()
            return steps

        await table.play(rounds, train, lambda: look(table, models))
        for seat in table.seats:
            await seat.rounds.rest()
        return table, models

    return clock.run(main(), seed=1)


@pytest.fixture
def always(monkeypatch):
    """Chains wherever the method is streaming, though one part only is under way at a time."""
    monkeypatch.setattr(Manifest, "chained", property(lambda self: self.outer.method == "streaming"))


@pytest.mark.parametrize("codec", ["fp32", "int8(block=256)"])
def test_one_chain_without_overlap_and_mixing_is_diloco_bit_for_bit(always, codec):
    seen = {}
    for text in ("steps = 6\nlr = 0.4", streaming(1, 0, 0.0)):
        found = seen.setdefault(text, [])

        def look(table, models, found=found):
            replicas = [one for seat in table.seats for _, one, _ in seat.replica.each(LAYOUT)]
            found.append([(one.round, one.digest, one.state.tobytes()) for one in replicas])
            found.append([model.theta.tobytes() for model in models])

        drive(text, 5, codec=codec, look=look)
    assert len(seen) == 2 and len({repr(found) for found in seen.values()}) == 1


@pytest.mark.parametrize(("fragments", "overlap"), [(2, 0), (3, 1), (2, 3)])
def test_with_one_part_under_way_chains_have_the_states_of_streaming(monkeypatch, fragments, overlap):
    ends = []
    for chained in (False, True):
        if chained:
            monkeypatch.setattr(Manifest, "chained", property(lambda self: True))
        table, models = drive(streaming(fragments, overlap), 5)
        assert isinstance(table.seats[0].replica, ChainedReplica) == chained
        ends.append([seat.replica.theta.tobytes() for seat in table.seats] + [one.theta.tobytes() for one in models])
        assert table.seats[0].replica.round == 5
    assert ends[0] == ends[1]


@pytest.mark.parametrize("overlap", [3, 4, 5, 6])
def test_several_fragments_under_way_against_the_formulas(overlap):
    """Each fragment follows so many steps after it was sent, however many turns that is."""
    text, count, turns = streaming(3, overlap), 3, 9
    outer, twins = manifest(text).outer, [Model(index) for index in range(2)]
    assert manifest(text).lag == (overlap - 1) // 2 and manifest(text).chained
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
        text, turns, count=2, look=lambda table, models: under_way.append(len(table.seats[0].rounds._flights))
    )
    assert max(under_way) == len(waiting) == (overlap - 1) // 2
    for model, mine in zip(models, local, strict=True):
        np.testing.assert_allclose(model.theta, mine, rtol=0, atol=1e-5)


@given(st.integers(1, 7), st.integers(0, 60))
def test_turns_are_shared_out(count, turns):
    assert sum(rounds_of(number, turns, count) for number in range(count)) == turns
    for number in range(count):
        last = rounds_of(number, turns, count)
        assert turn_of(number, last, count) >= turns and (not last or turn_of(number, last - 1, count) < turns)


@pytest.mark.parametrize("overlap", [3, 5])
def test_a_run_ends_when_every_fragment_has_had_its_rounds(overlap):
    """And the model is what all have, whatever was trained since a fragment had its last one."""
    last = []

    def look(table, models):
        last.append([one.round for _, one, _ in table.seats[0].replica.each(LAYOUT)])

    table, models = drive(streaming(3, overlap) + "\n[run]\nrounds = 7", 7, look=look)
    assert last[-1] == [3, 2, 2] and table.seats[0].replica.round == 7
    assert all(np.array_equal(model.theta, table.seats[0].replica.theta) for model in models)


@pytest.mark.parametrize("codec", ["fp32", "topk(k=64,chunk=4096)|2bit|rice"])
def test_a_fragment_that_is_late_does_not_hold_the_others(codec):
    """Its verdict comes when the others have had five more rounds; then the model follows, and it is sent again."""
    free, at = [], []

    def change(table):
        for seat in table.seats:
            link = seat.session.links[1]
            average = link.average

            async def slow(*given, average=average, link=link, **named):
                if not link.replica.round:
                    free.append(asyncio.Event())
                    await free[-1].wait()
                return await average(*given, **named)

            link.average = slow

    def look(table, models):
        rounds = [one.round for _, one, _ in table.seats[0].replica.each(LAYOUT)]
        at.append((rounds, asyncio.get_running_loop().time()))
        if rounds[0] == 6:
            for one in free:
                one.set()

    table, _ = drive(streaming(3, 4, None if codec[0] == "t" else 0.5), 24, codec=codec, look=look, change=change)
    held = [(rounds, time) for rounds, time in at if rounds[1] == 0]
    assert len(free) == 3 and max(rounds[0] for rounds, _ in held) == 6 and max(rounds[2] for rounds, _ in held) >= 5
    # A patience, of a second, at most in each of its turns.
    assert held[-1][1] < 10
    assert at[-1][0][1] >= 2 and at[-1][0][0] == 8
    assert len({seat.replica.digest for seat in table.seats}) == 1


def test_a_fragment_whose_round_others_have_had_does_not_hold_the_others():
    """Its results do not come: the turns of the others go on after a patience, of a second."""
    at = []

    def change(table):
        link = table.seats[0].session.links[1]
        link.current.agreement.commit = SimpleNamespace(opened=None)

        async def lacking(*, give_up):
            await asyncio.sleep(give_up)
            return Outcome()

        link.outcome = lacking

    def look(table, models):
        rounds = [one.round for _, one, _ in table.seats[0].replica.each(LAYOUT)]
        at.append((rounds, asyncio.get_running_loop().time()))

    drive(streaming(3, 4), 9, count=1, look=look, change=change)
    assert at[-1][0] == [3, 0, 3] and at[-1][1] < 8


def test_what_goes_wrong_in_a_fragment_is_raised():
    def change(table):
        async def broken(*given, **named):
            raise ZeroDivisionError

        table.seats[0].session.links[2].average = broken

    with pytest.raises((ZeroDivisionError, clock.SimFailure)):
        drive(streaming(3, 4), 8, change=change)


def test_weights_count_what_went_into_each_fragment():
    """A part counts the steps since it was sent last: H of them, and at first what it waited for its turn."""
    table, _ = drive(streaming(3, 4) + "\n[inner]\nbatch = 1\n[model]\ncontext = 100", 8)
    assert [weights[0] for weights in table.weights][:6] == [2, 4, 6, 6, 6, 6]


def test_the_model_is_touched_while_training_rests():
    async def main():
        floor, seen = Floor(), []

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
        await floor.take()  # waits for who is there
        assert seen == ["in", "out"] and visit.done()

    clock.run(main(), seed=1)


def test_parts_of_parameters_are_named_by_their_range_and_joined_again():
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
def test_a_checkpoint_has_every_fragment_in_its_round(tmp_path, codec):
    run = manifest(streaming(3, 4, None), codec)
    table, _ = drive(streaming(3, 4, None), 7, codec=codec)
    replica, identity, events = table.seats[0].replica, Identity.generate(bytes(32)), []
    rounds = [one.round for _, one, _ in replica.each(LAYOUT)]
    assert len(set(rounds)) > 1

    def keep():
        doors = Doors(now=lambda: 0.0, wall=lambda: 1e9, rng=random.Random(1), disk=RealDisk())
        return Keep(
            CheckpointStore(tmp_path / "c", RealDisk(), identity), bytes(32), doors, lambda *told: events.append(told)
        )

    def fresh(held=None):
        made, _ = fitted(run, LAYOUT)
        return ChainedReplica.begin(run, LAYOUT, made, np.zeros(SIZE, np.float32), (), held)

    assert not hasattr(keep().save(replica, LAYOUT, None), "reason")
    again = fresh()
    asyncio.run(keep().restore(again, LAYOUT, at_once))
    assert again.digest == replica.digest and again.round == replica.round and again.members == replica.members
    for (_, one, inner), (_, other, _) in zip(again.each(LAYOUT), replica.each(LAYOUT), strict=True):
        assert one.round == other.round and one.state.tobytes() == other.state.tobytes()
        for name, tensor in other.private(inner).items():
            assert np.array_equal(tensor, one.private(inner)[name])
    some = fresh((1,))
    asyncio.run(keep().restore(some, LAYOUT, at_once))
    assert some.chains[1].replica.digest == replica.chains[1].replica.digest and set(some.chains) == {1}
    # Of a peer that holds less there is no whole state.
    assert not hasattr(keep().save(some, LAYOUT, None), "reason")
    events.clear()
    untouched = fresh()
    before = untouched.digest
    asyncio.run(keep().restore(untouched, LAYOUT, at_once))
    assert untouched.digest == before and "does not fit" in events[-1][1]["detail"]


@pytest.mark.parametrize(
    ("text", "codec", "found"),
    [
        (streaming(3, 7), "fp32", "outer.overlap 7 is more than the 6 steps"),
        (streaming(3, 1, 0.5), "topk(k=64,chunk=4096)|2bit|rice", "takes the place of momentum"),
        (streaming(65, 3, steps=65), "fp32", "outer.fragments is 65, and 64 can have rounds"),
        ("steps = 6", "topk(k=64,chunk=4096)|2bit|rice", "is not for the method 'diloco'"),
    ],
)
def test_what_cannot_be_is_refused(text, codec, found):
    with pytest.raises(ManifestError, match=found):
        manifest(text, codec)


def test_what_is_under_way_follows_from_the_manifest():
    found = [(run.lag, run.overlap, run.chained) for run in (manifest(streaming(3, overlap)) for overlap in range(7))]
    assert found == [
        (0, 0, False),
        (0, 1, False),
        (0, 2, False),
        (1, 1, True),
        (1, 2, True),
        (2, 1, True),
        (2, 2, True),
    ]
    run = manifest(streaming(3, 1, None), "topk(k=64,chunk=4096)|2bit|rice")
    assert run.chained and run.exchange.collective == "gather"
    assert (run.outer.lr, run.outer.momentum, run.outer.alpha) == (1.0, 0.0, 0.0)
