"""Computation of the origin itself, in the worker: the beginning and the end of each micro-batch."""

from __future__ import annotations

import torch
from thinwire.compression.boundary_codec import Boundary
from thinwire.compression.core.codec import CodecError
from thinwire.node.pipeline.model.section import ModelSection
from thinwire.node.pipeline.model.stage import Stage
from thinwire.node.training.batches import Batch
from thinwire.node.training.inner_loop import DIVERGED_HINT, Diverged
from torch import Tensor


class OriginCompute:
    """Embedding and first blocks, last norm, head and loss; counts each micro-batch once per step."""

    def __init__(self, section: ModelSection, boundary: Boundary, *, recompute: bool) -> None:
        self._front, self._tail = Stage(section.front, recompute=recompute), Stage(section.loss)
        self._boundary = boundary

    def begin(self, micro: int, tokens: Tensor) -> bytes:
        """Return the payload for the first stage. Raises Diverged if it is not finite."""
        try:
            return self._boundary.pack(self._front.forward(micro, tokens), tokens, backward=False)
        except CodecError:
            raise Diverged("the origin's activations are not finite", DIVERGED_HINT) from None

    def turn(self, micro: int, batch: Batch, payload: bytes) -> tuple[float, bytes]:
        """Return the loss of the last stage's output, and the gradient payload. Raises CodecError."""
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
        """Take the gradient that came back. Raises CodecError, with nothing counted, if it is invalid."""
        gradient, _ = self._boundary.unpack(payload, *batch[0].shape, backward=True)
        self._front.backward(micro, gradient)

    def alone(self, micro: int, batch: Batch, payload: bytes) -> float:
        """Return the loss of a micro-batch without other stages: the output returns directly. Raises Diverged."""
        try:
            loss, back = self.turn(micro, batch, payload)
        except CodecError:
            raise Diverged("the loss is not finite", DIVERGED_HINT) from None
        self.finish(micro, batch, back)
        return loss

    def forget(self, micro: int) -> None:
        """Discard a micro-batch that is given up."""
        self._front.forget(micro)

    def clear(self) -> None:
        """End a step."""
        self._front.clear()
        self._tail.clear()
