"""Pace of chunk owners: lost chunks, and owners that are slower than they announced."""

from __future__ import annotations

import msgspec
import pytest
from thinwire.collectives.topology.bandwidth_shares import PeerLoad
from thinwire.collectives.topology.owner_pace import FELT, LATE, OwnerPace, overdue
from thinwire.swarm.messages.registry import Ballot, Contribution, Proposal, Ready

IDS = [bytes([i]) * 32 for i in range(4)]
ANN, BEN, CAT, DAN = IDS


def proposal_of(term=1, *, alive=IDS, idle=(), shares=()):
    contributors = tuple(Contribution(peer, 1, 10) for peer in alive)
    one = Proposal(1, 0, Ballot(term, ANN), tuple(IDS), tuple(alive), contributors, (), None, (), tuple(sorted(idle)))
    return msgspec.structs.replace(one, shares=shares)


LINKS = [PeerLoad(10, 10), PeerLoad(10, 10), PeerLoad(10, 10), PeerLoad(1000, 1000)]
SHARED = proposal_of(shares=(2, 2, 2, 18))
PLANNED = (24 + 2 * 2) / 10  # one of the first three, chunks of one byte


def test_slow_owner_with_many_chunks_is_overdue():
    limit = LATE * PLANNED + FELT
    took = {ANN: 1.0, BEN: 1.0, CAT: 1.0, DAN: limit + 0.1}
    assert overdue(SHARED, LINKS, took, 1) == {DAN}
    assert overdue(SHARED, LINKS, took | {DAN: limit - 0.1}, 1) == set(), "no more than a link may need"
    assert overdue(SHARED, LINKS, dict.fromkeys(IDS, 100.0), 1) == set(), "slow for all"
    assert overdue(SHARED, LINKS, took | {CAT: 100.0, DAN: 1.0}, 1) == set(), "it owns few, whatever it says"


def test_nobody_is_overdue_with_equal_shares_or_unknown_links():
    took = {ANN: 1.0, BEN: 1.0, CAT: 1.0, DAN: 1e6}
    assert overdue(proposal_of(), LINKS, took, 1) == set()
    assert overdue(SHARED, [PeerLoad(0, 0)] * 4, took, 1) == set()
    assert overdue(SHARED, LINKS, {DAN: 1e6}, 1) == set(), "nobody to compare with"


def announced(link):
    """Return an announcement with the rates of a link."""
    ready = Ready(1, 0, 1, bytes(32), bytes(32), 10, b"", True, 0.0, 1.0)
    return msgspec.structs.replace(ready, up=int(link.up), down=int(link.down))


READY = {peer: announced(link) for peer, link in zip(IDS, LINKS, strict=True)}


@pytest.mark.parametrize(
    ("last", "lost"),
    [
        (proposal_of(2, alive=IDS[:3]), {DAN}),
        (proposal_of(2, idle=(BEN,)), {BEN}),
        (proposal_of(2, idle=(CAT,)), set()),
    ],
)
def test_owner_of_the_first_ballot_without_chunks_in_the_last_one_has_failed(last, lost):
    pace = OwnerPace()
    pace.open(proposal_of(idle=(CAT,)), 5.0)
    pace.open(last, 6.0)
    assert pace.failed(last, READY, 1) == lost, "CAT owned nothing from the start"


@pytest.mark.parametrize("spare", [-0.1, 0.1])
def test_time_of_an_owner_counts_from_the_first_ballot(spare):
    pace = OwnerPace()
    pace.open(SHARED, 5.0)
    for peer in IDS[:3]:
        pace.note_result(peer, 6.0)
    pace.note_result(DAN, 6.0)
    pace.note_result(DAN, 5.0 + LATE * PLANNED + FELT - spare)
    assert pace.failed(SHARED, READY, 1) == (set() if spare > 0 else {DAN}), "its last result counts"


def test_pace_is_not_judged_if_another_ballot_was_needed():
    pace = OwnerPace()
    pace.open(SHARED, 5.0)
    pace.note_result(ANN, 6.0)
    pace.note_result(DAN, 500.0)
    last = msgspec.structs.replace(SHARED, ballot=Ballot(2, BEN))
    assert pace.failed(SHARED, READY, 1) == {DAN} and pace.failed(last, READY, 1) == set()


def test_no_owner_has_failed_before_a_ballot():
    assert OwnerPace().failed(SHARED, READY, 1) == set()
