"""Speed of a group of hosts in virtual time: with even paths, planned paths, and a third of the stages skipped.

python -m benchmarks.pipeline.groupplans      # half a minute on one core
"""

from __future__ import annotations

from statistics import mean

from thinwire.sims.scenario.scenario import PeerSpec, Scenario
from thinwire.sims.simulation.world import simulate

RUN = """[outer]
method = "streaming"
sync_every = 6
[model]
layers = 3
width = 8
heads = 2
context = 8
[inner]
batch = 1
warmup = 0
[exchange]
straggler_timeout = 1.0
[pipeline]
stages = 3
codec = "fp32"
microbatches = 8
max_in_flight = 8
"""
PATHS = {
    "even": "rebalance = 0.0\n",
    "planned": 'paths = "planned"\n',
    "a third skipped": 'paths = "planned"\nskip_fraction = 0.34\n',
}
LAST = 4
"""Number of the last turns of the origin's fragment whose speed is averaged."""


def peer(index: int, step: float, stage: int | None) -> PeerSpec:
    """A peer with a cable link, whose part of an inner step takes `step` seconds."""
    name = f"peer-{index}"
    return PeerSpec(index, name, "Oregon", step, up=2.5e6, down=37.5e6, join=0.2 * index, stage=stage, origin=1)


def speed(kind: str, slow: float) -> float:
    """Return the tokens per second that the group's origin reports for its last turns.

    `slow`: seconds of a step at one of its hosts; the others need one.
    """
    hosts = [peer(index, slow if index == 3 else 1.0, 1 + index % 2) for index in range(2, 7)]
    peers = (peer(0, 0.5, None), peer(1, 0.1, 0), *hosts)
    run = simulate(Scenario("plans", 3, 40.0, RUN + PATHS[kind], peers, compute="torch", interval=40.0))
    assert not run.violations, run.violations
    rounds = [event for event in run.journal.events if event.name == "round" and event.peer == 1]
    return mean(float(event.fields["tokens_per_second"]) for event in rounds[-LAST:])


def main() -> None:
    """Print a table."""
    print("| paths | tokens/s | with one host four times as slow |\n|---|---|---|")
    for kind in PATHS:
        print(f"| {kind} | {speed(kind, 1.0):.0f} | {speed(kind, 4.0):.0f} |", flush=True)


if __name__ == "__main__":
    main()
