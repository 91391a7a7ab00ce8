"""Custom training loops in real swarms over loopback: several peers in one process, each with its threads."""

import copy
import math
import os
import signal
import subprocess
import sys
import threading
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest
import thinwire
import torch
from kit.real.warm_process import WarmProcess
from thinwire.compression import device
from thinwire.compression.dense import torch_backend
from thinwire.node.outer.round_session import RoundSession
from thinwire.node.peer import checkpoint_schedule
from thinwire.node.runtime.event_log import read_events
from thinwire.node.state.layout import layout_of
from thinwire.node.state.replica import Replica
from torch import nn

MANIFEST = """
[run]
name = "mine"
rounds = {rounds}
[model]
kind = "custom"
{model}
[outer]
sync_every = {steps}
{outer}
[exchange]
codec = "{codec}"
{exchange}
"""


@pytest.fixture
def found(tmp_path):
    """Write a manifest and found its run; a second call returns to the run."""

    def make(home="founder", *, rounds=0, steps=2, outer="", codec="fp32", exchange="", model=""):
        path = tmp_path / "run.toml"
        keys = dict(rounds=rounds, steps=steps, outer=outer, codec=codec, exchange=exchange, model=model)
        path.write_text(MANIFEST.format(**keys))
        return thinwire.join(path, home=tmp_path / home, host="127.0.0.1")

    return make


@pytest.fixture
def enter(tmp_path):
    """Join with an invite, at an address that no other test uses.

    A founder that returns asks there for its run, and would wait for a process of another test at the same port.
    """
    return lambda invite, home: thinwire.join(invite, home=tmp_path / home, host="127.0.0.2")


def net(seed=0, width=8):
    torch.manual_seed(seed)
    return nn.Sequential(nn.Linear(6, width), nn.BatchNorm1d(width), nn.ReLU(), nn.Linear(width, 3))


class Tied(nn.Module):
    """Model with a frozen part, a tied one, and elements of two types."""

    def __init__(self, seed=0):
        super().__init__()
        torch.manual_seed(seed)
        self.embed, self.body, self.head = nn.Embedding(5, 6), nn.Linear(6, 6), nn.Linear(6, 5, bias=False)
        self.head.weight = self.embed.weight
        self.frozen = nn.Linear(6, 6).requires_grad_(False)
        self.narrow = nn.Parameter(torch.randn(6).bfloat16())

    def forward(self, tokens):
        hidden = self.frozen(self.body(self.embed(tokens))) * self.narrow.float()
        return self.head(hidden)


def batch(generator, count=16):
    x = torch.randn(count, 6, generator=generator)
    return x, x[:, :3].argmax(1)


def one_step(model, optimizer, generator):
    x, y = batch(generator)
    optimizer.zero_grad()
    loss = nn.functional.cross_entropy(model(x), y)
    loss.backward()
    optimizer.step()
    return loss.item()


def vector(model):
    return torch.cat([p.detach().float().reshape(-1) for p in model.parameters()])


def train(swarm, model, optimizer, seed, make_step=one_step):
    """Train until the run's end. Return the states after each round: number -> (digest, parameters)."""
    generator, seen, last = torch.Generator().manual_seed(seed), {}, swarm.round
    while not swarm.done:
        make_step(model, optimizer, generator)
        if swarm.round != last:
            last = swarm.round
            seen[last] = swarm.digest, vector(model)
    return seen


def together(*calls):
    """Runs each in a thread; the results."""
    with ThreadPoolExecutor(len(calls)) as pool:
        return [future.result(timeout=240) for future in [pool.submit(*call) for call in calls]]


def test_status_shows_last_step_before_its_digest(found, monkeypatch):
    model = nn.Linear(2, 2)
    with found(steps=1) as swarm:
        optimizer = swarm.wrap(model, torch.optim.SGD(model.parameters(), lr=0.1))
        settle, asked = Replica.compute_digest, threading.Event()

        def waits(replica):
            asked.wait(60)
            settle(replica)

        monkeypatch.setattr(Replica, "compute_digest", waits)
        try:
            for loss in (0.5, 0.25):
                optimizer.zero_grad()
                model(torch.ones(1, 2)).sum().backward()
                optimizer.step(loss=loss)
                assert swarm.status.loss == loss
                asked.set()
        finally:
            asked.set()


def test_swarm_encodes_on_the_device_of_the_parameters(tmp_path, monkeypatch):
    """Tensors of a type that the choice names are encoded by torch; the state is the same bit for bit."""
    used, encode = [], torch_backend.encode
    monkeypatch.setattr(torch_backend, "encode", lambda *given: (used.append(1), encode(*given))[1])
    digests, text = [], MANIFEST.format(rounds=0, steps=1, outer="", codec="int8(block=64)", exchange="", model="")
    for devices in ((), ("cpu",)):
        monkeypatch.setattr(device, "DEVICES", devices)
        assert not used
        (path := tmp_path / f"run{len(devices)}.toml").write_text(text)
        model = Tied()
        with thinwire.join(path, home=tmp_path / f"home{len(devices)}", host="127.0.0.1") as swarm:
            optimizer = swarm.wrap(model, torch.optim.SGD(model.parameters(), lr=0.1))
            for _ in range(2):
                model(torch.arange(5)).square().sum().backward()
                optimizer.step()
            digests.append([value.tobytes() for value in map(torch.Tensor.numpy, swarm.outer().values())])
    assert used and digests[0] == digests[1]


def test_lone_swarm_with_neutral_outer_settings_equals_inner_optimizer(found):
    torch.manual_seed(0)
    alone = nn.Sequential(nn.Linear(6, 8), nn.Tanh(), nn.Linear(8, 3))
    model = copy.deepcopy(alone)
    before = vector(alone)
    reference = torch.optim.SGD(alone.parameters(), lr=0.1, momentum=0.9)
    with found(steps=1, outer="lr = 1.0\nmomentum = 0.0\nnesterov = false") as swarm:
        optimizer = swarm.wrap(model, torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9))
        ours, theirs = torch.Generator().manual_seed(1), torch.Generator().manual_seed(1)
        for number in range(1, 21):
            one_step(model, optimizer, ours)
            one_step(alone, reference, theirs)
            assert swarm.round == number and swarm.last.committed and swarm.last.contributors == 1
            torch.testing.assert_close(vector(model), vector(alone), rtol=0, atol=3e-6)
        assert (vector(model) - before).abs().max() > 0.05
        assert swarm.status.loss is None
        optimizer.step(loss=0.5)
        assert swarm.status.loss == 0.5
        while (status := swarm.status).round < 21:
            time.sleep(0.01)  # A round is shown when its state has a digest, which is computed beside training.
        assert (status.round, status.run_name, status.device) == (21, "mine", "cpu")


@pytest.mark.parametrize("codec", ["fp32", "int8(block=256)"])
def test_two_peers_are_equal_after_every_round(found, enter, codec):
    ours, theirs = net(1), net(2)
    with found(rounds=5, codec=codec) as first, enter(first.invite, "joiner") as second:
        inner = torch.optim.SGD(ours.parameters(), lr=0.1, momentum=0.9)
        one = first.wrap(ours, inner)
        two = second.wrap(theirs, torch.optim.AdamW(theirs.parameters(), lr=0.01), batch=3)
        assert torch.equal(vector(ours), vector(theirs)), "a joiner starts from the swarm's parameters"
        scheduler = torch.optim.lr_scheduler.StepLR(one, step_size=1, gamma=0.5)

        def with_schedule(model, optimizer, generator):
            one_step(model, optimizer, generator)
            scheduler.step()

        left, right = together((train, first, ours, one, 1, with_schedule), (train, second, theirs, two, 2))
        assert inner.param_groups[0]["lr"] < 0.1 / 2**8
        assert first.digest == second.digest and first.round == second.round == 5
        assert [peer.state for peer in first.peers] == ["alive"]
    for number in left.keys() & right.keys():
        assert left[number][0] == right[number][0]
        assert torch.equal(left[number][1], right[number][1])
    assert 5 in left and 5 in right
    assert torch.equal(ours[1].running_mean, theirs[1].running_mean)


@pytest.mark.parametrize(
    ("outer", "codec", "rule"),
    [
        ("", "int8(block=256)", "average"),
        ("", "fp32", "heaviest"),
        ('method = "sparseloco"', "topk(k=64,chunk=4096)|2bit|rice", "average"),
        ('method = "sparseloco"', "topk(k=64,chunk=4096)|2bit|rice", "heaviest"),
        ('method = "demo"', "demo(k=32,chunk=4096)|2bit|rice", "average"),
        ('method = "eager"', "int8(block=256)", "average"),
        ('method = "co2"', "int4(block=256)", "heaviest"),
        ('method = "delayed-nesterov"', "fp32", "average"),
        ('method = "buffered-async"', "int8(block=256)", "heaviest"),
    ],
)
def test_peers_share_the_buffers_of_their_models(found, enter, outer, codec, rule):
    """A joiner without a step of its own evaluates as the founder; later both have the same buffers, bit for bit."""
    ours, theirs, generator = net(1), net(2), torch.Generator().manual_seed(3)
    x, _ = batch(generator, 512)
    with found(rounds=8, outer=outer, codec=codec, model=f'buffers = "{rule}"') as first:
        one = first.wrap(ours, torch.optim.SGD(ours.parameters(), lr=0.3))
        while first.round < 5:
            one_step(ours, one, generator)
        with enter(first.invite, "joiner") as second:
            two = second.wrap(theirs, torch.optim.SGD(theirs.parameters(), lr=0.3))
            state = first.outer()
            assert state["1.num_batches_tracked"].dtype == torch.int64 and state["1.num_batches_tracked"] > 5
            assert state["1.running_var"].min() > 0
            for name, value in theirs.state_dict().items():
                assert torch.equal(value, state[name]), name
            with torch.no_grad():
                expected = torch.func.functional_call(ours.eval(), state, (x,)).argmax(1)
                assert torch.equal(theirs.eval()(x).argmax(1), expected)
            ours.train(), theirs.train()
            together((train, first, ours, one, 1), (train, second, theirs, two, 2))
            assert first.digest == second.digest
            for name, value in ours.state_dict().items():
                assert torch.equal(theirs.state_dict()[name], value), name
            assert ours[1].running_var.min() > 0 and ours[1].num_batches_tracked > 5
    with found(rounds=8, outer=outer, codec=codec, model=f'buffers = "{rule}"') as first:
        again = net(4)
        first.wrap(again, torch.optim.SGD(again.parameters(), lr=0.3))
        for name, value in ours.state_dict().items():
            assert torch.equal(again.state_dict()[name], value), f"{name} is not in the checkpoint"


@pytest.mark.parametrize(
    ("outer", "exchange"),
    [
        ('method = "noloco"', ""),
        ('method = "streaming"', ""),
        ('method = "powersgd"', 'codec = "powersgd(rank=1)"'),
        ("", 'topology = "ring"'),
        ('method = "sparseloco"', 'collective = "sparse-butterfly"'),
        ("", 'aggregation = "median"\nmax_liars = 1\nmin_peers = 3'),
    ],
)
def test_wrap_refuses_buffers_that_a_run_cannot_share(tmp_path, outer, exchange):
    path = tmp_path / "run.toml"
    for more in ("", 'buffers = "local"'):
        model = net()
        path.write_text(f'[model]\nkind = "custom"\n{more}\n[outer]\n{outer}\n[exchange]\n{exchange}\n')
        with thinwire.join(path, home=tmp_path / "home", host="127.0.0.1") as swarm:
            inner = torch.optim.SGD(model.parameters(), lr=0.1)
            if more:
                swarm.wrap(model, inner)
                continue
            with pytest.raises(thinwire.ManifestError, match="1.num_batches_tracked|1.running_mean") as refused:
                swarm.wrap(model, inner)
            assert "model.buffers = 'local'" in refused.value.hint


def test_wrap_refuses_buffers_that_are_not_finite(found):
    model = net()
    model.register_buffer("mask", torch.full((3,), float("-inf")))
    with found() as swarm, pytest.raises(ValueError, match="mask has values that are not finite; .*persistent=False"):
        swarm.wrap(model, torch.optim.SGD(model.parameters(), lr=0.1))


@pytest.mark.filterwarnings("ignore:the mean loss since the last round is nan")
def test_lone_peer_with_parameters_that_are_not_finite_reports_that_and_does_not_wait(found, tmp_path):
    model = net()
    with found() as swarm:
        optimizer = swarm.wrap(model, torch.optim.SGD(model.parameters(), lr=0.1))
        for loss in (1.0, 1.0, math.nan, math.nan):
            model(torch.randn(4, 6)).sum().backward()
            if math.isnan(loss):
                next(model.parameters()).data.fill_(loss)
            optimizer.step(loss=loss)
        assert swarm.round == 1
    (path,) = (tmp_path / "founder").rglob("events.jsonl")
    events = read_events(path).events
    (waited,) = [one for one in events if one["kind"] == "uncommitted"]
    (alarm,) = [one["detail"] for one in events if one["kind"] == "alarm"]
    assert waited["detail"] == "no peer that is here has a contribution" and "training has diverged" in alarm


def test_swarm_supports_frozen_tied_and_narrow_parameters(found, enter):
    ours, theirs = Tied(1), Tied(2)
    frozen = copy.deepcopy(theirs.frozen.weight)

    def step(model, optimizer, generator):
        for _ in range(2):  # gradients add up; only a step counts
            tokens = torch.randint(0, 5, (8,), generator=generator)
            nn.functional.cross_entropy(model(tokens), (tokens + 1) % 5).backward()
        optimizer.step()
        optimizer.zero_grad()

    with found(rounds=3) as first, enter(first.invite, "joiner") as second:
        one, two = (
            swarm.wrap(model, torch.optim.AdamW((p for p in model.parameters() if p.requires_grad), lr=0.05))
            for swarm, model in ((first, ours), (second, theirs))
        )
        together((train, first, ours, one, 1, step), (train, second, theirs, two, 2, step))
        assert first.digest == second.digest
    for model in (ours, theirs):
        assert model.head.weight is model.embed.weight
    for name, parameter in ours.named_parameters():
        assert torch.equal(parameter, theirs.get_parameter(name)) == (not name.startswith("frozen")), name
    assert torch.equal(theirs.frozen.weight, frozen)
    assert theirs.narrow.dtype == torch.bfloat16


def test_overtaken_peer_adopts_state_at_next_step(found, enter):
    models = [net(seed) for seed in range(3)]
    with (
        found(steps=4, exchange="straggler_timeout = 0.2") as a,
        enter(a.invite, "b") as b,
        enter(a.invite, "slow") as slow,
    ):
        swarms = (a, b, slow)
        wrapped = [s.wrap(m, torch.optim.SGD(m.parameters(), lr=0.1)) for s, m in zip(swarms, models, strict=True)]
        generators = [torch.Generator().manual_seed(seed) for seed in range(3)]

        def steps(index, until):
            while swarms[index].round < until:
                one_step(models[index], wrapped[index], generators[index])

        together((steps, 0, 1), (steps, 1, 1), (steps, 2, 1))
        start = a.round
        one_step(models[2], wrapped[2], generators[2])
        together((steps, 0, start + 1), (steps, 1, start + 1))
        until = time.monotonic() + 60
        while not slow.overtaken and time.monotonic() < until:
            time.sleep(0.01)
        one_step(models[2], wrapped[2], generators[2])
        assert slow.round == start + 1 and slow.last.adopted
        assert slow.digest == a.digest and torch.equal(vector(models[2]), vector(models[0]))


def test_round_reports_reach_callback_and_iterator(found):
    class Mine(Exception):
        pass

    told = []

    def tell(report):
        told.append(report)
        if report.round == 2:
            raise Mine("of the user")

    model, generator = net(), torch.Generator().manual_seed(0)
    with found(steps=2) as swarm:
        inner = torch.optim.SGD(model.parameters(), lr=0.1)
        with pytest.raises(thinwire.ManifestMismatch, match="'diloco', not 'noloco'"):
            swarm.wrap(model, inner, method="noloco")
        optimizer = swarm.wrap(model, inner, batch=16, method="diloco", on_round=tell)
        for _ in range(3):
            one_step(model, optimizer, generator)
        assert [report.round for report in swarm.rounds()] == [1] and not list(swarm.rounds())
        with pytest.raises(Mine, match="of the user"):
            one_step(model, optimizer, generator)
        assert swarm.round == 2
        one_step(model, optimizer, generator)
        optimizer.step(loss=0.25)
        assert swarm.round == 3 and [report.round for report in told] == [1, 2, 3]
        last = told[-1]
        assert list(swarm.rounds()) == told[1:] and last is swarm.last and last.committed and last.adopted
        assert (last.loss, last.steps, last.weight, last.contributors, dict(last.missing)) == (0.25, 2, 32, 1, {})
        assert last.members == (swarm.status.peer,) and last.bytes_up >= 0 and last.seconds > 0


def test_exception_in_loop_passes_and_restart_resumes(found, tmp_path):
    class Mine(BaseException):
        pass

    model, mine = net(), Mine()
    with pytest.raises(Mine) as caught, found() as swarm:
        optimizer = swarm.wrap(model, torch.optim.AdamW(model.parameters(), lr=0.01))
        generator = torch.Generator().manual_seed(1)
        for _ in range(6):
            one_step(model, optimizer, generator)
        digest, moment = swarm.digest, optimizer.state[model[0].weight]["exp_avg"].clone()
        raise mine
    assert caught.value is mine
    assert not any(thread.name.startswith("thinwire") for thread in threading.enumerate())
    with pytest.raises(thinwire.SwarmError, match="left"):
        optimizer.step()

    again = net(5)
    with found() as swarm:
        with pytest.raises(thinwire.InUseError):
            found()
        inner = torch.optim.AdamW(again.parameters(), lr=0.01)
        optimizer = swarm.wrap(again, inner)
        assert swarm.round == 3
        assert torch.equal(vector(again), vector(model)), "the last step ended a round"
        assert torch.equal(inner.state[again[0].weight]["exp_avg"], moment)
        assert inner.state[again[0].weight]["step"] == 6
        for _ in range(2):
            one_step(again, optimizer, generator)
        assert swarm.round == 4 and swarm.digest != digest


@pytest.mark.skipif(not torch.cuda.is_available(), reason="no GPU")
def test_swarm_supports_parameters_on_gpu(found, enter):
    ours, theirs = net(1).cuda(), net(2)  # one model on the GPU, the other on the CPU

    def step(model, optimizer, generator):
        x, y = (tensor.to(next(model.parameters()).device) for tensor in batch(generator))
        optimizer.zero_grad()
        nn.functional.cross_entropy(model(x), y).backward()
        optimizer.step()

    with found(rounds=4) as first, enter(first.invite, "joiner") as second:
        one = first.wrap(ours, torch.optim.AdamW(ours.parameters(), lr=0.01, fused=True))
        two = second.wrap(theirs, torch.optim.AdamW(theirs.parameters(), lr=0.01))
        together((train, first, ours, one, 1, step), (train, second, theirs, two, 2, step))
        assert first.digest == second.digest and first.status.device == "cuda:0"
    assert torch.equal(vector(ours).cpu(), vector(theirs))
    for rounds in (1, 2):  # the second time with the moments from the checkpoint
        model, generator = net(3).cuda(), torch.Generator().manual_seed(rounds)
        with found("returning", rounds=2) as swarm:
            inner = torch.optim.AdamW(model.parameters(), lr=0.01, fused=True)
            optimizer = swarm.wrap(model, inner)
            assert len(inner.state) == (0 if rounds == 1 else len(list(model.parameters())))
            while swarm.round < rounds:
                step(model, optimizer, generator)


@pytest.mark.parametrize(
    ("other", "words"),
    [
        (lambda: net(width=9), "99 trainable parameters, the one here has 111"),
        (lambda: nn.Sequential(nn.Linear(8, 9), nn.Linear(2, 6)), "99 trainable parameters too"),
        (lambda: nn.Sequential(*net(), nn.BatchNorm1d(3, affine=False)), "or buffers than the one here, which has 99"),
    ],
)
def test_join_with_another_model_is_a_mismatch(found, enter, other, words):
    model, wrong = net(), other()
    assert layout_of(model).total == 99
    rule = "average" if "buffers" in words else "local"
    with found(model=f'buffers = "{rule}"') as first:
        first.wrap(model, torch.optim.SGD(model.parameters(), lr=0.1))
        with pytest.raises(thinwire.ManifestMismatch, match=words) as caught, enter(first.invite, "joiner") as second:
            second.wrap(wrong, torch.optim.SGD(wrong.parameters(), lr=0.1))
        assert caught.value.exit_code == 5 and "freeze" in caught.value.hint
        with enter(first.invite, "joiner") as second:
            with pytest.raises(thinwire.ManifestMismatch):
                second.wrap(wrong, torch.optim.SGD(wrong.parameters(), lr=0.1))
            right = net(3)
            second.wrap(right, torch.optim.SGD(right.parameters(), lr=0.1))
            assert torch.equal(vector(right), vector(model))


def test_merge_makes_first_round_before_training(found):
    model, reports = net(), []
    start = vector(model)
    with found(rounds=2, steps=2, outer='method = "merge"') as swarm:
        optimizer = swarm.wrap(
            model,
            torch.optim.SGD(model.parameters(), lr=0.1),
            on_round=lambda report: reports.append((report, swarm.outer())),
        )
        generator = torch.Generator().manual_seed(1)
        while not swarm.done:
            one_step(model, optimizer, generator)
    (gathered, outer), (merged, _) = reports
    assert (gathered.round, gathered.steps, gathered.weight) == (1, 0, 1)
    assert torch.equal(torch.cat([outer[name].reshape(-1) for name, _ in model.named_parameters()]), start)
    assert (merged.round, merged.steps, merged.weight) == (2, 2, 2) and not torch.equal(vector(model), start)


def test_swarm_refuses_invalid_models_and_optimizers(found):
    class Compiled(nn.Module):
        """Like the result of torch.compile: the module under this name, and other parameter names."""

        def __init__(self, module):
            super().__init__()
            self._orig_mod = module

    model = net()
    sgd = torch.optim.SGD(net(1).parameters(), lr=0.1)
    with found() as swarm:
        with pytest.raises(ValueError, match="not parameters of this model"):
            swarm.wrap(model, sgd)
        with pytest.raises(ValueError, match="no trainable parameters"):
            swarm.wrap(net().requires_grad_(False), sgd)
        with pytest.raises(ValueError, match="no values yet"):
            swarm.wrap(nn.LazyLinear(3), sgd)
        with pytest.raises(ValueError, match="meta device.: call to_empty"):
            swarm.wrap(net().to("meta"), sgd)
        with pytest.raises(TypeError, match="model must be an nn.Module, not generator"):
            swarm.wrap(model.parameters(), sgd)
        with pytest.raises(TypeError, match="optimizer must be a torch.optim.Optimizer, not str"):
            swarm.wrap(model, "sgd")
        with pytest.raises(ValueError, match="call wrap first"):
            swarm.outer()
        swarm.wrap(Compiled(model), torch.optim.SGD(model.parameters(), lr=0.1))
        assert next(iter(swarm.outer())) == "0.bias"
        with pytest.raises(ValueError, match="already"):
            swarm.wrap(model, torch.optim.SGD(model.parameters(), lr=0.1))


def test_swarm_refuses_invalid_run_arguments(tmp_path):
    (tmp_path / "run.toml").write_text('[run]\nname = "x"\n')
    for what, error, words in [
        (tmp_path / "run.toml", thinwire.ManifestError, "kind is not custom"),
        (tmp_path / "none.toml", thinwire.ManifestError, "cannot read"),
        (str(tmp_path / "none.toml"), thinwire.ManifestError, "cannot read"),
        (Path("/dev/zero"), thinwire.ManifestError, "cannot read /dev/zero: not a regular file"),
        ("tw1-nonsense", thinwire.InviteError, "typo"),
        ("hello", thinwire.InviteError, "not an invite"),
    ]:
        with pytest.raises(error, match=words) as caught:
            thinwire.join(what, home=tmp_path / "home")
        assert isinstance(caught.value, thinwire.HintedError) and caught.value.hint
    with pytest.raises(thinwire.ConfigError, match="port"):
        thinwire.join("hello", home=tmp_path / "home", port=70_000)
    (tmp_path / "own.toml").write_text('[model]\nkind = "custom"\n')
    with pytest.raises(thinwire.ConfigError, match="has no port"):
        thinwire.join(tmp_path / "own.toml", home=tmp_path / "home", advertise="example.org")


def test_swarm_on_taken_port_leaves_nothing_behind(found, tmp_path):
    with found() as first:
        model = net()
        first.wrap(model, torch.optim.SGD(model.parameters(), lr=0.1))
        port = int(first.status.addresses[0].rpartition(":")[2])
        for _ in range(2):  # the second time would find the home in use, had the first left a lock
            with pytest.raises(thinwire.PortTaken):
                thinwire.join(first.invite, home=tmp_path / "other", host="127.0.0.1", port=port)


def test_ctrl_c_ends_waiting_and_training_may_continue(found):
    model = net()
    with found(steps=1, exchange="min_peers = 2") as swarm:
        optimizer = swarm.wrap(model, torch.optim.SGD(model.parameters(), lr=0.1))
        generator = torch.Generator().manual_seed(1)

        def interrupt():
            until = time.monotonic() + 60
            while swarm.status.phase != "exchanging" and time.monotonic() < until:
                time.sleep(0.02)
            os.kill(os.getpid(), signal.SIGINT)

        for _ in range(2):
            thread = threading.Thread(target=interrupt)
            thread.start()
            with pytest.raises(KeyboardInterrupt):
                one_step(model, optimizer, generator)
            thread.join()
        assert swarm.round == 0


def test_background_failure_is_raised_in_training_loop(found, monkeypatch):
    model = net()
    with pytest.raises(thinwire.SwarmError, match="RuntimeError: a mistake of ours"), found() as swarm:
        optimizer = swarm.wrap(model, torch.optim.SGD(model.parameters(), lr=0.1))
        generator = torch.Generator().manual_seed(1)
        one_step(model, optimizer, generator)

        def fail(session):
            raise RuntimeError("a mistake of ours")

        monkeypatch.setattr(RoundSession, "on_tick", fail)
        until = time.monotonic() + 60
        while time.monotonic() < until:
            one_step(model, optimizer, generator)
    assert not any(thread.name.startswith("thinwire") for thread in threading.enumerate())


CHILD = """
import sys, thinwire, torch
from torch import nn
torch.manual_seed(7)
with thinwire.join(sys.argv[1], home=sys.argv[2], host="127.0.0.1") as swarm:
    model = nn.Sequential(nn.Linear(6, 8), nn.BatchNorm1d(8), nn.ReLU(), nn.Linear(8, 3))
    optimizer = swarm.wrap(model, torch.optim.SGD(model.parameters(), lr=0.1))
    while True:
        x = torch.randn(16, 6)
        optimizer.zero_grad()
        nn.functional.cross_entropy(model(x), x[:, :3].argmax(1)).backward()
        optimizer.step()
        print(swarm.round, swarm.digest, flush=True)
"""


@pytest.mark.trial
def test_survivor_continues_when_the_other_peer_is_killed(found, tmp_path):
    model = net()
    with found(steps=1, exchange="straggler_timeout = 0.2") as swarm:
        optimizer = swarm.wrap(model, torch.optim.SGD(model.parameters(), lr=0.1))
        generator = torch.Generator().manual_seed(1)
        program, out, errors = tmp_path / "child.py", tmp_path / "stdout", tmp_path / "stderr"
        program.write_text(CHILD)
        child = WarmProcess([swarm.invite, str(tmp_path / "child")], out, errors, program=str(program))
        digests = {}
        try:
            until = time.monotonic() + 90
            while not swarm.peers and time.monotonic() < until:
                time.sleep(0.02)
            both = 0
            while both < 3 and time.monotonic() < until:
                time.sleep(0.03)  # a step of a real model; a joiner cannot follow rounds of a millisecond
                one_step(model, optimizer, generator)
                digests[str(swarm.round)] = swarm.digest
                both += swarm.last.contributors == 2
        finally:
            child.kill()
            child.wait()
        assert both == 3, errors.read_text()
        theirs = dict(line.split() for line in out.read_text().splitlines() if line.count(" ") == 1)
        common = digests.keys() & theirs.keys() - {"0"}
        assert common and all(digests[number] == theirs[number] for number in common)
        reached = swarm.round
        while swarm.round < reached + 3 and time.monotonic() < until:
            one_step(model, optimizer, generator)
        assert swarm.round >= reached + 3 and swarm.last.contributors == 1


def test_swarm_writes_checkpoints_during_training(found, monkeypatch):
    monkeypatch.setattr(checkpoint_schedule, "SAVE_SECONDS", 0.0)
    monkeypatch.setattr(checkpoint_schedule, "SAVE_ROUNDS", 1)
    model = net()
    with found(steps=1) as swarm:
        optimizer = swarm.wrap(model, torch.optim.SGD(model.parameters(), lr=0.1))
        one_step(model, optimizer, torch.Generator().manual_seed(1))
        until = time.monotonic() + 60
        while not swarm.status.checkpoint and time.monotonic() < until:
            time.sleep(0.01)
        assert swarm.status.checkpoint.endswith("step-00000001")


def test_import_thinwire_loads_nothing_heavy():
    code = (
        "import sys, thinwire; heavy = {'torch', 'zmq', 'numba', 'numpy', 'asyncio'};"
        "version, listed, error = thinwire.__version__, 'join' in dir(thinwire), thinwire.InUseError;"
        "print(sorted(heavy & set(sys.modules)), version, listed)"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=240)
    assert done.returncode == 0, done.stderr
    assert done.stdout.startswith("[] ") and done.stdout.endswith("True\n")
    with pytest.raises(AttributeError, match="no attribute 'jion'"):
        getattr(thinwire, "jion")  # noqa: B009


def test_gpu_without_room_for_encoding_leaves_it_to_the_host(found, monkeypatch):
    contribution, failed = Replica.contribution, []

    def crowded(self, *given, **named):
        if not failed:
            failed.append(True)
            raise torch.OutOfMemoryError("CUDA out of memory")
        return contribution(self, *given, **named)

    monkeypatch.setattr(Replica, "contribution", crowded)
    swarm = found()
    model = nn.Linear(2, 2)
    optimizer = swarm.wrap(model, torch.optim.SGD(model.parameters(), lr=0.1))
    while not swarm.round:
        model(torch.ones(1, 2)).sum().backward()
        optimizer.step()
    assert failed and "no room to encode" in swarm.status.alarm


FORK = """
import os, sys, pathlib, thinwire, torch
run, home = sys.argv[1:]
model = torch.nn.Linear(2, 2)
swarm = thinwire.join(run, home=home, host="127.0.0.1", port=0)
optimizer = swarm.wrap(model, torch.optim.SGD(model.parameters(), lr=0.1))
optimizer.step()
child = os.fork()
if not child:
    try:
        swarm.check()
    except thinwire.SwarmError as error:
        print(error, flush=True)
    sys.exit(7)  # runs the functions that are registered for the end of the process
print(os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]), flush=True)
optimizer.step()
swarm.leave()
print(swarm.round, len(list(pathlib.Path(home).glob("state/runs/*/checkpoints/*/private.safetensors"))))
"""


def test_forked_child_ends_without_touching_the_peer(tmp_path):
    (tmp_path / "run.toml").write_text(
        MANIFEST.format(rounds=0, steps=1, outer="", codec="fp32", exchange="", model="")
    )
    command = [sys.executable, "-W", "ignore", "-c", FORK, tmp_path / "run.toml", tmp_path / "home"]
    ended = subprocess.run(command, capture_output=True, text=True, timeout=120, check=False)
    assert ended.stdout.splitlines() == [
        "this process is a fork of the one that joined the swarm, and has no peer",
        "7",
        "2 2",
    ], ended.stderr
    assert ended.returncode == 0
