"""Peers that lie. A liar is a real peer whose session is changed in one respect; everything else it does is honest.

In a run of pairs (NoLoCo) each kind is the nearest that there is; where fragments have rounds of their own it lies in all of
them. A lie that fails is a mistake of ours: the simulation ends.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Mapping, Sequence
from typing import Any, cast

import msgspec
import numpy as np
from numpy.typing import NDArray
from thinwire.collectives.gossip import Meeting
from thinwire.collectives.outcome import Outcome
from thinwire.collectives.payload import cut_up
from thinwire.compression.portions import layout as runs
from thinwire.compression.sparse import Sparse
from thinwire.node.chainsession import ChainedSession
from thinwire.node.gossipsession import GossipSession
from thinwire.node.session import Session
from thinwire.node.sparse import RunCodec, SparseCodec
from thinwire.sims.clock import current
from thinwire.sims.machine import Process
from thinwire.swarm.errors import HintedError
from thinwire.swarm.frame import Frame
from thinwire.swarm.protocol import Behind, Blame, Decline, Message, PeerId, Ready, Result

KINDS: Mapping[str, str] = {
    "hash": "sends chunks that are not those it announced",
    "nan": "announces and sends values that are not numbers",
    "huge": "announces and sends its update a million times as long",
    "flip": "announces and sends its update with the sign turned",
    "zero": "announces and sends an update of nothing but zeros",
    "boast": "claims a thousand times the tokens that it has trained on",
    "base": "announces another base than its own: a state that nobody has; in pairs another plan of the exchange",
    "equivocate": "sends other results of its chunks to every second peer than it signs for; in pairs announces other attempts "
    "than it sends",
    "blame": "complains about everybody, all the time; in pairs declines everybody",
    "behind": "tells everybody that the swarm has long gone on",
    "silent": "announces and sends nothing more",
}
"""Kind -> what it does."""

CRY_SECONDS = 0.5
"""How often a liar cries what it has to say."""


def corrupt(process: Process, kind: str) -> None:
    """Make the peer of a process, which is ready, lie from now on. Raises KeyError for a kind that there is not."""
    end = process._end

    def told(reason: str, failure: BaseException | None) -> None:
        if failure is not None and not isinstance(failure, HintedError):
            _fail(failure)
        end(reason, failure)

    process._end = told  # type: ignore[method-assign]
    _LIES[kind](process)


def _fail(error: BaseException) -> None:
    """End the simulation, as an error in a callback does."""
    current().call_exception_handler({"exception": error})


def _sessions(process: Process) -> Sequence[Session | GossipSession]:
    """One; or one for each fragment."""
    session: Session | GossipSession | ChainedSession = process.peer.session
    return tuple(session.links.values()) if isinstance(session, ChainedSession) else (session,)


def _announce(
    session: Session | GossipSession,
    change: Callable[[NDArray[np.uint8]], NDArray[np.uint8] | None],
    *,
    openly: bool = True,
) -> None:
    """Change every encoded chunk before it is announced, or (not `openly`) behind the announcement's back. `change` does so in
    place, or returns another.
    """
    average = session.average

    async def lying(
        source: Sequence[Any], *, hashes: bytes | None = None, **rest: Any
    ) -> Outcome | tuple[Meeting, ...]:
        changed = []
        for chunk in source:
            payload = np.frombuffer(bytes(chunk), np.uint8).copy()
            other = change(payload)
            changed.append((payload if other is None else other).data)
        return await average(changed, hashes=None if openly else hashes, **rest)

    session.average = lying  # type: ignore[method-assign, assignment]


def _values(session: Session | GossipSession, change: Callable[[NDArray[np.float32]], NDArray[np.float32]]) -> None:
    """Change the values of an update, honestly encoded and announced."""
    if isinstance(session.codec, SparseCodec) and not isinstance(session.codec, RunCodec):
        return _whole(session, session.codec, change)
    index, announced = 0, (0, 0)

    def turn(payload: NDArray[np.uint8]) -> NDArray[np.uint8] | None:
        nonlocal index, announced
        now = (session.replica.round, session.current.attempt)
        index, announced = (index + 1 if announced == now else 0), now
        start, stop = session.grid.span(index)
        values, base = np.empty(stop - start, np.float32), np.zeros(stop - start, np.float32)
        if isinstance(session.codec, RunCodec):
            sparse = session.codec.portions.codec
            chunks = runs(values.size, values.size, sparse.chunk)
            values[:] = 0.0
            sparse.decode(payload.data, chunks).scatter(values)
            return np.frombuffer(sparse.encode(sparse.select(change(values), chunks)), np.uint8)
        if isinstance(session, GossipSession):
            # Of the two vectors the update; where one is enough it is the parameters, not how far they have moved.
            codec = session.codec.fast
            if session.codec.slow is None:
                base[:] = session.replica.theta[start:stop]
        else:
            codec = session.codec
        codec.decode(payload.data, values)
        codec.encode(np.ascontiguousarray(change(values - base) + base, np.float32), payload)
        return None

    _announce(session, turn)


def _whole(
    session: Session | GossipSession, codec: SparseCodec, change: Callable[[NDArray[np.float32]], NDArray[np.float32]]
) -> None:
    """The same of a sparse payload, which is one for all parameters and travels in pieces."""
    average, sparse, chunks = session.average, cast(Sparse, codec.codec), codec.chunks

    async def lying(
        source: Sequence[Any], *, hashes: bytes | None = None, **rest: Any
    ) -> Outcome | tuple[Meeting, ...]:
        if source:
            values = np.zeros(session.replica.theta.size, np.float32)
            sparse.decode(b"".join(source), chunks).scatter(values)
            said = sparse.encode(sparse.select(np.ascontiguousarray(change(values), np.float32), chunks))
            source = cut_up(said, session.grid)
        return await average(source, hashes=None, **rest)

    session.average = lying  # type: ignore[method-assign, assignment]


def _flip_bits(payload: NDArray[np.uint8]) -> None:
    payload[: payload.size // 2] ^= 0x55


def _poison(payload: NDArray[np.uint8]) -> None:
    # All ones are not a number as a float32, and the scale of an int8 block likewise.
    payload[-4:] = 255
    payload[:4] = 255


def _boast(session: Session | GossipSession) -> None:
    average = session.average

    async def lying(source: Sequence[Any], *, weight: int, **rest: Any) -> Outcome | tuple[Meeting, ...]:
        return await average(source, weight=1000 * weight, **rest)

    session.average = lying  # type: ignore[method-assign, assignment]


def _outgoing(process: Process, change: Callable[[PeerId, Message], Message]) -> None:
    """Change control messages on their way out."""
    outbox = process.peer.presence.outbox
    control = outbox.control
    outbox.control = lambda to, message: control(to, change(to, message))  # type: ignore[method-assign]


def _other_plan(to: PeerId, message: Message) -> Message:
    return msgspec.structs.replace(message, plan=bytes(32)) if isinstance(message, Ready) else message


def _other_base(to: PeerId, message: Message) -> Message:
    if isinstance(message, Ready):
        return msgspec.structs.replace(message, base=bytes(32))
    return message


def _other_attempt(to: PeerId, message: Message) -> Message:
    if isinstance(message, Ready):
        return msgspec.structs.replace(message, attempt=message.attempt + 1)
    return message


def _equivocate(process: Process) -> None:
    if isinstance(process.peer.session, GossipSession):
        return _outgoing(process, _other_attempt)
    outbox = process.peer.presence.outbox
    bulk = outbox.bulk

    def lying(to: PeerId, frame: Frame, *, later: bool = False) -> None:
        if isinstance(frame.message, Result) and to[0] % 2:
            payload = bytearray(frame.payload)
            payload[len(payload) // 2] ^= 1
            frame = Frame(frame.message, payload)
        bulk(to, frame, later=later)

    outbox.bulk = lying  # type: ignore[method-assign]


def _cry(process: Process, words: Callable[[Session | GossipSession], Sequence[Message]]) -> None:
    """Say something to everybody again and again, for as long as the process lives."""

    async def cry() -> None:
        while process.alive:
            await asyncio.sleep(CRY_SECONDS)
            try:
                for session in _sessions(process):
                    for message in words(session):
                        for peer in sorted(session.live):
                            session.presence.outbox.control(peer, message)
            except Exception as error:
                _fail(error)
                raise

    process.others.append(asyncio.get_running_loop().create_task(cry()))


def _round(session: Session | GossipSession) -> int:
    return session.current.round if isinstance(session, GossipSession) else session.current.agreement.terms.round


def _fragment(session: Session | GossipSession) -> int:
    return session.fragment if isinstance(session, Session) else 0


def _complaints(session: Session | GossipSession) -> list[Message]:
    if isinstance(session, GossipSession):
        return [Decline(_round(session), 0, "a liar")]
    agreement = session.current.agreement
    opened, terms = agreement.opened, agreement.terms
    if opened is None:
        return []
    return [
        Blame(terms.round, terms.fragment, opened.ballot, entry.peer, "chunk missing") for entry in opened.contributors
    ]


def _silence(process: Process) -> None:
    process.peer.presence.outbox.bulk = lambda to, frame, *, later=False: None  # type: ignore[method-assign]


def _each(lie: Callable[[Session | GossipSession], None]) -> Callable[[Process], None]:
    """A lie in all sessions of a peer."""

    def tell(process: Process) -> None:
        for session in _sessions(process):
            lie(session)

    return tell


_LIES: dict[str, Callable[[Process], None]] = {
    "hash": _each(lambda session: _announce(session, _flip_bits, openly=False)),
    "nan": _each(lambda session: _announce(session, _poison)),
    "huge": _each(lambda session: _values(session, lambda values: values * np.float32(1e6))),
    "flip": _each(lambda session: _values(session, lambda values: -values)),
    "zero": _each(lambda session: _values(session, np.zeros_like)),
    "boast": _each(_boast),
    "base": lambda process: _outgoing(
        process, _other_plan if isinstance(process.peer.session, GossipSession) else _other_base
    ),
    "equivocate": _equivocate,
    "blame": lambda process: _cry(process, _complaints),
    "behind": lambda process: _cry(process, lambda session: [Behind(_round(session) + 1000, _fragment(session))]),
    "silent": _silence,
}
