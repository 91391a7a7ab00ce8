"""A peer of thinwire that trains through the Python interface; alone, with "toml" null. Options as in loss.py."""

import json
import sys
import time
from typing import Any

import thinwire
import torch
from thinwire.compression.compile_kernels import warm_up

from benchmarks.peers.lesson import Lesson
from benchmarks.peers.turns import listen, say, until


def main() -> None:
    """Join, train until the run or so many steps are over, say how it went."""
    options = json.loads(sys.argv[1])
    lesson = Lesson(options)
    warm_up()
    say(loaded=True)
    request = listen()
    if options["toml"] is None:
        train(lesson, options, None)
        return
    host = options["hosts"][options["rank"]]
    place: dict[str, Any] = {"host": "127.0.0.1"}
    if options["links"]:
        place = {"host": host, "port": 7400, "ports": "7401-7499", "advertise": f"{host}:7400"}
    with thinwire.join(options["toml"] or request["invite"], home=options["home"], **place) as swarm:
        say(invite=swarm.invite)
        train(lesson, options, swarm)


def train(lesson: Lesson, options: dict[str, Any], swarm: thinwire.Swarm | None) -> None:
    """The training loop that anyone could have."""
    missing, waited = 0, 0.0

    optimizer: torch.optim.Optimizer = lesson.inner
    if swarm is not None:

        def note(report: thinwire.RoundReport) -> None:
            nonlocal missing, waited
            missing += len(report.missing) + (not report.committed)
            waited += report.seconds
            lesson.snapshot(swarm.outer())

        optimizer = swarm.wrap(lesson.model, lesson.inner, batch=options["batch"], on_round=note)
    say(ready=True)
    moment = listen()["at"]
    until(moment)
    lesson.begin()
    while lesson.step < options["steps"] and not (swarm is not None and swarm.done):
        lesson.gradients()
        lesson.clip()
        optimizer.step()
        lesson.rest()
    end = time.monotonic()
    moments = lesson.save(options["snapshots"])
    digest = "" if swarm is None else swarm.digest
    say(end=end, steps=lesson.step, moments=moments, missing=missing, waited=waited, digest=digest)
    listen()


if __name__ == "__main__":
    main()
