"""What peers train with and how much, in whole swarms in virtual time."""

from __future__ import annotations

from thinwire.sims.scenario import Scenario
from thinwire.sims.scenariofile import parse
from thinwire.sims.world import Run, simulate

HEAD = """
name = "inner"
duration = {duration}
seed = {seed}
{top}
[links]
regions = ["home"]
rtt_ms = [[20]]
"""


def scenario(manifest: str, peers: str, *, duration: float = 60, seed: int = 1, top: str = "") -> Scenario:
    return parse(HEAD.format(duration=duration, seed=seed, top=top) + manifest + peers)


def sound(run: Run) -> Run:
    assert not run.violations, run.violations[:5]
    return run


MULOCO = """
[manifest.outer]
method = "muloco"
steps = 5
[manifest.model]
layers = 1
width = 16
heads = 2
context = 16
[manifest.inner]
batch = 4
warmup = 2
[manifest.exchange]
codec = "int4(block=256)"
"""


def test_muon_trains_a_swarm_with_four_bits_over_a_kill() -> None:
    peers = '[[peers]]\nregion = "home"\ncount = 3\nstep = 0.4\n[[faults]]\nat = 20\nkind = "kill"\npeers = [2]\n'
    run = sound(simulate(scenario(MULOCO, peers, duration=45, top='compute = "torch"')))
    rounds = [event for event in run.journal.events if event.name == "round" and event.peer == 0]
    assert len(rounds) >= 12 and rounds[-1].fields["loss"] < rounds[0].fields["loss"] - 0.3
    last = rounds[-2].fields["round"]
    digests = {e.fields["digest"] for e in run.journal.events if e.name == "round" and e.fields["round"] == last}
    assert len(digests) == 1
