"""Survivors of a lost majority found a lineage and continue, also after they restart."""

from __future__ import annotations

import pytest
from kit.histories import (
    ORPHAN,
    REUNION,
    alive,
    common,
    digests_of,
    forks,
    played,
    save_each_round,
    short_rounds,
    standstills,
)
from thinwire.sims.scenario.faults import Fault

AT, SOON = 14.0, ORPHAN + 6.0
"""Virtual second of the loss, and the seconds after it in which survivors commit a round."""

UNSEEN = 12.0
"""Seconds until SWIM and the links' time-outs find out that a peer has fallen silent."""


@pytest.fixture(autouse=True)
def _often_saved(monkeypatch):
    save_each_round(monkeypatch)


def _loss(kind, lost):
    """Return the fault: processes that are killed and whose ports refuse, or a site that only falls silent."""
    return Fault(AT, "majority-lost", lost) if kind == "killed" else Fault(AT, "partition", lost, 5000.0)


def _check(run, survivors, kind="silent"):
    assert not forks(run)
    soon = AT + SOON + (UNSEEN if kind == "silent" else 0.0)
    assert common(run, survivors, AT, soon), f"no round of {survivors} soon"
    assert common(run, survivors, run.ended - 10.0, run.ended), f"no round of {survivors} at the end"
    assert not standstills(run, *survivors)


_LOST = [(5, (2, 3, 4)), (5, (0, 1, 2)), (4, (0, 1)), (4, (2, 3)), (7, (1, 2, 3, 4, 5, 6))]


@pytest.mark.trial
@pytest.mark.parametrize(
    ("kind", "peers", "lost"),
    [
        *(("killed", *one) for one in _LOST),
        *(pytest.param("silent", *one, marks=() if one[0] == 5 else pytest.mark.soak) for one in _LOST),
    ],
)
def test_survivors_of_a_lost_majority_continue(kind, peers, lost):
    run = played(short_rounds(peers, _loss(kind, lost), seconds=60.0))
    _check(run, [peer for peer in range(peers) if peer not in lost], kind)


@pytest.mark.parametrize("seed", range(3))
def test_all_survivors_report_the_lineage_and_keep_their_training(seed):
    """The one that completes the founding first announces the lineage, and the other is no newcomer to it."""
    run = played(short_rounds(5, _loss("killed", (0, 1, 2)), seconds=40.0, seed=seed))
    for survivor in (3, 4):
        kinds = [event.name for event in run.journal.events if event.peer == survivor and event.at > AT]
        assert kinds.count("lineage") == 1 and "synced" not in kinds


@pytest.mark.parametrize(
    ("kind", "second"),
    [
        ("killed", 60.0),
        ("killed", 40.0),
        ("silent", 40.0),
        ("silent", 60.0),
    ],
)
def test_survivors_of_a_lost_majority_continue_after_restarts(kind, second):
    """Both survivors are restarted by their owners, at once or one after the other."""
    restarts = (Fault(40.0, "restart", (0,), 3.0), Fault(second, "restart", (1,), 3.0))
    run = played(short_rounds(5, _loss(kind, (2, 3, 4)), *restarts, seconds=110.0))
    _check(run, [0, 1], kind)
    unseen = UNSEEN if kind == "silent" else 0.0  # They dial the silent peers first.
    assert common(run, [0, 1], second + 3.0, second + 3.0 + SOON + unseen)


@pytest.mark.trial
@pytest.mark.parametrize("seed", [1, 2, 14])
def test_newcomers_that_fall_silent_do_not_stop_the_swarm(seed):
    """Four identities join three peers and fall silent: the three continue, and so do the four among themselves."""
    joins = {3: 6.0, 4: 6.1, 5: 6.2, 6: 6.3}
    run = played(short_rounds(7, _loss("silent", (3, 4, 5, 6)), seconds=60.0, seed=seed, joins=joins))
    _check(run, [0, 1, 2])
    assert not standstills(run)


@pytest.mark.trial
def test_lost_majority_that_returns_joins_the_winning_lineage():
    """Three of five were only cut off. With a quorum of the common configuration they win, and the others join them."""
    run = played(short_rounds(5, Fault(AT, "partition", (2, 3, 4), 30.0), seconds=90.0))
    _check(run, [0, 1])
    end = AT + 30.0
    found = common(run, alive(run), end, end + REUNION)
    assert found
    assert {slot.lineage for slot, _ in found} == {""}, "the side with a quorum is the run's first lineage"
    assert {slot.lineage for slot in digests_of(run, since=end + REUNION)} == {""}
