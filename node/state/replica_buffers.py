"""Access to the model of a replica, and the part of its state that has the model's buffers."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, Protocol

import numpy as np
from thinwire.compression.core.types import Floats

Read = Callable[[int, int, Any], None]
"""Copies the model's parameters [start, stop) as float32 into a vector of stop - start elements.

The vector is an array, or a tensor on the device that has the parameters (see `Replica.encode_on`).
"""


class ParameterWrite(Protocol):
    """Sets parameters [start, start + theta.size) to keep · present values + (1 − keep) · theta.

    With `start` at the end of the parameters it sets all buffers.
    """

    def __call__(self, theta: Floats, start: int = 0, keep: float = 0.0) -> None: ...


class BufferState:
    """Base of replicas: state that has the model's buffers at `_place`.

    In the vector that `Read` and `ParameterWrite` use, the buffers follow the parameters.
    """

    state: Floats
    size: int
    _place: slice
    _sent_buffers: Floats

    @property
    def theta(self) -> Floats:
        """Outer parameters (a view)."""
        return self.state[: self.size]

    @property
    def buffers(self) -> Floats:
        """Values of the model's buffers (a view), see ModelBuffers; empty if they are no state."""
        return self.state[self._place]

    def read_buffers(self, read: Read) -> None:
        """Read the buffers that the next contribution has. Raises FloatingPointError if they are not finite."""
        if self.buffers.size:
            values = self._sent_buffers
            read(self.size, self.size + values.size, values)
            if not np.isfinite(values).all():
                raise FloatingPointError("the model's buffers are not finite")

    def write_model(self, write: ParameterWrite) -> None:
        """Set the model to the outer parameters and the buffers."""
        write(self.theta)
        self.write_buffers(write)

    def write_buffers(self, write: ParameterWrite) -> None:
        """Set the model's buffers."""
        if self.buffers.size:
            write(self.buffers, self.size)
