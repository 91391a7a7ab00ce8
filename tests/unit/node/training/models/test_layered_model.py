"""Models of the user that can be cut into stages: of transformers, and of a Python function."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import blake3
import pytest
import torch
from kit.real.documents import blocks
from thinwire.node.pipeline.groups.stage_assignment import memory
from thinwire.node.pipeline.model.held_stage import HeldStage
from thinwire.node.pipeline.model.stage import Stage
from thinwire.node.pipeline.model.staged_model import StagedModel
from thinwire.node.state.fragments import fragments_of
from thinwire.node.state.layout import layout_of
from thinwire.node.training.models.causal_model import loss_of
from thinwire.node.training.models.layered_model import layered, whole_model
from thinwire.node.training.models.user_model import ModelError, make_model
from thinwire.swarm.manifest.manifest import Manifest, ManifestError
from thinwire.swarm.manifest.parser import parse

VOCAB, CONTEXT, STAGES = 64, 24, 3
(LAYERED,) = (one.code for one in blocks("python") if one.document == "docs/guides/pipelines.md")
TINY = {"vocab_size": VOCAB, "bos_token_id": 0, "eos_token_id": 0, "pad_token_id": None}
LLAMA = TINY | {
    "model_type": "llama",
    "hidden_size": 16,
    "intermediate_size": 24,
    "num_hidden_layers": 5,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 32,
}
GPT2 = TINY | {"model_type": "gpt2", "n_embd": 16, "n_layer": 4, "n_head": 2, "n_positions": 32}
GPT2 |= {"embd_pdrop": 0.0, "attn_pdrop": 0.0, "resid_pdrop": 0.0}
MODELS: dict[str, dict[str, Any]] = {
    "llama": LLAMA,
    "tied llama": LLAMA | {"tie_word_embeddings": True},
    "mistral": LLAMA | {"model_type": "mistral", "sliding_window": None},
    "qwen2": LLAMA | {"model_type": "qwen2"},
    "qwen3": LLAMA | {"model_type": "qwen3", "head_dim": 4},
    "gpt2": GPT2,
    "function": {},
}


@pytest.fixture
def staged(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Any:
    """Return a function that makes a run's model in stages: from a config.json, or of a Python function."""

    def make(config: dict[str, Any], code: str = LAYERED, more: str = "") -> StagedModel:
        run = f"{more}context = {CONTEXT}\n[outer]\nmethod = 'streaming'\n[pipeline]\nstages = {STAGES}\n"
        if not config:
            (tmp_path / "layered.py").write_text(code)
            monkeypatch.syspath_prepend(tmp_path)
            monkeypatch.delitem(__import__("sys").modules, "layered", raising=False)
            manifest = parse(f"[model]\nkind = 'module'\nname = 'layered:make'\n{run}")
            return StagedModel(manifest, VOCAB, "layered:make", tmp_path)
        content = json.dumps(config).encode()
        (tmp_path / "config.json").write_bytes(content)
        digest = blake3.blake3(content).hexdigest()
        manifest = parse(f"[model]\nkind = 'hf'\nname = 'tiny'\nconfig_hash = '{digest}'\n{run}")
        return StagedModel(manifest, VOCAB, f"hf:{tmp_path}", tmp_path)

    return make


def whole_of(staged: StagedModel, tmp_path: Path) -> torch.nn.Module:
    manifest = staged.manifest
    named = "layered:make" if manifest.model.kind == "module" else f"hf:{tmp_path}"
    return make_model(manifest, named, VOCAB, tmp_path)


@pytest.mark.parametrize("name", MODELS)
def test_stages_together_have_the_loss_and_the_gradients_of_the_whole_model(staged, name, tmp_path):
    model = staged(MODELS[name])
    whole = whole_of(model, tmp_path)
    model.check(whole)
    generator = torch.Generator().manual_seed(1)
    tokens, targets = torch.randint(0, VOCAB, (2, 2, CONTEXT), generator=generator)
    sections = [model.section(whole, stage) for stage in range(STAGES)]
    expected = loss_of(whole)(tokens, targets)
    expected.backward()
    gradients = {name: value.grad.clone() for name, value in whole.named_parameters()}
    whole.zero_grad()
    front, tail = Stage(sections[0].front), Stage(sections[0].loss)
    hosts = [Stage(section) for section in sections[1:]]
    x = front.forward(0, tokens)
    for host in hosts:
        x = host.forward(0, x)
    loss = tail.forward(0, x, targets)
    back = tail.backward(0, torch.ones_like(loss))
    for host in reversed(hosts):
        back = host.backward(0, back)
    front.backward(0, back)
    torch.testing.assert_close(loss, expected.detach(), rtol=1e-6, atol=0)
    assert len(gradients) > 20
    for named, value in whole.named_parameters():
        torch.testing.assert_close(value.grad, gradients[named], rtol=1e-4, atol=1e-7)


@pytest.mark.parametrize("name", MODELS)
def test_each_stage_holds_its_part_of_the_layout_and_nothing_else(staged, name, tmp_path):
    model = staged(MODELS[name])
    whole = whole_of(model, tmp_path)
    layout = layout_of(whole)
    assert model.layout == layout
    parts = fragments_of(model.manifest, layout)
    for stage, part in enumerate(parts):
        holding = HeldStage(model, stage)
        held = dict(holding.section.module.named_parameters())
        assert sum(value.numel() for value in held.values()) == part.size == model.parameters(stage)
        theta = layout.split(holding.parameters())
        for named, value in whole.named_parameters():
            assert (theta[named] == (value.detach().numpy() if named in held else 0)).all()
        assert layered(holding.section.module).prefix == layered(whole).prefix
    assert sum(part.size for part in parts) == layout.total
    # All weights exist for a moment, and a stage is smaller than the model.
    assert 4 * layout.total <= memory(model, 1) < memory(model, None)


def test_models_that_cannot_be_cut_are_refused(staged, tmp_path):
    with pytest.raises(ModelError, match="cannot be cut into stages") as refused:
        layered(torch.nn.Sequential(torch.nn.Embedding(9, 4), torch.nn.Linear(4, 9)))
    assert "blocks, embed, through and logits" in refused.value.hint
    few = staged(GPT2 | {"n_layer": 2})
    with pytest.raises(ModelError, match="too few layers for 3 stages: 2"):
        few.check(whole_of(few, tmp_path))
    with pytest.raises(ModelError, match="too few layers"):
        HeldStage(few, 1)
    window = staged(LLAMA | {"model_type": "mistral", "sliding_window": 8})
    with pytest.raises(ModelError, match="their logits or loss differ"):
        window.check(whole_of(window, tmp_path))
    narrow = staged({}, LAYERED.replace("width: int = 64", "width: int = 8"))
    with pytest.raises(ModelError, match="cannot encode x of width 8"):
        narrow.check(whole_of(narrow, tmp_path))


@pytest.mark.parametrize(
    ("old", "new", "match"),
    [
        ("return self.logits(", "return 1.5 * self.logits(", "their logits or loss differ"),
        ("is_causal=True", "causal=True", "causal"),
        (
            "        return x\n\n    def logits",
            "        return x * 1.1\n\n    def logits",
            "their logits or loss differ",
        ),
        (
            "for block in blocks:",
            "for n, block in enumerate(blocks):\n            x = x + n",
            "their logits or loss differ",
        ),
        ("        return x\n\n    def logits", "        return x + self.head.bias[0]\n\n    def logits", "bias"),
        (
            "        return x\n\n    def logits",
            "        self.head(x)\n        return x\n\n    def logits",
            "another stage holds",
        ),
        ("def forward(self, tokens):", "def forward(self, tokens, targets=None):", "cannot be cut"),
        ("return self.logits(", "return (1 + self.training) * self.logits(", "their logits or loss differ"),
        ("        for block in blocks:", "        for block in blocks:\n            x += 1", "cannot be cut"),
        (
            "        self.head = nn.Linear(width, vocab)",
            "        self.head = nn.Linear(width, vocab)\n        self.double()",
            "float32 of shape",
        ),
        (
            "        self.head = ",
            "        self.again = self.blocks\n        self.head = ",
            "again.0.* is in another list",
        ),
        ("        self.head = ", "        self.blocks[3].requires_grad_(False)\n        self.head = ", "the parameter"),
        (
            "        self.head = ",
            "        self.blocks[3] = self.blocks[0]\n        self.head = ",
            "shared between layers",
        ),
        ("        self.head = ", "        self.lock = __import__('threading').Lock()\n        self.head = ", "copied"),
    ],
)
def test_models_whose_stages_would_train_another_one_are_refused(staged, old, new, match, tmp_path):
    assert old in LAYERED
    model = staged({}, LAYERED.replace(old, new))
    with pytest.raises(ModelError, match=match):
        model.check(whole_of(model, tmp_path))


def test_head_that_starts_at_zero_is_no_reason_to_refuse_a_model(staged, tmp_path):
    zero = "nn.init.zeros_(self.head.weight), nn.init.zeros_(self.head.bias)"
    model = staged({}, LAYERED.replace("    def embed(", f"        {zero}\n\n    def embed(", 1))
    model.check(whole_of(model, tmp_path))


def test_check_changes_neither_buffers_nor_random_numbers(staged, tmp_path):
    code = LAYERED.replace("self.head = ", "self.norm = nn.BatchNorm1d(width)\n        self.head = ")
    code = code.replace("return self.head(x)", "return self.head(self.norm(x.mT).mT)").replace(
        "dropout=0.0", "dropout=0.5"
    )
    model = staged({}, code, 'buffers = "local"\n')
    whole = whole_of(model, tmp_path)
    before, state = {name: value.clone() for name, value in whole.state_dict().items()}, torch.get_rng_state()
    model.check(whole)
    assert whole.training and torch.equal(torch.get_rng_state(), state)
    assert all(torch.equal(before[name], value) for name, value in whole.state_dict().items())


@pytest.mark.parametrize(
    ("added", "match"),
    [
        ("self.extra = nn.Parameter(torch.zeros(3))", "extra is in no module beside"),
        ("self.more = nn.Sequential(nn.Linear(3, 3))", "more.0.* is in another list than blocks"),
        ("self.blocks[2].linear1.weight = self.blocks[0].linear1.weight", "blocks.2.linear1.weight is shared"),
        ("self.positions.weight = self.blocks[0].linear1.weight", "blocks.0.linear1.weight is shared"),
    ],
)
def test_parameters_that_belong_to_no_stage_or_to_two_are_refused(staged, added, match, tmp_path):
    code = LAYERED.replace("self.head = ", f"{added}\n        self.head = ")
    with pytest.raises(ModelError, match=match):
        whole_model(whole_of(staged({}, code), tmp_path))


def test_function_that_needs_real_tensors_cannot_be_counted(staged):
    model = staged({}, LAYERED.replace("self.head = ", "float(self.positions.weight.sum())\n        self.head = "))
    with pytest.raises(ModelError, match="cannot be counted without memory") as refused:
        memory(model, 1)
    assert "meta device" in refused.value.hint


def test_adapters_and_subspaces_have_no_stages():
    run = "[model]\nkind = 'module'\nname = 'm:make'\n[outer]\nmethod = 'streaming'\n"
    with pytest.raises(ManifestError, match="adapter cannot be cut"):
        parse(run + "[lora]\nrank = 4\ntargets = ['a']\n[pipeline]\nstages = 2\n")
    with pytest.raises(ManifestError, match="only applies to the built-in model"):
        parse(run + "[pipeline]\nstages = 2\ncodec = 'subspace(k=8)'\n")
    manifest: Manifest = parse(run + "[pipeline]\nstages = 2\n")
    assert manifest.pipeline.stages == 2
