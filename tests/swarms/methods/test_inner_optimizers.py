"""Inner optimizers, step balancing and data bookkeeping in whole swarms."""

from __future__ import annotations

import msgspec
import pytest
from thinwire.node.state.data_ledger import DataLedger
from thinwire.sims.scenario.faults import QUIET, draw
from thinwire.sims.scenario.parser import parse
from thinwire.sims.scenario.scenario import Scenario
from thinwire.sims.simulation.world import SimulatedRun, simulate
from thinwire.sims.trials.trial import PACE, STALL
from thinwire.swarm.messages.registry import Contribution

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


def sound(run: SimulatedRun) -> SimulatedRun:
    assert not run.violations, run.violations[:5]
    return run


MULOCO = """
[manifest.outer]
method = "muloco"
sync_every = 5
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


def test_muon_swarm_with_int4_learns_through_a_kill() -> None:
    peers = '[[peers]]\nregion = "home"\ncount = 3\nstep = 0.4\n[[faults]]\nat = 12\nkind = "kill"\npeers = [2]\n'
    run = sound(simulate(scenario(MULOCO, peers, duration=30, top='compute = "torch"')))
    rounds = [event for event in run.journal.events if event.name == "round" and event.peer == 0]
    assert len(rounds) >= 8 and rounds[-1].fields["loss"] < rounds[0].fields["loss"] - 0.2
    last = rounds[-2].fields["round"]
    digests = {e.fields["digest"] for e in run.journal.events if e.name == "round" and e.fields["round"] == last}
    assert len(digests) == 1


WORK = """
[manifest.outer]
sync_every = 20
step_balancing = "{work}"
[manifest.exchange]
straggler_timeout = 120
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
    """Return rounds, utilisation of the first peer, and the slow peer's share of tokens, in steady state."""
    run = sound(simulate(scenario(WORK.format(work=work), UNEQUAL, duration=150)))
    late = [event for event in run.journal.events if event.name == "round" and event.at > 60]
    first, last = (next(s for s in samples if s.at > 60) for samples in (run.journal.samples, run.journal.samples[-1:]))
    assert first.peers[0] is not None and last.peers[0] is not None
    tokens = [sum(event.fields["tokens"] for event in late if event.peer == peer) for peer in range(4)]
    rounds = sum(event.peer == 0 for event in late)
    assert all(event.fields["contributors"] == 4 for event in late)
    return rounds, (last.peers[0].busy - first.peers[0].busy) / (last.at - first.at), tokens[3] / sum(tokens)


@pytest.mark.trial
def test_steps_by_power_let_unequal_peers_finish_together() -> None:
    equal, by_power = pace("equal"), pace("by-speed")
    assert by_power[0] > 3 * equal[0]  # the round is no longer as long as H steps of the slow peer
    assert equal[1] < 0.35 and by_power[1] > 0.9  # all peers are busy
    # The slow peer makes 1 of 13 steps, and still contributes to each round.
    assert abs(by_power[2] - 1 / 13) < 0.01 and abs(equal[2] - 1 / 4) < 0.01


ONCE = """
[manifest.data]
exactly_once = true
shards = 24
[manifest.inner]
batch = 3
global_batch = {batch}
[manifest.model]
context = 4
[manifest.outer]
sync_every = 4
method = "{method}"
[manifest.exchange]
straggler_timeout = 1
codec = "{codec}"
"""
MANY = """
[[peers]]
name = "first"
region = "home"
count = 5
step = 0.3
[[peers]]
name = "late"
region = "home"
count = 3
step = 0.4
join = 8
every = 6
"""


CODECS = ("fp32", "int8(block=256)", "int4(block=256)")
MIX = {
    "kill": 3,
    "restart": 9,
    "pause": 6,
    "isolate": 3,
    "partition": 3,
    "loss": 6,
    "reset": 6,
    "bit-rot": 3,
    "half-open": 3,
}


def churn(seed: int, batch: int = 0, method: str = "diloco") -> SimulatedRun:
    """Peers join, die, return, stop and part from the sixth second on, for half a minute; then all is quiet."""
    codec = "topk(k=16,chunk=256)|2bit|rice" if method == "sparseloco" else CODECS[seed % len(CODECS)]
    toml = ONCE.format(batch=batch, codec=codec, method=method)
    faults = tuple(msgspec.structs.replace(fault, at=fault.at + 6.0) for fault in draw(seed, MIX, 8, 30.0 / QUIET))
    run = simulate(
        scenario(toml, MANY, duration=60, seed=seed, top="parameters = 1500"), faults=faults, preset=PACE, stall=STALL
    )
    return run


DATA = {"once", "weight", "aggregate", "round-order", "crash"}
"""Invariants of the data that must hold under all faults; other tests check progress."""


def unkept(run: SimulatedRun) -> list[object]:
    assert sum(event.name == "round" for event in run.journal.events) > 20
    return [violation for violation in run.violations if violation.oracle in DATA]


@pytest.mark.trial
@pytest.mark.parametrize(
    "seed",
    [
        *range(2),
        21,  # a founder of a lineage contributes what it has trained before
        *(pytest.param(seed, marks=pytest.mark.trial) for seed in range(2, 4)),
        *(pytest.param(seed, marks=pytest.mark.soak) for seed in range(4, 200) if seed != 21),
    ],
)
def test_samples_are_used_exactly_once_under_random_faults(seed: int) -> None:
    assert not unkept(churn(seed, batch=0 if seed % 2 else 20))


@pytest.mark.trial
def test_sparse_swarm_uses_samples_exactly_once() -> None:
    assert not unkept(churn(4, method="sparseloco"))


@pytest.mark.trial
def test_data_invariants_find_missing_and_double_booking(monkeypatch: pytest.MonkeyPatch) -> None:
    book = DataLedger.book
    monkeypatch.setattr(DataLedger, "book", lambda *given: None)
    assert "again" in str(unkept(churn(0))[0])

    def twice(ledger: DataLedger, contributors: list[Contribution], members: list[bytes], round: int) -> None:
        doubled = [msgspec.structs.replace(entry, weight=2 * entry.weight) for entry in contributors]
        book(ledger, doubled, members, round)

    monkeypatch.setattr(DataLedger, "book", twice)
    assert "with a gap" in str(unkept(churn(0))[0])


SHARED = """
[manifest.data]
exactly_once = true
shards = 24
[manifest.inner]
batch = 3
global_batch = 11
[manifest.model]
context = 4
[manifest.outer]
sync_every = 4
[[peers]]
name = "first"
region = "home"
count = 3
step = 0.3
[[peers]]
name = "guest"
region = "home"
step = 0.3
join = 9
leave = 25
"""


@pytest.mark.trial
def test_global_batch_stays_constant_as_peers_come_and_go() -> None:
    run = sound(simulate(scenario(SHARED, "", duration=40, seed=3)))
    rounds: dict[int, list[int]] = {}
    for event in run.journal.events:
        if event.name == "round":
            rounds.setdefault(event.fields["round"], []).append(event.fields["tokens"])
    full = {number: tokens for number, tokens in rounds.items() if sum(tokens) == 4 * 11 * 4}
    assert len(rounds) > 20 and len(full) >= len(rounds) - 2  # all but one that a peer left, and one that is not over
    assert {len([n for n in tokens if n]) for tokens in full.values()} == {1, 3, 4}


def test_newcomers_without_leases_train_after_founder_dies() -> None:
    """The founder dies before the first round, so no live peer has a lease."""
    peers = '[[peers]]\nregion = "home"\ncount = 3\nstep = 2.0\n[[faults]]\nat = 7\nkind = "kill"\npeers = [0]\n'
    toml = SHARED[: SHARED.index("[[peers]]")]
    run = simulate(scenario(toml, peers, duration=90, seed=1), preset=PACE)
    last = [event for event in run.journal.events if event.name == "round"][-2:]
    assert {event.peer for event in last} == {1, 2} and sum(event.fields["tokens"] for event in last) == 4 * 11 * 4
    assert not [violation for violation in run.violations if violation.oracle in DATA]


MERGE = """
[manifest.outer]
method = "merge"
sync_every = 60
[manifest.exchange]
codec = "{codec}"
[[peers]]
name = "quick"
region = "home"
count = 2
step = 0.2
[[peers]]
name = "slow"
region = "home"
count = 2
step = 0.5
"""


@pytest.mark.parametrize("codec", ["fp32", "int8(block=256)"])
def test_merge_averages_all_peers_once_at_the_end(codec: str) -> None:
    """Invariants check the average; this test checks that all are in it, and that nothing was sent before."""
    toml = MERGE.format(codec=codec)
    run = sound(simulate(scenario(toml, "", duration=60)))
    rounds = [event for event in run.journal.events if event.name == "round"]
    first, last = ([event for event in rounds if event.fields["round"] == number] for number in (1, 2))
    assert len(rounds) == 8 and all(event.fields["steps"] == 0 and event.fields["contributors"] == 4 for event in first)
    assert all(event.fields["steps"] == 60 and event.fields["contributors"] == 4 for event in last)
    assert last[0].at > 30  # the round waited for the slow peers
    assert len({event.fields["digest"] for event in last}) == 1


def test_merge_leaves_out_dead_peer() -> None:
    toml = MERGE.format(codec="fp32")
    run = sound(simulate(scenario(toml, '[[faults]]\nat = 8\nkind = "kill"\npeers = [3]\n', duration=90)))
    last = [event for event in run.journal.events if event.name == "round"][-3:]
    assert {event.peer for event in last} == {0, 1, 2}
    assert all(event.fields["round"] == 2 and event.fields["contributors"] == 3 for event in last)
