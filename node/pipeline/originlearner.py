"""What the origin of a group trains: the model that all of the group hold together."""

from __future__ import annotations

import asyncio
import math
from collections.abc import Callable, Mapping

from thinwire.swarm.manifest import Manifest
from thinwire.swarm.protocol import PeerId

from ..data import Batches, Cursor, cursor_after
from ..learner import NOTHING, Share, StepReport
from ..power import steps_by_power
from ..presence import Emit
from ..snapshot import PrivateState
from ..training import own_shards
from .account import Outcome
from .holding import Holding
from .muster import Muster
from .origin import Origin
from .pilot import Pilot
from .rebalance import Balance
from .stagelearner import StageLearner
from .update import Update

Order = Callable[[PeerId, int], None]
"""Tells a host which stage it shall hold from the next turn on."""

SMOOTHING = 0.3
"""Weight of the last step in the mean of our speed."""


class OriginLearner(StageLearner):
    """A Learner whose inner steps are those of its group (see Origin); `muster` is its Handler of Presence.

    `pilot`: the origin's, where paths are planned; `balance`: says which host moves, and `order` tells it.
    """

    def __init__(
        self,
        holding: Holding,
        muster: Muster,
        batches: Batches,
        manifest: Manifest,
        *,
        now: Callable[[], float],
        emit: Emit,
        pilot: Pilot | None = None,
        balance: Balance | None = None,
        order: Order = lambda peer, stage: None,
    ) -> None:
        super().__init__(holding)
        self._emit, self._pilot, self._balance, self._order = emit, pilot, balance, order
        self._flown, self._planned, self._plans = 0.0, 0.0, 0
        self.muster, self.batches = muster, batches
        self._origin, self._manifest, self._now = muster.origin, manifest, now
        self.totals: Mapping[str, int] = {"retried": 0, "skipped": 0, "lost": 0}
        """Micro-batches that were sent once more, that went past a stage, and whose gradient some stage has lost."""
        self.others: Callable[[], list[float]] = list
        """Tokens per second of those that hold the whole model, or drive a group as we do."""
        self._speed = 0.0

    @property
    def said(self) -> str:
        """How the group does, for people."""
        counts = ", ".join(f"{count} micro-batches {what}" for what, count in self.totals.items())
        brought = f"; stage 0 was brought back, from: {self.source}" if self.source else ""
        return f"{self.muster.said}; {counts}; {self._speed:.0f} tokens/s in steps{self._plan}{brought}"

    @property
    def _plan(self) -> str:
        pilot = self._pilot
        if pilot is None or not pilot.plans:
            return ""
        whys = ", ".join(f"{why} {count}" for why, count in pilot.whys.items())
        times = f"{self._flown:.2f} s, {self._planned:.2f} s by plan" if self._planned else "without a plan"
        return f"; {pilot.paths} paths: last step {times}; planned {pilot.plans} times ({whys})"

    @property
    def drives(self) -> Origin:
        """What drives the group."""
        return self._origin

    @property
    def update(self) -> Update:
        """The inner optimizer of our own stage."""
        return self._origin.update

    def assign(self, share: Share) -> None:
        """Take this peer's shards; the steps are counted by the turns of the swarm's rounds."""
        self.batches.assign(own_shards(self._manifest, share))
        if self._origin.next_step != share.step:
            self.muster.jump(share.step)

    async def steps(self, n: int, stop: asyncio.Event) -> StepReport:
        """Make inner steps with the group: `n`, or as many as others make of `n` in the time that we need; fewer when `stop` is
        set on the way. Waits for who is to take part. At their end the hosts end theirs.
        """
        origin, losses, made, began = self._origin, list[float](), 0, self._now()
        end, wanted = origin.next_step + n, self._share(n)
        while made < wanted and not stop.is_set():
            if made:
                self.muster.refresh()
            if (not made or self.muster.lame) and not await self.muster.gather(stop):
                break
            outcome = await origin.step([self.batches.next() for _ in range(self._manifest.micro)])
            if outcome.losses:
                losses.append(outcome.loss)
            made += 1
            self._speed = self._faster(outcome)
            self._see(outcome)
            self.totals = {
                "retried": self.totals["retried"] + outcome.attempts - self._manifest.micro,
                "skipped": self.totals["skipped"] + len(outcome.skipped),
                "lost": self.totals["lost"] + sum(len(micros) for _, (_, micros, _) in outcome.lost),
            }
        if origin.next_step < end:
            self.muster.jump(end)
        self._rebalance()
        tokens = origin.update.take_tokens()
        over = made if stop.is_set() else n  # those that we did not make are over for the whole group, too
        if not losses:
            return StepReport(over, math.nan, math.nan, tokens, 0.0) if over else NOTHING
        return StepReport(over, sum(losses) / len(losses), losses[-1], tokens, self._now() - began)

    def _see(self, outcome: Outcome) -> None:
        """Whether the step took what was planned; a new plan is told with that."""
        self._flown, self._planned, pilot = outcome.flown, outcome.planned, self._pilot
        if pilot is not None and outcome.planned and pilot.plans > self._plans:
            self._plans = pilot.plans
            detail = f"seconds planned and measured, by {pilot.paths} paths; plan {pilot.plans}"
            seconds = {"planned": round(outcome.planned, 3), "measured": round(outcome.flown, 3)}
            self._emit("plan", {"why": pilot.newest, **seconds, "detail": detail})

    def _rebalance(self) -> None:
        if self._balance is None:
            return
        muster = self.muster  # nobody is sent to a stage whose state nobody has
        here = {stage: hosts for stage, hosts in muster.hosts.items() if hosts or muster.source(stage) == "holder"}
        found = self._balance.due(here)
        if found is not None:
            self._emit("move", {"peer": found.peer.hex(), "detail": f"from stage {found.source} to {found.target}"})
            self._order(found.peer, found.target)

    def _share(self, n: int) -> int:
        """How many of `n` steps we make, so that others need not wait for us long."""
        others = self.others()
        if not others:
            return n
        return steps_by_power(self._speed, others, n, 1.0) if self._speed else 1

    def _faster(self, outcome: Outcome) -> float:
        """Our speed after a step, as a moving mean."""
        inner, model = self._manifest.inner, self._manifest.model
        now = self._manifest.micro * inner.batch * model.context / max(outcome.seconds, 1e-6)
        return now if not self._speed else self._speed + SMOOTHING * (now - self._speed)

    def private(self) -> PrivateState:
        """See Learner: the place in the data, too."""
        found, cursor = super().private(), self.batches.cursor
        return PrivateState(found.tensors, {**found.values, "epoch": cursor.epoch, "position": cursor.position})

    def restore(self, private: PrivateState) -> bool:
        """See Learner."""
        epoch, place = private.values.get("epoch"), private.values.get("position")
        if not (isinstance(epoch, int) and isinstance(place, int)) or min(epoch, place) < 0:
            return False
        if not super().restore(private):
            return False
        self.batches.cursor = Cursor(epoch, place)
        return True

    def skip_to(self, round: int, peers: int) -> None:
        """See Learner."""
        inner = self._manifest.inner
        samples = self._manifest.steps_after(round) * inner.batch * self._manifest.micro * max(1, peers)
        self.batches.cursor = cursor_after(self.batches.split, samples)
