"""Weak peers hold a model of the user together, beside a peer that holds all of it."""

from __future__ import annotations

import json

import blake3
import pytest
from kit.real.documents import blocks

LLAMA = {
    "model_type": "llama",
    "vocab_size": 256,
    "hidden_size": 32,
    "intermediate_size": 64,
    "num_hidden_layers": 3,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 64,
    "bos_token_id": 0,
    "eos_token_id": 0,
}
RUN = """
[run]
name = "layered"
rounds = 12
[model]
{model}
context = 32
[inner]
lr = 0.01
batch = 2
accumulate = 2
warmup = 0
[outer]
method = "streaming"
sync_every = 12
[pipeline]
stages = 3
codec = "fp32"
[exchange]
straggler_timeout = 5.0
"""


def held_together(founder, weak):
    """Check that a group has learned together with the peer that holds the whole model."""
    for daemon in (founder, *weak):
        assert daemon.exit() == 0, daemon.stderr
        assert not daemon.alarms()
    rounds = founder.of("round")
    assert [event["contributors"] for event in rounds[-6:]] == [2] * 6
    assert rounds[-1]["loss"] < 5.0  # from 5.5
    assert {(event["round"] - 1) % 3 for daemon in weak for event in daemon.of("round")} == {0, 1, 2}


@pytest.mark.trial
def test_group_holds_a_model_of_transformers_and_trains_it_with_a_whole_replica(machine):
    here = machine()
    folder = here.path / "tiny"
    folder.mkdir()
    content = json.dumps(LLAMA).encode()
    (folder / "config.json").write_bytes(content)
    digest = blake3.blake3(content).hexdigest()
    here.manifest.write_text(RUN.format(model=f'kind = "hf"\nname = "tiny"\nconfig_hash = "{digest}"'))
    founder = here.found("founder", "--wait-for", 4)
    named = ["--model", f"hf:{folder}"]
    weak = [here.join(f"weak{stage}", founder.invite(), "--stage", stage, *named) for stage in range(3)]
    held_together(founder, weak)
    assert here.check() >= 12
    # The stages of three homes are the model of the founder's checkpoint.
    homes = [word for daemon in weak[1:] for word in ("--with", str(daemon.home))]
    words = ["generate", "--tokens", "8", "--prompt", "lorem", "--threads", "1", *named]
    whole, parts = founder.command(*words), weak[0].command(*words, *homes)
    assert whole.returncode == parts.returncode == 0, whole.stderr + parts.stderr
    assert whole.stdout == parts.stdout and whole.stdout.startswith("lorem")
    out = here.path / "out"
    done = weak[0].command("export", str(out), "--format", "transformers", *homes)
    assert done.returncode == 0, done.stderr
    from transformers import AutoModelForCausalLM

    _, found = AutoModelForCausalLM.from_pretrained(out, output_loading_info=True)
    assert not any(found.values())


@pytest.mark.trial
def test_group_holds_the_model_of_a_function_by_the_memory_of_its_peers(machine):
    here = machine()
    here.manifest.write_text(RUN.format(model='kind = "module"\nname = "mymodel:make"'))
    (code,) = (one.code for one in blocks("python") if one.document == "docs/guides/pipelines.md")
    (here.path / "mymodel.py").write_text(code)
    founder = here.found("founder", "--wait-for", 4)
    invite = founder.invite()
    weak = []
    for number in range(3):
        name = f"weak{number}"
        here.daemon(name).folder = str(here.path)  # where it finds the module
        weak.append(here.join(name, invite, "--memory", "8MiB", "--model", "mymodel:make"))
    held_together(founder, weak)
    assert here.check() >= 12
