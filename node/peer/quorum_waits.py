"""Waits of a peer for a quorum, and their end by hand."""

from __future__ import annotations

from thinwire.node.outer.round_session import RoundSession
from thinwire.node.peer.peer import Peer
from thinwire.node.peer.status import Stall


def stalls(peer: Peer) -> tuple[Stall, ...]:
    """Return the waits of a peer for a quorum, by fragment.

    Empty if quorums are here, or if the method needs none.
    """
    now = peer.environment.now()
    return tuple(_stall(session, now) for session in _waiting(peer))


def recover(peer: Peer) -> int:
    """Found lineages without a quorum, and wait no longer; return in how many fragments."""
    waiting = _waiting(peer)
    for session in waiting:
        session.quorum_wait.recover()
    return len(waiting)


def _waiting(peer: Peer) -> list[RoundSession]:
    sessions = peer.session.sessions.values() if peer.ready else ()
    return [one for one in sessions if isinstance(one, RoundSession) and one.quorum_wait.since is not None]


def _stall(session: RoundSession, now: float) -> Stall:
    agreement, wait, members = session.current.agreement, session.quorum_wait, session.replica.members
    here = [peer for peer in members if peer in session.live and peer not in agreement.nonvoters]
    obstacle = ""
    if session.states.held:
        obstacle = "a state is being fetched"
    elif agreement.diverged:
        obstacle = "most of the members have another state, which must be fetched"
    return Stall(
        fragment=session.fragment,
        round=session.replica.round,
        members=tuple(peer.hex() for peer in members),
        absent=tuple(peer.hex() for peer in agreement.absent if peer != session.me),
        founders=tuple(peer.hex() for peer in sorted({session.me, *here})),
        seconds=max(0.0, now - (wait.since or 0.0)),
        until=None if wait.until is None else max(0.0, wait.until - now),
        obstacle=obstacle,
    )
