"""Copy of a peer's state in memory, from which a checkpoint is written while training continues."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
from thinwire.node.state.layout import Layout
from thinwire.node.state.replica import Replica
from thinwire.node.state.snapshot import PrivateState
from thinwire.node.state.tensor_file import Array, Tensors


class StateCopy:
    """Copy of a replica and of the private state, made in parts.

    The next copy reuses the memory, because clearing fresh pages takes longer than copying into old ones. `replica`, `own` and `private`
    are valid once `extend` has returned True, until `extend` is called again. own: private tensors of the replica, by
    fragment number.
    """

    replica: Replica

    def __init__(self) -> None:
        self._memory: dict[str, Array] = {}
        self._restart()

    def _restart(self) -> None:
        self._old, self._memory = self._memory, {}
        self._copies: dict[int, Replica] = {}
        self._complete = False
        self.own: dict[int, Tensors] = {}
        self.private: PrivateState | None = None

    @property
    def begun(self) -> bool:
        """True if some parts have been copied and some have not."""
        return bool(self._copies) and not self._complete

    def extend(self, replica: Replica, layout: Layout, private: Callable[[], PrivateState | None]) -> bool:
        """Copy the next part; return True if it was the last one.

        The parts are the fragments with separate rounds, and the private state; without such fragments there is one part.
        Each part is consistent, so nothing else may change the replica or the private state meanwhile.
        """
        if self._complete:
            self._restart()
        missing = [part for part in replica.each(layout) if part[0] not in self._copies]
        if missing:
            number, one, inner = missing[0]
            self._copies[number] = one.twin(self._copied(f"state/{number}", one.state))
            tensors = one.private_state(inner)
            self.own[number] = {name: self._copied(f"own/{number}/{name}", each) for name, each in tensors.items()}
            if one is not replica:
                return False
        found = private()
        if found is not None:
            tensors = {name: self._copied(f"private/{name}", tensor) for name, tensor in found.tensors.items()}
            self.private = PrivateState(tensors, dict(found.values))
        self.replica = replica.with_fragments(self._copies)
        self._complete = True
        self._old.clear()
        return True

    def _copied(self, key: str, array: Array) -> Array:
        held = self._old.pop(key, None)
        if held is None or held.shape != array.shape or held.dtype != array.dtype:
            held = np.empty(array.shape, array.dtype)
        np.copyto(held, array)
        self._memory[key] = held
        return held
