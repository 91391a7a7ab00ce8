"""Optimizer for a user's training loop.

Wraps the inner optimizer and runs a round with the swarm every H steps.
"""

from __future__ import annotations

import math
import warnings
from collections import deque
from collections.abc import Callable
from numbers import Real
from typing import Any, SupportsInt

import torch
from thinwire.node.api.arguments import samples
from thinwire.node.api.background_peer import BackgroundPeer
from thinwire.node.api.exchange import RoundReport
from thinwire.node.api.group_peer import GroupPeer
from torch import Tensor
from torch.optim.lr_scheduler import LambdaLR


def _scalar(loss: object) -> float | Tensor | None:
    """Return a loss as a number, or as a tensor without dimensions and history; None if it is neither."""
    if isinstance(loss, Tensor):
        return loss.detach().reshape(()) if loss.numel() == 1 else None
    return float(loss) if isinstance(loss, Real) else None


def _kind(loss: object) -> str:
    return f"a tensor of {loss.numel()} elements" if isinstance(loss, Tensor) else type(loss).__name__


class SwarmOptimizer(torch.optim.Optimizer):
    """Replacement for the inner optimizer; learning rate schedulers and GradScaler accept it.

    See `Swarm.wrap`. `background_peer` runs the rounds; `on_round` is called with the report of each; `loss_of_step` is asked
    for the loss of a step if neither its caller nor its closure gives one.

    Parameter groups, state, hooks and state dicts are those of the inner optimizer.
    """

    # If this were True, GradScaler would store its scale on this object, where the inner optimizer does not read it.
    _step_supports_amp_scaling = False

    def __init__(
        self,
        background_peer: BackgroundPeer | GroupPeer,
        inner: torch.optim.Optimizer,
        batch: int,
        on_round: Callable[[RoundReport], None] | None = None,
        loss_of_step: Callable[[], float | Tensor | None] = lambda: None,
    ) -> None:
        # Do not call the base class: attributes that it sets belong to the inner optimizer, see __getattr__.
        self._inner, self._background_peer, self._batch, self._on_round = inner, background_peer, batch, on_round
        self._steps = self._weight = self._sent = 0
        self._losses: float | Tensor = 0.0
        self._losses_count, self._loss_of_step = 0, loss_of_step
        self._unreported: deque[RoundReport] = deque(maxlen=1024)
        self._known = {id(one) for one in self._trainable()}

    def __getattr__(self, name: str) -> Any:
        if name == "_inner":  # not set yet: the object is being copied
            raise AttributeError(name)
        return getattr(self._inner, name)

    def step(
        self,
        closure: Callable[[], Any] | None = None,
        *,
        weight: SupportsInt | None = None,
        loss: float | Tensor | None = None,
    ) -> Any:
        """Run one inner step, and block for a round when it is due.

        A round is due after every H-th step, and when the others have committed without us.

        An overlapping method blocks twice: to send, and some steps later for the result. With "merge" the first call
        starts with the round in which the present peers become members.

        `weight`: samples (or tokens) of this step, 0 or more; by default `batch` of `wrap`. `loss`: a number, or a tensor of
        one element, for display here and at other peers, as the mean over the steps of a round; by default the value of the
        closure. Returns the result of the inner optimizer's step. Once the run is over, the closure is called, and the
        parameters stay as the swarm left them. Raises ValueError for a weight that is no whole number or negative,
        TypeError for a `loss` that is no such number or tensor, what `Swarm.check` raises, and the exceptions of `on_round`.
        """
        if loss is not None and _scalar(loss) is None:
            raise TypeError(f"loss must be a number or a tensor of one element, not {_kind(loss)}")
        result = self._step(closure, weight, loss)
        # Only here: an exception of `on_round` on one rank must not skip calls that all ranks make together.
        while self._unreported and self._on_round is not None:
            self._on_round(self._unreported.popleft())
        return result

    def _step(self, closure: Callable[[], Any] | None, weight: SupportsInt | None, loss: float | Tensor | None) -> Any:
        peer = self._background_peer
        peer.refresh()
        weight = self._batch if weight is None else samples("weight", weight)
        if peer.done:
            return None if closure is None else closure()
        while peer.gathers and not peer.done:
            # before any training, repeated until it succeeds; parameters that are equal everywhere do not change
            self._unreported.append(peer.gather())
        result = self._inner.step() if closure is None else self._inner.step(closure)
        self._steps += 1
        self._weight += weight
        self._add_loss(result if loss is None else loss)
        if peer.under_way and self._steps >= peer.overlap:
            self._book(peer.finish())
        if not peer.under_way and (self._steps >= peer.steps or peer.overtaken) and not peer.done:
            self._warn_of_local_parameters()
            steps, self._steps, self._sent = self._steps, 0, self._weight
            exchange = peer.begin if peer.overlap else peer.exchange
            report = exchange(steps=steps, weight=self._weight, loss=self._mean_loss())
            if report is not None:
                self._book(report)
        return result

    def _trainable(self) -> list[Tensor]:
        return [one for group in self._inner.param_groups for one in group["params"] if one.requires_grad]

    def _warn_of_local_parameters(self) -> None:
        """Warn once of each parameter that became trainable after `wrap`: no round averages it."""
        new = [one for one in self._trainable() if id(one) not in self._known]
        if not new:
            return
        self._known.update(map(id, new))
        text = (
            f"parameters that became trainable after wrap are not averaged ({len(new)}, the first of shape "
            f"{tuple(new[0].shape)}), so peers differ in them; make them trainable before wrap"
        )
        warnings.warn(text, RuntimeWarning, stacklevel=4)

    def _add_loss(self, loss: Any) -> None:
        """Add the loss of a step; it stays on its device, so that nothing waits for it before the round."""
        number = _scalar(self._loss_of_step() if loss is None else loss)
        if number is not None:
            self._losses, self._losses_count = self._losses + number, self._losses_count + 1

    def _mean_loss(self) -> float | None:
        """Return the mean loss since the last call, if it is known and finite; warn if it is not finite."""
        mean = float(self._losses) / self._losses_count if self._losses_count else None
        self._losses, self._losses_count = 0.0, 0
        if mean is None or math.isfinite(mean):
            return mean
        text = (
            f"the mean loss since the last round is {mean}; a peer whose parameters are not finite contributes nothing"
        )
        warnings.warn(text, RuntimeWarning, stacklevel=4)
        return None

    @property
    def swarm_step(self) -> int:
        """Inner steps of a peer since the run began, see `Swarm.step`."""
        return self._background_peer.steps_before + self._steps

    def _book(self, report: RoundReport) -> None:
        """Account for the weight of a round.

        Without a commit the local progress stays in the model and joins the next round.
        """
        if report.committed or report.taken:
            self._weight -= self._sent - report.kept
        elif report.adopted:
            self._steps = self._weight = 0
        self._unreported.append(report)

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


class SwarmLR(LambdaLR):
    """Learning rate scheduler that follows the run: the base rate times `factor(Swarm.step)`.

    Joiners and peers that return have the rate of all other peers. Call its `step` after that of the optimizer.
    """

    optimizer: SwarmOptimizer

    def __init__(self, optimizer: SwarmOptimizer, factor: Callable[[int], float]) -> None:
        super().__init__(optimizer, factor)

    def get_lr(self) -> list[float | Tensor]:
        """Return the learning rate of each parameter group."""
        self.last_epoch = self.optimizer.swarm_step
        return super().get_lr()
