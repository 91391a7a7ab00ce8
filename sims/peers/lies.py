"""Byzantine peers: real peers whose session lies in one respect and is honest otherwise.

In runs of pairs (NoLoCo) each kind is the nearest equivalent; if fragments have separate rounds it lies in all of
them. An error in a lie is an error of ours: it ends the simulation.
"""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Sequence
from typing import Any, cast

import msgspec
import numpy as np
from numpy.typing import NDArray
from thinwire.collectives.consensus.proposal import MISSING
from thinwire.collectives.gossip.owner_group import OwnerGroup
from thinwire.collectives.gossip.pair import PairResult
from thinwire.collectives.gossip.pair_codec import payload_of
from thinwire.collectives.outcome import Outcome
from thinwire.collectives.rounds.data_planes.allgather.payload_pieces import pieces_of
from thinwire.compression.core.codec import CodecError
from thinwire.compression.core.types import Buffer, Floats
from thinwire.compression.sparse.portions import portion_chunks
from thinwire.compression.sparse.topk import Sparse
from thinwire.node.methods.noloco.session import GossipSession
from thinwire.node.methods.sparse.sparse_codec import OwnedChunkCodec, SparseCodec
from thinwire.node.outer.round_session import RoundSession
from thinwire.node.outer.verification.score_book import NOTHING
from thinwire.sims.peers.agreement_lies import AGREEMENT_LIES
from thinwire.sims.peers.false_messages import change_outgoing, each, fail, fragment_of, repeat, round_of
from thinwire.sims.peers.learners import StubLearner
from thinwire.sims.peers.machine import Process
from thinwire.sims.peers.member_lies import MEMBER_LIES
from thinwire.sims.peers.owner_lies import OWNER_LIES
from thinwire.sims.peers.stopping_lies import STOPPING_LIES
from thinwire.swarm.frame import Frame
from thinwire.swarm.identity.errors import HintedError
from thinwire.swarm.messages.registry import Behind, Blame, Decline, Message, PeerId, Ready, Result

MIMIC_SECONDS, MIMIC_LOOKS = 2.0, 40
"""Seconds for which a mimic waits for the announcement that it repeats, and its looks in them."""


ALIE_DEVIATIONS = 1.5
"""Standard deviations by which the attack "alie" is away from the mean of the honest updates."""


def make_liar(process: Process, kind: str) -> None:
    """Make the peer of a ready process lie from now on.

    `kind`: see ALL_LIES of faults.py. Raises KeyError.
    """
    end = process._end

    def checked_end(reason: str, failure: BaseException | None) -> None:
        if failure is not None and not isinstance(failure, HintedError):
            fail(failure)
        end(reason, failure)

    process._end = checked_end  # type: ignore[method-assign]
    IMPLEMENTED[kind](process)


def _change_contributions(
    session: RoundSession | GossipSession, change: Callable[[Sequence[Any], dict[str, Any]], Awaitable[Sequence[Any]]]
) -> None:
    """Change every contribution.

    `change` gets the chunks and the other arguments of `average`, which it may change, and returns the chunks to contribute.
    """
    average = session.average

    async def lying(source: Sequence[Any], **others: Any) -> Outcome | tuple[PairResult, ...]:
        return await average(await change(source, others), **others)

    session.average = lying  # type: ignore[method-assign, assignment]


def _change_chunks(
    session: RoundSession | GossipSession,
    change: Callable[[NDArray[np.uint8]], NDArray[np.uint8] | None],
    *,
    announced: bool = True,
) -> None:
    """Change every encoded chunk before it is announced, or (not `announced`) after the announcement.

    `change` works in place, or returns another chunk.
    """

    async def lying(source: Sequence[Any], others: dict[str, Any]) -> Sequence[Any]:
        changed = []
        for chunk in source:
            payload = np.frombuffer(bytes(chunk), np.uint8).copy()
            other = change(payload)
            changed.append((payload if other is None else other).data)
        if isinstance(session, GossipSession) and isinstance(session.current, OwnerGroup):
            _read_honestly(session, session.current, source, changed)
        if announced:
            others["summary"] = None  # which is then made of the changed chunks
        return changed

    _change_contributions(session, lying)


def _send_unreadable(session: RoundSession | GossipSession, change: Callable[[NDArray[np.uint8]], None]) -> None:
    """Send chunks that no decoder accepts, and score no other peer.

    A score compares with the own contribution.
    """
    _change_chunks(session, change)
    if isinstance(session, RoundSession):
        session.trials.evaluate = lambda sample, score: (NOTHING, NOTHING)  # type: ignore[method-assign]


def _read_honestly(
    session: GossipSession, group: OwnerGroup, source: Sequence[Buffer], changed: Sequence[Buffer]
) -> None:
    """Let a liar use its honest chunk for the means that it computes itself.

    That is the case for chunks that it owns, where the false chunk cannot be decoded.
    """
    own, unreadable = group.own, {}
    for number, payload in enumerate(changed):
        try:
            session.codec.fast.check(payload, session.grid.size(number))
        except CodecError:
            unreadable[number] = source[number]

    def honest(number: int) -> Buffer | None:
        announced = own(number)
        return announced if announced is None else unreadable.get(number, announced)

    group.own = honest  # type: ignore[method-assign]


def change_values(
    session: RoundSession | GossipSession, change: Callable[[NDArray[np.float32]], NDArray[np.float32]]
) -> None:
    """Change the values of an update, which is then encoded and announced honestly."""
    _change_parts(session, lambda values, start: change(values))


def _change_parts(
    session: RoundSession | GossipSession, change: Callable[[NDArray[np.float32], int], NDArray[np.float32]]
) -> None:
    """As `change_values`; `change` also gets the number of the first element."""
    if isinstance(session.codec, SparseCodec) and not isinstance(session.codec, OwnedChunkCodec):
        return _change_sparse(session, session.codec, change)
    index, announced = 0, (0, 0)

    def turn(payload: NDArray[np.uint8]) -> NDArray[np.uint8] | None:
        nonlocal index, announced
        now = (session.replica.round, session.current.attempt)
        index, announced = (index + 1 if announced == now else 0), now
        start, stop = session.grid.span(index)
        values, base = np.empty(stop - start, np.float32), np.zeros(stop - start, np.float32)
        if isinstance(session.codec, OwnedChunkCodec):
            sparse = session.codec.portions.codec
            chunks = portion_chunks(values.size, values.size, sparse.chunk)
            values[:] = 0.0
            sparse.decode(payload.data, chunks).scatter(values)
            return np.frombuffer(sparse.encode(sparse.select(change(values, start), chunks)), np.uint8)
        if isinstance(session, GossipSession):
            # Change the update vector of the two; a single vector holds the parameters, not their change.
            codec = session.codec.fast
            if session.codec.slow is None:
                base[:] = session.replica.theta[start:stop]
        else:
            codec = session.codec
        codec.decode(payload.data, values)
        changed = payload_of(codec, np.ascontiguousarray(change(values - base, start) + base, np.float32))
        return np.frombuffer(changed, np.uint8)

    _change_chunks(session, turn)


def _change_sparse(
    session: RoundSession | GossipSession,
    codec: SparseCodec,
    change: Callable[[NDArray[np.float32], int], NDArray[np.float32]],
) -> None:
    """Change a sparse payload, one vector of all parameters that travels in pieces."""
    sparse, chunks = cast(Sparse, codec.codec), codec.chunks

    async def lying(source: Sequence[Any], others: dict[str, Any]) -> Sequence[Any]:
        others["summary"] = None
        if source:
            values = np.zeros(session.replica.theta.size, np.float32)
            sparse.decode(b"".join(source), chunks).scatter(values)
            encoded = sparse.encode(sparse.select(np.ascontiguousarray(change(values, 0), np.float32), chunks))
            return pieces_of(encoded, session.grid)
        return source

    _change_contributions(session, lying)


def _flip_bits(payload: NDArray[np.uint8]) -> None:
    payload[: payload.size // 2] ^= 0x55


def _write_nan(payload: NDArray[np.uint8]) -> None:
    # A float32 of all ones is not a number, and so is the scale of an int8 block.
    payload[-4:] = 255
    payload[:4] = 255


def _write_infinity(payload: NDArray[np.uint8]) -> None:
    # A float32 of the value infinity at the start, and a float16 of it at the end, where int8 has a scale.
    payload[:4] = (0, 0, 0x80, 0x7F)
    payload[-2:] = (0, 0x7C)


def _same_everywhere(values: NDArray[np.float32]) -> NDArray[np.float32]:
    return np.full_like(values, 10.0 * np.sqrt(np.mean(np.square(values, dtype=np.float64))))


def _least_changed(values: NDArray[np.float32]) -> NDArray[np.float32]:
    """Return as long an update, of the eighth of the values that the honest one changes least."""
    made = np.zeros_like(values)
    at = np.argsort(np.abs(values))[: max(1, values.size // 8)]
    made[at] = -np.sqrt(np.sum(np.square(values, dtype=np.float64)) / at.size)
    return made


def _alie(process: Process) -> None:
    """Announce values at one side of the spread of the honest ones.

    A Little Is Enough (Baruch et al., arXiv 1902.06156). The liar knows the updates of all peers. Not for models in fragments.
    """
    machines = process.machine.world.machines

    def begin(session: RoundSession | GossipSession) -> None:
        def change(values: NDArray[np.float32], start: int) -> NDArray[np.float32]:
            stop = start + values.size
            running = [one.process for one in machines if not one.lie and one.process is not None and one.process.ready]
            theirs = [one.learner.parameters()[start:stop] for one in running if one.learner is not None]
            if len(theirs) < 2:
                return values
            rows = session.replica.theta[start:stop] - np.stack(theirs)
            made: Floats = (rows.mean(0) - ALIE_DEVIATIONS * rows.std(0)).astype(np.float32)
            return made

        _change_parts(session, change)

    each(begin)(process)


def _false_labels(process: Process) -> None:
    """Train on false labels from now on; the contributions are honest otherwise."""
    if not isinstance(process.learner, StubLearner):
        raise TypeError("only the stub model can be trained on false labels")
    process.learner.false_labels = True


def _repeat(session: RoundSession | GossipSession) -> None:
    first = list[bytes]()

    async def lying(source: Sequence[Any], others: dict[str, Any]) -> Sequence[Any]:
        others["summary"] = None
        first.extend(bytes(chunk) for chunk in source if not first or len(first) < len(source))
        return [memoryview(chunk) for chunk in first] if source else source

    _change_contributions(session, lying)


def _copy_honest(process: Process) -> None:
    """Repeat the data of the first honest peer, after its announcement to the same round.

    The liar knows the data of all peers.
    """
    machines = process.machine.world.machines

    def of_victim(own: RoundSession | GossipSession) -> Sequence[Buffer]:
        victim = next((one.process for one in machines if not one.lie and one.process is not None), None)
        if victim is None or not victim.ready or not isinstance(own, RoundSession):
            return ()
        theirs = victim.peer.session.sessions[own.fragment]
        if not isinstance(theirs, RoundSession) or theirs.current.round != own.current.round:
            return ()
        return theirs.current.data_plane.source

    def begin(session: RoundSession | GossipSession) -> None:
        async def lying(source: Sequence[Any], others: dict[str, Any]) -> Sequence[Any]:
            for _ in range(MIMIC_LOOKS):
                if copied := [memoryview(bytes(chunk)) for chunk in of_victim(session)]:
                    others["summary"] = None
                    return copied if source else source
                await asyncio.sleep(MIMIC_SECONDS / MIMIC_LOOKS)
            return source

        _change_contributions(session, lying)

    each(begin)(process)


def _inflate_weight(session: RoundSession | GossipSession) -> None:
    async def lying(source: Sequence[Any], others: dict[str, Any]) -> Sequence[Any]:
        others["weight"] *= 1000
        return source

    _change_contributions(session, lying)


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
        return change_outgoing(process, _other_attempt)
    send_queue = process.peer.presence.send_queue
    bulk = send_queue.bulk

    def lying(to: PeerId, frame: Frame, **how: bool) -> None:
        if isinstance(frame.message, Result) and to[0] % 2:
            payload = bytearray(frame.payload)
            payload[len(payload) // 2] ^= 1
            frame = Frame(frame.message, payload)
        bulk(to, frame, **how)

    send_queue.bulk = lying  # type: ignore


def false_blames(session: RoundSession | GossipSession) -> list[Message]:
    """Return false accusations of the other peers."""
    if isinstance(session, GossipSession):
        return [Decline(round_of(session), 0, "a liar")]
    agreement = session.current.agreement
    proposal, terms = agreement.proposal, agreement.terms
    if proposal is None:
        return []
    return [Blame(terms.round, terms.fragment, proposal.ballot, entry.peer, MISSING) for entry in proposal.contributors]


def _send_no_bulk(process: Process) -> None:
    process.peer.presence.send_queue.bulk = lambda to, frame, **how: None  # type: ignore


IMPLEMENTED: dict[str, Callable[[Process], None]] = {
    "hash": each(lambda session: _change_chunks(session, _flip_bits, announced=False)),
    "nan": each(lambda session: _send_unreadable(session, _write_nan)),
    "huge": each(lambda session: change_values(session, lambda values: values * np.float32(1e6))),
    "flip": each(lambda session: change_values(session, lambda values: -values)),
    "zero": each(lambda session: change_values(session, np.zeros_like)),
    "false-weight": each(_inflate_weight),
    "base": lambda process: change_outgoing(
        process, _other_plan if isinstance(process.peer.session, GossipSession) else _other_base
    ),
    "equivocate": _equivocate,
    "blame": lambda process: repeat(process, false_blames),
    "behind": lambda process: repeat(process, lambda session: [Behind(round_of(session) + 1000, fragment_of(session))]),
    "silent": _send_no_bulk,
    "flip10": each(lambda session: change_values(session, lambda values: np.float32(-10) * values)),
    "scale900": each(lambda session: change_values(session, lambda values: np.float32(900) * values)),
    "1e30": each(lambda session: change_values(session, lambda values: np.full_like(values, 1e30))),
    "inf": each(lambda session: _send_unreadable(session, _write_infinity)),
    "constant": each(lambda session: change_values(session, _same_everywhere)),
    "repeat": each(_repeat),
    "mimic": _copy_honest,
    "alie": _alie,
    "labels": _false_labels,
    "rare": each(lambda session: change_values(session, _least_changed)),
    **AGREEMENT_LIES,
    **OWNER_LIES,
    **MEMBER_LIES,
    **STOPPING_LIES,
}
"""Kind of lie -> function that makes a peer tell it. Has the keys of ALL_LIES in faults.py."""
