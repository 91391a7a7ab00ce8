"""Replicas that train on from where they are when they send: what methods have in common in which a round is under way during
all of the next one's inner steps.

θ̄ makes its step as soon as a round commits, the same bits everywhere, as without overlap. The model is set to θ̄ when its next
contribution has been read, so that what it is trained from is one round older than it could be.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence

import numpy as np
from thinwire.collectives.state_sync import FetchedState
from thinwire.compression.core.types import Floats
from thinwire.node.state.layout import Layout
from thinwire.node.state.replica import Read, Replica
from thinwire.swarm.manifest.manifest import Manifest
from thinwire.swarm.messages.registry import PeerId


class OneRoundLateReplica(Replica):
    """θ̄ and its momentum, and values that only this peer has. Made by `begin`.

    start: what the model was set to. sent: the last contribution.
    """

    start: Floats
    sent: Floats
    _open: bool

    def _begin(self, manifest: Manifest, layout: Layout) -> None:
        """Start from θ̄."""
        self.reset()

    def reset(self) -> None:
        """See Replica: the model starts from θ̄."""
        self.start, self.sent = self.theta.copy(), np.zeros(self.size, np.float32)
        self._open = False

    def take(self, read: Read) -> Floats:
        """What was trained since `start`, with the last contribution where that came to nothing.

        Raises FloatingPointError when a parameter is not finite.
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
        """Take the next contribution from the model, and set `start`. Raises FloatingPointError, with nothing changed."""
        raise NotImplementedError

    def contribution(self, read: Read, *, attempt: int, peers: int) -> Iterable[memoryview]:
        """Measure and encode what was trained since `start`."""
        self.measure(read, peers)
        return self._encode_vector(self.sent)

    @property
    def next_start(self) -> Floats | None:
        """`start`: the model continues from it as soon as the contribution has been read."""
        return self.start

    def advance(self, members: Sequence[PeerId], lives: bytes = b"") -> None:
        """End the round: what was sent is in it."""
        super().advance(members, lives)
        self._open = False

    def install(self, fetched: FetchedState) -> int:
        """See Replica."""
        changed = super().install(fetched)
        self.reset()
        return changed
