"""A peer of thinwire that trains through the Python interface; alone, with "toml" null. Options as in loss.py."""

import json
import sys
import time
from typing import Any

import thinwire
import torch
from thinwire.compression.compile_kernels import warm_up

from benchmarks.peers.shared_training import SharedTraining
from benchmarks.peers.turns import listen, say, until


def main() -> None:
    """Join, train to the end of the run or of the steps, and report."""
    options = json.loads(sys.argv[1])
    training = SharedTraining(options)
    warm_up()
    say(loaded=True)
    request = listen()
    if options["toml"] is None:
        train(training, options, None)
        return
    host = options["hosts"][options["rank"]]
    place: dict[str, Any] = {"host": "127.0.0.1"}
    if options["links"]:
        place = {"host": host, "port": 7400, "ports": "7401-7499", "advertise": f"{host}:7400"}
    with thinwire.join(options["toml"] or request["invite"], home=options["home"], **place) as swarm:
        say(invite=swarm.invite)
        train(training, options, swarm)


def train(training: SharedTraining, options: dict[str, Any], swarm: thinwire.Swarm | None) -> None:
    """Train in a loop as any user writes it."""
    missing, waited = 0, 0.0

    optimizer: torch.optim.Optimizer = training.inner
    if swarm is not None:

        def note(report: thinwire.RoundReport) -> None:
            nonlocal missing, waited
            missing += len(report.missing) + (not report.committed)
            waited += report.seconds
            training.snapshot(swarm.outer())

        optimizer = swarm.wrap(training.model, training.inner, batch=options["batch"], on_round=note)
    say(ready=True)
    moment = listen()["at"]
    until(moment)
    training.begin()
    while training.step < options["steps"] and not (swarm is not None and swarm.done):
        training.gradients()
        training.clip()
        optimizer.step()
        training.rest()
    end = time.monotonic()
    moments = training.save(options["snapshots"])
    digest = "" if swarm is None else swarm.digest
    say(end=end, steps=training.step, moments=moments, missing=missing, waited=waited, digest=digest)
    listen()


if __name__ == "__main__":
    main()
