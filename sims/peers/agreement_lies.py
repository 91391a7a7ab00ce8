"""Peers that lie about the agreement: ballots, promises, votes, commits.

Rounds of pairs have none of these.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Sequence

import blake3
import numpy as np
from msgspec.structs import replace
from thinwire.collectives.consensus.justification import sealed
from thinwire.collectives.consensus.members.lives import lives_in_order, lives_of
from thinwire.collectives.consensus.members.terms import RoundTerms
from thinwire.collectives.consensus.paxos import Agreement
from thinwire.collectives.consensus.proposal import name_of, new_lives, vote_for
from thinwire.collectives.rounds.data_planes.owner_records import basis_of
from thinwire.collectives.rounds.data_planes.result_store import digest_of
from thinwire.collectives.rounds.round import Round
from thinwire.compression.core.types import Buffer
from thinwire.node.methods.noloco.session import GossipSession
from thinwire.node.outer.round_session import RoundSession
from thinwire.sims.peers.false_messages import change_outgoing, each, repeat, sessions
from thinwire.sims.peers.machine import Process
from thinwire.swarm.frame import Frame
from thinwire.swarm.messages.registry import (
    Ballot,
    Commit,
    Digest,
    Message,
    PeerId,
    Prepare,
    Promise,
    Proof,
    Proposal,
    Propose,
    ResultRecord,
    Vote,
)

TERMS_ABOVE = 50
"""Terms by which a false proposal is above the one in progress."""

DELAY = 0.005
"""Seconds after a proposal in which honest peers vote."""

HUGE = 1e3
"""Values of false results."""

WITHIN = -0.5
"""Factor of a liar's own contribution in false results whose norms are usual."""

ATTEMPTS = 20
"""Number of false announcements that are sent at once."""

MessagesOf = Callable[[Agreement], Sequence[Message]]


def _flood(messages_of: MessagesOf) -> Callable[[Process], None]:
    """Repeat these messages, as long as a ballot is open."""

    def messages(session: RoundSession | GossipSession) -> Sequence[Message]:
        return messages_of(session.current.agreement) if isinstance(session, RoundSession) else ()

    return lambda process: repeat(process, messages)


def _higher(agreement: Agreement) -> Sequence[Message]:
    proposal = agreement.proposal
    if proposal is None:
        return ()
    return (Propose(replace(proposal, ballot=Ballot(proposal.ballot.term + TERMS_ABOVE, agreement.me))),)


def _prepares(agreement: Agreement) -> Sequence[Message]:
    terms = agreement.terms
    ballot = Ballot(max(agreement.acceptor.promised.term, 1) + 1, agreement.me)
    return (Prepare(terms.round, terms.fragment, ballot, terms.lineage),)


def _announcements(agreement: Agreement) -> Sequence[Message]:
    mine = agreement.ready.get(agreement.me)
    return [replace(mine, attempt=mine.attempt + more) for more in range(1, ATTEMPTS)] if mine is not None else ()


def _commits(agreement: Agreement) -> Sequence[Message]:
    proposal = agreement.proposal
    if proposal is None:
        return ()
    return (Commit(proposal, bytes(32), tuple(Proof(peer, bytes(64)) for peer in proposal.alive)),)


def _vote_twice(session: RoundSession | GossipSession) -> None:
    """Vote twice for each proposal, before the results are here."""
    if isinstance(session, GossipSession):
        return
    control, on_frame = session.presence.send_queue.control, session.on_frame

    def receive(peer: PeerId, frame: Frame) -> None:
        message = frame.message
        on_frame(peer, frame)
        if isinstance(message, Propose):
            proposal = message.proposal
            for digest in (bytes(32), bytes([1]) * 32):
                control(peer, vote_for(proposal, digest))

    session.on_frame = receive  # type: ignore[method-assign]


def _other_vote(to: PeerId, message: Message) -> Message:
    return replace(message, digest=blake3.blake3(to).digest()) if isinstance(message, Vote) else message


def _false_report(process: Process) -> None:
    """Report a vote for results that no peer has."""
    sessions = process.peer.session.sessions

    def change(to: PeerId, message: Message) -> Message:
        if isinstance(message, Promise) and isinstance(session := sessions[message.fragment], RoundSession):
            proposal = session.current.agreement.proposal
            if proposal is not None and proposal.ballot < message.ballot:
                return replace(message, voted=proposal, digest=bytes([7]) * 32)
        return message

    change_outgoing(process, change)


def _first(message: Message) -> bool:
    """Return True for the proposal of a first ballot."""
    return isinstance(message, Propose) and not message.reports


class _TwoProposals:
    """Leader that proposes fewer contributors to every second peer.

    It commits both proposals with its own votes.
    """

    def __init__(self, session: RoundSession) -> None:
        self._session, self._queue = session, session.presence.send_queue
        self._control, self._on_frame = self._queue.control, session.on_frame
        self._other: Proposal | None = None
        self._votes: dict[tuple[Digest, Digest], dict[PeerId, bytes]] = {}
        self._queue.control = self._send  # type: ignore[method-assign]
        session.on_frame = self._receive  # type: ignore[method-assign]

    def _send(self, to: PeerId, message: Message) -> None:
        session = self._session
        if isinstance(message, Propose) and _first(message) and message.fragment == session.fragment and to[0] % 2:
            proposal = message.proposal
            if proposal.ballot.leader == session.me and len(proposal.contributors) > 1:
                self._other = sealed(
                    replace(proposal, contributors=proposal.contributors[:-1]), session.factory.keyring.sign
                )
                self._votes = {}
                message = Propose(self._other)
        self._control(to, message)

    def _receive(self, peer: PeerId, frame: Frame) -> None:
        vote, session = frame.message, self._session
        proposal = self._other if isinstance(vote, Vote) and self._other is not None else None
        if (
            proposal is None
            or not isinstance(vote, Vote)
            or vote.proposal_digest != name_of(proposal)
            or vote.digest is None
        ):
            return self._on_frame(peer, frame)
        mine = session.factory.keyring.sign(vote_for(proposal, vote.digest))
        votes = self._votes.setdefault((vote.proposal_digest, vote.digest), {session.me: mine})
        votes[peer] = frame.signature
        proofs = tuple(Proof(voter, votes[voter]) for voter in sorted(votes))
        for to in sorted(session.live):
            if to[0] % 2:
                self._control(to, Commit(proposal, vote.digest, proofs))


class _DroppedVotes:
    """Member that answers each proposal with its own ballot, without the promises that report a vote."""

    def __init__(self, session: RoundSession) -> None:
        self._session, self._on_frame, self._control = session, session.on_frame, session.presence.send_queue.control
        session.on_frame = self._receive  # type: ignore[method-assign]
        session.presence.send_queue.control = self._send  # type: ignore[method-assign]

    def _receive(self, peer: PeerId, frame: Frame) -> None:
        self._on_frame(peer, frame)
        session = self._session
        if _first(frame.message) and session.current.agreement.proposal is not None:
            asyncio.get_running_loop().call_later(DELAY, self._begin_ballot, session.current)

    def _begin_ballot(self, current: Round) -> None:
        current.agreement._prepare(self._session._now())
        current.pump()

    def _send(self, to: PeerId, message: Message) -> None:
        session = self._session
        if isinstance(message, Propose) and message.reports and message.fragment == session.fragment:
            proposal, ready = message.proposal, session.current.agreement.ready
            if len(proposal.contributors) > 1 and all(peer in ready for peer in proposal.alive):
                lives = b"".join(ready[peer].life for peer in proposal.alive)
                free = replace(
                    proposal, adopted=None, sources=(), kept=(), shares=(), group=proposal.alive, lives=lives
                )
                free = _proven(replace(free, contributors=proposal.contributors[1:]), session.current.agreement)
                ours = sealed(free, session.factory.keyring.sign)
                message = Propose(ours, tuple(one for one in message.reports if not one.voted), message.earlier)
        self._control(to, message)


class _FalseVote:
    """Member that answers each proposal with its own ballot, and reports its vote for false results.

    It uses no promises with another vote, and no more than a quorum: the other members may have voted as it did, too.
    The results are huge, or, if `bounded`, a negative share of its own contribution. If it `claims` them, it signs for having
    computed them, and replaces its announcement, which an audit needs. If it `omits` a member, the results have another
    contributor and member less: one that is honest.
    """

    def __init__(
        self, session: RoundSession, *, bounded: bool = False, claims: bool = False, omits: bool = False
    ) -> None:
        self._bounded, self._claims, self._omits = bounded, claims, omits
        self._session, self._on_frame, self._control = session, session.on_frame, session.presence.send_queue.control
        self._chunks: list[Buffer] = []
        self._promises: set[PeerId] = set()
        session.on_frame = self._receive  # type: ignore[method-assign]
        session.presence.send_queue.control = self._send  # type: ignore[method-assign]

    def _receive(self, peer: PeerId, frame: Frame) -> None:
        session = self._session
        if not isinstance(frame.message, Promise) or self._is_useful(
            peer, frame.message, session.current.agreement.terms
        ):
            self._on_frame(peer, frame)
        if _first(frame.message):
            asyncio.get_running_loop().call_later(DELAY, self._begin_ballot, session.current)

    def _is_useful(self, peer: PeerId, promise: Promise, terms: RoundTerms) -> bool:
        if promise.voted is not None or terms.enough(self._promises):
            return False
        self._promises.add(peer)
        return True

    def _begin_ballot(self, current: Round) -> None:
        session, agreement = self._session, current.agreement
        if agreement.proposal is None or agreement.commit is not None or agreement.proposal.adopted is not None:
            return
        if self._bounded and not current.data_plane.source:
            return
        self._chunks = [self._false_result(index, current) for index in range(len(session.grid))]
        if self._claims and (ready := agreement.ready.get(session.me)) is not None:
            self._send_to_all(replace(ready, attempt=ready.attempt + 1))
        proposal = agreement.proposal
        if self._omits:  # It poses as the leader of that ballot.
            ballot = Ballot(proposal.ballot.term + 1, session.me)
            proposal = replace(_without_one(proposal, session.me), ballot=ballot)
            proposal = sealed(_proven(proposal, agreement), session.factory.keyring.sign)
        agreement.acceptor.vote(proposal, digest_of([blake3.blake3(chunk).digest() for chunk in self._chunks]))
        self._promises = {session.me}
        agreement._prepare(session._now())
        current.pump()

    def _false_result(self, index: int, current: Round) -> Buffer:
        """Return a false result of a chunk."""
        codec, size = self._session.codec, self._session.grid.size(index)
        payload, values = np.empty(codec.nbytes(size), np.uint8), np.full(size, HUGE, np.float32)
        if self._bounded:
            codec.decode(np.frombuffer(current.data_plane.source[index], np.uint8), values)
            values *= np.float32(WITHIN)
        codec.encode(values, payload)
        return payload.data

    def _send(self, to: PeerId, message: Message) -> None:
        session, adopted = self._session, message.proposal.adopted if isinstance(message, Propose) else None
        if adopted is not None and isinstance(message, Propose) and message.fragment == session.fragment:
            asyncio.get_running_loop().call_soon(self._insert_results, session.current, adopted)
        self._control(to, message)

    def _insert_results(self, current: Round, wanted: Digest) -> None:
        """Have the results, so that others can fetch them."""
        results = current.data_plane.results
        if results.wanted != wanted or not results.missing:
            return
        for index, chunk in enumerate(self._chunks):
            if results.chunks[index] is not None:
                results.drop(index)
            results.put(index, chunk)
        proposal = current.data_plane.proposal
        if self._claims and proposal is not None:
            hashes = b"".join(results.all_hashes())
            place = proposal.round, proposal.fragment, proposal.ballot
            basis = basis_of(proposal.contributors)
            self._send_to_all(ResultRecord(*place, tuple(range(len(results))), hashes, proposal.lineage, basis))
        current.data_plane.check()

    def _send_to_all(self, message: Message) -> None:
        for peer in sorted(self._session.live):
            self._control(peer, message)


def _proven(proposal: Proposal, agreement: Agreement) -> Proposal:
    """Return the proposal with the proofs of its new lives, as far as they are known."""
    proofs = map(agreement.announcements.member_proof, new_lives(proposal, agreement.terms))
    return replace(proposal, member_proofs=tuple(proof for proof in proofs if proof is not None))


def _without_one(proposal: Proposal, me: PeerId) -> Proposal:
    """Return the proposal without its first member that is not the sender."""
    out = next(peer for peer in proposal.members if peer != me)
    lives = {peer: life for peer, life in lives_of(proposal.members, proposal.lives).items() if peer != out}
    group = tuple(lives)
    return replace(
        proposal,
        group=group,
        alive=group,
        kept=(),
        shares=(),
        idle=(),
        contributors=tuple(entry for entry in proposal.contributors if entry.peer in lives),
        lives=lives_in_order(group, lives),
    )


def _hide_records(process: Process) -> None:
    """Send no votes, and records to the half of the peers with the lower ids only."""
    send_queue, me = process.peer.presence.send_queue, process.peer.identity.peer_id
    control = send_queue.control

    def send(to: PeerId, message: Message) -> None:
        others = sorted(peer for session in sessions(process) for peer in session.live if peer != me)
        if not isinstance(message, Vote) and (
            not isinstance(message, ResultRecord) or to in others[: len(others) // 2]
        ):
            control(to, message)

    send_queue.control = send  # type: ignore[method-assign]


def _lead_twice(session: RoundSession | GossipSession) -> None:
    if isinstance(session, RoundSession):
        _TwoProposals(session)


def _drop_votes(session: RoundSession | GossipSession) -> None:
    if isinstance(session, RoundSession):
        _DroppedVotes(session)


def _vote_falsely(session: RoundSession | GossipSession) -> None:
    if isinstance(session, RoundSession):
        _FalseVote(session)


def _vote_within_bounds(session: RoundSession | GossipSession) -> None:
    if isinstance(session, RoundSession):
        _FalseVote(session, bounded=True)


def _claim_falsely(session: RoundSession | GossipSession) -> None:
    if isinstance(session, RoundSession):
        _FalseVote(session, bounded=True, claims=True)


def _omit_a_member(session: RoundSession | GossipSession) -> None:
    if isinstance(session, RoundSession):
        _FalseVote(session, bounded=True, claims=True, omits=True)


AGREEMENT_LIES: dict[str, Callable[[Process], None]] = {
    "double-vote": each(_vote_twice),
    "other-vote": lambda process: change_outgoing(process, _other_vote),
    "report": _false_report,
    "commit": _flood(_commits),
    "open": _flood(_higher),
    "prepare": _flood(_prepares),
    "announce": _flood(_announcements),
    "two-proposals": each(_lead_twice),
    "drop-votes": each(_drop_votes),
    "half-record": _hide_records,
    "false-vote": each(_vote_falsely),
    "bounded-vote": each(_vote_within_bounds),
    "false-claim": each(_claim_falsely),
    "false-members": each(_omit_a_member),
}
"""Kind of lie -> function that makes the peer of a process tell it.

VOTE_LIES in faults.py describes them, and those of stopping_lies.py.
"""
