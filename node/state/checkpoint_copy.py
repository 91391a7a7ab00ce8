"""Copy of a peer's state in memory, from which a checkpoint is written while training continues."""

from __future__ import annotations

import numpy as np
from thinwire.node.state.layout import Layout
from thinwire.node.state.replica import Replica
from thinwire.node.state.snapshot import PrivateState
from thinwire.node.state.tensor_file import Array, Tensors


class CheckpointCopy:
    """Copy of a replica and of the private state, made in parts.

    The next copy reuses the memory, because clearing fresh pages takes longer than copying into old ones. Each part is
    consistent in itself: nothing else may change the state while a part is copied. `replica`, `own` and `private` are
    valid while `complete` is True. own: private tensors of the replica, by fragment number.
    """

    replica: Replica

    def __init__(self) -> None:
        self._old: dict[str, Array] = {}
        self._memory: dict[str, Array] = {}
        self._fragments: dict[int, Replica] = {}
        self.complete = False
        self.allocated = False
        """True if there is memory from an earlier copy."""
        self.own: dict[int, Tensors] = {}
        self.private: PrivateState | None = None

    def drop(self) -> None:
        """Give the memory of all copies back."""
        self._old, self._memory, self._fragments, self.own = {}, {}, {}, {}
        self.private, self.complete, self.allocated = None, False, False

    def begin(self, replica: Replica, layout: Layout, private: PrivateState | None) -> None:
        """Begin a new copy: copy the private state, and the replica unless its fragments have separate rounds."""
        self._old, self._memory, self._fragments, self.own, self.complete = self._memory, {}, {}, {}, False
        if private is not None:
            tensors = {name: self._copied(f"private/{name}", tensor) for name, tensor in private.tensors.items()}
            private = PrivateState(tensors, dict(private.values))
        self.private = private
        if all(one is replica for _, one, _ in replica.each(layout)):
            self.extend(replica, layout)

    def extend(self, replica: Replica, layout: Layout) -> None:
        """Copy the next fragment."""
        missing = [part for part in replica.each(layout) if part[0] not in self._fragments]
        number, one, inner = missing[0]
        self._fragments[number] = one.twin(self._copied(f"state/{number}", one.state))
        tensors = one.private_state(inner)
        self.own[number] = {name: self._copied(f"own/{number}/{name}", each) for name, each in tensors.items()}
        if len(missing) == 1:
            self.replica, self.complete = replica.with_fragments(self._fragments), True
            self.allocated = True
            self._old.clear()

    def _copied(self, key: str, array: Array) -> Array:
        held = self._old.pop(key, None)
        if held is None or held.shape != array.shape or held.dtype != array.dtype:
            held = np.empty(array.shape, array.dtype)
        np.copyto(held, array)
        self._memory[key] = held
        return held
