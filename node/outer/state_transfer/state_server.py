"""Server of the replica's state for joiners and for peers that are behind."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field

from thinwire.collectives.state_sync.chunk_transfer import IN_FLIGHT
from thinwire.collectives.state_sync.offer_search import LAST_ROUND
from thinwire.collectives.transport.rate_limit import TokenBuckets
from thinwire.collectives.transport.sending.send_queue import SendQueue
from thinwire.compression.core.types import Buffer
from thinwire.node.outer.state_transfer.round_history import HURRY, RoundHistory
from thinwire.node.runtime.asyncio_extra import Result, Work
from thinwire.node.state.replica import Replica
from thinwire.swarm.frame import Frame
from thinwire.swarm.messages.registry import CHUNK_BYTES, PeerId, StateAsk, StateChunk, StateFetch, StateOffer

QUESTIONS = (StateAsk, StateFetch)
"""Types of messages to a peer that serves a state."""

SIDE_BY_SIDE = 2
"""Number of states from which one peer fetches chunks at the same time."""

SNAPSHOT_SECONDS = 15.0
"""Seconds for which the state of a round is stored after the last request for a chunk was served."""

STORED = 3
"""Number of rounds whose states are stored for readers, besides the replica."""

WHOLE = 2
"""Number of states that a reader may have at once before its allowance is spent."""

REFILL_SECONDS = 600.0
"""Seconds in which the allowance of a reader grows by one state."""


@dataclass(slots=True, eq=False)
class _Snapshot:
    """State of one round that peers may read.

    - `proof`: payload of its offer.
    - `twin`: has the state.
    - `used`: time of the last use by a reader.
    - `served`: time of the last chunk that was sent, None before the first one.
    """

    offer: StateOffer
    proof: bytes
    twin: Replica
    used: float
    served: float | None = None
    readers: set[PeerId] = field(default_factory=set)


class StateServer:
    """Serves the state of the round in which a peer asked for it, while rounds continue.

    If the state has readers when the replica is about to change, it is left to them, and the replica continues with a copy, see
    `Replica.twin`. A peer that takes part in a round is no reader any more (`done`). Until `resume` (or `entered`) makes this
    peer part of the swarm, it answers that it has no state.

    - `history`: past rounds whose results are served, too; None: none.
    - `paced`: chunks for joiners take a small part of the uplink (send_priority.py). Two kinds of readers have no pauses:
      members, because rounds may wait for them, and readers of an old state, if the stored rounds that continue it would soon
      be dropped.

    States of at most STORED rounds are stored. A newcomer is always offered the newest, because a liar may offer a false state
    of a round that no honest peer offers. Each reader has an allowance of chunks. When it is used up, the reader's chunks have
    pauses in any case, and its state is the first to be dropped. So a peer that reads for ever takes little of the uplink.
    """

    def __init__(
        self,
        replica: Replica,
        send_queue: SendQueue,
        now: Callable[[], float],
        *,
        entered: bool,
        fragment: int = 0,
        report: Callable[[str, str], None] = lambda name, detail: None,
        history: RoundHistory | None = None,
        paced: bool = True,
    ) -> None:
        self.entered = entered
        """True if this peer is part of the swarm."""
        self._replica, self._send_queue, self._now, self._fragment = replica, send_queue, now, fragment
        self._report = report
        self._history = RoundHistory(0, now) if history is None else history
        self._paced, self._hurried = paced, set[PeerId]()
        chunks = max(1, -(-replica.state.nbytes // CHUNK_BYTES))
        self._allowance = TokenBuckets(WHOLE * chunks, chunks / REFILL_SECONDS)
        self._over_allowance: set[PeerId] = set()
        """Readers whose allowance is used up."""
        self._stored: list[_Snapshot] = []
        """Offered states, the oldest first; the last one may be that of the replica."""
        self._waiting: set[PeerId] = set()
        self.held = False
        """True while the replica changes."""
        self._warned = False
        """True if the alarm that our chain is too long has been given."""

    async def change(self, work: Work, how: Callable[[], Result]) -> Result:
        """Run `how`, which changes the replica, in `work`. The state is not offered until `resume`.

        A state with readers, or of which a checkpoint is being written, is left to them; the replica continues with a copy,
        which is made in `work` too, because it may be large. Where memory is short, readers get a file. Without memory for the
        copy the readers have to ask for the next state, and the checkpoint fails.
        """
        self.held = True
        self._keep(lambda one: bool(one.readers))

        def change() -> Result:
            self._replica.move_from_twins()
            self._replica.torn = True
            result = how()
            self._replica.torn = False
            return result

        changed: Result = await work(change)
        self._keep(lambda one: not one.twin.lost)
        return changed

    def resume(self) -> None:
        """End `change`: answer the requests that came meanwhile."""
        self.held, self.entered = False, True
        waiting, self._waiting = sorted(self._waiting), set()
        for peer in waiting:
            self._offer(peer)

    @property
    def busy(self) -> bool:
        """True while states are stored for readers, so that `on_tick` has work."""
        return bool(self._stored or self._hurried)

    @property
    def read(self) -> bool:
        """True if a peer reads the state of a round."""
        return any(one.readers for one in self._stored)

    @property
    def copied(self) -> int:
        """Bytes of states that are stored for readers besides the replica."""
        return sum(one.twin.state.nbytes for one in self._stored if self._detached(one))

    def _is_read(self, snapshot: _Snapshot) -> bool:
        """Return True if a reader that has an allowance has got chunks of this state."""
        return snapshot.served is not None and bool(snapshot.readers - self._over_allowance)

    def _detached(self, snapshot: _Snapshot) -> bool:
        """Return True if the replica does not use this state any more."""
        return snapshot.twin.state is not self._replica.state

    def done(self, peer: PeerId, round: int = LAST_ROUND) -> None:
        """Note that a peer takes part in `round`, so that it has the state before it."""
        for snapshot in self._stored:
            if snapshot.offer.round < round:
                snapshot.readers.discard(peer)
        self._keep(lambda one: bool(one.readers) or not self._detached(one))

    def on_link_down(self, peer: PeerId) -> None:
        """Forget a reader."""
        self.done(peer)

    def on_frame(self, peer: PeerId, frame: Frame) -> None:
        message = frame.message
        if isinstance(message, StateAsk):
            self._offer(peer)
        elif isinstance(message, StateFetch):
            self._serve(peer, message)

    def on_tick(self) -> None:
        """Drop states that were not requested for SNAPSHOT_SECONDS, or that no stored rounds continue."""
        if not self.busy:
            return
        self._keep(self._is_current)
        self._pace()

    def _is_current(self, snapshot: _Snapshot) -> bool:
        if any(self._send_queue.requested(peer, StateChunk, self._fragment) for peer in snapshot.readers):
            snapshot.used = self._now()  # its pauses may be longer
        return self._now() <= snapshot.used + SNAPSHOT_SECONDS and self._history.used_part(snapshot.offer.round) < 1

    def _keep(self, wanted: Callable[[_Snapshot], bool]) -> None:
        """Drop the states that are not `wanted`. Their readers learn it at once, and look for a newer state."""
        dropped = [one for one in self._stored if not wanted(one)]
        if not dropped:
            return  # the usual case: called at each tick
        self._stored = [one for one in self._stored if one not in dropped]
        for snapshot in dropped:
            for peer in sorted(snapshot.readers):
                self._tell_dropped(peer, snapshot.offer.round)

    def _tell_dropped(self, peer: PeerId, round: int) -> None:
        """Send empty chunks instead of those of this round's state that wait for a peer."""
        for frame in self._send_queue.withdraw(peer, StateChunk, self._fragment):
            message = frame.message
            gone = isinstance(message, StateChunk) and message.round == round
            self._send_queue.bulk(peer, Frame(message) if gone else frame, requested=True)

    def _pace(self) -> None:
        """Decide which readers have pauses."""
        hurried: set[PeerId] = set()
        self._over_allowance &= {peer for one in self._stored for peer in one.readers}
        for snapshot in self._stored:
            late = not self._paced or self._history.used_part(snapshot.offer.round) > HURRY
            hurried |= snapshot.readers if late else snapshot.readers.intersection(self._replica.members)
        if self._paced:
            hurried -= self._over_allowance.difference(self._replica.members)
        for peer in sorted(hurried ^ self._hurried):
            self._send_queue.hurry((peer, self._fragment), peer in hurried)
        self._hurried = hurried

    def _offer(self, peer: PeerId) -> None:
        replica = self._replica
        if self._send_queue.requested(peer, StateOffer, self._fragment) > 2 * IN_FLIGHT:
            return  # the peer has not even read the earlier offers
        if not self.entered:
            nothing = StateOffer(
                replica.round, replica.digest, replica.layout, replica.state.nbytes, (), self._fragment
            )
            self._send_queue.bulk(peer, Frame(nothing), requested=True)
            return
        if self.held:
            self._waiting.add(peer)
            return
        if not self._stored or self._stored[-1].offer.digest != replica.digest:
            self._make_room()
            offer = StateOffer(
                replica.round,
                replica.digest,
                replica.layout,
                replica.state.nbytes,
                replica.members,
                self._fragment,
                replica.lives,
                replica.lineage,
                *self._history.replay,
            )
            if replica.chain and not replica.proof and not self._warned:
                self._warned = True
                detail = "the members have changed too often: their proof is too long, so no peer can join or catch up"
                self._report("alarm", detail)
            proof = b"".join(replica.hashes) + replica.proof
            self._stored.append(_Snapshot(offer, proof, replica.twin(), self._now()))
        snapshot = self._stored[-1]
        snapshot.used = self._now()
        snapshot.readers.add(peer)
        self._send_queue.bulk(peer, Frame(snapshot.offer, snapshot.proof), requested=True)

    def _make_room(self) -> None:
        """Drop states for that of a new round.

        First those that no peer reads, except the newest; then, if there are still too many, the newest, whose readers have the
        fewest chunks.
        """
        self._keep(lambda one: one is self._stored[-1] or self._is_read(one))
        if len(self._stored) >= STORED:
            worst = next((one for one in self._stored if not self._is_read(one)), self._stored[-1])
            self._keep(lambda one: one is not worst)

    def _serve(self, peer: PeerId, message: StateFetch) -> None:
        if self._send_queue.requested(peer, StateChunk) > SIDE_BY_SIDE * IN_FLIGHT:
            return  # an honest peer does not request as many at once, and each may cost a copy
        payload: Buffer = b""
        for snapshot in self._stored:
            if snapshot.offer.round == message.round:
                payload = snapshot.twin.lent_chunk(message.index, self._replica)
                snapshot.used = snapshot.served = self._now()
                snapshot.readers.add(peer)
                within = self._allowance.take(peer, self._now())
                (self._over_allowance.discard if within else self._over_allowance.add)(peer)
                self._pace()
                break
        chunk = StateChunk(message.round, message.index, self._fragment)
        self._send_queue.bulk(peer, Frame(chunk, payload), requested=True)
