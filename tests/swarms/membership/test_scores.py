"""Members of open runs that lie after their trial: the others leave their contributions out, in virtual time."""

from __future__ import annotations

from collections.abc import Mapping

import pytest
from kit.outer.open_runs import invite, name_of, noise, replaces, told_at, update_of
from kit.scenarios import SPARSE, events_of, manifest_of, swarm_of
from thinwire.collectives.consensus.proposal import DISTRUSTED
from thinwire.sims.peers import lies
from thinwire.sims.scenario.faults import Fault
from thinwire.sims.simulation.world import SimulatedRun, simulate
from thinwire.sims.trials.trial import PACE, STALL

PEERS, LIAR = 6, 5
TURNS = 40.0
"""Second at which the liar begins to lie: it has been an honest member for about twenty rounds."""

WITHIN = 14
"""Most rounds with its contribution after that."""

DENSE = {"outer": "sync_every = 4", "codec": "fp32"}

LIES = {
    "flip": None,
    "zero": None,
    "noise": replaces(noise),
    "inner": replaces(lambda process, values: -0.1 * update_of(process, 1, values.size)),
    "shaky": replaces(lambda process, values: values + 0.3 * noise(process, values)),
}


@pytest.fixture
def played(monkeypatch):
    """Return a function that plays an open run of invited peers, the last one of which may lie for `lying` seconds."""

    def play(
        lie: str = "",
        *,
        peers: int = PEERS,
        at: float = TURNS,
        lying: float = 500.0,
        tables: str = "",
        method: Mapping[str, str] = DENSE,
        **more,
    ) -> SimulatedRun:
        toml = manifest_of(**method, tables=f"[admission]\nmode = 'open'\n{tables}")
        faults = (Fault(at, "liar", (peers - 1,), lying, 0.0, lie),) if lie else ()
        scenario = swarm_of(peers, toml, **{"seconds": 80.0, "parameters": 2_000, "faults": faults, **more})
        with monkeypatch.context() as patch:
            invite(patch, peers)
            if LIES.get(lie):
                patch.setitem(lies.IMPLEMENTED, lie, LIES[lie])
            run = simulate(scenario, preset=PACE, stall=STALL)
        assert run.violations == (), run.violations
        return run

    return play


def _out(run: SimulatedRun, peer: int = 0) -> dict[str, list[int]]:
    """Return the rounds without the contribution of a distrusted member, by the start of its id, as a peer tells it."""
    found: dict[str, list[int]] = {}
    for event in events_of(run, "round", peer):
        for other, reason in event.fields["missing"].items():
            if reason == DISTRUSTED:
                found.setdefault(other, []).append(event.fields["round"])
    return found


def _turn(run: SimulatedRun, at: float = TURNS) -> int:
    """Return the last round before the liar began."""
    return max(event.fields["round"] for event in events_of(run, "round", 0) if event.at < at)


@pytest.mark.trial
@pytest.mark.parametrize("lie", ["flip", "zero", "noise", "inner"])
def test_member_that_begins_to_lie_is_soon_left_out_but_stays_a_member(played, lie):
    run = played(lie)
    out, name = _out(run), name_of(LIAR)[:8]
    assert out.keys() == {name}
    rounds = {event.fields["round"]: event.fields for event in events_of(run, "round", 0)}
    first, last = min(out[name]), max(rounds)
    assert _turn(run) < first <= _turn(run) + WITHIN
    if lie != "noise":  # A step along noise lowers the loss now and then.
        assert out[name] == [*range(first, last + 1)]
    assert all(name in rounds[number]["members"] and rounds[number]["contributors"] == 5 for number in out[name])
    told = [event for event in events_of(run, "withdrawn") if event.fields["round"] == first]
    assert {event.peer for event in told} == {*range(PEERS)}
    assert all(event.fields["peer"] == name_of(LIAR) and DISTRUSTED in event.fields["detail"] for event in told)


@pytest.mark.parametrize("lie", ["nan", "inf"])
def test_member_whose_contributions_cannot_be_read_is_left_out(played, lie):
    run = played(lie)
    after = [event.fields for event in events_of(run, "round", 0) if event.at > TURNS + 5.0]
    assert len(after) > 10 and all(name_of(LIAR)[:8] in fields["missing"] for fields in after)


@pytest.mark.parametrize(
    ("lie", "exchange"),
    [
        ("flip10", ""),
        pytest.param("rare", "", marks=pytest.mark.trial),
        pytest.param("zero", "", marks=pytest.mark.trial),
        pytest.param("flip", "collective = 'sparse-butterfly'", marks=pytest.mark.trial),
    ],
)
def test_liar_among_members_is_left_out_of_sparse_rounds(played, lie, exchange):
    run = played(lie, method={**SPARSE, "exchange": exchange})
    out = _out(run)
    assert out.keys() == {name_of(LIAR)[:8]}
    assert _turn(run) < min(out[name_of(LIAR)[:8]]) <= _turn(run) + WITHIN


@pytest.mark.trial
def test_no_honest_member_is_left_out_of_sparse_rounds(played):
    run = played(method=SPARSE, seconds=160.0)
    assert len(events_of(run, "round", 0)) > 60 and len(events_of(run, "trial")) > 100
    assert not any(_out(run, peer) for peer in range(PEERS))


@pytest.mark.trial
def test_status_shows_scores_and_since_when_a_member_is_out(played, monkeypatch):
    told: list[dict[str, str]] = []
    told_at(75.0, told, monkeypatch)
    first = min(_out(played("flip"))[name_of(LIAR)[:8]])
    assert told[0][name_of(LIAR)].startswith(f"out since round {first} ({DISTRUSTED}): score ")
    assert told[0][name_of(1)].startswith("score +")


@pytest.mark.trial
def test_liar_that_repents_counts_again_when_its_contributions_lower_the_loss(played):
    """It is restarted as an honest peer."""
    run = played("flip", lying=30.0, seconds=130.0)
    out, rounds = _out(run)[name_of(LIAR)[:8]], [event.fields["round"] for event in events_of(run, "round", 0)]
    assert max(out) < max(rounds) - 5
    again = [event for event in events_of(run, "counts_again", 0) if event.fields["peer"] == name_of(LIAR)]
    assert again and again[-1].fields["round"] > max(out)


def test_two_of_three_members_leave_the_third_one_out(played):
    assert _out(played("flip", peers=3)).keys() == {name_of(2)[:8]}


def test_one_of_two_members_cannot_leave_the_other_one_out(played):
    assert not _out(played("flip", peers=2))


@pytest.mark.trial
@pytest.mark.parametrize("seed", [0, *(pytest.param(seed, marks=pytest.mark.soak) for seed in range(1, 30))])
@pytest.mark.parametrize("lie", [pytest.param("", marks=pytest.mark.soak), "shaky"])
def test_honest_members_are_never_left_out_although_the_model_has_converged(played, lie, seed):
    """After about twenty rounds the loss of the stub model is its noise. "shaky": one peer adds noise to its updates."""
    run = played(lie, at=2.0, seed=seed, seconds=160.0)
    assert len(events_of(run, "round", 0)) > 60 and len(events_of(run, "trial")) > 100
    assert not any(_out(run, peer) for peer in range(PEERS))


@pytest.mark.trial
@pytest.mark.timeout(240)
@pytest.mark.parametrize("method", [DENSE, SPARSE])
def test_members_that_train_a_real_model_leave_a_liar_out(played, method):
    model = "[model]\nlayers = 1\nwidth = 16\nheads = 2\ncontext = 16\n[inner]\nbatch = 4\n"
    run = played("flip", peers=4, tables=model, compute="torch", method=method)
    assert _out(run).keys() == {name_of(3)[:8]}
    assert min(_out(run)[name_of(3)[:8]]) <= _turn(run) + WITHIN
