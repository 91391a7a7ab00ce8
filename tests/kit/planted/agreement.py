"""Eleven mistakes of the agreement that tests patch into the product, see test_planted_agreement.py.

Each function takes a pytest MonkeyPatch and plants one mistake. `lying_offer` is the lie of a peer that one of them needs.
"""

from __future__ import annotations

import blake3
import msgspec
import numpy as np
from thinwire.collectives.consensus.acceptor import Acceptor
from thinwire.collectives.consensus.chain import encode as encode_chain
from thinwire.collectives.consensus.chain import end_of
from thinwire.collectives.consensus.electorate import Electorate
from thinwire.collectives.consensus.members import terms
from thinwire.collectives.consensus.members.vote_store import VoteRecord
from thinwire.collectives.state_sync import state_sync
from thinwire.collectives.state_sync.state_offers import matches, state_digest
from thinwire.node.outer.catch_up import CatchUp
from thinwire.node.outer.lineages import Lineages
from thinwire.node.outer.quorum_wait import QuorumWait
from thinwire.node.state import vote_file
from thinwire.node.state.vote_file import VoteFile
from thinwire.sims.peers import lies
from thinwire.swarm.evidence import Equivocation
from thinwire.swarm.frame import Frame
from thinwire.swarm.messages.registry import CHUNK_BYTES, LIFE, StateChunk, StateOffer


def promise_forgets_votes(patch):
    """A promise does not report the last vote."""
    promise = Acceptor.promise

    def forgetful(self, ballot):
        made = promise(self, ballot)
        return made and msgspec.structs.replace(made, voted=None, digest=None)

    patch.setattr(Acceptor, "promise", forgetful)


def quorum_without_unreachable(patch):
    """A quorum is counted over the members that this peer can reach."""
    enough = Electorate.enough

    def shrinking(self, agreeing, left=None):
        left = set(self.farewells) if left is None else set(left)
        gone = set(self.terms.members) - self.live if self.me else set()
        return enough(self, agreeing, left | gone)

    patch.setattr(Electorate, "enough", shrinking)


def vote_before_it_is_stored(patch):
    """A vote is sent first; the disk gets it with the next one."""
    save = VoteFile.save

    def late(self, record):
        before = self.record
        if before is not None:
            save(self, before)
        self._record = record

    patch.setattr(VoteFile, "save", late)


def farewell_without_vote(patch):
    """A farewell does not report the last vote."""
    farewell = Acceptor.farewell

    def empty(self, me, sign):
        record = self._record
        self._record = VoteRecord(record.lineage, record.round, record.promised, None, None, record.left)
        try:
            return farewell(self, me, sign)
        finally:
            self._record = record

    patch.setattr(Acceptor, "farewell", empty)


def chain_not_checked(patch):
    """The chain of an offered state is believed as it is."""

    def proves(self, offered):
        yield from ()
        return matches(offered.offer, end_of(offered.chain) if offered.chain else None)

    patch.setattr(CatchUp, "_proves", proves)


def older_state_taken(patch):
    """Of the states of one lineage the oldest one is taken."""
    best = state_sync.best
    patch.setattr(state_sync, "best", lambda offers, ours, peers: best(_oldest(offers), ours, peers))
    useful = CatchUp._useful

    patch.setattr(CatchUp, "_useful", lambda self, offered, behind: useful(self, offered, behind=-(2**32)))


def _oldest(offers):
    oldest = min((one.offer.round for one in offers.values()), default=0)
    return {peer: one for peer, one in offers.items() if one.offer.round == oldest}


def lineage_never_yields(patch):
    """A peer never gives way to another lineage."""
    patch.setattr(Lineages, "gives_way", lambda self, chain: False)


def both_halves_decide(patch):
    """Half of the members are a quorum, with or without the most senior one."""
    enough = terms.enough

    def tie(agreeing, seniors, left=(), *, fraction=0.5):
        base = [member for member in seniors if member not in left]
        half = bool(base) and 2 * len([member for member in base if member in agreeing]) == len(base)
        return half or enough(agreeing, seniors, left, fraction=fraction)

    patch.setattr(terms, "enough", tie)


def lost_folder_keeps_its_vote(patch):
    """A peer that lost its run folder continues its former life, without the votes of it."""
    patch.setattr(vote_file, "new_life", lambda rng, wall: bytes([1]) * LIFE)


def orphan_timer_not_reset(patch):
    """The time without a quorum continues when a quorum is here again."""
    end = QuorumWait.end

    def kept(self):
        since = self.since
        end(self)
        self.since = since

    patch.setattr(QuorumWait, "end", kept)


def equivocation_ignored(patch):
    """Two statements of one peer about one ballot are not compared."""
    patch.setattr(Equivocation, "note", lambda self, peer, statement, signature: None)


PLANTED = [
    promise_forgets_votes,
    quorum_without_unreachable,
    vote_before_it_is_stored,
    farewell_without_vote,
    chain_not_checked,
    older_state_taken,
    lineage_never_yields,
    both_halves_decide,
    lost_folder_keeps_its_vote,
    orphan_timer_not_reset,
    equivocation_ignored,
]

LIE = "offer"
"""Kind of lie that `lying_offer` adds."""

AHEAD = 2
"""Rounds by which a false offer is ahead of the liar."""


def lying_offer(patch):
    """Add a lie: a peer offers zeros as the state of a later round, with a chain whose last certificate is forged."""
    patch.setitem(lies.IMPLEMENTED, LIE, _lie)


def _lie(process):
    for session in process.peer.session.sessions.values():
        _offer_falsely(session)


def _offer_falsely(session):
    states, honest = session.states, session.states._offer
    bulk = session.presence.send_queue.bulk
    raw = np.zeros_like(session.replica.state).view(np.uint8).data
    pieces = [raw[at : at + CHUNK_BYTES] for at in range(0, len(raw), CHUNK_BYTES)]
    hashes = [blake3.blake3(piece).digest() for piece in pieces]

    def offer(peer):
        replica = session.replica
        entry = replica.chain[-1] if replica.chain else None
        if entry is None or not entry.certificates or states.held or not states.entered:
            return honest(peer)
        last, round = entry.certificates[-1], replica.round + AHEAD
        proposal = msgspec.structs.replace(last.commit.proposal, round=round)
        forged = msgspec.structs.replace(last, commit=msgspec.structs.replace(last.commit, proposal=proposal))
        chain = (*replica.chain[:-1], msgspec.structs.replace(entry, certificates=(*entry.certificates[:-1], forged)))
        end = end_of(chain)
        lives = b"".join(end.lives.get(member, bytes(LIFE)) for member in end.members)
        digest = state_digest(round, replica.layout, end.members, hashes, lives, end.lineage)
        told = StateOffer(round, digest, replica.layout, len(raw), end.members, session.fragment, lives, end.lineage)
        return bulk(peer, Frame(told, b"".join(hashes) + encode_chain(chain)), requested=True)

    def serve(peer, message):
        bulk(
            peer,
            Frame(StateChunk(message.round, message.index, session.fragment), pieces[message.index]),
            requested=True,
        )

    states._offer, states._serve = offer, serve
