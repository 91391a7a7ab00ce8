"""Daemons that train an adapter on a frozen model of the transformers library."""

from __future__ import annotations

import json
import shutil

import blake3
import numpy as np
import pytest
import torch
from safetensors.numpy import load_file
from thinwire.node.runtime.directories import directories
from thinwire.node.training.models.lora import base_digest

CONFIG = {"model_type": "gpt2", "n_embd": 32, "n_layer": 2, "n_head": 2, "vocab_size": 256, "n_positions": 64}
CONTENT = json.dumps(CONFIG).encode()


def saved(folder, seed):
    """Write a folder of transformers with random weights, and return their hash."""
    from transformers import AutoConfig, AutoModelForCausalLM

    torch.manual_seed(seed)
    model = AutoModelForCausalLM.from_config(AutoConfig.for_model(**CONFIG))
    model.save_pretrained(folder)
    (folder / "config.json").write_bytes(CONTENT)
    return base_digest(model)


def adapt(here, weights, rounds):
    """Write a manifest for an adapter on the model in the folder "tiny" beside it."""
    here.manifest.write_text(
        f"""
[run]
name = "e2e"
seed = 1
rounds = {rounds}
[model]
kind = "hf"
name = "tiny"
context = 32
config_hash = "{blake3.blake3(CONTENT).hexdigest()}"
weights = "{weights}"
[lora]
rank = 4
targets = ["c_attn", "c_proj"]
[data]
shards = 16
[inner]
batch = 4
lr = 0.03
warmup = 0
[outer]
method = "sparseloco"
sync_every = 10
"""
    )


@pytest.mark.soak
def test_killed_peer_continues_its_adapter_from_its_checkpoint(machine, tmp_path):
    here = machine()
    weights = saved(here.path / "tiny", 1)
    shutil.copytree(here.path / "tiny", tmp_path / "copy")
    adapt(here, weights, rounds=0)
    founder = here.found("founder", "--wait-for", 2, "--evaluate-every", 1)
    invite = founder.invite()
    words = ("--model", f"hf:{tmp_path / 'copy'}", "--evaluate-every", 1)
    other = here.join("other", invite, *words)
    other.wait("round", least=4, contributors=2)
    run = directories(other.home).run(bytes.fromhex(other.of("start")[0]["run"]))
    other.kill()
    other.process.wait()
    digests = {event["round"]: event["digest"] for event in other.of("round")}
    first_loss = other.of("held_out")[0]["loss"]
    here.join("other", invite, *words)
    restored = other.wait("restored")["round"]
    stored = json.loads((run.checkpoints / f"step-{restored:08}" / "manifest.json").read_bytes())
    assert digests[restored] in json.dumps(stored), "the state of the checkpoint is that of its round"
    assert other.wait("ready")["parameters"] == founder.wait("ready")["parameters"] == 2 * (512 + 256 + 640)
    together = other.wait("round", least=restored + 1, contributors=2)["round"]
    assert other.wait("held_out", least=together)["loss"] < first_loss
    founder.wait("round", least=together)
    assert here.check() > 4


@pytest.mark.soak
def test_two_peers_train_an_adapter_that_peft_loads_and_another_base_is_refused(machine, tmp_path):
    here = machine(rounds=3, steps=10, method="sparseloco")
    base, copy, other_base = here.path / "tiny", tmp_path / "copy", tmp_path / "other"
    weights = saved(base, 1)
    shutil.copytree(base, copy)
    saved(other_base, 2)
    before = (base / "model.safetensors").read_bytes()
    adapt(here, weights, rounds=3)
    founder = here.found("founder", "--wait-for", 2, "--evaluate-every", 1)
    invite = founder.invite()
    stranger = here.join("stranger", invite, "--model", f"hf:{other_base}")
    other = here.join("other", invite, "--model", f"hf:{copy}")
    assert stranger.exit() == 2
    error, hint = stranger.complaint()
    assert "has other weights" in error and weights[:8] in error and "the weights that the manifest names" in hint
    assert (founder.exit(), other.exit()) == (0, 0), founder.stderr + other.stderr
    assert here.check() >= 3
    rounds = other.of("round")
    assert all(event["contributors"] == 2 for event in rounds if event["round"] > 1)
    losses = {event["round"]: event["loss"] for event in founder.of("held_out")}
    assert losses[3] < losses[1]
    sent = (rounds[-1]["bytes_up"] - rounds[0]["bytes_up"]) / (len(rounds) - 1)
    print(f"{sent:.0f} bytes sent a round, of a model of {len(before)} bytes")
    assert sent < len(before) / 10

    out = tmp_path / "adapter"
    done = other.command("export", str(out), "--format", "peft")
    assert done.returncode == 0, done.stderr
    assert sorted(file.name for file in out.iterdir()) == ["adapter_config.json", "adapter_model.safetensors"]
    from peft import PeftModel
    from transformers import AutoModelForCausalLM

    plain = AutoModelForCausalLM.from_pretrained(base)
    text = torch.frombuffer(bytearray(here.text.read_bytes()[:64]), dtype=torch.uint8)[None].long()
    untrained = plain(text, labels=text).loss.item()
    loaded = PeftModel.from_pretrained(plain, out)
    adapter = load_file(out / "adapter_model.safetensors")
    found = {name.replace(".default", ""): value for name, value in loaded.named_parameters() if ".lora_" in name}
    assert adapter.keys() == found.keys() and len(adapter) == 2 * 2 * 3
    assert all(np.array_equal(adapter[name], value.detach()) for name, value in found.items())
    assert loaded(text, labels=text).loss.item() < untrained - 0.05
    assert (base / "model.safetensors").read_bytes() == before and base_digest(loaded.unload()) == weights
    refused = other.command("export", str(tmp_path / "whole"), "--format", "transformers")
    assert refused.returncode == 2 and "--model hf:FOLDER" in refused.stderr
    done = other.command("export", str(tmp_path / "whole"), "--format", "transformers", "--model", f"hf:{copy}")
    assert done.returncode == 0, done.stderr
    whole = AutoModelForCausalLM.from_pretrained(tmp_path / "whole")
    loaded = PeftModel.from_pretrained(AutoModelForCausalLM.from_pretrained(base), out)
    assert torch.allclose(whole(text).logits, loaded(text).logits, atol=1e-4)
