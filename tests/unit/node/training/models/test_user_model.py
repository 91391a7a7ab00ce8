"""Models of the user: nothing is made that the owner of the peer has not named, and only models that can be trained."""

from __future__ import annotations

import json
import sys
from pathlib import Path

import pytest
import torch
from thinwire.node.cli import main
from thinwire.node.runtime.device import DeviceError
from thinwire.node.state.layout import layout_of
from thinwire.node.training.local_learner import Computing, build_learner
from thinwire.node.training.models.initial_weights import WeightsError, digest_of
from thinwire.node.training.models.missing_hashes import MissingHashError
from thinwire.node.training.models.model_size import check_memory
from thinwire.node.training.models.user_model import ModelError, make_model
from thinwire.swarm.identity.errors import HintedError
from thinwire.swarm.manifest.manifest import Manifest
from thinwire.swarm.manifest.parser import parse

CONFIG = {"model_type": "gpt2", "n_embd": 32, "n_layer": 2, "n_head": 2, "vocab_size": 256, "n_positions": 64}
CODE = """
import types
import torch
from torch import nn

class Model(nn.Module):
    def __init__(self, vocab, size=8):
        super().__init__()
        self.inner, self.outer = nn.Embedding(vocab, size), nn.Linear(size, vocab)
    def forward(self, tokens):
        return self.outer(self.inner(tokens))

def make(vocab, context):
    return Model(vocab)

def narrow(vocab, context):
    return Model(vocab - 1)

def faulty(vocab, context):
    return {}["rope"]

def nothing(vocab, context):
    return types.SimpleNamespace()

def frozen(vocab, context):
    return Model(vocab).requires_grad_(False)

def flat(vocab, context):
    return nn.Embedding(vocab, 3)

def silent(vocab, context):
    model = Model(vocab)
    model.forward = lambda tokens: None
    return model

def without(): ...
"""


def folder(path: Path, **changes: object) -> Path:
    """Write config.json into a new folder."""
    path.mkdir()
    (path / "config.json").write_text(json.dumps(CONFIG | changes))
    return path


def hash_of(path: Path) -> str:
    """Return the hash that the error without one gives."""
    with pytest.raises(MissingHashError, match="no hash of .*config.json") as missing:
        make_model(parse('[model]\nkind = "hf"\nname = "x"\n'), f"hf:{path}", 256, path)
    return missing.value.hint.split('"')[1]


def hf(path: Path, *, context: int = 32, seed: int = 0, weights: str = "") -> Manifest:
    """Return the manifest of a folder."""
    keys = f'kind = "hf"\nname = "x"\ncontext = {context}\nconfig_hash = "{hash_of(path)}"\n{weights}'
    return parse(f"[run]\nseed = {seed}\n[model]\n{keys}\n")


def module(function: str) -> Manifest:
    return parse(f'[model]\nkind = "module"\nname = "{function}"\ncontext = 16\n')


def made_by(tmp_path: Path, function: str) -> torch.nn.Module:
    """Return the result of a function in a module that only this test has."""
    name = f"models_{tmp_path.name}".replace("-", "_")
    (tmp_path / f"{name}.py").write_text(CODE)
    return make_model(module(f"{name}:{function}"), f"{name}:{function}", 50, tmp_path)


def test_model_of_transformers_has_the_same_first_parameters_and_leaves_the_generator_alone(tmp_path: Path) -> None:
    path = folder(tmp_path / "tiny")
    manifest, before = hf(path), torch.get_rng_state()
    models = [make_model(manifest, named, 256, path) for named in (f"hf:{path}", f"hf:{path}/config.json")]
    assert torch.equal(before, torch.get_rng_state())
    first, second = (dict(model.named_parameters()) for model in models)
    assert first.keys() == second.keys() and all(torch.equal(first[name], second[name]) for name in first)
    assert first["transformer.wte.weight"].std() > 0 and models[0].training


def test_configuration_with_code_of_its_own_runs_none_of_it(tmp_path: Path) -> None:
    path = folder(tmp_path / "tiny", auto_map={"AutoModelForCausalLM": "evil.Model", "AutoConfig": "evil.Config"})
    (path / "evil.py").write_text(f"open({str(tmp_path / 'ran')!r}, 'w')\n")
    assert type(make_model(hf(path), f"hf:{path}", 256, path)).__name__ == "GPT2LMHeadModel"
    assert not (tmp_path / "ran").exists()
    unknown = folder(tmp_path / "unknown", model_type="evil", auto_map={"AutoConfig": "evil.Config"})
    (unknown / "evil.py").write_text(f"open({str(tmp_path / 'ran')!r}, 'w')\n")
    with pytest.raises(ModelError, match="evil"):
        make_model(hf(unknown), f"hf:{unknown}", 256, unknown)
    assert not (tmp_path / "ran").exists()


def test_configuration_must_be_that_of_the_manifest_and_fit_the_data(tmp_path: Path) -> None:
    path, other = folder(tmp_path / "tiny"), folder(tmp_path / "other", activation_function="relu")
    with pytest.raises(ModelError, match="is not the configuration of run demo"):
        make_model(hf(path), f"hf:{other}", 256, path)
    with pytest.raises(ModelError, match=r"context is 128, but the model has 64 positions"):
        make_model(hf(path, context=128), f"hf:{path}", 256, path)
    with pytest.raises(ModelError, match=r"\[1, 8, 256\], and the tokenizer has 300"):
        make_model(hf(path), f"hf:{path}", 300, path)
    with pytest.raises(ModelError, match="no folder .*none") as absent:
        make_model(hf(path), "hf:none/none", 256, path)
    assert "hf download none/none config.json" in absent.value.hint
    (other / "config.json").write_text("[]")
    with pytest.raises(ModelError, match="is no configuration"):
        make_model(hf(path), f"hf:{other}", 256, path)


def test_model_without_the_owners_consent_is_neither_imported_nor_read(tmp_path: Path) -> None:
    (tmp_path / "unwanted.py").write_text("raise SystemExit('imported')")
    with pytest.raises(ModelError, match="unwanted:make, not the built-in model") as refused:
        make_model(module("unwanted:make"), "", 50, tmp_path)
    assert "--model unwanted:make" in refused.value.hint and "unwanted" not in sys.modules
    path = folder(tmp_path / "tiny")
    with pytest.raises(ModelError, match="not in the settings here"):
        make_model(hf(path), "", 256, path)
    for manifest, named in ((module("unwanted:make"), f"hf:{path}"), (hf(path), "unwanted:make")):
        with pytest.raises(ModelError, match="the setting model is"):
            make_model(manifest, named, 50, tmp_path)
    assert "unwanted" not in sys.modules


def test_function_makes_the_model_from_vocabulary_and_seed(tmp_path: Path) -> None:
    one, two = made_by(tmp_path, "make"), made_by(tmp_path, "make")
    assert layout_of(one).total == 50 * 8 * 2 + 50
    assert all(torch.equal(a, b) for a, b in zip(one.parameters(), two.parameters(), strict=True))


@pytest.mark.parametrize(
    ("function", "text"),
    [
        ("absent", "no attribute 'absent'"),
        ("without", "unexpected keyword argument"),
        ("faulty", ":faulty: KeyError: 'rope'"),
        ("nothing", "returned SimpleNamespace"),
        ("frozen", "no trainable parameters"),
        ("narrow", r"\[1, 8, 49\], and the tokenizer has 50"),
        ("flat", r"\[1, 8, 3\]"),
        ("silent", "'NoneType' object has no attribute 'logits'"),
    ],
)
def test_function_without_a_usable_model_is_refused(tmp_path: Path, function: str, text: str) -> None:
    with pytest.raises(ModelError, match=text):
        made_by(tmp_path, function)


def test_setting_that_is_no_name_of_a_function_is_refused(tmp_path: Path) -> None:
    with pytest.raises(ModelError, match="the setting model is"):
        make_model(module("a:b"), "os:path:join", 50, tmp_path)
    with pytest.raises(ModelError, match="No module named 'no_such_module'"):
        make_model(module("a:b"), "no_such_module:make", 50, tmp_path)


def test_first_weights_from_a_folder_of_transformers_are_checked_by_hash_and_never_unpickled(tmp_path: Path) -> None:
    path = folder(tmp_path / "tiny")
    given = make_model(hf(path, seed=9), f"hf:{path}", 256, path)
    given.save_pretrained(tmp_path / "given")  # type: ignore[operator]
    theta = torch.cat([p.detach().reshape(-1) for _, p in sorted(given.named_parameters())]).numpy()
    (tmp_path / "text.txt").write_text("word " * 2000)

    def prepared(weights: Path, more: str = "") -> object:
        return build_learner(
            hf(path, weights=more),
            Computing("cpu", 1),
            data=tmp_path / "text.txt",
            cache=tmp_path / "cache",
            here=tmp_path,
            clock=lambda: 0.0,
            weights=[weights] if weights else [],
            model=f"hf:{path}",
        )

    with pytest.raises(HintedError, match="no hash of .*given") as unnamed:
        prepared(tmp_path / "given")
    learner = prepared(tmp_path / "given", unnamed.value.hint.partition("[model]: ")[2] + "\n")
    assert digest_of(learner.parameters()) == digest_of(theta)  # type: ignore[attr-defined]
    (tmp_path / "given" / "model.safetensors").unlink()
    torch.save(given.state_dict(), tmp_path / "given" / "pytorch_model.bin")
    with pytest.raises(WeightsError, match="safetensors"):
        prepared(tmp_path / "given")


def test_plan_counts_a_model_of_the_user_or_names_the_flag(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    run = tmp_path / "run.toml"
    run.write_text('[model]\nkind = "module"\nname = "planned_model:make"\n')
    assert main.main(["plan", str(run), "--step", "1"]) == 2
    said = capsys.readouterr().err
    assert "the size of the model is not known" in said and "--parameters" in said
    (tmp_path / "planned_model.py").write_text(CODE)
    assert main.main(["plan", str(run), "--step", "1", "--json"]) == 0
    assert json.loads(capsys.readouterr().out)["question"]["parameters"] == 256 * 8 + 8 * 256 + 256


def test_model_whose_weights_do_not_fit_into_the_memory_is_an_error_before_any_is_used(tmp_path):
    (tmp_path / "config.json").write_text(json.dumps({"model_type": "llama"}))  # the library's default: 6.7 billion
    large = parse('[model]\nkind = "hf"\nname = "."\n', "run.toml")
    with pytest.raises(DeviceError, match="6,738,415,616 parameters.* 27.0 GB; this machine has 20.0 GB") as caught:
        check_memory(large, f"hf:{tmp_path}", 256, tmp_path, 20 * 10**9)
    assert caught.value.exit_code == 3
    check_memory(large, f"hf:{tmp_path}", 256, tmp_path, 27 * 10**9)
    built_in = parse("[model]\nlayers = 100\nwidth = 8192\nheads = 64\n", "run.toml")
    with pytest.raises(DeviceError, match="parameters"):
        check_memory(built_in, "", 256, tmp_path, 20 * 10**9)


def test_daemon_with_too_large_a_model_ends_with_the_reason(tmp_path, monkeypatch, capsys):
    monkeypatch.setattr("thinwire.node.training.local_learner.whole_memory", lambda: 1000)
    (tmp_path / "run.toml").write_text('[run]\nname = "large"\n')
    code = main.main(["start", str(tmp_path / "run.toml"), "--home", str(tmp_path / "home"), "--port", "0"])
    assert code == 3 and "this machine has 1.0 kB of memory" in capsys.readouterr().err
