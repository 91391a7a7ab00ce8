"""Optimizer for a user's training loop.

Wraps the inner optimizer and runs a round with the swarm every H steps.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any, Protocol

import torch
from thinwire.node.api.background_peer import RoundReport
from torch import Tensor


class RoundClient(Protocol):
    """Rounds with the swarm as a SwarmOptimizer uses them; see the methods of the same names of `Swarm`."""

    @property
    def done(self) -> bool:
        """True when the run has had all its rounds."""
        ...

    @property
    def steps(self) -> int:
        """Inner steps of the next round."""
        ...

    @property
    def overlap(self) -> int:
        """Inner steps made while an exchange is in progress; 0 when training waits for it."""
        ...

    @property
    def under_way(self) -> bool:
        """True while an exchange has begun and is not finished."""
        ...

    @property
    def overtaken(self) -> bool:
        """True when the others have committed the round in progress without this peer."""
        ...

    @property
    def gathers(self) -> bool:
        """True when the next round only makes the peers that are present members."""
        ...

    def gather(self) -> RoundReport:
        """Run that round."""
        ...

    def exchange(self, *, steps: int, weight: int, loss: float | None = None) -> RoundReport:
        """Run a round after `steps` inner steps on `weight` samples."""
        ...

    def begin(self, *, steps: int, weight: int, loss: float | None = None) -> RoundReport | None:
        """Begin a round.

        Return a report when it is over already, else None: `finish` is due `overlap` inner steps later.
        """
        ...

    def finish(self) -> RoundReport:
        """Finish the round that `begin` began."""
        ...

    def tell(self, report: RoundReport) -> None:
        """Pass the report of a round to the user's callback."""
        ...


class SwarmOptimizer(torch.optim.Optimizer):
    """Replaces the inner optimizer everywhere: learning rate schedulers and GradScaler accept it.

    See `Swarm.wrap`.

    Parameter groups, state, hooks and state dicts are those of the inner optimizer.
    """

    # GradScaler would store its scale on this object, which the inner optimizer does not read; so let it unscale by
    # itself.
    _step_supports_amp_scaling = False

    def __init__(self, swarm: RoundClient, inner: torch.optim.Optimizer, batch: int) -> None:
        # Do not call the base class: attributes that it sets belong to the inner optimizer, see __getattr__.
        self._inner, self._swarm, self._batch = inner, swarm, batch
        self._steps = self._weight = self._sent = 0

    def __getattr__(self, name: str) -> Any:
        if name == "_inner":  # not set yet: the object is being copied
            raise AttributeError(name)
        return getattr(self._inner, name)

    def step(
        self, closure: Callable[[], Any] | None = None, *, weight: int | None = None, loss: float | Tensor | None = None
    ) -> Any:
        """Run one inner step, and block for a round when it is due.

        A round is due after every H-th step, and when the others have committed without us.

        An overlapping method blocks twice: to send, and some steps later for the result. With "merge" the first call
        starts with the round in which the present peers become members.

        `weight`: samples (or tokens) of this step, by default `batch` of `wrap`. `loss`: for display, here and at other
        peers; by default the value of the closure. Returns the result of the inner optimizer's step. Once the run is
        over, the parameters stay as the swarm left them. Raises what `Swarm.check` raises.
        """
        swarm = self._swarm
        weight = self._batch if weight is None else weight
        if weight < 0:
            raise ValueError(f"weight must be a number of samples, not {weight}")
        if swarm.done:
            return None if closure is None else closure()
        while swarm.gathers and not swarm.done:
            # before any training, repeated until it succeeds; parameters that are equal everywhere do not change
            swarm.tell(swarm.gather())
        result = self._inner.step() if closure is None else self._inner.step(closure)
        self._steps += 1
        self._weight += weight
        if swarm.under_way and self._steps >= swarm.overlap:
            self._book(swarm.finish())
        if not swarm.under_way and (self._steps >= swarm.steps or swarm.overtaken) and not swarm.done:
            steps, self._steps, self._sent = self._steps, 0, self._weight
            exchange = swarm.begin if swarm.overlap else swarm.exchange
            report = exchange(steps=steps, weight=self._weight, loss=_number(result if loss is None else loss))
            if report is not None:
                self._book(report)
        return result

    def _book(self, report: RoundReport) -> None:
        """Account for the weight of a round.

        Without a commit the local progress stays in the model and joins the next round.
        """
        if report.committed or report.taken:
            self._weight -= self._sent - report.kept
        elif report.adopted:
            self._steps = self._weight = 0
        self._swarm.tell(report)

    def zero_grad(self, set_to_none: bool = True) -> None:
        """Reset gradients, see torch.optim.Optimizer."""
        self._inner.zero_grad(set_to_none)

    def state_dict(self) -> dict[str, Any]:
        """Return the inner optimizer's state; the swarm stores the outer one's."""
        return self._inner.state_dict()

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Load into the inner optimizer."""
        self._inner.load_state_dict(state_dict)

    def add_param_group(self, param_group: dict[str, Any]) -> None:
        """Add a group to the inner optimizer.

        Parameters that were not trainable at `wrap` are not averaged and stay local.
        """
        self._inner.add_param_group(param_group)


def _number(loss: Any) -> float | None:
    """Return a loss as a finite number, or None."""
    if isinstance(loss, Tensor) and loss.numel() == 1:
        loss = loss.item()
    return float(loss) if isinstance(loss, float | int) and math.isfinite(loss) else None
