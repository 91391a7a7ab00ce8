"""Adapters: only they are state, the base is frozen and is that of the manifest."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import blake3
import pytest
import torch
from thinwire.node.runtime.directories import directories
from thinwire.node.runtime.load_settings import Config, load
from thinwire.node.training.export import export
from thinwire.node.training.local_learner import Computing, LocalLearner, build_learner
from thinwire.node.training.models.initial_weights import WeightsError, digest_of
from thinwire.node.training.models.lora import base_digest, in_peft
from thinwire.node.training.models.tokenizer import byte_tokenizer_file
from thinwire.node.training.models.user_model import ModelError
from thinwire.node.training.stored_model import StoredModel
from thinwire.swarm.identity.errors import HintedError
from thinwire.swarm.manifest.manifest import Manifest
from thinwire.swarm.manifest.parser import parse
from torch import nn
from transformers import AutoModelForCausalLM

GPT2 = {"model_type": "gpt2", "n_embd": 16, "n_layer": 2, "n_head": 2, "vocab_size": 256, "n_positions": 32}
CODE = """
import torch
from torch import nn

def make(vocab, context):
    return nn.Sequential(nn.Embedding(vocab, 8), nn.Linear(8, 8), nn.Linear(8, vocab))
"""


def saved(folder: Path, seed: int) -> nn.Module:
    """Write a folder of transformers with random weights, and return the model."""
    from transformers import AutoConfig

    torch.manual_seed(seed)
    model: nn.Module = AutoModelForCausalLM.from_config(AutoConfig.for_model(**GPT2))  # type: ignore[arg-type]
    model.save_pretrained(folder)  # type: ignore[operator]
    (folder / "config.json").write_text(json.dumps(GPT2))
    return model


def toml(weights: str, lora: str = "rank = 2", seed: int = 0) -> str:
    digest = blake3.blake3(json.dumps(GPT2).encode()).hexdigest()
    model = f'kind = "hf"\nname = "x"\ncontext = 16\nconfig_hash = "{digest}"\nweights = "{weights}"'
    return f"[run]\nseed = {seed}\n[model]\n{model}\n[lora]\n{lora}\n[inner]\nbatch = 4\nwarmup = 0\nlr = 0.02"


def learner(
    path: Path,
    folder: Path,
    *,
    weights: str,
    lora: str = "rank = 2",
    seed: int = 0,
    first: Path | None = None,
    **more: Any,
) -> LocalLearner:
    (path / "text.txt").write_text("a few words of text " * 300)
    manifest = parse(toml(weights, lora, seed))
    return prepared(path, manifest_of=manifest, named=f"hf:{folder}", weights=first, **more)


def prepared(
    path: Path, *, manifest_of: Manifest, named: str, checkpointing: bool = False, **more: Any
) -> LocalLearner:
    return build_learner(
        manifest_of,
        Computing("cpu", 0, checkpointing=checkpointing),
        data=path / "text.txt",
        cache=path / "cache",
        here=path,
        clock=lambda: 0.0,
        model=named,
        **more,
    )


def test_adapter_is_all_that_is_state_and_the_base_stays(tmp_path: Path) -> None:
    base = saved(tmp_path / "base", 1)
    whole = torch.cat([p.detach().reshape(-1) for _, p in sorted(base.named_parameters())]).numpy()
    assert base_digest(base) == digest_of(whole), "the hash is that of the same weights as first weights"
    made = learner(tmp_path, tmp_path / "base", weights=base_digest(base))
    model = made.trainer.model
    assert all(".lora_" in piece.name for piece in made.layout.pieces)
    assert made.layout.total == 2 * (16 * 2 + 2 * 48)  # c_attn of two layers, 16 to 48
    tokens = torch.arange(8)[None]
    with torch.no_grad():
        assert torch.equal(model.eval()(tokens).logits, base.eval()(tokens).logits), "the adapter changes nothing yet"
    first = made.held_out_loss()
    frozen = {name: p.detach().clone() for name, p in model.named_parameters() if not p.requires_grad}
    assert made.trainer.run_steps(20).steps == 20
    assert made.held_out_loss() < first
    assert len(frozen) == len(list(base.parameters()))
    assert all(torch.equal(model.get_parameter(name), value) for name, value in frozen.items())
    private = made.private()
    assert {name.partition("/")[2] for name in private.tensors} == {piece.name for piece in made.layout.pieces}


def test_adapter_starts_from_the_seed_and_leaves_the_generator_alone(tmp_path: Path) -> None:
    weights = base_digest(saved(tmp_path / "base", 1))
    state = torch.get_rng_state()
    one, two, other = (learner(tmp_path, tmp_path / "base", weights=weights, seed=seed) for seed in (0, 0, 1))
    assert torch.equal(state, torch.get_rng_state())
    assert (one.parameters() == two.parameters()).all() and (one.parameters() != other.parameters()).any()


def test_peer_with_another_base_is_refused_and_the_missing_hash_is_named(tmp_path: Path) -> None:
    weights = base_digest(saved(tmp_path / "base", 1))
    saved(tmp_path / "other", 2)
    with pytest.raises(WeightsError, match=rf"other has other weights .* than the manifest names .*{weights[:8]}"):
        learner(tmp_path, tmp_path / "other", weights=weights)
    with pytest.raises(HintedError, match="no hash of .*base") as unnamed:
        learner(tmp_path, tmp_path / "base", weights="")
    assert weights in unnamed.value.hint
    without = parse(toml("").replace("config_hash", "# config_hash") + '\n[data]\ntokenizer = "t.json"\n')
    (tmp_path / "t.json").write_bytes(byte_tokenizer_file())
    with pytest.raises(HintedError) as all_missing:
        prepared(tmp_path, manifest_of=without, named=f"hf:{tmp_path / 'base'}")
    hint, tokenizer = all_missing.value.hint, blake3.blake3(byte_tokenizer_file()).hexdigest()
    assert f'weights = "{weights}"' in hint and parse(toml("")).model.config_hash in hint and tokenizer in hint
    (tmp_path / "base" / "model.safetensors").unlink()
    with pytest.raises(WeightsError, match="safetensors"):
        learner(tmp_path, tmp_path / "base", weights=weights)


def test_adapter_with_gradient_checkpointing_has_the_same_gradients(tmp_path: Path) -> None:
    weights = base_digest(saved(tmp_path / "base", 1))
    steps = []
    for checkpointing in (False, True):
        made = learner(tmp_path, tmp_path / "base", weights=weights, checkpointing=checkpointing)
        torch.manual_seed(3)  # of dropout
        made.trainer.run_steps(3)
        steps.append(made.parameters())
    assert (steps[0] != learner(tmp_path, tmp_path / "base", weights=weights).parameters()).any()
    assert torch.allclose(torch.from_numpy(steps[0]), torch.from_numpy(steps[1]), atol=1e-6)


def test_first_values_of_an_adapter_are_not_those_of_a_file(tmp_path: Path) -> None:
    weights = base_digest(saved(tmp_path / "base", 1))
    with pytest.raises(WeightsError, match="--from does not apply to a run with"):
        learner(tmp_path, tmp_path / "base", weights=weights, first=tmp_path / "base")


def test_targets_choose_the_layers(tmp_path: Path) -> None:
    weights = base_digest(saved(tmp_path / "base", 1))
    lines = {
        'targets = ["attn.c_proj"]': {"attn.c_proj"},
        'targets = ["all-linear"]': {"attn.c_attn", "attn.c_proj", "mlp.c_fc", "mlp.c_proj"},
    }
    for line, wanted in lines.items():
        made = learner(tmp_path, tmp_path / "base", weights=weights, lora=f"rank = 2\nalpha = 4\n{line}")
        assert {piece.name.split(".lora_")[0].split(".", 3)[3] for piece in made.layout.pieces} == wanted
    for targets, unknown in (('["absent"]', "absent"), ('["c_proj", "c_prj"]', "c_prj"), ('["proj"]', "proj")):
        with pytest.raises(ModelError, match=f"no layer of .* is named {unknown}"):
            learner(tmp_path, tmp_path / "base", weights=weights, lora=f"rank = 2\ntargets = {targets}")
    with pytest.raises(ModelError, match="no adapter fits .*"):
        learner(tmp_path, tmp_path / "base", weights=weights, lora='rank = 2\ntargets = ["attn"]')


def test_adapter_beside_the_model_of_a_function(tmp_path: Path) -> None:
    name = f"adapted_{tmp_path.name}".replace("-", "_")
    (tmp_path / f"{name}.py").write_text(CODE)
    (tmp_path / "text.txt").write_text("a few words of text " * 300)
    text = f'[model]\nkind = "module"\nname = "{name}:make"\ncontext = 16\nweights = "{{}}"\n[lora]\nrank = 2\ntargets = ["1"]'
    with pytest.raises(HintedError) as unnamed:
        prepared(tmp_path, manifest_of=parse(text.format("")), named=f"{name}:make")
    weights = unnamed.value.hint.split('"')[1]
    made = prepared(tmp_path, manifest_of=parse(text.format(weights)), named=f"{name}:make")
    assert [piece.name for piece in made.layout.pieces] == ["1.lora_A.default.weight", "1.lora_B.default.weight"]
    assert made.trainer.run_steps(2).steps == 2


def stored(path: Path, base: Path, lora: str) -> tuple[StoredModel, Config, nn.Module]:
    """Return an adapter that changes the logits as a stored model, settings that name its base, and the model of both."""
    home = directories(path / "home")
    run = home.run(bytes(32))
    digest = base_digest(AutoModelForCausalLM.from_pretrained(base))
    made = learner(path, base, weights=digest, lora=lora)
    with torch.no_grad():
        for number, (_, parameter) in enumerate(made.trainer.model.named_parameters()):
            if parameter.requires_grad:
                torch.nn.init.normal_(parameter, std=0.2, generator=torch.Generator().manual_seed(number))
    run.path.mkdir(parents=True)
    run.model_config.write_bytes((base / "config.json").read_bytes())
    model = made.trainer.model
    weights = {name: p.detach().numpy() for name, p in model.named_parameters() if p.requires_grad}
    return (
        StoredModel(weights, path, toml(digest, lora), run),
        load({"home": path / "home", "model": f"hf:{base}"}, {}),
        model,
    )


def test_merged_export_has_the_logits_of_base_and_adapter(tmp_path: Path) -> None:
    base = saved(tmp_path / "base", 1)
    model, config, both = stored(tmp_path, tmp_path / "base", lora='rank = 2\ntargets = ["c_attn", "c_proj"]')
    export(model, tmp_path / "out", "transformers", config)
    loaded = AutoModelForCausalLM.from_pretrained(tmp_path / "out")
    assert {type(layer) for layer in loaded.modules()} == {type(layer) for layer in base.modules()}
    tokens = torch.arange(12)[None]
    with torch.no_grad():
        wanted, found = both.eval()(tokens).logits, loaded.eval()(tokens).logits
        assert torch.allclose(wanted, found, atol=1e-5) and not torch.allclose(
            wanted, base.eval()(tokens).logits, atol=0.1
        )
    assert (tmp_path / "out" / "config.json").read_bytes() == (tmp_path / "base" / "config.json").read_bytes()
    assert (tmp_path / "out" / "tokenizer.json").exists()


def test_adapter_beside_a_tied_head_is_not_merged(tmp_path: Path) -> None:
    saved(tmp_path / "base", 1)
    model, config, _ = stored(tmp_path, tmp_path / "base", lora='rank = 2\ntargets = ["lm_head"]')
    with pytest.raises(ModelError, match="lm_head, which is tied"):
        export(model, tmp_path / "out", "transformers", config)
    assert not (tmp_path / "out").exists()


def test_names_are_those_of_peft() -> None:
    names = ["h.0.c.lora_A.default.weight", "e.lora_embedding_B.default", "default.lora_B.default.weight"]
    wanted = ["h.0.c.lora_A.weight", "e.lora_embedding_B", "default.lora_B.weight"]
    assert list(in_peft(dict.fromkeys(names))) == [f"base_model.model.{name}" for name in wanted]  # type: ignore[arg-type]
