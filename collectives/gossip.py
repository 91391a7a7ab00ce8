"""The average of two: one side of a pair in one round. No quorum, no leader, no vote, and nobody waits for a third.

Message by message (control messages are signed, chunks travel on sealed streams):

    Ready    each → its partner, when its inner steps are done: hashes of its encoded chunks       (commit, then send)
    Fetch    the partner → it, at once, even while it still trains itself: send them
    Chunk    checked against the announced hash, then length and finiteness
    Decline  not with you, or not any more, and why

Who has announced itself and holds every chunk of the other is done and goes on, and serves what it announced for as long as
the other may need it. Whatever goes wrong makes a pair of one, with a reason: harmless, the round is a local step then. When
only one of the two fails, the mean of all replicas moves by β/2 times the difference of the two; that is borne. A larger group
is a pair with each of the others (`circle`).
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace

import blake3
from thinwire.collectives.halves import Halves
from thinwire.collectives.outbox import Outbox
from thinwire.collectives.series import GIVE_UP
from thinwire.collectives.shards import Grid
from thinwire.compression.codec import Buffer, CodecError
from thinwire.swarm.frame import Frame
from thinwire.swarm.protocol import Chunk, Decline, Digest, Fetch, PeerId, Ready

STALL = 5
"""Patiences that a partner may take for one chunk."""

RATE = 32 * 1024
"""Bytes/s that a partner sends at least where all of it takes longer than GIVE_UP patiences: else many chunks, each of them in
time, would hold a pair for hours. Patience follows what exchanges take, so that only of the first one so little is known.
"""


@dataclass(frozen=True, slots=True)
class Meeting:
    """How it ended. `theirs`: the partner's encoded chunks in grid order; empty for a pair of one, and then `reason` says why.
    `attempt` and `weight` (tokens) are what the partner announced.
    """

    partner: PeerId
    theirs: tuple[Buffer, ...] = ()
    attempt: int = 0
    weight: int = 0
    reason: str = ""


@dataclass(frozen=True, slots=True)
class Terms:
    """What all pairs of a round have in common.

    `plan`: digest of layout, codecs, grid and constants, which must be equal. `max_weight`: most tokens that a peer may
    claim. `patience`: seconds for an answer, or for progress.
    """

    round: int
    plan: Digest
    grid: Grid
    halves: Halves
    max_weight: int
    outbox: Outbox
    now: Callable[[], float]
    patience: float
    fragment: int = 0


class Pair:
    """See the module. Made when the partner is known; `announce` is for when the inner steps are done.

    Feed it the partner's frames of the round with `hear`, time with `tick`, link changes with `lost` and `reach`. `settled` is
    called once, when it has ended. Holds at most one contribution of the partner, and after the end what it still has to serve.
    """

    def __init__(self, partner: PeerId, terms: Terms, settled: Callable[[], None]) -> None:
        self.partner, self.round, self.fragment = partner, terms.round, terms.fragment
        self.theirs: Ready | None = None
        self.theirs_at = 0.0
        """When the partner was ready."""
        self.ours: Ready | None = None
        self.ours_at = 0.0
        self.meeting: Meeting | None = None
        self.met = False
        self._plan, self._grid, self._halves, self._max_weight = terms.plan, terms.grid, terms.halves, terms.max_weight
        self._outbox, self._now, self._patience = terms.outbox, terms.now, terms.patience
        self._source: Sequence[Buffer] = ()
        self._served: set[int] = set()
        self._chunks: list[Buffer | None] = []
        self._missing = 0
        self._deadline = 0.0
        self._answered = self._linked = True
        self._moved = self._since = 0.0
        self._came = 0
        """When both were ready first, and the bytes that are here of what the partner announced last."""
        self._refused = ""
        self._settled = settled

    # --- our side

    def announce(self, ready: Ready, source: Sequence[Buffer], *, deadline: float) -> None:
        """Tell the partner that we are ready with these encoded chunks (not to be changed any more).

        `deadline`: seconds to wait for a partner that is there and not ready.
        """
        self._source, self.ours_at, self._moved = source, self._now(), self._now()
        self.ours, self._deadline, self._answered = ready, deadline, self.theirs is not None
        if self._refused:
            self.fail(self._refused, tell=False)
        else:
            self._outbox.control(self.partner, ready)
            self._look()

    @property
    def refused(self) -> str:
        """Why there will be no meeting in this round, before we are ready; empty while there may be one."""
        return self._refused

    def fail(self, reason: str, *, tell: bool = True) -> None:
        """Go on without the partner; before we are ready ourselves it is remembered until then."""
        if self.meeting is not None:
            return
        self.theirs, self._chunks = None, []
        self._refused = self._refused or reason
        if tell:
            self._outbox.control(self.partner, Decline(self.round, self.fragment, reason))
        if self.ours is not None:
            self._source = ()
            self._settle(Meeting(self.partner, reason=self._refused))

    def release(self) -> None:
        """The meeting has been made use of: what it held of the partner is not needed any more."""
        self._chunks = []
        if self.meeting is not None:
            self.meeting = replace(self.meeting, theirs=())

    # --- events

    def hear(self, frame: Frame) -> None:
        """A checked frame of this round, from the partner."""
        message = frame.message
        if getattr(message, "fragment", self.fragment) != self.fragment:
            return
        if isinstance(message, Ready):
            self._take_ready(message)
        elif isinstance(message, Fetch):
            self._answered = True
            self._serve(message)
        elif isinstance(message, Chunk):
            self._take_chunk(message, frame)
        elif isinstance(message, Decline):
            self.fail(f"declined: {message.reason.removeprefix('declined: ')}"[:64], tell=False)

    def heard(self) -> None:
        """The partner is there, though not ready."""
        self._answered = True

    def lost(self) -> None:
        """The link broke; it has a patience to come back."""
        self._served.clear()
        self._linked, self._moved = False, self._now()

    def reach(self) -> None:
        """The link is up."""
        if self._linked:
            return
        self._linked, self._moved = True, self._now()
        if self.ours is not None and (self.meeting is None or self.met):
            self._outbox.control(self.partner, self.ours)
        self._ask()

    def tick(self) -> None:
        """Let time pass: a partner that says nothing, sends nothing or is too late is given up."""
        if self.meeting is not None or self.ours is None:
            return
        now = self._now()
        if not self._linked and now > self._moved + self._patience:
            self.fail("unreachable")
        elif self.theirs is not None and now > self._due:
            self.fail("stalled")
        elif not self._answered and now > self.ours_at + self._patience:
            self.fail("silent")
        elif self.theirs is None and now > self.ours_at + self._deadline:
            self.fail("late")

    @property
    def _due(self) -> float:
        """When a partner that is ready has stalled: its next chunk does not come, or all of them come too slowly."""
        longest = max(GIVE_UP * self._patience, self._came / RATE)
        return min(self._moved + STALL * self._patience, max(self._since, self.ours_at) + longest)

    # --- the partner's side

    def _take_ready(self, ready: Ready) -> None:
        if self.ours is not None and not self._answered:
            self._outbox.control(self.partner, self.ours)  # it may not have been there yet when we said so
        self._answered = True
        if self.meeting is not None or self._refused:
            if not self.met:
                self._outbox.control(self.partner, Decline(self.round, self.fragment, self._refused or "late"))
            return
        if self.theirs is not None and ready.attempt <= self.theirs.attempt:
            return
        if ready.plan != self._plan:
            return self.fail("plan")
        if len(ready.hashes) != 32 * len(self._grid) or ready.weight > self._max_weight:
            return self.fail("announcement")
        if self.theirs is None:  # who announces itself anew has not moved
            self._moved = self._since = self._now()
        self.theirs, self.theirs_at = ready, self._now()
        self._chunks, self._missing, self._came = [None] * len(self._grid), len(self._grid), 0
        self._ask()

    def _ask(self) -> None:
        if self.theirs is not None and self._missing and self.meeting is None:
            lacking = tuple(index for index, chunk in enumerate(self._chunks) if chunk is None)
            digest = blake3.blake3(self.theirs.hashes).digest()
            self._outbox.control(self.partner, Fetch(self.round, self.fragment, digest, lacking))

    def _serve(self, message: Fetch) -> None:
        if self.ours is None or message.digest != blake3.blake3(self.ours.hashes).digest() or not self._source:
            if self.meeting is not None:
                self._outbox.control(self.partner, Decline(self.round, self.fragment, self.meeting.reason or "late"))
            return
        for index in message.indices:
            # Once for each link: what it has taken comes, unless the link breaks.
            if index < len(self._grid) and index not in self._served:
                self._served.add(index)
                frame = Frame(Chunk(self.round, self.fragment, self.ours.attempt, index), self._source[index])
                self._outbox.bulk(self.partner, frame)

    def _take_chunk(self, message: Chunk, frame: Frame) -> None:
        ready, index = self.theirs, message.index
        if ready is None or message.attempt != ready.attempt or index >= len(self._chunks) or self.meeting is not None:
            return
        if self._chunks[index] is not None:
            return
        payload = frame.payload
        if frame.hashed() != ready.hashes[32 * index : 32 * index + 32]:
            return self.fail("hash")
        try:
            self._halves.check(payload, self._grid.size(index))
        except CodecError as error:
            return self.fail(error.reason)
        self._chunks[index] = payload
        self._missing -= 1
        self._came += memoryview(payload).nbytes
        self._moved = self._now()
        self._look()

    def _look(self) -> None:
        if self.ours is not None and self.theirs is not None and not self._missing:
            chunks = tuple(chunk for chunk in self._chunks if chunk is not None)
            self._settle(Meeting(self.partner, chunks, self.theirs.attempt, self.theirs.weight))

    def _settle(self, meeting: Meeting) -> None:
        if self.meeting is None:
            self.meeting, self.met = meeting, bool(meeting.theirs)
            self._settled()
