"""Rounds of a process beside the plan for its peers and links."""

import pytest
from thinwire.collectives.costs.plan_outcome import Comparison
from thinwire.node.peer.reports.plan_outcome_check import BYTES, PeerFacts, PlanCheck
from thinwire.node.peer.reports.plan_outcome_text import comparison_text
from thinwire.sims.planner.plan import plan
from thinwire.sims.planner.question import question
from thinwire.swarm.manifest.parser import parse

TOML = "[model]\nlayers = 2\nwidth = 64\n[outer]\nsync_every = 10\n"
MBIT = 125_000


def played(rounds=5, contributors=3):
    check = PlanCheck()
    for number in range(rounds):
        fields = {"round": number, "contributors": contributors, "sync_seconds": 1.0, "steps": 10}
        check.add({**fields, "bytes_up": 1000 * number, "bytes_down": 2000 * number}, at=100.0 + 5.0 * number)
    return check


def compared(check, toml=TOML, speeds=(100.0, 100.0, 50.0), up=10 * MBIT, trips=(0.06, 0.02)):
    mine, *others = [PeerFacts(speed, up, 5 * up) for speed in speeds]
    return {row.name: row for row in check.compare(parse(toml), 114_880, mine, others, trips)}


def test_plan_is_that_of_the_command_for_the_measured_peers_and_links():
    rows = compared(played())
    links = ("2x50/10@0.4", "1x50/10@0.8")  # 10 steps take 4 of 5 seconds; one peer trains half as many tokens
    asked = question(TOML.encode(), parameters="114880", step=1.0, links=links, rtt=40.0)
    answer = plan(asked).round
    assert rows["its exchange"].planned == pytest.approx(answer.agreement + answer.data)
    assert rows["a round"].planned == pytest.approx(answer.computing + answer.agreement + answer.data)
    assert answer.computing == pytest.approx(8.0) and rows["a round"].measured == 5.0
    assert (rows["sent a round"].planned, rows["sent a round"].measured) == (
        pytest.approx(answer.sent + 3 * 500),
        1000.0,
    )
    assert rows["utilisation"].planned == pytest.approx(answer.utilisation)


def test_rounds_of_fragments_are_kept_for_several_cycles():
    check = PlanCheck()
    for turn in range(40 * 9):
        fields = {"contributors": 3, "sync_seconds": 0.1, "steps": 1, "bytes_up": 10 * turn, "bytes_down": 10 * turn}
        check.add({"fragment": turn % 40, **fields}, at=float(turn), fragments=40)
    rows = compared(check, '[outer]\nmethod = "streaming"\nfragments = 40\nsync_every = 40\n')
    assert (rows["a round"].measured, rows["sent a round"].measured) == (40.0, 400.0)


def test_round_without_our_contribution_is_in_no_figure():
    check = played(4)
    check.interrupt()
    fields = {"contributors": 3, "sync_seconds": 1.0, "steps": 10, "bytes_up": 10**9, "bytes_down": 10**9}
    check.add(fields, at=10_000.0)
    assert compared(check)["sent a round"].measured == 1000.0
    assert not compared(played(3)) and compared(check)


def test_without_rates_only_bytes_are_compared():
    assert tuple(compared(played(), up=0)) == BYTES


@pytest.mark.parametrize(
    ("rounds", "contributors", "speeds", "toml"),
    [
        (3, 3, (100.0, 100.0), TOML),
        (5, 1, (100.0, 100.0), TOML),
        (5, 3, (100.0,), TOML),
        (5, 3, (100.0, 100.0), '[outer]\nmethod = "buffered-async"\n'),
    ],
)
def test_too_few_rounds_no_other_peer_and_methods_without_a_plan_have_no_comparison(rounds, contributors, speeds, toml):
    assert not compared(played(rounds, contributors), toml, speeds)


def test_every_method_with_rounds_of_all_peers_can_be_compared():
    for method in ("diloco", "noloco", "eager", "sparseloco", "powersgd", "streaming"):
        assert len(compared(played(), f'[outer]\nmethod = "{method}"\n')) == 5, method


def test_text_has_units():
    rows = [Comparison("a round", "seconds", 2.0, 2.5, 1.25), Comparison("utilisation", "part", 0.8, 0.75, 0.94)]
    rows.append(Comparison("sent a round", "bytes", 1e6, 2e6, 2.0))
    wanted = "a round 2.5 s (planned 2 s), utilisation 75 % (planned 80 %), sent a round 2.0 MB (planned 1.0 MB)"
    assert comparison_text(rows) == wanted
