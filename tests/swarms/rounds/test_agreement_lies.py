"""Swarms of four with one member that lies about the agreement."""

import pytest
from kit.histories import digests_of, played
from kit.scenarios import manifest_of, swarm_of
from thinwire.node.membership.join import BANNED_HINT
from thinwire.node.peer.peer_services import Banned
from thinwire.sims.scenario.faults import VOTE_LIES, Fault
from thinwire.sims.simulation.world import SimWorld

LIAR, BEGINS, SECONDS = 3, 5.0, 30.0
HONEST = [0, 1, 2]


def lied(lie, *, quorum='"two-thirds"', peers=4, liar=LIAR, more=(), seconds=SECONDS, parameters=2_000, exchange=""):
    lines = f"[exchange]\nquorum = {quorum}\n{exchange}"
    toml = manifest_of("sync_every = 4\n", codec="fp32").replace("[exchange]\n", lines, 1)
    assert "quorum" in toml
    faults = (*([Fault(BEGINS, "liar", (liar,), 100.0, 0.0, lie)] if lie else []), *more)
    return played(swarm_of(peers, toml, seconds=seconds, seed=2, faults=faults, parameters=parameters))


@pytest.mark.parametrize("lie", sorted(VOTE_LIES))
def test_honest_peers_have_one_digest_in_each_round_and_continue(lie):
    run = lied(lie)
    assert not run.violations
    digests = digests_of(run, *HONEST)
    assert all(len(found) == 1 for found in digests.values())
    assert {slot.lineage for slot in digests} == {""}
    assert max(slot.round for slot in digests) >= (4 if lie in ("divide", "false-claim") else 6)


@pytest.mark.trial
@pytest.mark.parametrize("lie", sorted(VOTE_LIES))
def test_lies_beside_a_partition_make_no_second_digest(lie):
    """Two members cannot reach each other for a while, so ballots are repeated."""
    run = lied(lie, more=(Fault(8.0, "one-way", (0, 1), 6.0), Fault(16.0, "isolate", (2,), 4.0)), seconds=45.0)
    assert all(len(found) == 1 for found in digests_of(run, *HONEST).values())
    assert "agreement" not in {violation.oracle for violation in run.violations}


@pytest.mark.parametrize(
    ("lie", "reason"), [("double-vote", "two votes in round"), ("two-proposals", "two proposals in round")]
)
@pytest.mark.parametrize("quorum", ["0.5", '"two-thirds"'])
def test_peer_that_signs_two_statements_is_banned_for_good(lie, reason, quorum):
    if (lie, quorum) == ("double-vote", "0.5"):
        quorum = "0.6"  # With half and the most senior member two votes suffice, and its votes may come later.
    run = lied(lie, quorum=quorum, seconds=40.0)  # The liar leads first in round 12.
    assert not run.violations
    liar = next(event.fields["peer"] for event in run.journal.of("start") if event.peer == LIAR)
    bans = [event for event in run.journal.of("banned") if event.peer in HONEST]
    assert {event.peer for event in bans} == set(HONEST)
    assert all(event.fields["peer"] == liar and str(event.fields["detail"]).startswith(reason) for event in bans)
    last = max(event.at for event in bans)
    later = [event for event in run.journal.of("round") if event.at > last + 5.0]
    assert later and all(event.fields["peers"] == len(HONEST) for event in later)
    if quorum == '"two-thirds"':  # It stays in name, so that a liar is still tolerated.
        assert all(event.fields["missing"] == {liar[:8]: "banned"} for event in later)
    else:
        assert all(liar[:8] not in event.fields["members"] for event in later)


def losses(run):
    """Return the loss of the first peer after each round."""
    return {event.fields["round"]: event.fields["loss"] for event in run.journal.of("round") if event.peer == 0}


def test_leader_that_reports_a_false_vote_of_its_own_does_not_change_the_results():
    """It leaves out promises, so its results may be decided. No honest peer votes for them: their norms are too large."""
    run = lied("false-vote", seconds=40.0)
    refused = [event for event in run.journal.of("result_refused") if event.peer in HONEST]
    assert not run.violations and refused, "the attack was made"
    found, clean = losses(run), losses(lied("", seconds=40.0))
    assert max(found) >= 4 and found == {number: pytest.approx(clean[number], rel=0.5) for number in found}


def test_leader_that_reports_a_vote_for_bounded_false_results_does_not_change_the_results():
    """No owner has claimed them, so no honest peer votes for them."""
    found, clean = losses(lied("bounded-vote", seconds=40.0)), losses(lied("", seconds=40.0))
    assert max(found) >= 8 and found == {number: clean[number] for number in found}


def test_leader_that_reports_a_vote_of_its_own_takes_no_member_out():
    """Of three members, one that lies could stop all rounds. No honest peer adopts other members because of one vote."""
    run = lied("false-members", seconds=40.0)
    rounds = [event for event in run.journal.of("round") if event.peer in HONEST]
    assert not run.violations and max(event.fields["round"] for event in rounds) >= 8
    assert all(len(event.fields["members"]) == 4 for event in rounds)


@pytest.mark.parametrize("quorum", ['"two-thirds"', "0.5"])
def test_leader_brings_in_no_members_with_keys_that_it_has_made(quorum):
    """Only peers with an admission token become members. Otherwise one liar of four would outvote all others."""
    run, clean = lied("made-members", quorum=quorum, seconds=50.0), lied("", quorum=quorum, seconds=50.0)
    rounds = [event for event in run.journal.of("round") if event.peer in HONEST]
    assert not run.violations and max(losses(run)) >= 0.7 * max(losses(clean)), "it leads four rounds"
    assert all(len(event.fields["members"]) == 4 for event in rounds)


@pytest.mark.trial
@pytest.mark.parametrize("quorum", ['"two-thirds"', "0.5"])
def test_leader_that_claims_made_up_results_is_banned(quorum):
    """An audit names it at once, although it has replaced the announcement that the decided proposal names.

    Other rounds of a run with so few chunks are audited with a probability of 1 %.
    """
    run = lied("false-claim", quorum=quorum, seconds=60.0)
    assert not run.violations
    liar = next(event.fields["peer"] for event in run.journal.of("start") if event.peer == LIAR)
    bans = [event for event in run.journal.of("banned") if event.peer in HONEST]
    assert {event.peer for event in bans} == set(HONEST)
    assert all(event.fields["peer"] == liar and "a false result" in event.fields["detail"] for event in bans)
    last = max(event.at for event in bans)
    assert last < 15.0
    assert len([event for event in run.journal.of("round") if event.peer == 0 and event.at > last]) >= 5


@pytest.mark.trial
@pytest.mark.parametrize("lie", ["bounded-vote", "false-vote", "prepare"])
def test_member_that_always_begins_ballots_delays_fewer_rounds_as_time_passes(lie):
    """After a ballot in vain others follow the member's next ones, for 2, 4, 8 and so on rounds, only if a leader is stuck."""
    run, clean = lied(lie, seconds=160.0), lied("", seconds=160.0)
    assert not run.violations
    assert max(losses(run)) >= 0.75 * max(losses(clean))
    begun = [event.at for event in run.journal.of("round") if event.peer == 0]
    early, late = (sum(low <= at < low + 50.0 for at in begun) for low in (BEGINS, 110.0))
    assert late > 1.3 * early


@pytest.mark.parametrize("quorum", ['"two-thirds"', "0.5"])
def test_owner_that_signs_to_some_peers_only_slows_rounds_but_does_not_stop_them(quorum):
    """With two thirds of six, all five honest members must have its signature, or its chunks must move."""
    size = dict(peers=6, liar=5, seconds=60.0, parameters=300_000)
    slow, clean = losses(lied("half-record", quorum=quorum, **size)), losses(lied("", quorum=quorum, **size))
    assert len(slow) >= 0.6 * len(clean) >= 10


def test_banned_peer_is_told_the_reason_and_ends(monkeypatch):
    ends, ended = [], SimWorld.ended

    def observe(self, machine, reason, failure):
        ends.append((machine.index, failure))
        ended(self, machine, reason, failure)

    monkeypatch.setattr(SimWorld, "ended", observe)
    lied("double-vote")
    failures = [failure for index, failure in ends if index == LIAR and failure is not None]
    assert isinstance(failures[0], Banned) and "two votes in round" in str(failures[0])
    assert all(failure.exit_code == 5 and failure.hint == BANNED_HINT for failure in failures)
    assert all("banned" in str(failure) for failure in failures)


def test_banned_peer_that_returns_is_refused_after_a_restart_of_all():
    """The evidence is stored with the state of each peer."""
    outage = Fault(14.0, "outage", (0, 1, 2), 6.0)
    run = lied("double-vote", more=(outage, Fault(24.0, "restart", (LIAR,), 2.0)), seconds=45.0)
    liar = next(event.fields["peer"] for event in run.journal.of("start") if event.peer == LIAR)
    bans = [event for event in run.journal.of("banned") if event.peer in HONEST]
    assert {event.peer for event in bans if event.at > 14.0} == set(HONEST)
    later = [event for event in run.journal.of("round") if event.at > 26.0]
    assert later and all(event.fields["missing"].keys() <= {liar[:8]} for event in later)
    assert all(event.fields["peers"] == len(HONEST) for event in later)
