"""Schedule of a step that takes two rounds, as one transaction (PowerSGD)."""

from __future__ import annotations

from dataclasses import replace
from typing import cast

from thinwire.collectives.outcome import Outcome
from thinwire.node.methods.powersgd.replica import PowerSGDReplica
from thinwire.node.outer.outer_loop import Schedule
from thinwire.node.outer.round_loop import Meanwhile


class TwoPhase(Schedule):
    """Both rounds of a step in one call. Only the second one gives the model new parameters."""

    def __init__(self) -> None:
        self._stepped = False
        # Tokens of what is still to be sent: of steps that came to nothing; of the step in progress; and of training that
        # continued after the first round, because the second one had to be left.
        self._owed = self._offered = self._since = 0

    @property
    def _replica(self) -> PowerSGDReplica:
        return cast(PowerSGDReplica, self.loop.replica)

    async def sync(self, weight: int, loss: float, speed: float, meanwhile: Meanwhile | None) -> Outcome:
        """Run both rounds of a step, or the second one alone. The outcome has no commit when they came to nothing.

        If the second round did not end, the next call continues it with what was sent in the first one: what has been trained
        since then belongs to the step after.
        """
        if self._replica.phase:
            self._since = weight
        else:
            self._offered, self._since = weight + self._owed, 0
        outcome = await self.loop.round(self._offered, loss, speed)
        while outcome.commit is not None and self._replica.phase:
            outcome = await self.loop.round(self._offered, loss, speed)
        if outcome.commit is None:
            return outcome
        self._owed = self._since if self._stepped else self._since + self._offered
        return outcome if self._stepped else replace(outcome, commit=None)

    async def commit(self, outcome: Outcome) -> None:
        """End a round; let the model start from the outer parameters when the round has made the step."""
        kept = self._since if self._replica.memory.pending else 0
        self._stepped = await self.loop.step(outcome, since=self.loop.read if self._since else None)
        if self._stepped:
            self._since = kept
            await self.adopt()
        else:
            self.loop.session.advance()

    def replaced(self) -> None:
        """What was trained went into a model that is replaced."""
        self._owed = self._offered = self._since = 0
