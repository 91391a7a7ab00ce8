"""What a peer keeps of its replica: checkpoints to come back to."""

from __future__ import annotations

import numpy as np
from thinwire.swarm.protocol import Digest

from .checkpoint import CheckpointStore, Saved, SaveOutcome
from .doors import Doors
from .fragments import Layout
from .outer import Replica
from .presence import Emit
from .snapshot import FragmentState, PrivateState, Snapshot
from .waiting import Work

_EXTRA = "(extra)"
"""Name of what a method's state has beside parameters and momentum: no parameter can be called that."""

_OWN = "replica/"
"""Prefix of what is the replica's in the private part of a checkpoint."""


class Keep:
    """The checkpoints of one run's replica. `digest` is that of the newest kept state, as far as we know."""

    def __init__(self, store: CheckpointStore, run_id: bytes, doors: Doors, emit: Emit) -> None:
        self.digest: Digest | None = None
        self._store, self._run_id, self._doors, self._emit = store, run_id, doors, emit

    async def restore(self, replica: Replica, layout: Layout, work: Work) -> PrivateState | None:
        """Take up the newest checkpoint that can be trusted and fits, if there is one; its private state, if it has one."""
        loaded = await work(lambda: self._store.load(self._run_id))
        for remark in loaded.remarks:
            self._emit("checkpoint", {"detail": remark})
        snapshot: Snapshot | None = loaded.snapshot
        if snapshot is None:
            return None
        try:
            await work(lambda: _install(snapshot, replica, layout))
        except (KeyError, ValueError) as error:
            self._emit("checkpoint", {"detail": f"does not fit the model: {error}"})
            return None
        self.digest = replica.digest
        self._emit("restored", {"round": snapshot.round, "detail": str(loaded.path)})
        private = snapshot.private
        if private is None:
            return None
        own = {name.removeprefix(_OWN): one for name, one in private.tensors.items() if name.startswith(_OWN)}
        try:
            await work(lambda: replica.recall(own, layout))
        except (KeyError, ValueError) as error:
            self._emit("checkpoint", {"detail": f"what this replica had for itself is lost: {error}"})
        others = {name: one for name, one in private.tensors.items() if not name.startswith(_OWN)}
        return PrivateState(others, private.values) if others or private.values else None

    def save(self, replica: Replica, layout: Layout, private: PrivateState | None) -> SaveOutcome:
        """Write a checkpoint. Blocks for the disk; the replica must not change meanwhile, so in `work` or while that rests."""
        momentum = layout.split(replica.momentum) if replica.momentum.size else {}
        if replica.extra.size:
            momentum[_EXTRA] = replica.extra
        fragment = FragmentState(layout.split(replica.theta), momentum)
        own = {f"{_OWN}{name}": tensor for name, tensor in replica.private(layout).items()}
        if own:
            private = private or PrivateState({}, {})
            private = PrivateState({**private.tensors, **own}, private.values)
        snapshot = Snapshot(self._run_id, replica.round, replica.digest, replica.members, {0: fragment}, private)
        suffix = f"{self._doors.rng.getrandbits(32):08x}"
        saved = self._store.save(snapshot, now=self._doors.wall(), suffix=suffix)
        if isinstance(saved, Saved):
            self.digest = replica.digest
        return saved


def _install(snapshot: Snapshot, replica: Replica, layout: Layout) -> None:
    fragment = snapshot.fragments[0]
    parts = (fragment.weights, fragment.momentum)[: replica.vectors]
    extra = [np.asarray(fragment.momentum[_EXTRA], np.float32)] if replica.extra.size else []
    state = np.concatenate([*(layout.flat(tensors) for tensors in parts), *extra])
    if state.size != replica.state.size:
        raise ValueError(f"{state.size // len(parts)} parameters, the model has {layout.total}")
    replica.state[:] = state
    replica.round, replica.members = snapshot.round, snapshot.members
    replica.seal()
    replica.reset()
