"""Means of peers that lie: changed messages, and unsolicited messages."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Sequence

from thinwire.node.methods.noloco.session import GossipSession
from thinwire.node.outer.round_session import RoundSession
from thinwire.sims.engine.virtual_loop import current
from thinwire.sims.peers.machine import Process
from thinwire.swarm.messages.registry import Message, PeerId

REPEAT_SECONDS = 0.5
"""Interval in seconds between two messages of a liar that repeats itself."""


def fail(error: BaseException) -> None:
    """End the simulation, like an error in a callback."""
    current().call_exception_handler({"exception": error})


def sessions(process: Process) -> Sequence[RoundSession | GossipSession]:
    """Return the session of a peer, or those of its fragments."""
    found = process.peer.session.sessions.values()
    return tuple(one for one in found if isinstance(one, (RoundSession, GossipSession)))


def change_outgoing(process: Process, change: Callable[[PeerId, Message], Message]) -> None:
    """Change outgoing control messages."""
    send_queue = process.peer.presence.send_queue
    control = send_queue.control
    send_queue.control = lambda to, message: control(to, change(to, message))  # type: ignore[method-assign]


def repeat(process: Process, messages_of: Callable[[RoundSession | GossipSession], Sequence[Message]]) -> None:
    """Send messages to all peers repeatedly, as long as the process runs."""

    async def send_all() -> None:
        while process.alive:
            await asyncio.sleep(REPEAT_SECONDS)
            try:
                for session in sessions(process):
                    for message in messages_of(session):
                        for peer in sorted(session.live):
                            session.presence.send_queue.control(peer, message)
            except Exception as error:
                fail(error)
                raise

    process.others.append(asyncio.get_running_loop().create_task(send_all()))


def round_of(session: RoundSession | GossipSession) -> int:
    return session.current.round if isinstance(session, GossipSession) else session.current.agreement.terms.round


def fragment_of(session: RoundSession | GossipSession) -> int:
    return session.fragment if isinstance(session, RoundSession) else 0


def each(lie: Callable[[RoundSession | GossipSession], None]) -> Callable[[Process], None]:
    """Apply a lie to all sessions of a peer."""

    def apply(process: Process) -> None:
        for session in sessions(process):
            lie(session)

    return apply
