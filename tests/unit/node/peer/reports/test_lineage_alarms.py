"""Alarms about lineages, and their end."""

from types import SimpleNamespace

import pytest
from thinwire.node.peer.reports.lineage_alarms import ROUNDS, LineageAlarms
from thinwire.swarm.lineage import name_of_fork
from thinwire.swarm.messages.registry import LIFE, ChainEntry, Fork

IDS = tuple(bytes([number]) * 32 for number in range(5))
ME, ANN, BEN, CAT, DAN = IDS
ROOT = ChainEntry(Fork(0, bytes(32), (), IDS, b"", ()))
FORKED = 7
TEXT = "2 of 5 members continue as lineage 3f9ab210 since round 7"


def entry(*members, before=IDS, round=FORKED):
    return ChainEntry(Fork(round, b"b" * 32, before, members, b"l" * LIFE * len(members), ()))


def replica(round, *members, chain):
    return SimpleNamespace(round=round, members=members, chain=(ROOT, *chain))


def begun(*entries):
    alarms = LineageAlarms()
    for one in entries:
        alarms.begin({"lineage": name_of_fork(one.fork).hex(), "detail": TEXT})
    return alarms


OURS = entry(ME, ANN)


def test_alarm_stays_while_members_are_missing():
    alarms = begun(OURS)
    for round in range(FORKED, FORKED + ROUNDS):
        assert not alarms.look([replica(round, ME, ANN, BEN, chain=[OURS])], {ANN, BEN})


def test_alarm_ends_when_all_have_been_members_again():
    alarms = begun(OURS)
    assert not alarms.look([replica(8, ME, ANN, BEN, chain=[OURS])], {ANN, BEN})
    (over,) = alarms.look([replica(9, ME, CAT, DAN, chain=[OURS])], {CAT, DAN})
    assert over.text == TEXT
    assert over.summary == f"{TEXT.replace('continue', 'continued')}; all were together again in round 9"
    assert not alarms.look([replica(10, ME, chain=[OURS])], ()), "it has ended"


def test_alarm_of_all_members_stays_until_the_next_round():
    """After an outage of all peers every member founds the lineage; a person should see it."""
    every = entry(*IDS)
    alarms = begun(every)
    assert not alarms.look([replica(FORKED, *IDS, chain=[every])], IDS)
    assert alarms.look([replica(FORKED + 1, *IDS, chain=[every])], IDS)


def test_alarm_ends_when_another_lineage_was_taken_over():
    alarms = begun(OURS)
    (over,) = alarms.look([replica(FORKED, CAT, DAN, BEN, chain=[entry(CAT, DAN, BEN)])], {CAT})
    assert "took over another lineage" in over.summary


@pytest.mark.parametrize(("live", "ends"), [((), True), ((ANN,), True), ((ANN, CAT), False)])
def test_alarm_ends_after_many_rounds_unless_a_missing_member_is_reachable_and_outside(live, ends):
    alarms = begun(OURS)
    assert bool(alarms.look([replica(FORKED + ROUNDS, ME, ANN, chain=[OURS])], live)) == ends
    assert ("did not come back" in alarms.summaries[TEXT]) == ends


def test_alarm_of_a_lineage_stays_in_those_that_were_founded_in_it():
    second = entry(ME, before=(ME, ANN), round=FORKED + 3)
    alarms = begun(OURS, second)
    (over,) = alarms.look([replica(FORKED + 4, ME, ANN, chain=[OURS, second])], {ANN})
    assert over.name == name_of_fork(second.fork).hex()


def test_fragments_have_separate_alarms():
    other = entry(ME, BEN)
    alarms = begun(OURS, other)
    held = [replica(8, *IDS, chain=[OURS]), replica(8, ME, BEN, chain=[other])]
    (over,) = alarms.look(held, IDS)
    assert over.name == name_of_fork(OURS.fork).hex()
