"""Daemons that train a model of the user: of the transformers library, or of a Python function."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import time

import blake3
import numpy as np
import pytest
import torch
from kit.daemons import COMMAND
from safetensors.numpy import load_file
from thinwire.node.cli import main
from thinwire.node.peer.status import read_status
from thinwire.node.peer.status_table import summary
from thinwire.node.runtime.directories import directories

CONFIG = {"model_type": "gpt2", "n_embd": 32, "n_layer": 2, "n_head": 2, "vocab_size": 256, "n_positions": 64}

CODE = """
import os
import torch
from torch import nn

class Model(nn.Module):
    def __init__(self, vocab):
        super().__init__()
        self.inner, self.outer = nn.Embedding(vocab, 16), nn.Linear(16, vocab)

    def forward(self, tokens):
        return self.outer(self.inner(tokens))

def make(vocab, context):
    torch.manual_seed(int.from_bytes(os.urandom(4), "big"))  # every peer starts from other values
    return Model(vocab)
"""


def rewrite(here, model):
    """Replace [model] in the manifest of a machine."""
    before, _, rest = here.manifest.read_text().partition("[model]")
    settings = rest.partition("[data]")[2].replace("[inner]", "[inner]\nlr = 0.02\nwarmup = 0")
    here.manifest.write_text(f"{before}[model]\n{model}\ncontext = 32\n[data]{settings}")


def trained(founder, other):
    """Check that two daemons have ended, and learned together."""
    assert (founder.exit(), other.exit()) == (0, 0), founder.stderr + other.stderr
    for daemon in (founder, other):
        assert not daemon.alarms()
        assert all(event["contributors"] == 2 for event in daemon.of("round") if event["round"] > 1)
        assert daemon.of("round")[-1]["loss"] < 5.0  # from 5.5


@pytest.mark.trial
def test_two_peers_train_a_model_of_transformers_and_export_it(machine, tmp_path, capsys):
    here = machine(rounds=3, steps=10, method="sparseloco")
    folder = here.path / "tiny"
    folder.mkdir()
    content = json.dumps(CONFIG).encode()
    (folder / "config.json").write_bytes(content)
    digest = blake3.blake3(content).hexdigest()
    rewrite(here, f'kind = "hf"\nname = "tiny"\nconfig_hash = "{digest}"')
    here.manifest.write_text(here.manifest.read_text().replace("[inner]", '[inner]\nprecision = "bf16"'))
    founder = here.found("founder", "--wait-for", 2, "--evaluate-every", 1, "--gradient-checkpointing")
    other = here.join("other", founder.invite(), "--model", f"hf:{folder}", "--evaluate-every", 2)
    trained(founder, other)
    assert here.check() >= 3
    losses = {event["round"]: event["loss"] for event in founder.of("held_out")}
    assert list(losses) == [1, 2, 3] and losses[3] < losses[1]
    # The same model on the same samples.
    assert [(event["round"], event["loss"]) for event in other.of("held_out")] == [(2, losses[2])]
    said = read_status(directories(founder.home).status)
    assert (said.held_out_round, round(said.held_out, 6)) == (3, losses[3])
    assert f"held out   {losses[3]:.3f} after round 3" in summary(said, said.wall).plain
    out = tmp_path / "out"
    done = other.command("export", str(out), "--format", "transformers")
    assert done.returncode == 0, done.stderr
    assert (out / "config.json").read_bytes() == content
    from transformers import AutoModelForCausalLM

    loaded, found = AutoModelForCausalLM.from_pretrained(out, output_loading_info=True)
    assert not any(found.values())
    weights = load_file(out / "model.safetensors")
    assert all(np.array_equal(weights[name], value.detach()) for name, value in loaded.named_parameters())
    text = torch.frombuffer(bytearray(here.text.read_bytes()[:64]), dtype=torch.uint8)[None].long()
    assert loaded(text, labels=text).loss.item() < 5.0
    words = ["generate", "--tokens", "4", "--prompt", "lorem", "--threads", "1", "--home", str(other.home)]
    assert main.main(words) == 2 and "--model hf:FOLDER" in capsys.readouterr().err
    assert main.main([*words, "--model", f"hf:{folder}"]) == 0 and capsys.readouterr().out.startswith("lorem")


@pytest.mark.trial
def test_two_peers_train_the_model_of_a_function_from_the_founders_first_values(machine):
    here = machine(rounds=3, steps=10, method="sparseloco")
    rewrite(here, 'kind = "module"\nname = "mymodel:make"')
    (here.path / "mymodel.py").write_text(CODE)
    records = here.path / "records.jsonl"
    records.write_text("".join(json.dumps({"body": line}) + "\n" for line in [here.text.read_text()] * 2))
    founder = here.found("founder", "--wait-for", 2, "--data", f"{records}#body")
    invite = founder.invite()
    stranger = here.join("stranger", invite)
    assert stranger.exit() == 2
    error, hint = stranger.complaint()
    assert "trains mymodel:make, not the built-in model" in error and "--model mymodel:make" in hint
    # A joiner finds the module in its own directory.
    other = here.daemon("other")
    other.folder = str(here.path)
    here.join("other", invite, "--model", "mymodel:make", "--data", f"{records}#body")
    trained(founder, other)
    assert here.check() >= 3


def test_signal_ends_a_daemon_whose_model_takes_long_to_load(machine):
    here = machine()
    rewrite(here, 'kind = "module"\nname = "mymodel:make"')
    loads = here.path / "loads"
    code = CODE.replace(
        "    torch.manual_seed",
        f"    open({str(loads)!r}, 'w').close()\n    import time; time.sleep(3600)\n    torch.manual_seed",
    )
    (here.path / "mymodel.py").write_text(code)
    founder = here.found("founder")
    while not loads.exists():
        assert founder.process.poll() is None, founder.stderr
        time.sleep(0.05)
    founder.signal(signal.SIGTERM)
    assert founder.exit() == 143


def test_error_in_a_callback_of_the_daemon_is_an_alarm_with_its_traceback_in_the_log_file(machine):
    """The model's function finds the loop of the daemon, and plants the error there."""
    here = machine(rounds=2, steps=2)
    rewrite(here, 'kind = "module"\nname = "mymodel:make"')
    plant = "import gc\n    loop = next(one for one in gc.get_objects() if type(one).__name__ == 'Loop')\n    "
    code = CODE.replace("torch.manual_seed", f"{plant}loop.call_soon_threadsafe(lambda: 1 / 0)\n    torch.manual_seed")
    (here.path / "mymodel.py").write_text(code)
    founder = here.found("founder")
    assert founder.exit() == 0
    (alarm,) = founder.alarms()
    assert "internal error: ZeroDivisionError" in alarm["detail"]
    assert "Traceback" in directories(founder.home).log.read_text() and "Traceback" not in founder.stderr


@pytest.mark.trial
def test_local_swarm_gives_the_model_of_its_manifest_to_all_its_peers(machine):
    here = machine(rounds=2, steps=5)
    rewrite(here, 'kind = "module"\nname = "mymodel:make"')
    (here.path / "mymodel.py").write_text(CODE)
    home = here.path / "home"
    words = [COMMAND, "start", str(here.manifest), "--local", "2", "--threads", "1", "--log", "json"]
    words += ["--data", str(here.text), "--home", str(home)]
    done = subprocess.run(words, capture_output=True, text=True, timeout=200, env={**os.environ})
    assert done.returncode == 0, done.stderr
    report = json.loads(done.stdout)
    assert report["rounds"] == 2
    assert directories(home).cache.exists()
