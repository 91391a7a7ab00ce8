"""Base of replicas with one round of delay: a round is exchanged during the next round's inner steps.

The outer parameters θ̄ make their step when a round commits; they are bit-identical on all peers. The model is
set to θ̄ only after its next contribution was read, so it trains from parameters that are one round old.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence

import numpy as np
from thinwire.collectives.state_sync.state_sync import FetchedState
from thinwire.compression.core.types import Floats
from thinwire.node.state.layout import Layout
from thinwire.node.state.replica import Replica
from thinwire.node.state.replica_buffers import Read
from thinwire.swarm.manifest.manifest import Manifest
from thinwire.swarm.messages.registry import PeerId


class OneRoundLateReplica(Replica):
    """Replica with θ̄ and its momentum, and private vectors. Made by `begin`.

    start: parameters that the model was set to. sent: the last contribution.
    """

    start: Floats
    sent: Floats
    _open: bool

    def _begin(self, manifest: Manifest, layout: Layout) -> None:
        self.reset()

    def reset(self) -> None:
        """Let the model start from θ̄."""
        self.start, self.sent = self.theta.copy(), np.zeros(self.size, np.float32)
        self._open = False

    def take(self, read: Read) -> Floats:
        """Return the training since `start`, plus the last contribution if its round failed.

        Raises FloatingPointError if a parameter is not finite.
        """
        delta = np.empty(self.size, np.float32)
        read(0, delta.size, delta)
        np.subtract(self.start, delta, out=delta)
        if not np.isfinite(np.dot(delta, delta)):
            raise FloatingPointError("the pseudo-gradient is not finite")
        if self._open:
            delta += self.sent
        return delta

    def send(self, delta: Floats) -> None:
        """Make `delta` the next contribution. The caller sets `start`, from which the model continues."""
        self.sent, self._open = delta, True

    def measure(self, read: Read, peers: int) -> None:
        """Read the next contribution from the model, and set `start`. Raises FloatingPointError."""
        raise NotImplementedError

    def contribution(self, read: Read, *, attempt: int, peers: int) -> Iterable[memoryview]:
        """Measure and encode the training since `start`."""
        self.measure(read, peers)
        return self.coder.encoded(self.sent)

    @property
    def next_start(self) -> Floats | None:
        """`start`: the model continues from it after the contribution has been read."""
        return self.start

    def advance(self, members: Sequence[PeerId], lives: bytes = b"") -> None:
        """End the round, which has what was sent."""
        super().advance(members, lives)
        self._open = False

    def install(self, fetched: FetchedState) -> int:
        changed = super().install(fetched)
        self.reset()
        return changed
