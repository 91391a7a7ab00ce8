import pytest
from thinwire.sims.peers import lies
from thinwire.sims.scenario.faults import (
    ALL_LIES,
    FLAP,
    HARSH,
    KINDS,
    QUIET,
    SEVERE,
    SHAPES,
    Fault,
    draw,
    flaps,
    outages,
)
from thinwire.sims.simulation.fault_injector import FaultInjector
from thinwire.sims.trials import trial

EVERYTHING = dict.fromkeys(KINDS, 6.0)


def test_every_fault_kind_can_be_drawn() -> None:
    assert SHAPES.keys() == KINDS.keys()
    assert {fault.kind for fault in draw(1, EVERYTHING, 20, 600.0, liars=("nan",))} == KINDS.keys()


@pytest.mark.parametrize("seed", range(30))
def test_drawn_faults_are_ordered_and_leave_the_end_quiet(seed: int) -> None:
    faults = draw(seed, EVERYTHING, 20, 120.0, liars=("nan",))
    assert faults == tuple(sorted(faults, key=lambda fault: fault.at))
    assert all(0 < fault.at and fault.until <= QUIET * 120.0 + 1e-9 for fault in faults)
    assert all(len(set(fault.peers)) == len(fault.peers) and max(fault.peers) < 20 for fault in faults)
    killed = {fault.peers[0] for fault in faults if fault.kind == "kill"}
    liars = {fault.peers[0] for fault in faults if fault.kind == "liar"}
    assert not killed & liars and not (killed | liars) & {0, 1} and len(killed | liars) <= 6


def test_drawn_faults_depend_only_on_seed() -> None:
    assert draw(3, EVERYTHING, 9, 90.0) == draw(3, EVERYTHING, 9, 90.0) != draw(4, EVERYTHING, 9, 90.0)


def test_fault_rate_changes_only_its_own_kind() -> None:
    more = draw(3, EVERYTHING | {"reset": 60.0}, 9, 90.0)
    keep = [fault for fault in draw(3, EVERYTHING, 9, 90.0) if fault.kind != "reset"]
    assert [fault for fault in more if fault.kind != "reset"] == keep


@pytest.mark.parametrize("peers", [1, 2, 3])
def test_faults_can_be_drawn_for_few_peers(peers: int) -> None:
    assert all(max(fault.peers) < peers for fault in draw(0, EVERYTHING, peers, 600.0, liars=("nan",)))


def test_drawn_majority_is_lost_once_and_leaves_the_first_two_peers() -> None:
    for seed in range(20):
        lost = [fault for fault in draw(seed, {"majority-lost": 60.0}, 7, 120.0) if fault.kind == "majority-lost"]
        assert len(lost) == 1 and len(lost[0].peers) == 4 and not set(lost[0].peers) & {0, 1}
    assert draw(0, {"majority-lost": 60.0}, 4, 120.0) == (), "of four peers, three are too many"


def test_drawn_outage_names_all_peers() -> None:
    assert {fault.peers for fault in draw(0, {"outage": 6.0}, 5, 600.0)} == {(0, 1, 2, 3, 4)}


def test_outage_kills_all_before_the_first_returns_in_another_order() -> None:
    times = outages(Fault(3.0, "outage", (0, 2, 3, 4, 6), 10.0))
    assert times.keys() == {0, 2, 3, 4, 6} and times == outages(Fault(3.0, "outage", (0, 2, 3, 4, 6), 10.0))
    deaths, returns = ([times[peer][end] for peer in times] for end in range(2))
    assert len(set(deaths)) == len(set(returns)) == 5
    assert 0.0 <= min(deaths) and max(deaths) < min(returns) and max(returns) < 10.0
    assert sorted(times, key=lambda peer: times[peer][0]) != sorted(times, key=lambda peer: times[peer][1])


@pytest.mark.parametrize("seconds", [0.1, 3.0, 20.0, 100.0])
def test_flap_cuts_and_mends_by_turns_and_ends_mended(seconds: float) -> None:
    moments = flaps(Fault(7.0, "flap", (0, 1), seconds))
    assert moments == flaps(Fault(7.0, "flap", (0, 1), seconds)) and len(moments) % 2 == 0
    assert moments[0] == 0.0 and moments[-1] <= seconds
    pauses = [later - earlier for earlier, later in zip(moments, moments[1:], strict=False)]
    assert all(pause <= FLAP[1] for pause in pauses) and all(FLAP[0] <= pause for pause in pauses[:-1])


def test_harsh_mix_has_the_severe_kinds_that_trials_do_not_draw() -> None:
    assert SEVERE.keys() < HARSH.keys() <= KINDS.keys() and "liar" not in HARSH
    kinds = {fault.kind for seed in range(60) for fault in trial.trial(seed).faults}
    assert not kinds & SEVERE.keys() and len(kinds) == len(KINDS) - len(SEVERE)


def test_unknown_fault_kind_is_named() -> None:
    with pytest.raises(ValueError, match="'quake'"):
        draw(0, {"quake": 1.0}, 4, 10.0)


def test_each_kind_of_lie_is_implemented():
    assert lies.IMPLEMENTED.keys() == ALL_LIES.keys()


def test_each_kind_of_fault_is_implemented():
    assert FaultInjector(net=None, machines=()).kinds == KINDS.keys()
