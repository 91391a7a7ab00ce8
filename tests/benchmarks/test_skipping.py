"""Tests of benchmarks/pipeline/skipping.py: a byte model trained with stages skipped works without them."""

from __future__ import annotations

from pathlib import Path

import pytest
from thinwire.node.training.batches import split
from thinwire.node.training.corpus import open_corpus
from thinwire.node.training.inner_optimizer import InnerConfig
from thinwire.node.training.models.tokenizer import load_tokenizer
from thinwire.node.training.models.transformer import ModelConfig, Transformer


@pytest.fixture(scope="module")
def bench(load):
    return load("benchmarks.pipeline.skipping")


def test_skip_plans_have_the_given_length_and_change(bench):
    ways = bench.plans(4, 6, seed=1)
    steps = [next(ways) for _ in range(2 * bench.REPLAN + 1)]
    assert all(len(path) == 4 and path[0] == 0 and len(set(path)) == 4 for paths in steps for path in paths)
    assert steps[0] == steps[bench.REPLAN - 1] != steps[bench.REPLAN] != steps[-1]
    assert {stage for paths in steps for path in paths for stage in path} == set(range(bench.STAGES))


@pytest.mark.soak
@pytest.mark.timeout(300)
def test_half_model_is_good_when_trained_with_skipping(bench, tmp_path):
    text = tmp_path / "text.txt"
    text.write_text(
        "".join(f"{n} plus {m} is {n + m}, and {n} times {m} is {n * m}.\n" for n in range(70) for m in range(70))
    )
    data = split(open_corpus(text, load_tokenizer("bytes", Path()), tmp_path), 32, 1, bench.SHARDS, 0.02)
    ratios = {}
    for length, by_visits in ((6, False), (4, True)):
        model = Transformer(ModelConfig(256, layers=bench.STAGES, width=32, heads=2, context=32), 1)
        inner = InnerConfig(lr=6e-3, warmup=8, schedule="cosine", steps=120)
        sections = bench.train(data, model, inner, length, by_visits, micros=6, batch=4, seed=1)
        full, half = bench.perplexities(sections, data, 2)
        ratios[length] = half / full
        assert full < 4
    assert ratios[4] < 1.15 and ratios[6] > 1.3, ratios
