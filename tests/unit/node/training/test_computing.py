"""Precision, compilation and gradient checkpointing change speed and memory, not what is trained and exchanged."""

from __future__ import annotations

import functools
import json
from pathlib import Path

import blake3
import pytest
import torch
from thinwire.node.state.layout import layout_of
from thinwire.node.training.inner_loop import CompileError
from thinwire.node.training.local_learner import Computing, LocalLearner, build_learner, products_of
from thinwire.node.training.models.user_model import ModelError, checkpoint_activations
from thinwire.swarm.manifest.parser import parse
from torch import Tensor, nn

GPT2 = {"model_type": "gpt2", "n_embd": 16, "n_layer": 3, "n_head": 2, "vocab_size": 256, "n_positions": 32}
BUILT_IN = "layers = 3\nwidth = 16\nheads = 2\n"


@pytest.fixture
def gpt2(tmp_path: Path) -> tuple[str, str]:
    """Return [model] of a model with dropout, and the setting that names it."""
    (tmp_path / "tiny").mkdir()
    content = json.dumps(GPT2).encode()
    (tmp_path / "tiny" / "config.json").write_bytes(content)
    digest = blake3.blake3(content).hexdigest()
    return f'kind = "hf"\nname = "tiny"\nconfig_hash = "{digest}"\n', f"hf:{tmp_path / 'tiny'}"


def learner(path: Path, model: str = BUILT_IN, inner: str = "", named: str = "", **computing: bool) -> LocalLearner:
    """Return the learner of a daemon; the first parameters and the data are those of every other one."""
    (path / "text.txt").write_text("a few words of text " * 300)
    manifest = parse(f"[model]\n{model}context = 16\n[inner]\nbatch = 4\nwarmup = 0\n{inner}")
    return build_learner(
        manifest,
        Computing("cpu", 0, **computing),
        data=path / "text.txt",
        cache=path / "cache",
        here=path,
        clock=lambda: 0.0,
        model=named,
    )


def gradients(of: LocalLearner) -> dict[str, Tensor]:
    """Return the gradients of a step in which parameters do not change."""
    torch.manual_seed(5)  # of dropout
    for group in of.trainer.optimizer.param_groups:
        group["share"] = 0.0
    found = dict[str, Tensor]()

    def after_step(*arguments: object) -> None:
        found.update({name: p.grad.clone() for name, p in of.trainer.model.named_parameters() if p.grad is not None})

    hook = of.trainer.optimizer.register_step_post_hook(after_step)
    of.trainer.run_steps(1)
    hook.remove()
    return found


def passes(model: nn.Module, kind: str) -> list[bool]:
    """Record each forward pass of a layer of this class: whether gradients are wanted."""
    seen: list[bool] = []
    for part in model.modules():
        if type(part).__name__ == kind:
            inner = part.get_submodule("attn" if kind == "GPT2Block" else "attention")
            inner.register_forward_hook(lambda *_: seen.append(torch.is_grad_enabled()))
    return seen


@pytest.mark.parametrize("kind", ["Block", "GPT2Block"])
def test_gradient_checkpointing_computes_layers_twice_and_gives_the_same_gradients(
    tmp_path: Path, gpt2: tuple[str, str], kind: str
) -> None:
    model, named = gpt2 if kind == "GPT2Block" else (BUILT_IN, "")
    made = {on: learner(tmp_path, model, named=named, checkpointing=on) for on in (False, True)}
    seen = {on: passes(one.trainer.model, kind) for on, one in made.items()}
    plain, saved = gradients(made[False]), gradients(made[True])
    assert (len(seen[False]), len(seen[True])) == (3, 6)
    assert plain.keys() == saved.keys() and all(torch.allclose(plain[name], saved[name], atol=1e-7) for name in plain)
    assert any(bool(gradient.abs().max() > 1e-4) for gradient in plain.values())
    assert made[False].layout.digest == made[True].layout.digest


def test_gradient_checkpointing_stores_less(tmp_path: Path) -> None:
    def stored(on: bool) -> int:
        total = 0

        def pack(tensor: Tensor) -> Tensor:
            nonlocal total
            total += tensor.numel()
            return tensor

        trainer = learner(tmp_path, checkpointing=on).trainer
        batch = trainer.batches.next(4)
        with torch.autograd.graph.saved_tensors_hooks(pack, lambda tensor: tensor):
            trainer.model(*batch)
        return total

    assert stored(True) < stored(False) / 2


def test_module_without_gradient_checkpointing_is_refused(tmp_path: Path) -> None:
    with pytest.raises(ModelError, match="Linear has no method activation_checkpointing_enable") as refused:
        checkpoint_activations(nn.Linear(2, 2))
    assert "remove the setting gradient_checkpointing" in refused.value.hint
    from transformers import PretrainedConfig, PreTrainedModel

    class Unable(PreTrainedModel):
        pass

    with pytest.raises(ModelError, match="Unable does not support"):
        checkpoint_activations(Unable(PretrainedConfig()))


@pytest.mark.parametrize(("precision", "dtype"), [("bf16", torch.bfloat16), ("fp32", torch.float32)])
def test_precision_is_that_of_products_while_parameters_stay_float32(
    tmp_path: Path, precision: str, dtype: torch.dtype
) -> None:
    made = learner(tmp_path, inner=f'precision = "{precision}"')
    seen: set[torch.dtype] = set()
    for part in made.trainer.model.modules():
        if isinstance(part, nn.Linear):
            part.register_forward_hook(lambda _, __, result: seen.add(result.dtype))
    before = made.parameters()
    report = made.trainer.run_steps(2)
    assert seen == {dtype} and report.loss == pytest.approx(5.5, abs=0.2)
    tensors = [*made.trainer.model.parameters(), *gradients(made).values()]
    tensors += [one for state in made.trainer.optimizer.state.values() for one in state.values()]
    assert {one.dtype for one in tensors} == {torch.float32}
    assert made.layout.digest == learner(tmp_path).layout.digest and (made.parameters() != before).any()
    seen.clear()
    made.held_out_loss()
    assert seen == {dtype}


def test_precision_is_bf16_by_itself_on_a_gpu_only() -> None:
    usual, exact = parse(""), parse('[inner]\nprecision = "fp32"')
    assert (products_of(usual, "cpu"), products_of(usual, "cuda:1")) == (None, torch.bfloat16)
    assert products_of(exact, "cuda") is None


@pytest.fixture
def counted(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """Nodes of each graph that torch compiles; the graphs run as they are, which saves a minute."""
    graphs: list[int] = []

    def backend(graph: torch.fx.GraphModule, _: object) -> object:
        graphs.append(len(graph.graph.nodes))
        return graph.forward

    monkeypatch.setattr(torch, "compile", functools.partial(torch.compile, backend=backend))
    return graphs


def test_compiled_model_has_the_same_names_gradients_and_random_numbers(tmp_path: Path, counted: list[int]) -> None:
    plain = learner(tmp_path)
    assert not counted
    state = torch.get_rng_state()
    made = learner(tmp_path, compiled=True)
    assert torch.equal(torch.get_rng_state(), state) and len(counted) == 1 and counted[0] > 30
    assert made.layout.digest == plain.layout.digest == layout_of(made.trainer.model).digest
    assert (made.parameters() == plain.parameters()).all()
    one, two = gradients(plain), gradients(made)
    assert one.keys() == two.keys() and all(torch.allclose(one[name], two[name], atol=1e-7) for name in one)
    made.held_out_loss()
    assert len(counted) == 1, "neither the steps nor an evaluation compile again"


def test_compiler_that_fails_is_one_error_with_a_hint(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def backend(*_: object) -> object:
        raise OSError("no compiler found\nmore lines")

    monkeypatch.setattr(torch, "compile", functools.partial(torch.compile, backend=backend))
    with pytest.raises(CompileError, match="no compiler found(\n|$)") as failed:
        learner(tmp_path, compiled=True)
    assert "setting compile" in failed.value.hint and failed.value.exit_code == 3


@pytest.mark.soak
def test_real_compiler_trains_as_the_plain_model_with_and_without_checkpointing(tmp_path: Path) -> None:
    one = gradients(learner(tmp_path))
    for checkpointing in (False, True):
        made = learner(tmp_path, compiled=True, checkpointing=checkpointing)
        two = gradients(made)
        assert all(torch.allclose(one[name], two[name], atol=1e-5) for name in one)
        assert made.trainer.run_steps(3).steps == 3
