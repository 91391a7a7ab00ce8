"""Interface of all loops over rounds to training, and the entry of one replica into a running swarm."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Awaitable, Callable

from thinwire.collectives.outcome import Outcome
from thinwire.collectives.state_sync.state_sync import OtherModelState
from thinwire.node.outer.session import ReplicaSession, Session
from thinwire.node.outer.verification.trials import Score
from thinwire.node.state.replica import Replica
from thinwire.swarm.manifest.manifest import ManifestMismatch
from thinwire.swarm.messages.registry import PeerId

LONELY = 2
"""Consecutive attempts without an offered state after which the state counts as lost."""

DIVERGED = (
    "training has diverged, and this peer contributes nothing until a round of others replaces its parameters; without others, "
    "lower the learning rate and start again, and the run continues at its last checkpoint"
)
"""Alarm of a peer whose contribution is not finite, after the reason."""

Lost = Callable[[int], Awaitable[bool]]
"""Recovers the state of a fragment that no reachable peer has; returns True if the replica has it."""

Meanwhile = Callable[[], Awaitable[None]]
"""Trains while a round is in progress, for schedules that allow it; owns the model until it returns."""


class RoundLoop(ABC):
    """Rounds of one peer: contribute, average, then commit or roll back.

    The defaults suit a loop that has no work left when `sync` ends.
    """

    follows: bool = False
    """True if rounds of other peers change the replica between two calls of `sync`."""

    overlaps_calls: bool = False
    """True if rounds continue between two calls of `sync`, so that the replica may change."""

    on_trial: bool = False
    """True if this peer is on trial, and trains on the batches that are assigned to it."""

    next_cut: int = 0
    """Inner steps to skip before the next round, because this peer is late."""

    _session: Session

    @property
    @abstractmethod
    def turn(self) -> int:
        """Rounds that the swarm has completed, as far as this peer knows; they count the inner steps."""

    @property
    def overtaken(self) -> bool:
        """True if training on the old state is useless: the swarm has committed the round without us."""
        return self._session.overtaken

    def take_part(self) -> None:  # noqa: B027
        """Become a member of the next round without a contribution, if the loop follows rounds."""

    def follow(self, report: Callable[[Outcome], None]) -> None:  # noqa: B027
        """Start to report rounds that end outside `sync` to `report`, and to follow those of other peers."""

    async def rest(self) -> None:
        """Leave the replica as it is until `resume`, or for good. Raises an error of following, if any."""
        await self.settled()

    def resume(self) -> None:  # noqa: B027
        """Follow again, if `follow` was called."""

    async def settled(self) -> None:  # noqa: B027
        """Wait until the state has its digest and the next round has begun, which may be after `sync`.

        Until then nothing is announced and no checkpoint is written. Raises the error of this work, if any.
        """

    def call_when_settled(self, function: Callable[[], None]) -> None:
        """Call `function` as soon as `settled` has nothing to wait for: now, or on the loop."""
        function()

    async def judge(self, score: Score) -> None:  # noqa: B027
        """Score the contribution of another peer, if one is due."""

    def score_of(self, peer: PeerId) -> str:
        """Return the score of another peer for people, and why it does not count; empty without a score."""
        return ""

    @abstractmethod
    async def enter(self, *, tries: int = 0, alone: int = 0, lost: Lost | None = None) -> bool:
        """Enter a running swarm: fetch its state, write it into the model, take part in the round in progress.

        If it takes less to follow the rounds since our state than to fetch another state, take part with ours.

        Wait as long as no peer offers a state that is as new as ours. With `tries`, continue with our own state after that
        number of patiences, or as soon as the answers show that none is newer (`CatchUp.newest`). Return False after
        `alone` consecutive attempts in which no reachable peer had a state (0: never). `lost`: called when no peer has a
        state; with it, the number of `tries` is doubled. Raises ManifestMismatch if the swarm trains another model.
        """

    @abstractmethod
    async def sync(self, *, weight: int, loss: float, speed: float, meanwhile: Meanwhile | None = None) -> Outcome:
        """Run one round after the inner steps.

        `weight`: tokens of the inner steps. `loss`, `speed`: for display. `meanwhile`: trains while the round is in
        progress.
        """


class ReplicaLoop(RoundLoop):
    """Loop over the rounds of one replica."""

    _session: ReplicaSession
    _diverged = ""
    """Alarm of contributions that are not finite; empty if the last one was finite."""

    @property
    def turn(self) -> int:
        return self._session.replica.round

    def report_unsent(self, error: FloatingPointError) -> None:
        """Report a contribution that is not finite, with an alarm until one is finite again."""
        self._session.report("unsent", str(error))
        if not self._diverged:
            self._diverged = f"{error}: {DIVERGED}"
            self._session.report("alarm", self._diverged)

    def report_sent(self) -> None:
        """Note a contribution that is finite."""
        alarm, self._diverged = self._diverged, ""
        if alarm:
            self._session.report("alarm_over", "the contributions of this peer are finite again", alarm=alarm)

    async def enter(self, *, tries: int = 0, alone: int = 0, lost: Lost | None = None) -> bool:
        session, tried, lonely = self._session, 0, 0
        while not await self.catch_up():
            if session.catch_up.foreign is not None:
                raise mismatch(session.replica, session.catch_up.foreign)
            lonely = lonely + 1 if session.catch_up.alone else 0
            if lost is not None and lonely >= LONELY and await lost(session.fragment):
                await self.adopt()
                return True
            tried += 1
            enough = tries and (tried >= tries * (1 if lost is None else 2) or session.catch_up.newest)
            if enough or session.catch_up.replays:
                await self.adopt()
                return True
            if alone and lonely >= alone:
                return False
            await session.wait_before_retry()
        return True

    @abstractmethod
    async def catch_up(self) -> bool:
        """Take over the swarm's state; return True if there was a suitable one."""

    @abstractmethod
    async def adopt(self) -> None:
        """Set the model to the outer parameters, and begin the next round."""


def mismatch(replica: Replica, foreign: OtherModelState) -> ManifestMismatch:
    """Return the error for a swarm that offers the state of another model."""
    ours, held = replica.theta.size, 2 * replica.ledger.used.size if replica.ledger is not None else 0
    # The size of a state does not give the number of parameters if a method's extra state depends on the shapes.
    theirs, rest = divmod(foreign.nbytes // 4 - held, replica.vectors)
    if foreign.nbytes == replica.state.nbytes:
        differ = f"the swarm's model has {ours} trainable parameters too, but other names, shapes or element types"
    elif rest or theirs <= 0 or replica.extra.size != held:
        differ = f"the swarm's model has other trainable parameters or buffers than the one here, which has {ours} parameters"
    else:
        differ = f"the swarm's model has {theirs} trainable parameters, the one here has {ours}"
    return ManifestMismatch(differ, "build the model as the founder of the run does, and freeze the same parameters")
