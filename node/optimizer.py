"""The optimizer that a training loop of one's own calls: the inner one, and every H steps a round with the swarm."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

if TYPE_CHECKING:
    from .api import Swarm
    from .companion import RoundReport


class SwarmOptimizer(torch.optim.Optimizer):
    """Stands in for the inner optimizer everywhere: learning rate schedulers and GradScaler take it. See `Swarm.wrap`.

    Parameter groups, state, hooks and state dicts are those of the inner optimizer.
    """

    # GradScaler would leave its scale on this object, where the inner optimizer does not look; so it unscales by itself.
    _step_supports_amp_scaling = False

    def __init__(self, swarm: Swarm, inner: torch.optim.Optimizer, batch: int) -> None:
        # Not the base class's: the attributes that one makes are the inner optimizer's, see __getattr__.
        self._inner, self._swarm, self._batch = inner, swarm, batch
        self._steps = self._weight = self._sent = 0

    def __getattr__(self, name: str) -> Any:
        if name == "_inner":  # not there yet: a copy in the making
            raise AttributeError(name)
        return getattr(self._inner, name)

    def step(
        self, closure: Callable[[], Any] | None = None, *, weight: int | None = None, loss: float | Tensor | None = None
    ) -> Any:
        """One inner step; after every H-th, and when the others have committed without us, the round: then it blocks.
        With a method that overlaps it blocks twice: to send, and some steps later for the result. With "merge" the first call
        begins with the round in which those who are here become members.

        `weight`: samples (or tokens) that went into this step, `batch` of `wrap` by default. `loss`: for display, here and
        at the others; what a closure gives by default. Returns what the inner optimizer's step returns. Once the run is
        over the parameters stay as the swarm left them. Raises what `Swarm.check` raises.
        """
        swarm = self._swarm
        weight = self._batch if weight is None else weight
        if weight < 0:
            raise ValueError(f"a weight of {weight}: it counts samples")
        if swarm.done:
            return None if closure is None else closure()
        while swarm.gathers and not swarm.done:
            # Before anything is trained, however often it takes; parameters that are equal everywhere stay as they are.
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
        """Without a commit the local progress stays in the model and goes out with that of the next H steps."""
        if report.committed or report.taken:
            self._weight -= self._sent - report.kept
        elif report.adopted:
            self._steps = self._weight = 0
        self._swarm.tell(report)

    def zero_grad(self, set_to_none: bool = True) -> None:
        """See torch.optim.Optimizer."""
        self._inner.zero_grad(set_to_none)

    def state_dict(self) -> dict[str, Any]:
        """The inner optimizer's; the swarm keeps the outer one's."""
        return self._inner.state_dict()

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Into the inner optimizer."""
        self._inner.load_state_dict(state_dict)

    def add_param_group(self, param_group: dict[str, Any]) -> None:
        """To the inner optimizer. What is averaged was fixed by `wrap`: parameters that were not trainable then stay local."""
        self._inner.add_param_group(param_group)


def _number(loss: Any) -> float | None:
    """A loss as a finite number; None when it is none."""
    if isinstance(loss, Tensor) and loss.numel() == 1:
        loss = loss.item()
    return float(loss) if isinstance(loss, float | int) and math.isfinite(loss) else None
