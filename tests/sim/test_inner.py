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


WORK = """
[manifest.outer]
steps = 20
work = "{work}"
[manifest.exchange]
grace = 120
codec = "fp32"
"""
UNEQUAL = """
[[peers]]
name = "fast"
region = "home"
count = 3
step = 0.4
[[peers]]
name = "slow"
region = "home"
step = 1.6
"""


def pace(work: str) -> tuple[int, float, float]:
    """Rounds, how busy the first peer was, and the part of all tokens that is the slow one's; once all know their speed."""
    run = sound(simulate(scenario(WORK.format(work=work), UNEQUAL, duration=240)))
    late = [event for event in run.journal.events if event.name == "round" and event.at > 60]
    first, last = (next(s for s in samples if s.at > 60) for samples in (run.journal.samples, run.journal.samples[-1:]))
    assert first.peers[0] is not None and last.peers[0] is not None
    tokens = [sum(event.fields["tokens"] for event in late if event.peer == peer) for peer in range(4)]
    rounds = sum(event.peer == 0 for event in late)
    assert all(event.fields["contributors"] == 4 for event in late)
    return rounds, (last.peers[0].busy - first.peers[0].busy) / (last.at - first.at), tokens[3] / sum(tokens)


def test_unequal_peers_arrive_together_by_power() -> None:
    equal, by_power = pace("equal"), pace("by-power")
    assert by_power[0] > 3.5 * equal[0]  # the round no longer lasts as long as the slow one's H steps
    assert equal[1] < 0.35 and by_power[1] > 0.9  # nobody idles
    # 1 of 13 steps are the slow one's; each round still has its contribution.
    assert abs(by_power[2] - 1 / 13) < 0.01 and abs(equal[2] - 1 / 4) < 0.01
