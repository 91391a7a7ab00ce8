"""What the origin computes itself of a micro-batch: its beginning and its end. All of it where computing is allowed."""

from __future__ import annotations

import torch
from thinwire.compression.codec import CodecError
from torch import Tensor

from ..data import Batch
from ..trainer import Diverged
from .boundary import Boundary
from .section import Section
from .stage import Stage

NOT_FINITE = "lower inner.lr, or raise inner.warmup"


class Ends:
    """Embedding and first blocks, last norm, head and loss. Each counts a micro-batch's gradient once in a step."""

    def __init__(self, section: Section, boundary: Boundary, *, recompute: bool) -> None:
        self._front, self._tail = Stage(section.front, recompute=recompute), Stage(section.loss)
        self._boundary = boundary

    def begin(self, micro: int, tokens: Tensor) -> bytes:
        """What goes to the first stage. Raises Diverged when it is not finite."""
        try:
            return self._boundary.pack(self._front.forward(micro, tokens), tokens, backward=False)
        except CodecError:
            raise Diverged("the origin's activations are not finite", NOT_FINITE) from None

    def turn(self, micro: int, batch: Batch, payload: bytes) -> tuple[float, bytes]:
        """The loss of what came through the stages, and what goes back. Raises CodecError when something is not finite."""
        tokens, targets = batch
        x, _ = self._boundary.unpack(payload, *tokens.shape, backward=False)
        loss = self._tail.forward(micro, x, targets)
        if not bool(torch.isfinite(loss)):
            self._tail.forget(micro)
            raise CodecError("the loss is not finite", "not finite")
        gradient = self._tail.backward(micro, torch.ones_like(loss))
        assert gradient is not None
        return float(loss), self._boundary.pack(gradient, backward=True)

    def finish(self, micro: int, batch: Batch, payload: bytes) -> None:
        """Take the gradient that came back. Raises CodecError, with nothing counted, when the payload is none."""
        gradient, _ = self._boundary.unpack(payload, *batch[0].shape, backward=True)
        self._front.backward(micro, gradient)

    def alone(self, micro: int, batch: Batch, payload: bytes) -> float:
        """Nobody else is there: what goes out comes straight back. The loss; raises Diverged."""
        try:
            loss, back = self.turn(micro, batch, payload)
        except CodecError:
            raise Diverged("the loss is not finite", NOT_FINITE) from None
        self.finish(micro, batch, back)
        return loss

    def forget(self, micro: int) -> None:
        """A micro-batch is given up."""
        self._front.forget(micro)

    def clear(self) -> None:
        """A step is over."""
        self._front.clear()
        self._tail.clear()
