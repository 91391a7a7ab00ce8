import json
import math
import os
import shutil

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from safetensors.numpy import save_file
from safetensors.torch import load_file
from thinwire.node.cli import main
from thinwire.node.runtime.directories import directories
from thinwire.node.runtime.disk import RealDisk
from thinwire.node.state.checkpoint_store import CheckpointStore, Saved
from thinwire.node.state.snapshot import FragmentState, Snapshot
from thinwire.node.training.export import ExportError, for_peft
from thinwire.node.training.models.tokenizer import byte_tokenizer_file
from thinwire.node.training.models.transformer import ModelConfig, Transformer
from thinwire.node.training.stored_model import stored_model
from thinwire.swarm.identity.identity import Identity
from thinwire.swarm.manifest.parser import parse

RUN = b"\x05" * 32
TOML = '[run]\nname = "toy"\n[model]\nlayers = 2\nwidth = 32\nheads = 4\ncontext = 16\ntied = {tied}\n'


def trained(home, *, tied=True, run=RUN, round=3, seed=None, stages=None):
    """Return the model of a home with one checkpoint of its two fragments, or of those in `stages`."""
    model = Transformer(ModelConfig(vocab=50, layers=2, width=32, heads=4, context=16, tied=tied), seed=seed or round)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.add_(
                0.05 * torch.randn(parameter.shape, generator=torch.Generator().manual_seed(parameter.numel()))
            )
    weights = {name: parameter.detach().numpy() for name, parameter in model.named_parameters()}
    split = {0: [n for n in weights if "blocks.0" in n], 1: [n for n in weights if "blocks.0" not in n]}
    fragments = {
        i: FragmentState({n: weights[n] for n in names}, {n: weights[n] * 0 for n in names})
        for i, names in split.items()
        if stages is None or i in stages
    }
    where = directories(home)
    directory = where.run(run)
    store = CheckpointStore(directory.checkpoints, RealDisk(), Identity.load_or_create(where.key))
    standings = None if stages is None else {stage: (round, (), b"", ()) for stage in stages}
    snapshot = Snapshot(run, round, b"\x01" * 32, (), fragments, None, standings)
    assert isinstance(store.save(snapshot, now=1.0, suffix="x"), Saved)
    pipeline = "" if stages is None else "[pipeline]\nstages = 2\n[outer]\nmethod = 'streaming'\nfragments = 2\n"
    directory.manifest.write_text(TOML.format(tied=str(tied).lower()) + pipeline)
    return model


def outcome(capsys, *arguments):
    code = main.main(["export", *(str(argument) for argument in arguments)])
    said = capsys.readouterr()
    return code, said.out, said.err


def test_safetensors_export_has_every_parameter(tmp_path, capsys):
    model = trained(tmp_path / "home", tied=False)
    out = tmp_path / "new" / "model.safetensors"
    code, said, err = outcome(capsys, out, "--home", tmp_path / "home")
    assert code == 0 and err == "" and "round 3" in said and str(out) in said
    tensors = load_file(out)
    state = dict(model.named_parameters())
    assert tensors.keys() == state.keys() and all(torch.equal(tensors[name], state[name]) for name in state)
    assert [path.name for path in out.parent.iterdir()] == ["model.safetensors"]
    assert outcome(capsys, out, "--home", tmp_path / "home")[0] == 0  # over an older one


def llama_logits(folder, tokens):
    """Compute LlamaForCausalLM of transformers from such a folder, by the published architecture."""
    config, w = json.loads((folder / "config.json").read_text()), load_file(folder / "model.safetensors")
    heads, width, eps = config["num_attention_heads"], config["hidden_size"], config["rms_norm_eps"]
    size, length = width // heads, len(tokens)

    def norm(x, weight):
        return x * torch.rsqrt(x.pow(2).mean(-1, keepdim=True) + eps) * weight

    frequency = 1.0 / config["rope_theta"] ** (torch.arange(0, size, 2).float() / size)
    angle = torch.arange(length).float()[:, None] * torch.cat([frequency, frequency])[None, :]

    def turn(x):
        half = torch.cat([-x[..., size // 2 :], x[..., : size // 2]], dim=-1)
        return x * angle.cos() + half * angle.sin()

    mask = torch.full((length, length), -math.inf).triu(1)
    x = w["model.embed_tokens.weight"][tokens]
    for layer in range(config["num_hidden_layers"]):
        p = f"model.layers.{layer}."
        h = norm(x, w[p + "input_layernorm.weight"])
        q, k, v = (
            (h @ w[f"{p}self_attn.{letter}_proj.weight"].T).view(length, heads, size).transpose(0, 1)
            for letter in "qkv"
        )
        scores = turn(q) @ turn(k).transpose(1, 2) / math.sqrt(size) + mask
        mixed = (scores.softmax(-1) @ v).transpose(0, 1).reshape(length, width)
        x = x + mixed @ w[p + "self_attn.o_proj.weight"].T
        h = norm(x, w[p + "post_attention_layernorm.weight"])
        gate = F.silu(h @ w[p + "mlp.gate_proj.weight"].T)
        x = x + (gate * (h @ w[p + "mlp.up_proj.weight"].T)) @ w[p + "mlp.down_proj.weight"].T
    head = w["model.embed_tokens.weight"] if config["tie_word_embeddings"] else w["lm_head.weight"]
    return norm(x, w["model.norm.weight"]) @ head.T


@pytest.mark.parametrize("tied", [True, False])
def test_transformers_export_computes_the_same(tmp_path, capsys, tied):
    model = trained(tmp_path / "home", tied=tied)
    folder = tmp_path / "folder"
    code, _, err = outcome(capsys, folder, "--format", "transformers", "--home", tmp_path / "home")
    assert code == 0 and err == ""
    tokens = torch.tensor([3, 1, 4, 1, 5, 9, 2, 6, 49, 0])
    with torch.no_grad():
        ours, theirs = model(tokens[None])[0], llama_logits(folder, tokens)
    assert ours.std() > 0.1 and torch.allclose(ours, theirs, rtol=1e-4, atol=1e-5)
    config = json.loads((folder / "config.json").read_text())
    assert config["model_type"] == "llama" and config["vocab_size"] == 50 and config["max_position_embeddings"] == 16
    with open(folder / "model.safetensors", "rb") as file:
        header = json.loads(file.read(int.from_bytes(file.read(8), "little")))
    assert header["__metadata__"] == {"format": "pt"}


def test_export_replaces_an_earlier_export_and_no_other_file(tmp_path, capsys):
    home, manifest, weights = tmp_path / "home", tmp_path / "run.toml", tmp_path / "weights.safetensors"
    trained(home)
    assert outcome(capsys, weights, "--home", home)[0] == outcome(capsys, weights, "--home", home)[0] == 0
    manifest.write_text("[run]")
    save_file({"weight": np.zeros(3, np.float32)}, tmp_path / "mine.safetensors")
    for other in (manifest, tmp_path / "mine.safetensors"):
        before = other.read_bytes()
        code, said, err = outcome(capsys, other, "--home", home)
        assert code == 2 and not said and err.startswith(f"error: {other} is no earlier export\nhint: ")
        assert other.read_bytes() == before
        assert outcome(capsys, other, "--force", "--home", home)[0] == 0 and other.read_bytes() != before


def test_run_of_an_empty_manifest_has_the_defaults(tmp_path, capsys):
    home, weights = tmp_path / "home", tmp_path / "weights.safetensors"
    trained(home)
    directories(home).run(RUN).manifest.write_text("")
    for _ in range(2):
        assert outcome(capsys, weights, "--home", home)[0] == 0
    assert stored_model(directories(home), str(weights)).described() == parse("", "the run's manifest")


def test_transformers_export_has_the_tokenizer(tmp_path, capsys):
    home, folder = tmp_path / "home", tmp_path / "folder"
    trained(home)
    assert outcome(capsys, folder, "--format", "transformers", "--home", home)[0] == 0
    assert (folder / "tokenizer.json").read_bytes() == byte_tokenizer_file()
    settings = json.loads((folder / "tokenizer_config.json").read_text())
    assert settings == {"tokenizer_class": "PreTrainedTokenizerFast", "model_max_length": 16}

    run = directories(home).run(RUN)
    run.manifest.write_text(run.manifest.read_text() + '[data]\ntokenizer = "mine.json"\n')
    code, said, err = outcome(capsys, tmp_path / "without", "--format", "transformers", "--home", home)
    assert code == 0 and "no tokenizer is written" in err and "mine.json" in err and said
    run.tokenizer.write_bytes(b"{}")
    code, said, err = outcome(capsys, folder, "--format", "transformers", "--home", home)
    assert (
        code == 2 and said == "" and err.startswith(f"error: {folder} has files already\nhint: ") and "--force" in err
    )
    assert (folder / "tokenizer.json").read_bytes() == byte_tokenizer_file()
    code, _, err = outcome(capsys, folder, "--format", "transformers", "--force", "--home", home)
    assert code == 0 and err == "" and (folder / "tokenizer.json").read_bytes() == b"{}"


def test_export_falls_back_from_damaged_checkpoint(tmp_path, capsys):
    home = tmp_path / "home"
    trained(home, round=1)
    trained(home, round=2)
    checkpoints = directories(home).run(RUN).checkpoints

    def damage(round):
        file = checkpoints / f"step-0000000{round}" / "fragment-00000.safetensors"
        data = bytearray(file.read_bytes())
        data[-1] ^= 1
        file.write_bytes(data)

    damage(2)
    code, said, err = outcome(capsys, tmp_path / "m.safetensors", "--home", home)
    assert code == 0 and "round 1," in said
    assert err.startswith("warning: ") and "step-00000002: " in err and "of round 1, is used" in err
    damage(1)
    code, said, err = outcome(capsys, tmp_path / "n.safetensors", "--home", home)
    assert code == 2 and said == "" and "no good checkpoint" in err and "differs from its hash" in err


def test_export_before_the_first_round_names_what_to_wait_for(tmp_path, capsys):
    home = tmp_path / "home"
    trained(home, round=1)
    shutil.rmtree(directories(home).run(RUN).checkpoints)
    code, _, err = outcome(capsys, tmp_path / "m.safetensors", "--home", home)
    assert code == 2 and "there is no checkpoint in" in err and "after the first round" in err


def test_generate_with_a_file_that_is_not_there_names_the_file(tmp_path, capsys):
    trained(tmp_path / "home", round=1)
    assert main.main(["generate", "other.safetensors", "--home", str(tmp_path / "home")]) == 2
    assert "error: there is no file other.safetensors\n" in capsys.readouterr().err


def test_evaluate_with_a_text_as_the_model_names_the_option_for_text(tmp_path, capsys):
    text = tmp_path / "tiny.txt"
    text.write_text("words")
    assert main.main(["evaluate", str(text), "--home", str(tmp_path / "home")]) == 2
    err = capsys.readouterr().err
    assert err.startswith(f"error: {text}: ") and "evaluate` goes to --data" in err and "--from" not in err


def test_export_needs_a_run_id_when_there_are_several(tmp_path, capsys):
    home = tmp_path / "home"
    code, _, err = outcome(capsys, tmp_path / "m", "--home", home)
    assert code == 2 and "no runs" in err
    trained(home, round=1)
    trained(home, round=2, run=b"\xee" * 32)
    (
        directories(home).run(b"\xee" * 32).checkpoints / "LATEST"
    ).unlink()  # a crash may lose it; the checkpoint is found
    code, _, err = outcome(capsys, tmp_path / "m", "--home", home)
    assert code == 2 and "there are 2 runs" in err and "0505050505050505 (toy), eeeeeeeeeeeeeeee (toy)" in err
    assert outcome(capsys, tmp_path / "m", "--home", home, "--run", "ffff")[0] == 2
    code, said, _ = outcome(capsys, tmp_path / "m", "--home", home, "--run", "eeee")
    assert code == 0 and "round 2," in said
    assert outcome(capsys, tmp_path / "m", "--home", home, "--run", "ee" * 32)[0] == 0  # the whole id


def test_export_passes_over_a_run_that_never_had_a_checkpoint(tmp_path, capsys):
    home = tmp_path / "home"
    trained(home, round=1)
    failed = directories(home).run(b"\xee" * 32)
    failed.path.mkdir()
    failed.manifest.write_bytes(directories(home).run(RUN).manifest.read_bytes())
    for words in ((), ("--run", "toy")):
        code, said, err = outcome(capsys, tmp_path / "m", "--home", home, *words)
        assert code == 0 and "round 1," in said, err


def test_export_of_a_stage_holder_is_refused_without_the_other_stages(tmp_path, capsys):
    trained(tmp_path / "a", stages=[1])
    code, said, err = outcome(capsys, tmp_path / "m", "--home", tmp_path / "a")
    assert code == 2 and said == "" and "does not contain stage 0" in err and "2 stages" in err and "--with" in err
    assert not (tmp_path / "m").exists()


def test_export_names_all_stages_that_a_holder_of_the_middle_one_lacks(tmp_path, capsys):
    trained(tmp_path / "a", stages=[1])
    manifest = directories(tmp_path / "a").run(RUN).manifest
    three = manifest.read_text().replace("stages = 2", "stages = 3").replace("layers = 2", "layers = 3")
    manifest.write_text(three.replace("fragments = 2\n", ""))
    code, _, err = outcome(capsys, tmp_path / "m", "--home", tmp_path / "a")
    assert code == 2 and "the model has 3 stages (0 to 2), and the checkpoint does not contain stages 0 and 2" in err


@pytest.mark.parametrize(("round", "text"), [(5, "round 5,"), (4, "rounds 4 to 5, because")])
def test_export_gathers_stages_from_other_directories(tmp_path, capsys, round, text):
    model = trained(tmp_path / "a", stages=[1], round=5)
    trained(tmp_path / "b", stages=[0, 1], round=round, seed=5)
    code, said, err = outcome(capsys, tmp_path / "m", "--home", tmp_path / "a", "--with", tmp_path / "b")
    assert code == 0 and err == "" and text in said
    tensors, state = load_file(tmp_path / "m"), dict(model.named_parameters())
    assert tensors.keys() == state.keys() and all(torch.equal(tensors[name], state[name]) for name in state)


def test_export_of_stages_of_another_run_is_refused(tmp_path, capsys):
    trained(tmp_path / "a", stages=[1])
    trained(tmp_path / "b", stages=[0], run=b"\xee" * 32)
    code, _, err = outcome(capsys, tmp_path / "m", "--home", tmp_path / "a", "--with", tmp_path / "b")
    assert code == 2 and "no run of this machine has the name" in err


def test_export_mistakes_are_reported(tmp_path, capsys):
    home = tmp_path / "home"
    trained(home)
    code, _, err = outcome(capsys, tmp_path / "m", "--format", "onnx", "--home", home)
    assert code == 2 and "choose one of: safetensors, transformers" in err
    (tmp_path / "file").write_text("")
    code, _, err = outcome(capsys, tmp_path / "file" / "m", "--home", home)
    assert code == 2 and "cannot write" in err
    os.mkfifo(tmp_path / "pipe")
    code, _, err = outcome(capsys, tmp_path / "pipe", "--home", home)
    assert code == 2 and "neither a file nor a folder" in err and (tmp_path / "pipe").is_fifo()
    for folder in (tmp_path, ".", "/"):
        code, _, err = outcome(capsys, folder, "--force", "--home", home)
        assert code == 2 and "is a folder\nhint: name the file" in err
    manifest = directories(home).run(RUN).manifest
    manifest.write_text('[model]\nkind = "custom"\n')
    code, _, err = outcome(capsys, tmp_path / "f", "--format", "transformers", "--home", home)
    assert code == 2 and "trains a custom module" in err and not (tmp_path / "f").exists()
    manifest.write_text(TOML.format(tied="true").replace("layers = 2", "layers = 3"))
    code, _, err = outcome(capsys, tmp_path / "f", "--format", "transformers", "--home", home)
    assert code == 2 and "lacks blocks.2." in err
    manifest.write_text(TOML.format(tied="true").replace("layers = 2", "layers = 1"))
    code, _, err = outcome(capsys, tmp_path / "f", "--format", "transformers", "--home", home)
    assert code == 2 and "which the built-in model does not have" in err
    manifest.unlink()
    code, _, err = outcome(capsys, tmp_path / "f", "--format", "transformers", "--home", home)
    assert code == 2 and "there is no manifest for" in err
    assert np.all([not path.name.startswith(".") for path in tmp_path.iterdir()])


@pytest.mark.parametrize(
    ("kind", "formats"),
    [
        ("", "transformers or safetensors"),
        ('kind = "module"\nname = "mine:make"', "safetensors"),
        ('kind = "custom"', "safetensors"),
    ],
)
def test_hint_for_a_run_without_an_adapter_names_only_formats_that_it_has(tmp_path, kind, formats):
    with pytest.raises(ExportError) as found:
        for_peft({}, parse(f"[model]\n{kind}\n", "run.toml"), directories(tmp_path).run(RUN))
    assert found.value.hint == f"use --format {formats}"
