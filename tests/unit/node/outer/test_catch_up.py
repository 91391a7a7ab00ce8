"""Catch-up: which proofs make a peer give up its round, and which states it fetches."""

import asyncio
from types import SimpleNamespace

import pytest
from kit.outer.chains import offered, result_of
from thinwire.collectives.consensus.chain import Configuration, founded
from thinwire.collectives.consensus.members.terms import RoundTerms
from thinwire.collectives.state_sync.chunk_transfer import LATEST
from thinwire.collectives.state_sync.state_sync import OtherModelState
from thinwire.node.outer.catch_up import TRIES, CatchUp
from thinwire.node.outer.session import FragmentRounds
from thinwire.swarm.lineage import lineage_of
from thinwire.swarm.messages.registry import Ask, Fork, StateOffer

ME, ANN, BEN, CAT = (bytes([n]) * 32 for n in range(4))
PATIENCE = 2.0


def begun(life):
    return founded((), Fork(0, bytes(32), (), (ANN,), bytes([life]) * 16, ()))


OURS, BETTER, WORSE = begun(2), begun(1), begun(3)


class Here:
    """A peer after round 3 of OURS. `told`: sent messages; `asked`: peers asked for proof; `accepts`: of its fetches."""

    def __init__(self, *, chain=OURS, fetched=(), members=(ME, ANN)):
        self.now, self.told, self.asked, self.accepts, self.dropped = 100.0, [], [], [], []
        self.ahead, self.prevailing, self.adoptable = [], [], None
        self.fetcher = SimpleNamespace(
            without=set(), fetch=self._fetch, offers={}, forget=lambda *peers: None, reset=lambda: None
        )
        terms = RoundTerms(1, 0, tuple(members), bytes(32), bytes(32))
        acceptor = SimpleNamespace(voted=None)
        agreement = SimpleNamespace(
            diverged=False, commit=None, ready={}, overtaken=lambda: None, terms=terms, acceptor=acceptor, voter=True
        )
        self.current = SimpleNamespace(
            round=4,
            progressed_at=0.0,
            mostly_exhausted=False,
            unobtainable=lambda: False,
            exhausted=False,
            follows=False,
            pump=lambda: None,
            agreement=agreement,
        )
        roster = SimpleNamespace(peers=SimpleNamespace(is_live=lambda peer: True), record=SimpleNamespace(peer_id=ME))
        send_queue = SimpleNamespace(control=lambda to, message: self.told.append((to, type(message))))
        self._fetched = iter(fetched)
        lineages = SimpleNamespace(
            ahead=lambda: self.ahead,
            prevailing=lambda: self.prevailing,
            adoptable=lambda: self.adoptable,
            ask=self.asked.append,
            drop=self.dropped.append,
            gives_way=lambda other: other == BETTER,
            trusted=lambda fork: fork.lives != WORSE[0].fork.lives,
        )
        replica = SimpleNamespace(round=3, members=members, chain=chain, lineage=lineage_of(chain))
        rounds = FragmentRounds(
            replica=replica,
            presence=SimpleNamespace(roster=roster, live={ANN, BEN}, send_queue=send_queue),
            fragment=0,
            now=lambda: self.now,
            current=lambda: self.current,
        )
        factory = SimpleNamespace(behind=asyncio.Event(), patience=PATIENCE, floor=0.5)
        self.catch_up = CatchUp(rounds, self.fetcher, factory=factory, lineages=lineages, turn=None)
        self.proven = 4

    def accepts_offer(self, round, chain):
        """Return whether the last fetch accepts an offer with this chain, which proves `proven`."""

        def check(chain, fragment, trusted):
            yield 1
            return Configuration(lineage_of(chain), self.proven, (ANN,), {})

        return result_of(self.accepts[0](offered(offer(round, chain), chain, check=check)))

    async def _fetch(self, peers, work, *, accept, **rest):
        self.accepts.append(accept)
        return next(self._fetched)

    def newer(self):
        async def work(function):
            return function()

        return asyncio.run(self.catch_up.newer(work))

    def look(self, seconds):
        self.now += seconds
        self.catch_up.look()
        return self.catch_up.behind.is_set()


def offer(round, chain):
    return StateOffer(round, bytes(32), bytes(32), 4, (ANN,), lineage=lineage_of(chain))


def test_claim_is_questioned_and_does_not_make_a_peer_give_up_its_round():
    here = Here()
    here.catch_up.claimed(ANN, 10**6)
    assert not here.look(0.0)
    assert here.asked == [ANN] and here.told == [(ANN, Ask)]
    assert not here.look(100 * PATIENCE)


def test_proved_round_counts_after_a_patience_without_help():
    here = Here()
    here.ahead = [ANN]
    assert not here.look(0.0) and not here.look(PATIENCE - 0.1)
    here.current.progressed_at = here.now
    assert not here.look(PATIENCE - 0.1) and here.look(0.1)
    assert not here.asked, "the proof is there"


def test_patience_with_a_proof_begins_again_after_the_peer_has_gone_and_in_the_next_round():
    here = Here()
    here.ahead = [ANN]
    assert not here.look(0.0)
    here.ahead = []
    assert not here.look(PATIENCE), "the peer is gone"
    here.ahead = [ANN]
    assert not here.look(0.0) and not here.look(PATIENCE - 0.1)
    here.catch_up.begin()
    assert not here.look(0.1) and not here.look(PATIENCE - 0.1) and here.look(0.1)


def test_sender_of_messages_of_a_later_round_is_asked_about_ours_a_few_times_in_a_patience():
    here = Here()
    for _ in range(10):
        here.catch_up.seen(ANN, 5)
        here.now += 0.1 * PATIENCE
    assert 3 <= len(here.told) <= 5 and set(here.told) == {(ANN, Ask)}
    assert here.catch_up.begin() == [ANN]
    here.catch_up.on_link_down(ANN, gone=False)
    assert here.catch_up.begin() == [] and not here.catch_up.gone


def test_message_of_a_later_round_counts_but_asks_nothing_while_we_have_the_commit():
    here = Here()
    here.current.agreement.commit = SimpleNamespace(proposal=SimpleNamespace(members=(ME, ANN)))
    assert not here.catch_up.claimed_over
    here.catch_up.seen(BEN, 5)
    assert not here.catch_up.claimed_over, "most members do not claim it"
    here.catch_up.seen(ANN, 5)
    assert here.catch_up.claimed_over and here.told == [] and not here.catch_up.began_late
    assert here.catch_up.begin() == [ANN, BEN] and here.catch_up.began_late
    here.current.round = 5
    assert here.catch_up.begin() == [] and not here.catch_up.began_late, "the round of the others"


@pytest.mark.parametrize(
    ("mostly_exhausted", "follows", "wait"),
    [(False, False, 2 * PATIENCE), (True, False, 0.5), (False, True, LATEST), (True, True, 0.5)],
)
def test_peer_with_a_commit_waits_for_its_results(mostly_exhausted, follows, wait):
    here = Here()
    here.current.follows = follows
    here.ahead, here.current.agreement.commit, here.current.mostly_exhausted = [ANN], object(), mostly_exhausted
    assert not here.look(0.0) and not here.look(wait - 0.1) and here.look(0.1)


def test_peer_whose_results_no_reachable_voter_has_fetches_the_newer_state_soon():
    here = Here()
    here.current.follows, here.current.unobtainable = True, lambda: True
    here.ahead, here.current.agreement.commit = [ANN], object()
    assert not here.look(0.0) and not here.look(0.4) and here.look(0.2)


@pytest.mark.parametrize("exhausted", [True, False])
def test_peer_with_a_commit_asks_for_a_proof_at_once_if_no_source_has_its_results(exhausted):
    """If only most of them do not, the others may send with pauses."""
    here = Here()
    here.current.progressed_at, here.current.agreement.commit, here.current.mostly_exhausted = here.now, object(), True
    here.current.exhausted = exhausted
    here.catch_up.claimed(ANN, 6)
    here.look(0.0)
    assert here.asked == ([ANN] if exhausted else [])


def test_prevailing_lineage_is_followed_at_once():
    here = Here()
    here.prevailing = [ANN]
    assert here.look(0.0)


def test_prevailing_lineage_founded_with_our_state_is_not_fetched():
    here = Here()
    here.prevailing, here.adoptable = [ANN], BETTER[0].fork
    assert not here.look(0.0)


@pytest.mark.parametrize(
    ("chain", "round", "behind", "accepted"),
    [
        (OURS, 2, False, False),
        (OURS, 3, False, True),
        (OURS, 3, True, False),
        (OURS, 4, True, True),
        (BETTER, 1, True, True),
        (WORSE, 9, False, False),
    ],
)
def test_peer_fetches_later_states_of_its_lineage_and_those_of_a_prevailing_one(chain, round, behind, accepted):
    here = Here(fetched=[None])
    if behind:
        here.catch_up.behind.set()
    assert here.newer() is None
    here.proven = round
    assert here.accepts_offer(round, chain) == accepted
    here.proven = round - 1
    assert not here.accepts_offer(round, chain), "the chain is of another round"


@pytest.mark.parametrize(
    ("chain", "proven", "prevails"), [(begun(4), 4, True), (begun(4), 3, False), (BETTER, 4, False)]
)
def test_peer_notes_a_proved_offer_of_a_lineage_that_gives_way_to_its_own(chain, proven, prevails):
    """Those peers wait for its state, so a longer search for a newer one is in vain."""
    here = Here(fetched=[None])
    here.newer()
    here.proven = proven
    here.accepts_offer(4, chain)
    assert here.catch_up.newest == prevails


@pytest.mark.parametrize(
    ("members", "offers", "newest"),
    [
        ((ME,), {ANN: 2}, True),
        ((ME,), {ANN: 3}, True),
        ((ME,), {ANN: 4}, False),
        ((ME,), {ANN: 2, BEN: 4}, False),
        ((ME,), {}, False),
        ((ME, ANN), {BEN: 2}, True),
        ((ANN, ME), {BEN: 2}, False),
        ((ANN, ME), {ANN: 2}, True),
        ((ME, ANN, BEN), {ANN: 2}, True),
        ((ME, ANN, BEN), {CAT: 2}, False),
    ],
)
def test_state_is_the_newest_if_members_that_offer_no_older_one_are_no_quorum(members, offers, newest):
    here = Here(members=members)
    here.fetcher.offers = {peer: offer(round, OURS) for peer, round in offers.items()}
    assert here.catch_up.newest == newest


def test_state_is_not_known_to_be_the_newest_after_a_vote_without_a_vote_or_beside_another_lineage():
    here = Here(members=(ME,))
    here.fetcher.offers = {ANN: offer(2, OURS)}
    agreement = here.current.agreement
    assert here.catch_up.newest
    agreement.acceptor.voted = object()
    assert not here.catch_up.newest, "the round that we voted in may have committed"
    agreement.acceptor.voted, agreement.voter = None, False
    assert not here.catch_up.newest, "our votes are lost, or of later rounds"
    agreement.voter = True
    here.fetcher.offers[BEN] = offer(2, BETTER)
    assert not here.catch_up.newest
    here = Here(members=(ANN,))
    here.fetcher.offers = {ANN: offer(2, OURS)}
    assert not here.catch_up.newest, "this peer is no member"


def test_peer_without_a_state_takes_any_trusted_one():
    here = Here(chain=(), fetched=[None])
    here.newer()
    assert here.accepts_offer(4, BETTER) and not here.accepts_offer(4, WORSE)


def test_outdated_holder_of_a_stage_takes_the_recovered_state_whoever_founded_it():
    here = Here(fetched=[None])
    here.catch_up.gone.update((ANN, BEN))
    assert here.catch_up.outdated()
    here.newer()
    assert here.accepts_offer(4, WORSE)


def test_peers_that_serve_no_state_are_dropped_after_some_failures():
    here = Here(fetched=[None] * TRIES)
    here.ahead = [ANN]
    for _ in range(TRIES):
        assert not here.dropped
        here.newer()
    assert here.dropped == [{ANN}]


def test_state_of_another_model_is_noted():
    here = Here(fetched=[OtherModelState(7)])
    assert here.newer() is None and here.catch_up.foreign == OtherModelState(7)
