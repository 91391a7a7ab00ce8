"""One peer that trains on its shard alone, for the same steps: the baseline of a local swarm.

It runs in a separate process beside the swarm, so that it has the same share of the machine. It writes events like a
daemon: "held_out" (round, loss) before, during and after; "alone" (round, loss) after each stretch of H steps, numbered
like the swarm's rounds.
"""

from __future__ import annotations

import argparse
import time
from collections.abc import Callable, Sequence
from pathlib import Path

from thinwire.node.runtime.console import record_traceback, tell
from thinwire.node.runtime.device import choose_device
from thinwire.node.runtime.event_log import EventLog
from thinwire.node.training.batches import shards_of
from thinwire.node.training.local_learner import Computing, LocalLearner, build_learner
from thinwire.swarm.identity.errors import HintedError
from thinwire.swarm.identity.regular_file import content_of
from thinwire.swarm.manifest.parser import parse

SAMPLES, BATCH = 256, 32
"""Held-out samples of a measurement, and how many of them are a batch."""

WORK = 4e12
"""Most floating-point operations of a measurement; a large model gets fewer samples."""

Say = Callable[[str, dict[str, object]], object]
"""Function that writes an event."""


def evaluate(training: LocalLearner) -> float:
    """Return the held-out loss of the present model in nats per token; NaN if nothing is held out.

    All measurements of a run use the same samples.
    """
    sample = 2 * training.size * training.manifest.model.context
    samples = max(1, min(SAMPLES, int(WORK // sample)))
    size = min(BATCH, samples)
    return training.trainer.evaluate(training.split.evaluation(size, samples // size))


def train(training: LocalLearner, group: Sequence[bytes], me: bytes, rounds: int, say: Say) -> None:
    """Make the inner steps of `rounds` rounds on the shards that `me` has in `group`, without an exchange."""
    manifest = training.manifest
    data, seed = manifest.data, manifest.run.seed
    training.trainer.batches.assign(shards_of(seed, data.shards, group, me))
    say("held_out", {"round": 0, "loss": evaluate(training)})
    looks = {max(1, round(rounds * quarter / 4)) for quarter in (1, 2, 3)} | {rounds}
    for number in range(1, rounds + 1):
        report = training.trainer.run_steps(manifest.steps_after(number) - manifest.steps_after(number - 1))
        if report.steps:  # a round may have no steps
            say("alone", {"round": number, "loss": report.loss, "tokens_per_second": report.tokens / report.seconds})
        if number in looks:
            say("held_out", {"round": number, "loss": evaluate(training)})


def main(arguments: Sequence[str]) -> int:
    """Run the process. Return its exit code: 0 done, else that of the error."""
    parser = argparse.ArgumentParser(prog="alone")
    parser.add_argument("run", type=Path)
    parser.add_argument("--events", type=Path, required=True)
    parser.add_argument("--cache", type=Path, required=True)
    parser.add_argument("--data")
    parser.add_argument("--model", default="")
    parser.add_argument("--from", dest="weights", type=Path, action="append", default=[])
    parser.add_argument("--device", required=True)
    parser.add_argument("--compile", action="store_true")
    parser.add_argument("--gradient-checkpointing", action="store_true")
    parser.add_argument("--threads", type=int, required=True)
    parser.add_argument("--rounds", type=int, required=True)
    parser.add_argument("--me", type=bytes.fromhex, required=True)
    parser.add_argument("--group", type=lambda text: [bytes.fromhex(part) for part in text.split(",")], required=True)
    options = parser.parse_args(arguments)
    log = EventLog(options.events)

    def say(kind: str, fields: dict[str, object]) -> None:
        log.append(kind, fields, at=time.monotonic(), wall=time.time())

    try:
        training = build_learner(
            parse(content_of(options.run), options.run.name),
            Computing(
                choose_device(options.device),
                options.threads,
                compiled=options.compile,
                checkpointing=options.gradient_checkpointing,
            ),
            data=options.data,
            cache=options.cache,
            here=options.run.parent,
            clock=time.perf_counter,
            weights=options.weights,
            model=options.model,
        )
        train(training, options.group, options.me, options.rounds, say)
    except HintedError as error:
        record_traceback(error, None, show=False)
        tell(str(error), error.hint)
        return error.exit_code
    finally:
        log.close()
    return 0
