import json
from pathlib import Path

import pytest
import torch
from thinwire.node.training.models.transformer import ModelConfig, Transformer
from thinwire.sims.planner.plan import plan
from thinwire.sims.planner.question import PeerMachine, PlanError, count, question
from thinwire.swarm.manifest.manifest import ManifestError
from thinwire.swarm.manifest.parser import parse

DEMO = (Path(__file__).parents[3] / "examples" / "demo.toml").read_bytes()
FLAGS = {"parameters": "1.3B", "layers": 24, "step": 2.0}


@pytest.mark.parametrize("tied", [True, False])
def test_question_takes_model_size_from_manifest(tied):
    toml = f"[model]\nlayers = 3\nwidth = 64\nheads = 2\nmlp = 3.1\ntied = {str(tied).lower()}\n".encode()
    asked = question(toml, "run.toml", step=1.0)
    model = Transformer(ModelConfig(256, 3, 64, 2, 128, 3.1, tied))
    assert asked.parameters == sum(parameter.numel() for parameter in model.parameters())
    assert (asked.layers, asked.width) == (3, 64)


CONFIG = {"model_type": "gpt2", "n_embd": 32, "n_layer": 3, "n_head": 2, "vocab_size": 300, "n_positions": 64}
CODE = """
import torch
def make(vocab, context):
    layers = torch.nn.ModuleList(torch.nn.Linear(8, 8) for _ in range(5))
    return torch.nn.ModuleDict({"a": torch.nn.Embedding(vocab, 8), "b": layers})
def data_dependent(vocab, context):
    return torch.nn.Embedding(int(torch.ones(3).sum()), 8)
"""


def gpt2(folder: Path) -> int:
    """Write config.json into a folder; return the parameters of the model."""
    from transformers import AutoConfig, AutoModelForCausalLM

    (folder / "tiny").mkdir()
    (folder / "tiny" / "config.json").write_text(json.dumps(CONFIG))
    with torch.device("meta"):
        return sum(p.numel() for p in AutoModelForCausalLM.from_config(AutoConfig.for_model(**CONFIG)).parameters())


def test_question_counts_model_of_transformers_and_its_adapter(tmp_path):
    total, model = gpt2(tmp_path), b'[model]\nkind = "hf"\nname = "tiny"\ncontext = 16\n'
    asked = question(model, "run.toml", step=1.0, here=tmp_path)
    assert (asked.parameters, asked.frozen, asked.layers, asked.width) == (total, 0, 3, 32)
    lora = question(model + b"[lora]\nrank = 2\n", "run.toml", speed=1e-6, here=tmp_path)
    # peft adapts c_attn, 32 -> 96, of each layer.
    assert (lora.parameters, lora.frozen, lora.layers) == (3 * 2 * (32 + 96), total, 3)
    tokens = parse(model).inner.batch * parse(model).inner.accumulate * 16
    assert lora.machines[0].step == (6 * lora.parameters + 4 * total) * tokens / 1e6
    assert plan(lora).memory.model == 16 * lora.parameters + 4 * total


def test_question_counts_model_of_a_function_or_names_the_flag(tmp_path, monkeypatch):
    (tmp_path / "counted_model.py").write_text(CODE)
    model = '[model]\nkind = "module"\nname = "counted_model:{}"\n'
    asked = question(model.format("make").encode(), "run.toml", step=1.0, here=tmp_path)
    assert (asked.parameters, asked.layers) == (256 * 8 + 5 * 72, 5) and "width" in asked.assumed[0]
    with pytest.raises(PlanError, match="meta") as caught:
        question(model.format("data_dependent").encode(), "run.toml", step=1.0, here=tmp_path)
    assert "--parameters" in caught.value.hint


def test_question_takes_method_and_codec_from_manifest():
    asked, run = question(DEMO, "demo.toml", step=1.0), parse(DEMO)
    assert (asked.every, asked.codec, asked.grace) == (
        run.outer.sync_every,
        run.exchange.codec,
        run.exchange.straggler_timeout,
    )
    assert asked.tokens == run.inner.batch * run.inner.accumulate * run.model.context
    assert asked.name == "demo" and asked.peers == 8 and asked.assumed == ()


def test_question_flags_override_manifest():
    asked = question(
        DEMO, "demo.toml", parameters="7M", layers=6, width=512, tokens=99, step=1.0, peers=5, links=["20/10"], rtt=80.0,
        every=7, codec="fp32", memory=2 << 30,
    )  # fmt: skip
    assert (asked.parameters, asked.layers, asked.width, asked.tokens) == (7_000_000, 6, 512, 99)
    assert (asked.every, asked.codec, asked.memory, asked.latency) == (7, "fp32", 2 << 30, 0.04)
    assert asked.machines == (PeerMachine(5, 2.5e6, 1.25e6, 1.0),)


def test_question_parses_links():
    machines = question(**FLAGS, links=["3x50/10", "dsl", "2xfibre@0.5"]).machines
    assert machines == (
        PeerMachine(3, 6.25e6, 1.25e6, 2.0),
        PeerMachine(1, 6.25e6, 1.25e6, 2.0),
        PeerMachine(2, 37.5e6, 37.5e6, 0.5),
    )
    bare = {name: value for name, value in FLAGS.items() if name != "step"}
    assert question(**bare, links=["3x50/10@3", "dsl@0.5"]).machines[0].step == 3.0
    assert question(**FLAGS, peers=3).machines == (PeerMachine(3, 12.5e6, 12.5e6, 2.0),)


def test_question_computes_step_time_from_speed():
    """6 flop for every parameter and token."""
    asked = question(parameters="1e9", layers=10, tokens=1000, speed=2.0)
    assert asked.machines[0].step == 6 * 1e9 * 1000 / 2e12
    assert any("TFLOP/s" in said for said in asked.assumed)


def test_question_parses_counts_with_suffixes():
    assert [count(text) for text in ("350M", "1.3B", "7e9", "1.5t", "12")] == [
        350_000_000, 1_300_000_000, 7_000_000_000, 1_500_000_000_000, 12,
    ]  # fmt: skip


@pytest.mark.parametrize(
    ("flags", "words"),
    [
        ({}, "RUN.toml"),
        ({"parameters": "1B"}, "--layers"),
        ({"parameters": "1B", "layers": 8}, "--step"),
        ({"parameters": "1B", "layers": 8, "speed": 1.0}, "--tokens"),
        ({**FLAGS, "parameters": "big"}, "350M"),
        ({**FLAGS, "parameters": "0"}, "350M"),
        ({**FLAGS, "parameters": "9e99"}, "350M"),
        ({**FLAGS, "codec": "int9"}, "int8"),
        ({**FLAGS, "links": ["modem"]}, "dsl"),
        ({**FLAGS, "links": ["10"]}, "DOWN/UP"),
        ({**FLAGS, "links": ["1.2.3/4"]}, "DOWN/UP"),
        ({**FLAGS, "links": ["0/10"]}, "must be above 0"),
        ({**FLAGS, "links": ["50/10@0"]}, "must be above 0"),
        ({**FLAGS, "links": ["99999x50/10"]}, "10000"),
        ({**FLAGS, "links": ["3x50/10", "2xdsl"], "peers": 8}, "5 peers"),
        ({**FLAGS, "line": "4x50/10", "peers": 3}, "4 peers share the line, but there are 3"),
        ({"toml": b'[model]\nkind = "custom"\n', "step": 1.0}, "--parameters"),
        ({"toml": b'[data]\ntokenizer = "t.json"\n', "step": 1.0}, "--parameters"),
    ],
)
def test_question_refuses_impossible_input(flags, words):
    with pytest.raises(PlanError) as caught:
        question(**flags)
    assert words in f"{caught.value} {caught.value.hint}" and caught.value.hint and caught.value.exit_code == 2


def test_question_reports_bad_manifest_like_other_commands():
    with pytest.raises(ManifestError, match="mine.toml"):
        question(b"[outr]\n", "mine.toml", step=1.0)
