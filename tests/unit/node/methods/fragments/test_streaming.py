"""Streaming DiLoCo: parts in turn, steps during rounds, and no loss by failed rounds."""

from __future__ import annotations

import asyncio

import numpy as np
import pytest
from thinwire.collectives.outcome import Outcome
from thinwire.node.state.layout import Layout, Piece
from thinwire.swarm.manifest.manifest import ManifestError
from thinwire.swarm.manifest.parser import parse

from benchmarks.training.round_table import RoundTable

SIZE = 9_000
PIECES = [("emb", 3_000), ("l.0.w", 2_000), ("l.1.w", 2_500), ("l.2.w", 1_500)]
STARTS = [0, 3_000, 5_000, 7_500]
LAYOUT = Layout(
    tuple(Piece(n, (s,), "float32", at, at + s) for (n, s), at in zip(PIECES, STARTS, strict=True)), SIZE, b"l" * 32
)


def manifest(text, codec="fp32"):
    rule = "clip" if codec.startswith("topk") else "mean"
    return parse(f'[exchange]\ncodec = "{codec}"\naggregation = "{rule}"\n[outer]\n{text}')


class Model:
    """Parameters with random training steps."""

    def __init__(self, index):
        self.theta = np.random.default_rng(7).standard_normal(SIZE).astype(np.float32)
        self.rng = np.random.default_rng(index)

    def read(self, start, stop, out):
        out[:] = self.theta[start:stop]

    def write(self, theta, start=0, keep=0.0):
        part = self.theta[start : start + theta.size]
        part[:] = np.float32(keep) * part + np.float32(1 - keep) * theta if keep else theta

    def step(self):
        self.theta -= (self.rng.standard_normal(SIZE) * 0.01).astype(np.float32)


async def drive(text, rounds, *, count=3, codec="fp32", fail=(), look=lambda table, models: None):
    """Play rounds of replicas with random training; a step is a token."""
    models = [Model(index) for index in range(count)]
    table = RoundTable(manifest(text, codec), LAYOUT, [(one.theta.copy(), one.read, one.write) for one in models], fail)

    def train(index, steps):
        for _ in range(steps):
            models[index].step()
        return steps

    await table.play(rounds, train, lambda: look(table, models))
    return table, models


STREAMING = 'method = "streaming"\nfragments = 2\nsync_every = 6\noverlap = 1\nlocal_mix = 0.5'


@pytest.mark.parametrize("overlap", [0, 1, 3])
def test_streaming_round_moves_and_mixes_its_fragment(overlap):
    """Compared with the formulas of the paper, with the outer parameters of the part's last round."""
    text = f'method = "streaming"\nfragments = 2\nsync_every = 6\noverlap = {overlap}\nlocal_mix = 0.5'
    outer, twins = manifest(text).outer, [Model(index) for index in range(3)]
    theta, momentum = twins[0].theta.astype(np.float64), np.zeros(SIZE)
    local = [twin.theta.astype(np.float64) for twin in twins]
    masks = [np.zeros(SIZE, bool), np.zeros(SIZE, bool)]
    masks[0][3_000:5_000] = masks[0][7_500:] = True  # layers 0 and 2
    masks[1][:3_000] = masks[1][5_000:7_500] = True  # layer 1, and the parameters of no layer
    number = 0

    def step(count):
        for twin, mine in zip(twins, local, strict=True):
            for _ in range(count):
                mine -= (twin.rng.standard_normal(SIZE) * 0.01).astype(np.float32)

    def look(table, models):
        nonlocal number
        step(3 if not number else 3 - overlap)
        part = masks[number % 2]
        mean = np.mean([(theta - mine)[part] for mine in local], axis=0)
        step(overlap)
        momentum[part] = outer.momentum * momentum[part] + mean
        theta[part] -= outer.lr * (mean + outer.momentum * momentum[part])
        for mine in local:
            mine[part] = 0.5 * mine[part] + 0.5 * theta[part]
        number += 1
        for slot, model, mine in zip(table.slots, models, local, strict=True):
            np.testing.assert_allclose(slot.replica.theta, theta, rtol=0, atol=1e-5)
            np.testing.assert_allclose(model.theta, mine, rtol=0, atol=1e-5)
            assert slot.replica.digest == table.slots[0].replica.digest and slot.replica.round == number

    asyncio.run(drive(text, 5, look=look))
    assert number == 5


def test_streaming_failed_round_keeps_delta_and_tokens():
    """The same part is sent again with the training since then, and weighs as much."""
    seen = []

    def look(table, models):
        seen.append((table.slots[0].replica.round, models[0].theta.copy(), table.slots[0].replica.theta.copy()))

    table, _ = asyncio.run(drive(STREAMING, 6, fail=[2], look=look))
    assert [number for number, _, _ in seen] == [1, 2, 2, 2, 4, 4]
    assert seen[1][2].tobytes() == seen[2][2].tobytes()
    # Rounds are 3 steps apart. The third turn fails; its fragment counts in the fifth turn all training since its first
    # round.
    assert [weights[0] for weights in table.weights] == [3, 6, 6, 12, 6]

    # Without an outer step in between, all training is sent in the end.
    plain = (
        'method = "streaming"\nfragments = 1\nsync_every = 3\noverlap = 1\nlocal_mix = 0.0\nlr = 1.0\nmomentum = 0.0'
    )
    ends = []
    for fail in ([], [1]):
        rounds = 1 + len(fail)
        table, models = asyncio.run(drive(plain, rounds, count=1, fail=fail, look=lambda table, models: None))
        ends.append((table.slots[0].replica.theta.copy(), models[0].rng))
    once, twice = Model(0), Model(0)
    for model, count in ((once, 3), (twice, 3 + 3)):  # the steps before each announcement, one of them during the round
        for _ in range(count):
            model.step()
    np.testing.assert_allclose(ends[0][0], once.theta, rtol=0, atol=1e-5)
    np.testing.assert_allclose(ends[1][0], twice.theta, rtol=0, atol=1e-5)


def test_streaming_weight_is_capped_by_manifest():
    table, _ = asyncio.run(drive(STREAMING + "\n[inner]\nbatch = 1\n[model]\ncontext = 1", 6, fail=[2, 3]))
    assert manifest(STREAMING + "\n[inner]\nbatch = 1\n[model]\ncontext = 1").max_weight == 6
    assert max(weight for weights in table.weights for weight in weights) == 6


def test_streaming_model_equals_state_after_last_round():
    table, models = asyncio.run(drive(STREAMING + "\n[run]\nrounds = 4", 4))
    assert all(np.array_equal(model.theta, table.slots[0].replica.theta) for model in models)
    table, models = asyncio.run(drive(STREAMING, 4))
    assert not any(np.array_equal(model.theta, table.slots[0].replica.theta) for model in models)


@pytest.mark.parametrize(
    ("text", "found"),
    [
        ("sync_every = 10", "outer.sync_every = 10 is not a multiple of outer.fragments = 3"),
        ("sync_every = 12\noverlap = 13", "outer.overlap = 13 is more than outer.sync_every = 12"),
        ("local_mix = 1.0", "outer.local_mix"),
    ],
)
def test_streaming_refuses_invalid_settings(text, found):
    with pytest.raises(ManifestError, match=found):
        manifest(f'method = "streaming"\n{text}')


def test_streaming_has_defaults_and_run_ids():
    run = manifest('method = "streaming"')
    assert (run.outer.sync_every, run.outer.lr, run.outer.momentum) == (30, 0.4, 0.9)
    assert (run.outer.fragments, run.outer.overlap, run.outer.local_mix) == (3, "auto", 0.5)
    assert (run.pace, run.overlap, run.steps_after(7)) == (10, 5, 70)
    with pytest.raises(ManifestError, match="outer.fragments does not apply to this method"):
        manifest("fragments = 2")
    # Run ids before and after these keys were added.
    plain = parse('[outer]\nmethod = "diloco"')
    assert b"fragments" not in plain.canonical() and b"fragments" in run.canonical()
    assert plain.run_id(bytes(32)) != run.run_id(bytes(32))


@pytest.mark.parametrize("text", [STREAMING, 'method = "eager"\nsync_every = 3'])
def test_streaming_non_finite_model_sends_nothing_and_resets(text, monkeypatch):
    spoilt = []

    def look(table, models):
        if len(spoilt) < 1:
            models[1].theta[4_000] = np.nan
            spoilt.append(1)
        elif len(spoilt) == 1 and not np.isnan(models[1].theta).any():
            spoilt.append(2)

    said = []
    report = "benchmarks.training.round_table.StubSession.report"
    monkeypatch.setattr(report, lambda self, name, detail, **fields: said.append(name))
    table, models = asyncio.run(drive(text, 6, look=look))
    assert said == ["unsent", "alarm", "alarm_over"] and spoilt == [1, 2]
    assert all(np.isfinite(model.theta).all() for model in models)
    assert sum(0 in weights for weights in table.weights) == 1 and table.slots[0].replica.round == 6


EAGER = 'method = "eager"\nsync_every = 3'


async def late(text):
    """Return the announcements of a replica whose first round is given up and commits before the next call.

    Each call has 3 tokens.
    """
    model, announced, now = Model(0), [], asyncio.Event()
    table = RoundTable(manifest(text), LAYOUT, [(model.theta.copy(), model.read, model.write)])
    (slot,) = table.slots

    async def average(source, *, weight, **told):
        announced.append(weight)
        outcome = table.average_of(slot.session, [(source, weight)])
        slot.session.current.agreement.commit = None if len(announced) > 1 else outcome
        return outcome if len(announced) > 1 else Outcome()

    async def outcome(*, give_up):
        late, slot.session.current.agreement.commit = slot.session.current.agreement.commit, None
        return late

    slot.session.average, slot.session.outcome = average, outcome
    now.set()
    tokens, reports = 0, []
    for _ in range(4):
        model.step()
        tokens += 3
        reports.append(await slot.rounds.sync(weight=tokens, loss=0.0, speed=0.0, meanwhile=now.wait))
        tokens = reports[-1].kept if reports[-1].commit else tokens
    return announced, [(report.commit is not None, report.kept) for report in reports]


@pytest.mark.parametrize(("text", "weights"), [(EAGER, [3, 6, 3])])
def test_streaming_steps_after_announcement_count_in_next_round(text, weights):
    """The next call applies the given-up round, which has none of the later steps."""
    announced, reports = asyncio.run(late(text))
    assert reports == [(False, 0), (True, 3), (True, 0), (True, 0)]
    assert announced == weights


@pytest.mark.parametrize(("text", "weights"), [(EAGER, [3, 3])])
def test_streaming_call_cancelled_after_outer_step_is_completed_by_next(text, weights):
    """The model follows, the round is reported once, and the next round is another one."""

    async def main():
        model, announced, begun, now = Model(0), [], asyncio.Event(), asyncio.Event()
        table = RoundTable(
            manifest(text + "\n[run]\nrounds = 2"), LAYOUT, [(model.theta.copy(), model.read, model.write)]
        )
        (slot,) = table.slots
        average = slot.session.average

        async def noted(source, *, weight, **told):
            announced.append(weight)
            return await average(source, weight=weight)

        async def meanwhile():
            begun.set()
            await now.wait()

        slot.session.average = noted
        model.step()
        call = asyncio.create_task(slot.rounds.sync(weight=3, loss=0.0, speed=0.0, meanwhile=meanwhile))
        await begun.wait()
        while not slot.replica.round:
            await asyncio.sleep(0)
        call.cancel()
        with pytest.raises(asyncio.CancelledError):
            await call
        now.set()
        model.step()
        outcome = await slot.rounds.sync(weight=6, loss=0.0, speed=0.0, meanwhile=meanwhile)
        assert outcome.commit.proposal.round == 1 == slot.replica.round and outcome.kept == 3
        outcome = await slot.rounds.sync(weight=outcome.kept, loss=0.0, speed=0.0, meanwhile=meanwhile)
        assert outcome.commit.proposal.round == 2 == slot.replica.round and outcome.kept == 0
        assert np.array_equal(model.theta, slot.replica.theta)
        return announced

    assert asyncio.run(main()) == weights
