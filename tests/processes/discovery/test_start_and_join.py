"""A short run from start to end, and its restarts."""

from __future__ import annotations

import signal

import pytest
from safetensors.numpy import load_file, save_file
from thinwire.node.training.models.tokenizer import byte_tokenizer_file


def test_two_daemons_start_join_finish_and_resume(machine):
    here = machine()
    # Two peers, eight rounds, the end.
    founder = here.found("founder", "--wait-for", 2, "--rounds", 8)
    invite = founder.invite()
    other = here.join("other", invite, "--rounds", 8)
    assert (founder.exit(), other.exit()) == (0, 0)
    for daemon in (founder, other):
        assert [event["round"] for event in daemon.of("round")] == list(range(1, 9))
        assert not any(event["missing"] for event in daemon.of("round"))
        # A newcomer contributes to its first round with what is ready; later rounds wait for it.
        assert all(event["contributors"] == 2 for event in daemon.of("round") if event["round"] > 1)
        assert daemon.home.joinpath("identity.key").stat().st_mode & 0o777 == 0o600
    assert here.check() >= 8
    # Stdout has only the invite, and only the founder prints one.
    assert founder.stdout == f"thinwire join {invite}\n" and other.stdout == ""

    here.turn_page()

    # All had stopped: the first peer continues from its checkpoint, with its round number.
    founder = here.found("founder", "--wait-for", 2)
    assert founder.wait("ready")["round"] == 8
    other = here.join("other", founder.invite())
    founder.wait("round", least=9, contributors=2)

    # kill -9, and back: the swarm's state is newer than the checkpoint.
    other.wait("round", least=11)
    other.kill()
    other.exit()
    reached = founder.round
    founder.wait("round", least=reached + 3)
    other = here.join("other", founder.invite())
    assert other.wait("restored")["round"] == 8
    assert other.wait("ready")["round"] > reached
    assert founder.wait("round", least=other.round, contributors=2)

    # The reverse: the checkpoint is newer than the state of the remaining swarm.
    founder.kill()
    other.wait("round", least=other.round + 2)
    other.signal(signal.SIGTERM)
    assert other.exit(20) == 0
    here.turn_page()
    newest = other.of("left")[-1]["round"]
    founder = here.found("founder", "--wait-for", 2)
    assert founder.wait("ready")["round"] == 8
    other = here.join("other", founder.invite())
    assert other.wait("ready")["round"] == newest
    assert founder.wait("synced")["round"] >= newest
    founder.wait("round", least=newest + 1, contributors=2)
    for daemon in (founder, other):
        daemon.signal(signal.SIGTERM)
        assert daemon.exit(20) == 0
    assert here.check() > 0


@pytest.mark.trial
def test_run_starts_from_the_weights_that_its_manifest_names(machine, tmp_path):
    first = machine()
    founder = first.found("founder", "--rounds", 2)
    assert founder.exit() == 0
    weights = tmp_path / "w.safetensors"
    assert founder.command("export", str(weights)).returncode == 0

    second = machine(seed=2)
    without_key = second.found("founder", "--from", weights)
    assert without_key.exit() == 2
    _, hint = without_key.complaint()
    text = second.manifest.read_text()
    second.manifest.write_text(text.replace("[model]", f"[model]\n{hint.split(': ', 1)[1]}"))
    without_file = second.found("founder")
    assert without_file.exit() == 2 and "--from" in without_file.complaint()[1]
    tensors = sorted(load_file(weights).items())
    parts = [tmp_path / "first.safetensors", tmp_path / "second.safetensors"]  # as of peers that hold stages
    save_file(dict(tensors[::2]), parts[0])
    save_file(dict(tensors[1::2]), parts[1])
    half = second.found("founder", "--from", parts[0])
    assert half.exit() == 2 and "no such tensor" in half.complaint()[0]
    sources = [word for part in parts for word in ("--from", part)]
    founder = second.found("founder", *sources, "--wait-for", 2, "--rounds", 3)
    other = second.join("other", founder.invite(), "--rounds", 3)  # Its own first weights are random.
    assert (founder.exit(), other.exit()) == (0, 0)
    assert second.check() > 0 and founder.of("round")[-1]["contributors"] == 2
    assert second.found("founder", "--rounds", 4).exit() == 0, "a checkpoint needs no file"


def test_start_with_a_changed_manifest_names_the_changes_and_begins_another_run_only_if_asked(machine):
    here = machine()
    assert here.found("founder", "--rounds", 1).exit() == 0
    first = here.manifest.read_text()
    here.manifest.write_text(first.replace("sync_every = 30", "sync_every = 20").replace("batch = 2", "batch = 3"))
    founder = here.found("founder", "--rounds", 1)
    assert founder.exit() == 5, founder.stderr
    error, hint = founder.complaint()
    assert "run.toml has changed" in error and "'e2e'" in error
    assert "inner.batch was 2, is 3; outer.sync_every was 30, is 20" in error
    checkpoint = next(founder.home.glob("state/runs/*/checkpoints/step-00000001"))
    assert "--new" in hint and f"--from {checkpoint}" in hint
    runs = founder.home / "state" / "runs"
    assert len(list(runs.iterdir())) == 1, "no second run was begun"

    assert here.found("founder", "--new", "--rounds", 1).exit() == 0
    assert here.found("founder", "--rounds", 2).exit() == 0, "this run is known now"
    here.manifest.write_text(first)
    assert here.found("founder", "--rounds", 2).exit() == 0, "and so is the first one"
    other = first.replace("batch = 2", "batch = 4")
    here.manifest.write_text(other)
    assert here.found("founder", "--from", checkpoint, "--rounds", 1).exit() == 2
    assert len(list(runs.iterdir())) == 2, "the failed start left no folder of a run"
    key = founder.complaint()[1].split(": ", 1)[1]  # The manifest must name the weights.
    here.manifest.write_text(other.replace("[model]", f"[model]\n{key}"))
    assert here.found("founder", "--from", checkpoint, "--rounds", 1).exit() == 0
    assert len(list(runs.glob("*/checkpoints/step-00000001"))) == 3


@pytest.mark.trial
def test_daemon_says_that_it_trains_on_the_default_data_and_keeps_the_tokenizer_for_exports(machine, tmp_path):
    here = machine()
    (here.path / "mine.json").write_bytes(byte_tokenizer_file())
    here.manifest.write_text(here.manifest.read_text().replace("[data]", '[data]\ntokenizer = "mine.json"'))
    founder = here.daemon("founder").run("start", here.manifest, "--host", "127.0.0.1", "--log", "plain", "--rounds", 1)
    assert founder.exit() == 0, founder.stderr
    assert founder.stderr.count("the source of Python's standard library") == 1
    assert here.found("founder", "--rounds", 2).exit() == 0
    assert "standard library" not in founder.stderr, "this one has --data"
    assert founder.command("export", str(tmp_path / "out"), "--format", "transformers").returncode == 0
    assert (tmp_path / "out" / "tokenizer.json").read_bytes() == byte_tokenizer_file()
