"""Forward and backward passes of micro-batches through layers, in pure torch, without a network."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor


@dataclass(slots=True)
class _Held:
    """Data that a backward pass needs. `output` is None if it is to be recomputed."""

    inputs: tuple[Tensor, ...]
    output: Tensor | None


class Stage:
    """Forward and backward of `run`, which takes the micro-batch's x first. `grad` adds up gradients.

    A micro-batch's gradient is added at most once between two calls of `clear`, however often it is retried
    (`counted`). `recompute`: retain only the input of each micro-batch, and run the forward pass twice.
    """

    def __init__(self, run: Callable[..., Tensor], *, recompute: bool = False) -> None:
        self.counted: set[int] = set()
        self._run, self._recompute = run, recompute
        self._held: dict[int, _Held] = {}

    @property
    def holds(self) -> int:
        """Number of micro-batches between forward and backward."""
        return len(self._held)

    def forward(self, micro: int, x: Tensor, *others: Tensor) -> Tensor:
        """Return the detached output for micro-batch `micro`; a second call replaces the retained data."""
        self._held.pop(micro, None)
        x = x.detach()
        if x.is_floating_point():
            x.requires_grad_()
        if self._recompute:
            with torch.no_grad():
                output = self._run(x, *others)
            self._held[micro] = _Held((x, *others), None)
        else:
            output = self._run(x, *others)
            self._held[micro] = _Held((x, *others), output)
        return output.detach()

    def backward(self, micro: int, gradient: Tensor, *, count: bool = True) -> Tensor | None:
        """Return the gradient of x for a gradient of the output, or None if x are token ids.

        The parameters' gradients are added unless they were added before, or `count` is False. Raises KeyError without
        a forward pass.
        """
        held = self._held.pop(micro)
        x, output = held.inputs[0], held.output
        if output is None:
            output = self._run(*held.inputs)
        if count and micro not in self.counted:
            self.counted.add(micro)
            torch.autograd.backward(output, gradient)
            return x.grad
        if not x.requires_grad:
            return None
        return torch.autograd.grad(output, x, gradient)[0]

    def forget(self, micro: int) -> None:
        """Discard the data of a micro-batch that will have no backward pass."""
        self._held.pop(micro, None)

    def clear(self) -> None:
        """End a step: discard all retained data and counts. The parameters' gradients remain."""
        self._held.clear()
        self.counted.clear()
