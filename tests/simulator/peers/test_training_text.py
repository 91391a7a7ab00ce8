"""Text on which simulated peers train."""

from __future__ import annotations

import numpy as np
from thinwire.node.training.batches import trial_samples
from thinwire.node.training.local_learner import Computing, build_learner
from thinwire.sims.peers.training_text import LINES, training_text
from thinwire.swarm.manifest.parser import parse

BATCH, KEYS = 8, 12
TOML = f"""
[model]
layers = 1
width = 32
heads = 2
context = 32
[inner]
batch = {BATCH}
warmup = 0
"""


def test_all_lines_of_the_text_differ_and_it_is_the_same_each_time():
    text = training_text()
    assert len(set(text.splitlines())) == LINES and text == training_text()


def test_training_on_some_samples_lowers_their_loss_more_than_that_of_others(tmp_path):
    """Else no newcomer passes its trial in a simulated open run."""
    text = tmp_path / "text.txt"
    text.write_text(training_text())
    learner = build_learner(
        parse(TOML), Computing("cpu", 1), data=text, cache=tmp_path, here=tmp_path, clock=lambda: 0.0
    )
    learner.trainer.run_steps(60)
    base, better = learner.parameters(), 0
    for number in range(KEYS):
        peer = bytes([number]) * 32
        learner.write(base)
        learner.trainer.batches.repeat(trial_samples(learner.split, BATCH, peer, 1))
        learner.trainer.run_steps(10)
        step = (0.2 * (base - learner.parameters())).astype(np.float32)
        assigned, other = learner.score(base, step, peer, 1, b"salt")
        better += assigned > max(other, 0.0)
    assert better >= KEYS - 1
