"""The average of two: one side of a pair in one round. No quorum, no leader, no vote, and nobody waits for a third.

Message by message (control messages are signed, chunks travel on sealed streams):

    Base     each → its partner, when the round begins, where two vectors travel: hashes of its encoded slow weights
    Fetch    the partner → it, at once: send them, while we both train
    Ready    each → its partner, when its inner steps are done: hashes of its encoded chunks       (commit, then send)
    Fetch    the partner → it, at once, even while it still trains itself: send them
    Chunk    checked against the announced hash, then length and finiteness
    Decline  not with you, or not any more, and why

Who has announced itself and holds every chunk of the other is done and goes on, and serves what it announced for as long as
the other may need it. Whatever goes wrong makes a pair of one, with a reason: harmless, the round is a local step then. When
only one of the two fails, the mean of all replicas moves by β/2 times the difference of the two; that is borne. A larger group
is a pair with each of the others (`circle`).

Slow weights are early, and no more: a pair that is drawn anew meanwhile has them sent in vain, what counts is the Base that a
Ready names, and nobody is waited for, or given up, for what is missing of them before both are ready.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace

from thinwire.collectives.halves import Halves
from thinwire.collectives.outbox import Outbox
from thinwire.collectives.parcels import Incoming, Outgoing
from thinwire.collectives.series import GIVE_UP
from thinwire.collectives.shards import Grid
from thinwire.compression.codec import Buffer
from thinwire.swarm.frame import Frame, nbytes
from thinwire.swarm.protocol import Base, Chunk, Decline, Digest, Fetch, PeerId, Ready

STALL = 5
"""Patiences that a partner may take for one chunk."""

RATE = 32 * 1024
"""Bytes/s that a partner sends at least where all of it takes longer than GIVE_UP patiences: else many chunks, each of them in
time, would hold a pair for hours. Patience follows what exchanges take, so that only of the first one so little is known.
"""


@dataclass(frozen=True, slots=True)
class Meeting:
    """How it ended. `theirs`: the partner's encoded chunks in grid order, behind them those of its slow weights where these
    travel; empty for a pair of one, and then `reason` says why. `attempt` and `weight` (tokens) are what it announced.
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
    """See the module. Made when the partner is known; `post` is for slow weights, `announce` for when the inner steps are done.

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
        self._posted: Outgoing | None = None
        self._announced: Outgoing | None = None
        self._base: Incoming | None = None
        self._step: Incoming | None = None
        """Slow weights, and what is announced when steps are done: ours, then the partner's."""
        self._deadline = 0.0
        self._answered = self._linked = True
        self._echoed: Base | None = None
        self._moved = self._since = 0.0
        self._came = 0
        """When the partner was ready first, and the bytes that have come of it since it last was."""
        self._refused = ""
        self._settled = settled

    # --- our side

    def post(self, base: Base, source: Sequence[Buffer]) -> None:
        """Tell the partner what our slow weights are (not to be changed any more). Before `announce`, where they travel."""
        if not self._refused:
            self._posted = Outgoing(base, source, len(self._grid))
            self._outbox.control(self.partner, base)

    def announce(self, ready: Ready, source: Sequence[Buffer], *, deadline: float) -> None:
        """Tell the partner that we are ready with these encoded chunks (not to be changed any more).

        `deadline`: seconds to wait for a partner that is there and not ready.
        """
        self.ours_at, self._moved = self._now(), self._now()
        self.ours, self._deadline, self._answered = ready, deadline, self.theirs is not None
        if self._refused:
            self.fail(self._refused, tell=False)
        else:
            self._announced = Outgoing(ready, source, 0)
            self._say()
            self._look()

    def part(self) -> None:
        """Another partner has been drawn: what waits for this one is not sent."""
        self._outbox.withdraw(self.partner, self.round, self.fragment)

    @property
    def refused(self) -> str:
        """Why there will be no meeting in this round, before we are ready; empty while there may be one."""
        return self._refused

    def fail(self, reason: str, *, tell: bool = True) -> None:
        """Go on without the partner; before we are ready ourselves it is remembered until then."""
        if self.meeting is not None:
            return
        self.theirs = self._step = self._base = self._posted = self._announced = None
        self.part()
        self._refused = self._refused or reason
        if tell:
            self._outbox.control(self.partner, Decline(self.round, self.fragment, reason))
        if self.ours is not None:
            self._settle(Meeting(self.partner, reason=self._refused))

    def release(self) -> None:
        """The meeting has been made use of: what it held of the partner is not needed any more."""
        self._step = self._base = None
        if self.meeting is not None:
            self.meeting = replace(self.meeting, theirs=())

    # --- events

    def hear(self, frame: Frame) -> None:
        """A checked frame of this round, from the partner."""
        message = frame.message
        if getattr(message, "fragment", self.fragment) != self.fragment:
            return
        if isinstance(message, Base):
            self._take_base(message)
        elif isinstance(message, Ready):
            self._take_ready(message)
        elif isinstance(message, Fetch):
            self._answered = True
            self._serve(message)
        elif isinstance(message, Chunk):
            self._take_chunk(message, frame)
        elif isinstance(message, Decline) and (self.ours is not None or self.theirs is not None):
            # Before, it is about slow weights only, and the two may meet without having had them early.
            self.fail(f"declined: {message.reason.removeprefix('declined: ')}"[:64], tell=False)

    def heard(self) -> None:
        """The partner is there, though not ready."""
        self._answered = True

    def lost(self) -> None:
        """The link broke; it has a patience to come back."""
        for parcel in (self._posted, self._announced):
            if parcel is not None:
                parcel.lost()
        self._linked, self._moved = False, self._now()

    def reach(self) -> None:
        """The link is up."""
        if self._linked:
            return
        self._linked, self._moved = True, self._now()
        for mine in (self._posted, self._announced):
            if mine is not None:
                self._outbox.control(self.partner, mine.announced)
        for theirs in (self._base, self._step):
            self._ask(theirs)

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

    def _say(self) -> None:
        """Announce ourselves; slow weights again where the partner has not asked for them: it may have chosen us since."""
        if self._posted is not None and not self._posted.asked:
            self._outbox.control(self.partner, self._posted.announced)
        if self.ours is not None:
            self._outbox.control(self.partner, self.ours)

    def _hear_it(self) -> None:
        """The partner announces something: it is there, and may not have been yet when we said so."""
        if self.ours is not None and not self._answered:
            self._say()
        self._answered = True

    def _take_base(self, base: Base) -> None:
        codec = self._halves.slow
        if codec is None or self.meeting is not None or self._refused:
            return
        self._hear_it()
        if base.plan != self._plan:
            return self.fail("plan")
        if len(base.hashes) != 32 * len(self._grid):
            return self.fail("announcement")
        coming = Incoming(base, codec, self._grid, len(self._grid))
        if self._base is not None and coming.digest == self._base.digest and self._posted is not None:
            # It says again what is here: it has chosen another partner meanwhile, and us once more, and forgotten what we said.
            if self._echoed != base:
                self._echoed = base
                self._outbox.control(self.partner, self._posted.announced)
            return
        if self.theirs is None:
            wanted = self._base is None or base.attempt > self._base.attempt
        else:
            wanted = self._base is None and coming.digest == self.theirs.base
        if wanted:
            self._base = coming
            self._ask(coming)

    def _take_ready(self, ready: Ready) -> None:
        self._hear_it()
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
        self.theirs, self.theirs_at, self._came = ready, self._now(), 0
        if self._base is not None and self._base.digest != ready.base:
            self._base = None
        self._step = Incoming(ready, self._halves.fast, self._grid, 0)
        self._ask(self._step)

    def _ask(self, parcel: Incoming | None) -> None:
        if parcel is not None and parcel.missing and self.meeting is None:
            self._outbox.control(self.partner, Fetch(self.round, self.fragment, parcel.digest, parcel.lacking))

    def _serve(self, message: Fetch) -> None:
        for parcel in (self._posted, self._announced):
            if parcel is not None and parcel.digest == message.digest:
                for frame in parcel.serve(message.indices):
                    self._outbox.bulk(self.partner, frame)
                return
        if self.meeting is not None:
            self._outbox.control(self.partner, Decline(self.round, self.fragment, self.meeting.reason or "late"))

    def _take_chunk(self, message: Chunk, frame: Frame) -> None:
        parcel = self._step if message.index < len(self._grid) else self._base
        if parcel is None or self.meeting is not None:
            return
        if message.attempt != parcel.attempt or not parcel.wants(message.index):
            return
        fault = parcel.take(message.index, frame)
        if fault:
            return self.fail(fault)
        self._came += nbytes(frame.payload)
        self._moved = self._now()
        self._look()

    def _look(self) -> None:
        base, step, ready = self._base, self._step, self.theirs
        if self.ours is None or ready is None or step is None or step.missing:
            return
        if self._halves.slow is not None and (base is None or base.missing):
            return
        chunks = step.chunks + (base.chunks if base is not None else ())
        self._settle(Meeting(self.partner, chunks, ready.attempt, ready.weight))

    def _settle(self, meeting: Meeting) -> None:
        if self.meeting is None:
            self.meeting, self.met = meeting, bool(meeting.theirs)
            self._settled()
