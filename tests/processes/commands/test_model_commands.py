"""`thinwire generate` and `thinwire evaluate` with the checkpoint of a real daemon."""

import json

import pytest
from kit.daemons import Machine
from thinwire.node.cli import main
from thinwire.node.runtime.directories import directories


@pytest.fixture(scope="module")
def peer(tmp_path_factory):
    """Daemon that has trained for three rounds and ended."""
    here = Machine(tmp_path_factory.mktemp("models"), rounds=3, steps=30)
    daemon = here.found("peer", "--evaluate-every", 1)
    assert daemon.exit() == 0, daemon.stderr
    yield here, daemon
    here.end()


def outcome(capsys, *arguments):
    code = main.main([*map(str, arguments), "--threads", "1", "--device", "cpu"])
    said = capsys.readouterr()
    return code, said.out, said.err


def test_evaluate_finds_the_loss_that_the_daemon_found(peer, capsys):
    here, daemon = peer
    place = ("--home", daemon.home, "--data", here.text)
    losses = {event["round"]: event["loss"] for event in daemon.of("held_out")}
    code, out, err = outcome(capsys, "evaluate", "e2e", "--json", *place)
    assert code == 0 and err == ""
    found = json.loads(out)
    assert found["rounds"] == [3] and found["loss"] == pytest.approx(losses[3], abs=1e-6) != losses[1]
    assert found["tokens"] == 32 * found["samples"] > 0
    code, out, _ = outcome(capsys, "evaluate", "--samples", 5, *place)
    assert code == 0 and "on 5 sequences (160 tokens)" in out and "round 3" in out
    code, out, _ = outcome(capsys, "evaluate", "--samples", 0, "--whole", "--json", *place)
    assert code == 0 and json.loads(out)["samples"] == (here.text.stat().st_size + 2) // 33  # and the separator


def test_generate_writes_the_same_text_from_run_checkpoint_and_export(peer, capsys, tmp_path):
    _, daemon = peer
    words = ("--prompt", "lorem ip", "--tokens", 12, "--home", daemon.home)
    code, text, err = outcome(capsys, "generate", *words, "--seed", 3)
    assert code == 0 and "from round 3, " in err and text.startswith("lorem ip") and len(text) == 21
    assert main.main(["export", str(tmp_path / "w.safetensors"), "--home", str(daemon.home)]) == 0
    assert capsys.readouterr().err == ""
    run = directories(daemon.home).run(bytes.fromhex(daemon.of("start")[0]["run"]))
    newest = max(run.checkpoints.glob("step-*"))
    for source in (run.path.name[:6], "e2e", newest, tmp_path / "w.safetensors"):
        assert outcome(capsys, "generate", source, *words, "--seed", 3)[:2] == (0, text)
    assert outcome(capsys, "generate", *words, "--seed", 4)[1] != text
    likely = [outcome(capsys, "generate", *words, "--temperature", 0, "--seed", seed)[1] for seed in (1, 2)]
    assert likely[0] == likely[1]
    code, out, err = outcome(capsys, "generate", *words, "--temperature", "1e308")
    assert code == 2 and out == "" and "1000000000" in err
    code, out, _ = outcome(capsys, "generate", *words, "--seed", 3, "--json")
    assert code == 0 and "lorem ip" + json.loads(out)["text"] + "\n" == text
    code, out, err = outcome(capsys, "generate", "other", *words)
    assert code == 2 and out == "" and "no run of this machine has the name 'other'" in err and "(e2e)" in err
