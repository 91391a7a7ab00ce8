"""Peers that a proposer waits for before it opens a ballot."""

import pytest
from thinwire.collectives.consensus.electorate import Electorate
from thinwire.collectives.consensus.proposal import RoundTerms
from thinwire.collectives.consensus.proposer import FORSAKEN, Proposer
from thinwire.swarm.messages.registry import Ballot, Promise, Ready

IDS = [bytes([n]) * 32 for n in range(5)]
ME = IDS[3]
TERMS = RoundTerms(5, 0, tuple(IDS), bytes(32), bytes(32), patience=2.0)


@pytest.mark.parametrize("linked", [True, False])
@pytest.mark.parametrize("past", [True, False])
def test_proposer_waits_for_third_of_five_only_if_present_and_ahead(linked, past):
    """Two are dead, and may have voted; the third may know of it, and promises nothing."""
    live = {ME, IDS[4]} | ({IDS[0]} if linked else set())
    ready = {peer: Ready(5, 0, 1, bytes(32), bytes(32), 1, b"", True, 0.0, 0.0) for peer in (ME, IDS[4])}
    candidate = Proposer(Electorate(ME, TERMS, live, IDS[1:3]), ready)
    candidate.past |= {IDS[0]} if past else set()
    ballot, opened = Ballot(2, ME), None
    for patiences in range(FORSAKEN + 4):
        now = 2.0 * patiences
        if not candidate.preparing:
            candidate.prepare(Promise(5, 0, ballot, None, None), now)
            candidate.hear_promise(IDS[4], Promise(5, 0, ballot, None, None), counts=True)
        opened = candidate.propose(None, now + 0.1)
        if opened is None:
            opened = candidate.propose(None, now + 2.1)
        if opened is not None:
            break
    assert (opened is None) == (linked and past)
    if opened is not None:
        assert opened.alive == (ME, IDS[4]) and patiences >= FORSAKEN - 2


def test_proposer_waits_for_peer_without_state_only_if_member():
    """One of five is dead; a newcomer and a member have no state. Only the member may have voted before."""
    guest, alive = bytes([9]) * 32, [peer for peer in IDS if peer != IDS[0]]
    ready = {peer: Ready(5, 0, 1, bytes(32), bytes(32), 1, b"", True, 0.0, 0.0) for peer in alive}
    candidate = Proposer(Electorate(ME, TERMS, {*alive, guest}, IDS[:1]), ready)
    promise = Promise(5, 0, Ballot(2, ME), None, None)
    candidate.prepare(promise, 0.0)
    for peer in (IDS[1], IDS[2]):
        candidate.hear_promise(peer, promise, counts=True)
    candidate.excuse(guest)
    candidate.excuse(IDS[4])
    assert candidate.propose(None, 0.1) is None
    candidate.hear_promise(IDS[4], promise, counts=True)
    assert candidate.propose(None, 0.2) is not None
