"""Members that begin ballots and finish none, in order to stop rounds.

Leader views bound the delay. The liars do not vote, and do not commit ballots that they lead. Otherwise they follow the rounds,
so they remain members. What they send follows from the messages that they get.
"""

from __future__ import annotations

import asyncio
import random
from collections.abc import Callable, Mapping

from msgspec.structs import replace
from thinwire.collectives.consensus.acceptor import LAST_TERM, LEAP
from thinwire.collectives.consensus.justification import sealed
from thinwire.collectives.rounds.round import Round
from thinwire.node.methods.noloco.session import GossipSession
from thinwire.node.outer.round_session import RoundSession
from thinwire.sims.peers.false_messages import each, repeat
from thinwire.sims.peers.machine import Process
from thinwire.swarm.frame import Frame
from thinwire.swarm.messages.registry import (
    Ballot,
    Commit,
    CompactCommit,
    Message,
    PeerId,
    Prepare,
    Promise,
    Propose,
    ViewChange,
    Vote,
)

WAIT_SECONDS = (0.002, 0.5)
"""Range of the wait after a message of a leader: promises or votes are in transit on some links."""

VIEWS = (0, 1, 2, 5, LAST_TERM)
"""Views that are demanded falsely."""

TERMS = (1, LEAP // 2, LEAP, LAST_TERM)
"""Terms above the present one that are reported falsely."""


class _Stopper:
    """Member that neither votes nor commits, and disturbs the ballots of other leaders."""

    def __init__(self, session: RoundSession) -> None:
        self._session, self._rng = session, random.Random(session.me + bytes([session.fragment]))
        self._on_frame, self._control = session.on_frame, session.presence.send_queue.control
        session.on_frame = self._receive  # type: ignore[method-assign]
        session.presence.send_queue.control = self._send  # type: ignore[method-assign]

    def _send(self, to: PeerId, message: Message) -> None:
        ends = isinstance(message, (Vote, Commit, CompactCommit)) and message.fragment == self._session.fragment
        if not ends:
            self._control(to, message)

    def _receive(self, peer: PeerId, frame: Frame) -> None:
        message = frame.message
        if isinstance(message, (Prepare, Propose)) and message.round == self._session.current.round:
            self._disturb(peer, message)
        if not isinstance(message, Vote):
            self._on_frame(peer, frame)

    def _disturb(self, leader: PeerId, message: Prepare | Propose) -> None:
        """Act on a message of a leader."""
        raise NotImplementedError

    def _others(self, leader: PeerId) -> list[PeerId]:
        session = self._session
        return [peer for peer in session.current.agreement.terms.members if peer in session.live and peer != leader]

    def _prepare(self, number: int, to: PeerId, term: int) -> None:
        terms = self._session.current.agreement.terms
        if terms.round == number:  # else the round is over
            ballot = Ballot(min(term, LAST_TERM), self._session.me)
            self._control(to, Prepare(terms.round, terms.fragment, ballot, terms.lineage))


class _Outrun(_Stopper):
    """Sends some members a ballot just above that of a leader, at once: its Prepare may reach them later."""

    def _disturb(self, leader: PeerId, message: Prepare | Propose) -> None:
        if isinstance(message, Prepare) and (others := self._others(leader)):
            for to in self._rng.sample(others, self._rng.randint(1, len(others))):
                self._prepare(message.round, to, message.ballot.term + 1)


class _Strike(_Stopper):
    """Lets one member promise a higher ballot while a leader waits for promises or votes.

    The terms are the lowest and the highest that the member may accept, in turn.
    """

    _steps = (1, LEAP)

    def _disturb(self, leader: PeerId, message: Prepare | Propose) -> None:
        if others := self._others(leader):
            ballot = message.ballot if isinstance(message, Prepare) else message.proposal.ballot
            self._steps = self._steps[::-1]
            what = message.round, self._rng.choice(others), ballot.term + self._steps[0]
            low, high = WAIT_SECONDS
            wait = low * (high / low) ** self._rng.random()
            asyncio.get_running_loop().call_later(wait, self._prepare, *what)


class _Divide(_Stopper):
    """Lets two members vote for different results, and then is silent: either may have been decided.

    It begins a ballot once the first proposal is here, without the first leader's promise. Its proposal lacks a contributor
    and goes to one member.
    """

    _divided: Ballot | None = None
    """Ballot in which it has proposed."""

    def _receive(self, peer: PeerId, frame: Frame) -> None:
        message, agreement = frame.message, self._session.current.agreement
        first = isinstance(message, Promise) and peer == agreement.terms.members[0]
        if not first and not (self._divided and isinstance(message, (Prepare, ViewChange))):
            super()._receive(peer, frame)

    def _disturb(self, leader: PeerId, message: Prepare | Propose) -> None:
        if isinstance(message, Propose) and not message.reports:
            self._divided = None
            asyncio.get_running_loop().call_soon(self._begin_ballot, self._session.current)

    def _begin_ballot(self, current: Round) -> None:
        current.agreement._prepare(self._session._now())
        current.pump()

    def _send(self, to: PeerId, message: Message) -> None:
        session, first = self._session, self._session.current.agreement.terms.members[:1]
        if isinstance(message, (Prepare, Propose)) and message.fragment == session.fragment:
            if (to,) == first:
                return  # It has voted in its own ballot, and must not learn of this one.
            if isinstance(message, Propose) and message.reports:
                self._divided = message.proposal.ballot
                if to != self._others(first[0])[0]:
                    return
                other = replace(message.proposal, contributors=message.proposal.contributors[1:], shares=())
                message = replace(message, proposal=sealed(other, session.factory.keyring.sign))
        super()._send(to, message)


class _FalseViews(_Stopper):
    """Demands views, and reports promises that do not exist, to each leader."""

    def _disturb(self, leader: PeerId, message: Prepare | Propose) -> None:
        self._control(leader, self.demand())

    def demand(self) -> ViewChange:
        """Return a false message."""
        agreement = self._session.current.agreement
        terms, promised = agreement.terms, agreement.acceptor.promised
        term = min(promised.term + self._rng.choice(TERMS), LAST_TERM)
        ballot = Ballot(term, self._rng.choice(terms.members or (self._session.me,)))
        return ViewChange(terms.round, terms.fragment, self._rng.choice(VIEWS), ballot, terms.lineage)


def _stop(kind: type[_Stopper]) -> Callable[[Process], None]:
    def lie(session: RoundSession | GossipSession) -> None:
        if isinstance(session, RoundSession):
            kind(session)

    return each(lie)


def _demand_views(process: Process) -> None:
    liars = {}

    def lie(session: RoundSession | GossipSession) -> None:
        if isinstance(session, RoundSession):
            liars[session] = _FalseViews(session)

    each(lie)(process)
    repeat(process, lambda session: [liars[session].demand()] if session in liars else [])


STOPPING_LIES: Mapping[str, Callable[[Process], None]] = {
    "outrun": _stop(_Outrun),
    "strike": _stop(_Strike),
    "divide": _stop(_Divide),
    "false-views": _demand_views,
}
"""Kind of lie -> function that makes the peer of a process tell it.

VOTE_LIES in faults.py describes them.
"""
