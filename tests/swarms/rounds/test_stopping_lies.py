"""Swarms in four regions with members that begin ballots in order to stop rounds.

Their ballots reach one member while an honest leader waits for promises or votes. Stronger liars, which see all peers, are in
tests/unit/collectives/consensus/liars/test_stopping_liars.py: they attack the agreement alone.
"""

from functools import cache

import pytest
from kit.histories import digests_of, played
from kit.scenarios import manifest_of, swarm_of
from thinwire.collectives.consensus.electorate import VIEW
from thinwire.sims.peers.stopping_lies import STOPPING_LIES
from thinwire.sims.scenario.faults import Fault

REGIONS = ("Oregon", "Japan", "London", "Australia")
PATIENCE, TRAINING, BEGINS = 2.0, 3.0, 5.0
"""Seconds: the patience of these rounds, inner steps and exchange of a round, and the time at which the lies begin."""

ORPHAN = 10.0
"""Seconds without a quorum before a lineage is founded (`exchange.orphan`)."""

LIES = sorted(STOPPING_LIES.keys() - {"divide"})
"""Lies that only delay rounds."""

FAULTS = (
    Fault(8.0, "one-way", (0, 1), 6.0),
    Fault(16.0, "restart", (2,), 3.0),
    Fault(26.0, "isolate", (0,), 4.0),
    Fault(34.0, "partition", (0, 1), 4.0),
)


def lied(lie, peers, liars, *, quorum='"two-thirds"', faults=(), seconds=60.0):
    toml = manifest_of("sync_every = 4\n", codec="fp32", exchange=f"quorum = {quorum}\n")
    faults = (*[Fault(BEGINS, "liar", (liar,), 1_000.0, 0.0, lie) for liar in liars], *faults)
    size = dict(seconds=seconds, seed=2, parameters=2_000, spread={"region": REGIONS})
    return played(swarm_of(peers, toml, faults=faults, **size))


@cache
def clean(peers, seconds):
    """Return the rounds of a swarm without liars and faults."""
    return len(times_of(lied("", peers, (), seconds=seconds), range(peers)))


def times_of(run, honest):
    """Return round -> time of its first commit; honest peers have one digest of each round, in one lineage."""
    digests = digests_of(run, *honest)
    assert all(len(found) == 1 for found in digests.values())
    assert {slot.lineage for slot in digests} == {""} and not run.violations
    found = {}
    for event in run.journal.of("round"):
        if event.peer in honest:
            found.setdefault(event.fields["round"], event.at)
    return found


def continues(run, peers, liars, *, at_least, faults=0.0):
    """Return True if each round ends within a leader view for each liar and two more, with time for training and `faults`."""
    times = times_of(run, [peer for peer in range(peers) if peer not in liars])
    moments = [*sorted(times.values()), run.ended]
    longest = max(after - before for before, after in zip(moments, moments[1:], strict=False))
    bound = (len(liars) + 2) * VIEW * PATIENCE + TRAINING + faults
    return longest < bound and len(times) >= at_least * clean(peers, run.ended)


@pytest.mark.parametrize("quorum", ['"two-thirds"', "0.5"])
@pytest.mark.parametrize("lie", LIES)
def test_one_liar_of_four_delays_rounds_and_does_not_stop_them(lie, quorum):
    """It is a quarter of the leaders of first ballots, too, and delays the rounds that it leads most."""
    assert continues(lied(lie, 4, (3,), quorum=quorum), 4, (3,), at_least=0.4)


@pytest.mark.trial
@pytest.mark.parametrize("quorum", ['"two-thirds"', "0.5"])
@pytest.mark.parametrize("lie", LIES)
def test_two_liars_of_seven_delay_rounds_and_do_not_stop_them(lie, quorum):
    """With plain majorities, two of seven could demand any leader view if a peer followed two demands."""
    assert continues(lied(lie, 7, (5, 6), quorum=quorum, seconds=80.0), 7, (5, 6), at_least=0.25)


@pytest.mark.trial
@pytest.mark.parametrize("quorum", ['"two-thirds"', "0.5"])
@pytest.mark.parametrize("lie", LIES)
def test_one_liar_of_seven_beside_partitions_and_a_restart_does_not_stop_rounds(lie, quorum):
    run = lied(lie, 7, (6,), quorum=quorum, faults=FAULTS, seconds=80.0)
    assert continues(run, 7, (6,), at_least=0.35, faults=6.0)


@pytest.mark.trial
@pytest.mark.parametrize("quorum", ['"two-thirds"', "0.5"])
@pytest.mark.parametrize("lie", LIES)
def test_one_liar_of_four_stops_rounds_only_during_partitions_and_a_restart(lie, quorum):
    """With two thirds all honest members must vote. One that a round has left out stays a member, and votes when it is back."""
    run = lied(lie, 4, (3,), quorum=quorum, faults=FAULTS, seconds=100.0)
    times = times_of(run, (0, 1, 2))
    last = max(fault.until for fault in FAULTS)
    moments = [last, *sorted(at for at in times.values() if at > last), run.ended]
    longest = max(after - before for before, after in zip(moments, moments[1:], strict=False))
    assert longest < 3 * VIEW * PATIENCE + TRAINING and len(moments) > 10
    if quorum == "0.5":
        assert len(times) >= 0.3 * clean(4, run.ended)


@pytest.mark.trial
@pytest.mark.parametrize("quorum", ['"two-thirds"', "0.5"])
@pytest.mark.parametrize(("peers", "liars"), [(4, (3,)), (7, (5, 6))])
def test_members_that_a_liar_divides_continue_without_it(peers, liars, quorum):
    """Two values may have been chosen, and the liar does not tell. With two thirds the others continue as a lineage."""
    run = lied("divide", peers, liars, quorum=quorum, seconds=90.0)
    honest = [peer for peer in range(peers) if peer not in liars]
    digests = digests_of(run, *honest)
    assert all(len(found) == 1 for found in digests.values()) and not run.violations
    times = sorted({event.fields["round"]: event.at for event in run.journal.of("round")}.values())
    moments = [*times, run.ended]
    bound = (len(liars) + 2) * VIEW * PATIENCE + TRAINING + ORPHAN
    assert max(after - before for before, after in zip(moments, moments[1:], strict=False)) < bound
    if peers == 4 and quorum == '"two-thirds"':
        assert len({slot.lineage for slot in digests}) == 2 and len(times) >= 15
