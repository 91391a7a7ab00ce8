"""Founding and joining from Python: changed manifests, names, waiting for peers, the log file."""

import logging
import math
import traceback
from concurrent.futures import ThreadPoolExecutor

import pytest
import thinwire
import torch
from torch import nn

MANIFEST = (
    '[run]\nname = "mine"\nrounds = 8\n[model]\nkind = "custom"\n[outer]\nsync_every = 2\n[exchange]\ncodec = "fp32"\n'
)


@pytest.fixture
def run(tmp_path):
    path = tmp_path / "run.toml"
    path.write_text(MANIFEST)
    return path


def net(seed=0):
    torch.manual_seed(seed)
    return nn.Linear(6, 3)


def train(swarm, steps):
    """Make inner steps with a rate that falls by a hundredth a step; return the swarm's steps and rates."""
    model, seen = net(), []
    optimizer = swarm.wrap(model, torch.optim.SGD(model.parameters(), 1.0))
    scheduler = thinwire.SwarmLR(optimizer, lambda step: 1 - step / 100)
    for _ in range(steps):
        seen.append((swarm.step, round(optimizer.param_groups[0]["lr"], 6)))
        optimizer.zero_grad()
        model(torch.ones(4, 6)).square().mean().backward()
        optimizer.step()
        scheduler.step()
    return seen


def test_join_under_torchrun_without_a_group_is_refused(run, tmp_path, monkeypatch):
    """The ranks would be peers of two runs unnoticed."""
    monkeypatch.setenv("TORCHELASTIC_RUN_ID", "none")
    monkeypatch.setenv("WORLD_SIZE", "2")
    with pytest.raises(thinwire.GroupError, match="one of 2 that torchrun has started") as error:
        thinwire.join(run, home=tmp_path / "home", host="127.0.0.1")
    assert "init_process_group" in error.value.hint


def test_text_that_is_no_invite_and_no_path_is_refused_with_both_forms(tmp_path):
    with pytest.raises(thinwire.InviteError) as error:
        thinwire.join(str(tmp_path / "run.yaml"), home=tmp_path / "home")
    assert "tw1" in error.value.hint and ".toml" in error.value.hint


def test_join_with_a_changed_manifest_begins_another_run_only_if_asked(run, tmp_path):
    settings = dict(home=tmp_path / "home", host="127.0.0.1")
    with thinwire.join(run, **settings) as swarm:
        train(swarm, 4)
        first = swarm.status.run
    run.write_text(MANIFEST.replace("sync_every = 2", "sync_every = 3"))
    with pytest.raises(thinwire.ManifestMismatch, match=r"outer\.sync_every was 2, is 3") as error:
        thinwire.join(run, **settings)
    assert "new=True" in error.value.hint and "--from" not in error.value.hint
    with thinwire.join(run, new=True, **settings) as swarm:
        assert swarm.status.run != first
    run.write_text(MANIFEST)
    with thinwire.join(run, **settings) as swarm:
        train(swarm, 2)
        assert swarm.status.run == first and swarm.round == 3


class Transposed(nn.Module):
    def __init__(self):
        super().__init__()
        self.weight, self.bias = nn.Parameter(torch.zeros(6, 3)), nn.Parameter(torch.zeros(3))


def test_another_model_in_the_same_run_is_an_error_and_its_checkpoint_stays(run, tmp_path):
    settings = dict(home=tmp_path / "home", host="127.0.0.1")
    with thinwire.join(run, **settings) as swarm:
        train(swarm, 4)
    for other, reason in (
        (nn.Linear(6, 4), r"'bias' has shape \(3,\), that of the model \(4,\)"),
        (nn.Sequential(nn.Linear(6, 3)), "lacks parameter '0.bias'"),
        (nn.Linear(6, 3, bias=False), "the model lacks its parameter 'bias'"),
        (Transposed(), r"'weight' has shape \(3, 6\), that of the model \(6, 3\)"),
    ):
        with thinwire.join(run, **settings) as swarm:
            with pytest.raises(thinwire.ManifestMismatch, match=reason) as error:
                swarm.wrap(other, torch.optim.SGD(other.parameters(), 1.0))
            assert "another run.name" in error.value.hint
            assert f"hint: {error.value.hint}" in traceback.format_exception(error.value)[-1]
    with thinwire.join(run, **settings) as swarm:
        train(swarm, 2)
        assert swarm.round == 3


@pytest.mark.parametrize(
    "waits",
    [
        *({"wait_for": count} for count in (0, -1, 1.5, math.nan, "2")),
        *({"wait_seconds": seconds} for seconds in (-1.0, math.nan, "9")),
    ],
)
def test_wait_that_cannot_be_meant_is_refused(run, tmp_path, waits):
    """A wait of NaN seconds would never end."""
    with pytest.raises(ValueError, match=next(iter(waits))):
        thinwire.join(run, home=tmp_path / "one", host="127.0.0.1", **waits)
    assert not (tmp_path / "one").exists()


@pytest.mark.parametrize("setting", [{"port": math.nan}, {"ports": (1, 2)}, {"name": "x" * 10_000}, {"home": 5}])
def test_error_of_a_setting_names_the_argument_and_fits_a_line(run, tmp_path, setting):
    """Not a flag: there is none in Python."""
    with pytest.raises(thinwire.ConfigError, match=f"^argument {next(iter(setting))}: ") as error:
        thinwire.join(run, **{"home": tmp_path / "one", **setting})
    assert len(str(error.value)) < 300


@pytest.mark.parametrize("source", [5, None, b"run.toml"])
def test_source_of_another_type_is_refused(tmp_path, source):
    with pytest.raises(TypeError, match="invite_or_toml must be an invite or the path of a manifest, not"):
        thinwire.join(source, home=tmp_path / "one")


def test_name_of_a_peer_is_visible_to_the_others(run, tmp_path):
    with (
        thinwire.join(run, home=tmp_path / "one", host="127.0.0.1", name="the attic", wait_for=2) as one,
        thinwire.join(one.invite, home=tmp_path / "two", host="127.0.0.1") as two,
    ):
        # Both first rounds: a joiner knows the founder from its admission, before any round.
        with ThreadPoolExecutor() as pool:
            list(pool.map(lambda swarm: train(swarm, 4), (one, two)))
        assert [peer.name for peer in two.peers] == ["the attic"]
        assert [peer.name for peer in one.peers] == [""], "the name of a machine is not published unasked"
        assert one.status.name == "the attic" and two.status.name


@pytest.mark.parametrize("count", [1, 2])
def test_founder_waits_for_the_peers_it_was_told_to_wait_for(run, tmp_path, caplog, count):
    """Also if the joiner itself waits for `count` peers: the first round has both."""
    with ThreadPoolExecutor() as pool, thinwire.join(run, home=tmp_path / "one", host="127.0.0.1", wait_for=2) as one:
        training = pool.submit(train, one, 4)
        while one.status.phase != "waiting":
            assert not training.done()
        with thinwire.join(one.invite, home=tmp_path / "two", host="127.0.0.1", wait_for=count) as two:
            pool.submit(train, two, 4).result()
            training.result()
            assert one.round == two.round == 2 and one.digest == two.digest
            assert all(report.contributors == 2 for report in one.rounds())
    assert "waiting for 2 peers, 1 here, at most" in caplog.text


def test_founder_begins_without_the_others_after_the_time_it_was_given(run, tmp_path, caplog):
    with thinwire.join(run, home=tmp_path / "one", host="127.0.0.1", wait_for=3, wait_seconds=0.3) as one:
        train(one, 2)
        assert one.round == 1
    assert "waited long enough: training begins with 1 of 3 peers" in caplog.text


def test_messages_are_in_the_log_file_and_reach_the_handlers_of_the_program(run, tmp_path, caplog):
    root = list(logging.getLogger().handlers)
    with caplog.at_level(logging.INFO), thinwire.join(run, home=tmp_path / "one", host="127.0.0.1") as swarm:
        train(swarm, 4)
    text = (tmp_path / "one" / "state" / "thinwire.log").read_text()
    assert "INFO round 2 · loss" in text and "INFO left round 2" in text and "round 2 · loss" in caplog.text
    assert logging.getLogger().handlers == root and logging.getLogger("thinwire").handlers == []
    with caplog.at_level(logging.WARNING), thinwire.join(run, home=tmp_path / "two", host="127.0.0.1") as swarm:
        caplog.clear()
        train(swarm, 2)
    assert "round 1" in (tmp_path / "two" / "state" / "thinwire.log").read_text() and "round 1" not in caplog.text


def test_step_and_learning_rate_follow_the_run_at_founders_joiners_and_after_a_restart(run, tmp_path):
    settings = dict(host="127.0.0.1")
    rates = [(step, 1 - step / 100) for step in range(16)]
    with thinwire.join(run, home=tmp_path / "one", **settings) as one:
        assert one.step == 0 and train(one, 5) == rates[:5] and (one.round, one.step) == (2, 5)
        with thinwire.join(one.invite, home=tmp_path / "two", **settings) as two:
            assert train(two, 2) == rates[4:6], "it joins after two rounds, at step 4"
    with thinwire.join(run, home=tmp_path / "one", **settings) as one:
        seen = train(one, 1)
        assert seen[0][0] >= 4 and seen[0] in rates
