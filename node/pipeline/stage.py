"""A run of layers at work: forward and backward of micro-batches, in pure torch, without a network."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor


@dataclass(slots=True)
class _Held:
    """What a backward pass needs. `output` is None where it is to be computed again."""

    inputs: tuple[Tensor, ...]
    output: Tensor | None


class Stage:
    """Forward and backward of `run`, which takes the micro-batch's x first. Gradients add up in the parameters' `grad`.

    Whatever is retried, a micro-batch's gradient is added to the parameters' at most once between two `clear`s: `counted`.
    `recompute`: keep only the input of each micro-batch, and make the forward pass twice.
    """

    def __init__(self, run: Callable[..., Tensor], *, recompute: bool = False) -> None:
        self.counted: set[int] = set()
        self._run, self._recompute = run, recompute
        self._held: dict[int, _Held] = {}

    @property
    def holds(self) -> int:
        """Micro-batches between forward and backward."""
        return len(self._held)

    def forward(self, micro: int, x: Tensor, *others: Tensor) -> Tensor:
        """The output for micro-batch `micro`, detached. Once more for the same micro-batch: what was held is replaced."""
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
        """The gradient of x from that of the output; None where x are token ids. Raises KeyError without a forward pass.

        The parameters' gradients are added up unless they were before, or not `count`.
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
        """There will be no backward pass."""
        self._held.pop(micro, None)

    def clear(self) -> None:
        """A step is over: nothing is held or counted any more. The parameters' gradients are left."""
        self._held.clear()
        self.counted.clear()
