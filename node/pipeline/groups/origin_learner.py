"""Learner of a group's origin: trains the model that the group holds together."""

from __future__ import annotations

import asyncio
import math
from collections.abc import Callable, Mapping

from thinwire.node.pipeline.groups.host_readiness import HostReadiness
from thinwire.node.pipeline.groups.rebalance import Rebalancer
from thinwire.node.pipeline.groups.stage_learner import StageLearner
from thinwire.node.pipeline.model.held_stage import HeldStage
from thinwire.node.pipeline.model.stage_optimizer import StageOptimizer
from thinwire.node.pipeline.step.gradient_ledger import StepOutcome
from thinwire.node.pipeline.step.origin import Origin
from thinwire.node.pipeline.step.route_planner import RoutePlanner
from thinwire.node.runtime.event_log import Emit
from thinwire.node.state.snapshot import PrivateState
from thinwire.node.training.batches import Batches, Cursor, cursor_after
from thinwire.node.training.learner import NOTHING, StepReport, WorkShare
from thinwire.node.training.local_learner import own_shards
from thinwire.node.training.step_balancing import steps_by_power
from thinwire.swarm.manifest.manifest import Manifest
from thinwire.swarm.messages.registry import PeerId

Order = Callable[[PeerId, int], None]
"""Asks a host to hold a stage from the next turn on."""

SMOOTHING = 0.3
"""Weight of the last step in the moving mean of the speed."""


class OriginLearner(StageLearner):
    """Learner with the inner steps of its group (see Origin); `readiness` is its Handler of Presence.

    `route_planner`: the origin's, with planned paths; `balance`: chooses hosts to move, and `order` asks them. `others`:
    returns the tokens per second of peers with the whole model, and of other origins.
    """

    def __init__(
        self,
        holding: HeldStage,
        readiness: HostReadiness,
        batches: Batches,
        manifest: Manifest,
        *,
        now: Callable[[], float],
        emit: Emit,
        route_planner: RoutePlanner | None = None,
        balance: Rebalancer | None = None,
        order: Order = lambda peer, stage: None,
        others: Callable[[], list[float]] = list,
    ) -> None:
        super().__init__(holding)
        self._emit, self._route_planner, self._balance, self._order = emit, route_planner, balance, order
        self._measured, self._planned, self._plans = 0.0, 0.0, 0
        self.readiness, self.batches = readiness, batches
        self._origin, self._manifest, self._now = readiness.origin, manifest, now
        self.totals: Mapping[str, int] = {"retried": 0, "skipped": 0, "lost": 0}
        """Micro-batches that were sent again, that skipped a stage, and whose gradient a stage has lost."""
        self._others, self._speed = others, 0.0

    @property
    def summary(self) -> str:
        """Describe the state of the group, for people."""
        counts = ", ".join(f"{count} micro-batches {what}" for what, count in self.totals.items())
        recovered = f"; stage 0 was recovered, from: {self.source}" if self.source else ""
        return f"{self.readiness.summary}; {counts}; {self._speed:.0f} tokens/s in steps{self._plan}{recovered}"

    @property
    def _plan(self) -> str:
        route_planner = self._route_planner
        if route_planner is None or not route_planner.plans:
            return ""
        reasons = ", ".join(f"{reason} {count}" for reason, count in route_planner.reasons.items())
        times = f"{self._measured:.2f} s, {self._planned:.2f} s by plan" if self._planned else "without a plan"
        return f"; {route_planner.paths} paths: last step {times}; planned {route_planner.plans} times ({reasons})"

    @property
    def origin(self) -> Origin:
        """Origin that drives the group."""
        return self._origin

    @property
    def update(self) -> StageOptimizer:
        """Inner optimizer of the origin's own stage."""
        return self._origin.update

    def assign(self, share: WorkShare) -> None:
        """Take this peer's shards; steps are counted by the turns of the swarm's rounds."""
        self.batches.assign(own_shards(self._manifest, share))
        if self._origin.next_step != share.step:
            self.readiness.jump(share.step)

    async def steps(self, n: int, stop: asyncio.Event) -> StepReport:
        """Make `n` inner steps with the group, or as many of them as the usual peer makes in the same time.

        Fewer if `stop` is set. Waits for the hosts first; they end their steps together with these.
        """
        origin, losses, made, began = self._origin, list[float](), 0, self._now()
        end, wanted = origin.next_step + n, self._share(n)
        while made < wanted and not stop.is_set():
            if made:
                self.readiness.refresh()
            if (not made or self.readiness.incomplete) and not await self.readiness.gather(stop):
                break
            outcome = await origin.step([self.batches.next() for _ in range(self._manifest.microbatches)])
            if outcome.losses:
                losses.append(outcome.loss)
            made += 1
            self._speed = self._mean_speed(outcome)
            self._compare_with_plan(outcome)
            self.totals = {
                "retried": self.totals["retried"] + outcome.attempts - self._manifest.microbatches,
                "skipped": self.totals["skipped"] + len(outcome.skipped),
                "lost": self.totals["lost"] + sum(len(micros) for _, (_, micros, _) in outcome.lost),
            }
        if origin.next_step < end:
            self.readiness.jump(end)
        self._rebalance()
        tokens = origin.update.take_tokens()
        over = made if stop.is_set() else n  # Steps that we did not make are over for the whole group, too.
        if not losses:
            return StepReport(over, math.nan, math.nan, tokens, 0.0) if over else NOTHING
        return StepReport(over, sum(losses) / len(losses), losses[-1], tokens, self._now() - began)

    def _compare_with_plan(self, outcome: StepOutcome) -> None:
        """Compare the step's time with the plan, and report a new plan with it."""
        self._measured, self._planned, route_planner = outcome.measured, outcome.planned, self._route_planner
        if route_planner is not None and outcome.planned and route_planner.plans > self._plans:
            self._plans = route_planner.plans
            detail = f"seconds planned and measured, by {route_planner.paths} paths; plan {route_planner.plans}"
            seconds = {"planned": round(outcome.planned, 3), "measured": round(outcome.measured, 3)}
            self._emit("plan", {"why": route_planner.newest, **seconds, "detail": detail})

    def _rebalance(self) -> None:
        if self._balance is None:
            return
        readiness = self.readiness  # No host is sent to a stage whose state is lost.
        here = {
            stage: hosts for stage, hosts in readiness.hosts.items() if hosts or readiness.source(stage) == "holder"
        }
        found = self._balance.due(here)
        if found is not None:
            self._emit(
                "host_moved", {"peer": found.peer.hex(), "detail": f"from stage {found.source} to {found.target}"}
            )
            self._order(found.peer, found.target)

    def _share(self, n: int) -> int:
        """Return how many of `n` steps to make, so that other peers do not wait long for this group."""
        others = self._others()
        if not others:
            return n
        return steps_by_power(self._speed, others, n, 1.0) if self._speed else 1

    def _mean_speed(self, outcome: StepOutcome) -> float:
        """Return the speed after a step as a moving mean."""
        inner, model = self._manifest.inner, self._manifest.model
        now = self._manifest.microbatches * inner.batch * model.context / max(outcome.seconds, 1e-6)
        return now if not self._speed else self._speed + SMOOTHING * (now - self._speed)

    def private(self) -> PrivateState:
        """Return the private state for a checkpoint, including the position in the data."""
        found, cursor = super().private(), self.batches.cursor
        return PrivateState(found.tensors, {**found.values, "epoch": cursor.epoch, "position": cursor.position})

    def restore(self, private: PrivateState) -> bool:
        """Restore the private state of a checkpoint; return True if it fits."""
        epoch, place = private.values.get("epoch"), private.values.get("position")
        if not (isinstance(epoch, int) and isinstance(place, int)) or min(epoch, place) < 0:
            return False
        if not super().restore(private):
            return False
        self.batches.cursor = Cursor(epoch, place)
        return True

    def skip_to(self, round: int, peers: int) -> None:
        """Set the position in the data to that of a peer after `round` rounds in a group of `peers`."""
        inner = self._manifest.inner
        samples = self._manifest.steps_after(round) * inner.batch * self._manifest.microbatches * max(1, peers)
        self.batches.cursor = cursor_after(self.batches.split, samples)
