import pytest
from thinwire.sims.peers import byzantine
from thinwire.sims.scenario.faults import _SHAPES, KINDS, LIES, QUIET, draw
from thinwire.sims.simulation.fault_injector import FaultInjector

EVERYTHING = dict.fromkeys(KINDS, 6.0)


def test_every_fault_kind_can_be_drawn() -> None:
    assert _SHAPES.keys() == KINDS.keys()
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


def test_unknown_fault_kind_is_named() -> None:
    with pytest.raises(ValueError, match="'quake'"):
        draw(0, {"quake": 1.0}, 4, 10.0)


def test_each_kind_of_lie_is_implemented():
    assert byzantine.IMPLEMENTED.keys() == LIES.keys()


def test_each_kind_of_fault_is_implemented():
    assert FaultInjector(net=None, machines=()).kinds == KINDS.keys()
