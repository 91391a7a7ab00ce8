"""Averaging of two peers: one side of a pair in one round, without quorum, leader or vote.

Neither waits for a third peer.

Messages (control messages are signed, chunks travel on sealed streams):

    Base     each → its partner, when the round begins, where two vectors travel: hashes of its encoded slow weights
    Fetch    the partner → sender, at once: requests them while both train
    Ready    each → its partner, when its inner steps are done: hashes of its encoded chunks       (commit, then send)
    Fetch    the partner → sender, at once, even while it still trains: requests them
    Chunk    checked against the announced hash, then length and finiteness
    Decline  refuses or ends the exchange, with the reason

A side that has announced itself and holds every chunk of the other is done and continues. It serves its own announced
chunks for as long as the partner may need them. After a failure a side is alone, with a reason, which does no harm: its
round is a local step. If only one of the two fails, the mean of all replicas changes by β/2 times the difference of the
two, which is accepted. A larger group is a pair with each of the others (`group`).

Slow weights are sent early, while both sides train. If other partners are drawn meanwhile, they were sent in vain. Those
count that the partner's Ready names (`base`), and missing ones never delay or end a pair before both sides are ready.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass, replace

from thinwire.collectives.gossip.pair_codec import PairCodec
from thinwire.collectives.gossip.partner_patience import STALLED, PartnerPatience
from thinwire.collectives.gossip.transfer import ChunkReceiver, ChunkSender
from thinwire.collectives.topology.shards import Grid
from thinwire.collectives.transport.sending.send_queue import SendQueue
from thinwire.compression.core.types import Buffer
from thinwire.swarm.frame import Frame, nbytes
from thinwire.swarm.messages.registry import Base, Chunk, Decline, Digest, Fetch, PeerId, Ready

ECHOES = 16
"""Most times that a partner gets our slow weights again because it had chosen another one."""


@dataclass(frozen=True, slots=True)
class PairResult:
    """Result of a pair.

    `theirs`: the partner's encoded chunks in grid order, followed by those of its slow weights where these are
    exchanged; in a group whose chunks have owners, the means that the partner sent. `reason`: why the pair failed, or "".
    `attempt` and `weight` (tokens) are those of the partner's announcement.
    """

    partner: PeerId
    theirs: tuple[Buffer, ...] = ()
    attempt: int = 0
    weight: int = 0
    reason: str = ""


@dataclass(frozen=True, slots=True)
class PairTerms:
    """Settings common to all pairs of a round.

    `plan`: digest of layout, codecs, grid and constants, which must be equal. `max_weight`: most tokens that a peer may
    claim. `patience`: seconds to wait for an answer, or for progress. `mismatch`: reason to refuse another plan.
    """

    round: int
    plan: Digest
    grid: Grid
    codecs: PairCodec
    max_weight: int
    send_queue: SendQueue
    now: Callable[[], float]
    patience: float
    fragment: int = 0
    mismatch: str = "plan"

    @property
    def mixed(self) -> range:
        """Places of the chunks whose slow weights travel in this round."""
        return self.codecs.mixed(self.grid, self.round)


class Pair:
    """One side of a pair.

    Created when the partner is known; `post` sends the slow weights, `announce` is called when the inner steps are
    done. Pass it the partner's frames of the round (`on_frame`), time (`tick`) and link changes (`on_link_down`,
    `on_link_up`). `ended` is called once at the end. Stores at most one contribution of the partner, and after the end the
    data that it still has to serve. `wanted`: numbers of the chunks that we need of the partner, by default all.
    """

    def __init__(
        self, partner: PeerId, terms: PairTerms, ended: Callable[[], None], wanted: Collection[int] | None = None
    ) -> None:
        self.partner, self.round, self.fragment = partner, terms.round, terms.fragment
        self.theirs: Ready | None = None
        self.theirs_at = 0.0
        """When the partner's last announcement arrived."""
        self.ours: Ready | None = None
        self.result: PairResult | None = None
        self.exchanged = False
        self._plan, self._mismatch = terms.plan, terms.mismatch
        self._grid, self._codecs, self._mixed, self._max_weight = (
            terms.grid,
            terms.codecs,
            terms.mixed,
            terms.max_weight,
        )
        self._send_queue, self._now = terms.send_queue, terms.now
        self._patience = PartnerPatience(terms.now, terms.patience)
        self._posted: ChunkSender | None = None
        """Our slow weights."""
        self._announced: ChunkSender | None = None
        """Our chunks that are announced when our inner steps are done."""
        self._base: ChunkReceiver | None = None
        """The partner's slow weights."""
        self._step: ChunkReceiver | None = None
        """The partner's chunks that it announced when its inner steps were done."""
        self._echoed: Base | None = None
        """The repeated Base of the partner that we answered last with ours, and the number of these answers."""
        self._echoes = 0
        self._refused = ""
        self._received_before: int | None = None
        """Bulk bytes that had come over a relay when we announced ourselves; None: no relay."""
        self._ended, self._wanted = ended, wanted

    # --- our side

    def post(self, base: Base, source: Sequence[Buffer]) -> None:
        """Announce our slow weights (which must not change any more) to the partner.

        Before `announce`, where they are exchanged.
        """
        if not self._refused:
            self._posted = ChunkSender(base, source, len(self._grid), self._mixed)
            self._send_queue.control(self.partner, base)

    def announce(self, ready: Ready, source: Sequence[Buffer], *, deadline: float) -> None:
        """Announce our encoded chunks (which must not change any more) to the partner.

        `deadline`: seconds to wait for a partner that is present but not ready.
        """
        self.ours = ready
        self._patience.announce(deadline, answered=self.theirs is not None)
        self._received_before = self._send_queue.received_over_relay(self.partner)
        if self._refused:
            self.fail(self._refused, notify=False)
        else:
            self._announced = ChunkSender(ready, source, 0, range(len(self._grid)))
            self._announce()
            self._look()

    def withdraw_data(self) -> None:
        """Withdraw unsent data for this partner: another partner was drawn, or the pair has failed."""
        self._send_queue.drop_data(self.partner, self.round, self.fragment)

    @property
    def progressed_at(self) -> float:
        """Time of the partner's last progress, or of our announcement if that is later."""
        return self._patience.progressed_at

    @property
    def refused(self) -> str:
        """Reason why the pair failed before we were ready; "" while it may succeed."""
        return self._refused

    def fail(self, reason: str, *, notify: bool = True) -> None:
        """Continue without the partner; before we are ready, remember the reason until then.

        notify: send the partner a Decline.
        """
        if self.result is not None:
            return
        self.theirs = self._step = self._base = self._posted = self._announced = None
        self.withdraw_data()
        self._refused = self._refused or reason
        if reason == STALLED:
            self._send_queue.note_debtor(self.partner, self._received_before)
        if notify:
            self._send_queue.control(self.partner, Decline(self.round, self.fragment, reason))
        if self.ours is not None:
            self._end(PairResult(self.partner, reason=self._refused))

    def release(self) -> None:
        """Free the partner's data after the result was used."""
        self._step = self._base = None
        if self.result is not None:
            self.result = replace(self.result, theirs=())

    # --- events

    def on_frame(self, frame: Frame) -> None:
        """Handle a checked frame of this round from the partner."""
        message = frame.message
        if getattr(message, "fragment", self.fragment) != self.fragment:
            return
        if isinstance(message, Base):
            self._take_base(message)
        elif isinstance(message, Ready):
            self._take_ready(message)
        elif isinstance(message, Fetch):
            self.note_present()
            self._serve(message)
        elif isinstance(message, Chunk):
            self._take_chunk(message, frame)
        elif isinstance(message, Decline) and (self.ours is not None or self.theirs is not None):
            # An earlier Decline concerns slow weights only; the pair may still succeed without early ones.
            self.fail(f"declined: {message.reason.removeprefix('declined: ')}"[:64], notify=False)

    def note_present(self) -> None:
        """Note that the partner is present, though not ready."""
        self._patience.answered = True

    def note_behind(self, seconds: float) -> None:
        """Note that the partner still has to finish earlier rounds, whose exchanges take this time."""
        self._patience.note_behind(seconds)

    def on_link_down(self) -> None:
        """Handle a broken link; it has one patience to come back."""
        for sender in (self._posted, self._announced):
            if sender is not None:
                sender.resend()
        self._patience.note_link(False)

    def on_link_up(self) -> None:
        """Handle a new link."""
        if self._patience.linked:
            return
        self._patience.note_link(True)
        for mine in (self._posted, self._announced):
            if mine is not None:
                self._send_queue.control(self.partner, mine.announced)
        for theirs in (self._base, self._step):
            self._ask(theirs)

    def tick(self) -> None:
        """Let time pass: give up a partner that is silent, stalled or late."""
        if self.result is not None or self.ours is None:
            return
        if reason := self._patience.exhausted(ready=self.theirs is not None, extra=self._extra_time):
            self.fail(reason)

    @property
    def _extra_time(self) -> float:
        """Seconds that a ready partner gets in addition."""
        return 0.0

    # --- the partner's side

    def _announce(self) -> None:
        """Announce ourselves; repeat slow weights that the partner has not asked for.

        The partner may have chosen us after we sent them.
        """
        if self._posted is not None and not self._posted.asked:
            self._send_queue.control(self.partner, self._posted.announced)
        if self.ours is not None:
            self._send_queue.control(self.partner, self.ours)

    def _note_announcement(self) -> None:
        """Note an announcement of the partner: it is present, and may not have been when we announced."""
        if self.ours is not None and not self._patience.answered:
            self._announce()
        self.note_present()

    def _take_base(self, base: Base) -> None:
        codec = self._codecs.slow
        if codec is None or self.result is not None or self._refused:
            return
        self._note_announcement()
        if base.plan != self._plan:
            return self.fail(self._mismatch)
        if len(base.hashes) != 32 * len(self._mixed):
            return self.fail("announcement")
        coming = ChunkReceiver(base, codec, self._grid, len(self._grid), self._mixed, self._wanted)
        if self._base is not None and coming.digest == self._base.digest and self._posted is not None:
            # The partner repeats a known Base: it had chosen another partner, then us again, and has forgotten our
            # Base.
            if self._echoed != base and self._echoes < ECHOES:
                self._echoed, self._echoes = base, self._echoes + 1
                self._posted.resend()
                self._send_queue.control(self.partner, self._posted.announced)
            return
        if self.theirs is None:
            wanted = self._base is None or base.attempt > self._base.attempt
        else:
            wanted = self._base is None and coming.digest == self.theirs.base
        if wanted:
            self._base = coming
            self._ask(coming)
            self._look()  # We may need no chunk of it.

    def _take_ready(self, ready: Ready) -> None:
        self._note_announcement()
        if self.result is not None or self._refused:
            if not self.exchanged:
                self._send_queue.control(self.partner, Decline(self.round, self.fragment, self._refused or "late"))
            return
        if self.theirs is not None and ready.attempt <= self.theirs.attempt:
            return
        if ready.plan != self._plan:
            return self.fail(self._mismatch)
        if len(ready.hashes) != 32 * len(self._grid) or ready.weight > self._max_weight:
            return self.fail("announcement")
        self._patience.note_ready(first=self.theirs is None)
        self.theirs, self.theirs_at = ready, self._now()
        if self._base is not None and self._base.digest != ready.base:
            self._base = None
        self._step = ChunkReceiver(ready, self._codecs.fast, self._grid, 0, range(len(self._grid)), self._wanted)
        self._ask(self._step)
        self._look()

    def _ask(self, receiver: ChunkReceiver | None) -> None:
        # A request without chunks is an answer, too: the partner must not count us as silent.
        if receiver is not None and self.result is None and (receiver.missing or not receiver.chunks):
            self._send_queue.control(
                self.partner, Fetch(self.round, self.fragment, receiver.digest, receiver.missing_chunks)
            )

    def _serve(self, message: Fetch) -> None:
        for sender in (self._posted, self._announced):
            if sender is not None and sender.digest == message.digest:
                for frame in sender.serve(message.indices):
                    self._send_queue.bulk(self.partner, frame)
                return
        if self.result is not None:
            self._send_queue.control(self.partner, Decline(self.round, self.fragment, self.result.reason or "late"))

    def _take_chunk(self, message: Chunk, frame: Frame) -> None:
        receiver = self._step if message.index < len(self._grid) else self._base
        if receiver is None or self.result is not None:
            return
        if message.attempt != receiver.attempt or not receiver.wants(message.index):
            return
        fault = receiver.take(message.index, frame)
        if fault:
            return self.fail(fault)
        self._patience.note_data(nbytes(frame.payload))
        self._look()

    @property
    def complete(self) -> bool:
        """True if the partner is ready and all that we need of its contribution is here."""
        base, step = self._base, self._step
        if self.theirs is None or step is None or step.missing:
            return False
        return self._codecs.slow is None or (base is not None and not base.missing)

    def _look(self) -> None:
        base, step, ready = self._base, self._step, self.theirs
        if self.ours is not None and self.complete and ready is not None and step is not None:
            chunks = step.chunks + (base.chunks if base is not None else ())
            self._end(PairResult(self.partner, chunks, ready.attempt, ready.weight))

    def _end(self, result: PairResult) -> None:
        if self.result is None:
            self.result, self.exchanged = result, not result.reason
            self._ended()
