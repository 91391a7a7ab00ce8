"""Schedule with two rounds per outer step, as one transaction (PowerSGD)."""

from __future__ import annotations

from dataclasses import replace
from typing import cast

from thinwire.collectives.outcome import Outcome
from thinwire.node.methods.powersgd.replica import PowerSGDReplica
from thinwire.node.outer.outer_loop import Schedule
from thinwire.node.outer.round_loop import Meanwhile


class TwoPhase(Schedule):
    """Run both rounds of a step in one call. Only the second one changes the model."""

    def __init__(self) -> None:
        self._stepped = False
        # Tokens still to be sent: of failed steps; of the step in progress; and of training after the first round, if
        # the second one was given up.
        self._owed = self._offered = self._since = 0

    @property
    def _replica(self) -> PowerSGDReplica:
        return cast(PowerSGDReplica, self.loop.replica)

    async def sync(self, weight: int, loss: float, speed: float, meanwhile: Meanwhile | None) -> Outcome:
        """Run both rounds of a step, or only the second. The outcome has no commit if the step failed.

        If the second round was given up, the next call repeats it with what was sent in the first; later training
        belongs to the next step.
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
        """End a round; after the second one the model starts from the outer parameters."""
        unsent = self._since if self._replica.memory.pending else 0
        self._stepped = await self.loop.step(outcome, since=self.loop.read if self._since else None)
        if self._stepped:
            self._since = unsent
            await self.adopt()
        else:
            self.loop.session.advance()

    def replaced(self) -> None:
        """Discard all owed tokens: their model is replaced."""
        self._owed = self._offered = self._since = 0
