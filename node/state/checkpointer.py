"""Saves and restores checkpoints of a peer's replica."""

from __future__ import annotations

from collections import ChainMap
from collections.abc import Callable, Mapping
from dataclasses import replace
from functools import partial
from typing import ClassVar, cast

import numpy as np
from thinwire.node.runtime.asyncio_extra import Work
from thinwire.node.runtime.environment import Environment
from thinwire.node.runtime.event_log import Emit
from thinwire.node.state.checkpoint_store import CheckpointStore, Loaded, Saved, SaveFailed, SaveOutcome
from thinwire.node.state.layout import Layout
from thinwire.node.state.replica import Replica
from thinwire.node.state.snapshot import FragmentState, PrivateState, Snapshot, Standing
from thinwire.node.state.tensor_file import Array, Tensors
from thinwire.swarm.identity.errors import HintedError
from thinwire.swarm.manifest.manifest import ManifestMismatch
from thinwire.swarm.messages.registry import Digest

_EXTRA = "(extra)"
"""Name of a method's state besides parameters and momentum: no parameter can have this name."""

_OWN = "replica/"
"""Prefix of the replica's entries in the private part of a checkpoint."""


class CheckpointsLost(HintedError):
    """The checkpoints of a run cannot be read, and no other peer has its state.

    Its code is one after which a service is not started again: only a person can mend it.
    """

    exit_code: ClassVar[int] = 2


class Checkpointer:
    """The checkpoints of one run's replica. `digest` is that of the newest saved state, if known.

    `unreadable`: what the store found if it restored no checkpoint although there are some; else None.

    During training `begin` copies what each inner step changes and shares the rest, which `write` writes while training
    continues. Without memory for this copy `write` first writes what was not copied, and training `waits` for that. At the
    end, and without memory for what rounds replace meanwhile, `save` writes all at once. The caller ensures that only one of
    them runs.
    """

    def __init__(self, store: CheckpointStore, run_id: bytes, environment: Environment, emit: Emit) -> None:
        self.digest: Digest | None = None
        self.unreadable: Loaded | None = None
        self._store, self._run_id, self._environment, self._emit = store, run_id, environment, emit
        self.waits = False
        """True if the private state of the checkpoint that has begun is not copied."""
        self._overtaken = False
        """True if the last checkpoint was lost because a round had no memory for a copy."""
        self._sizes = 0, 0
        self._begun: tuple[Replica, dict[int, dict[str, Array]], PrivateState | None] | None = None
        """Twin of the replica, its private tensors by fragment number, and the private state of training."""

    async def restore(self, replica: Replica, layout: Layout, work: Work) -> PrivateState | None:
        """Restore the newest trusted checkpoint, if any; return its private state, if any.

        Raises ManifestMismatch, with an unchanged replica, if the checkpoint is that of another model.
        """
        loaded = await work(lambda: self._store.load(self._run_id))
        for remark in loaded.remarks:
            self._emit("checkpoint", {"detail": remark})
        snapshot: Snapshot | None = loaded.snapshot
        if snapshot is None:
            self.unreadable = loaded if loaded.saved and loaded.remarks else None
            return None
        try:
            await work(lambda: _install(snapshot, replica, layout))
        except ValueError as reason:
            raise ManifestMismatch(
                f"checkpoint {loaded.path} does not fit this model: {reason}",
                "another model is another run: give it another run.name; or use the model that this run had",
            ) from None
        self.digest = replica.digest
        self._emit("restored", {"round": snapshot.round, "detail": str(loaded.path)})
        private = snapshot.private
        if private is None:
            return None
        for number, one, inner in replica.each(layout):
            mark = _own(one, replica, number)
            own = {name.removeprefix(mark): each for name, each in private.tensors.items() if name.startswith(mark)}
            try:
                remark = await work(partial(one.load_private, own, inner))
            except (KeyError, ValueError) as error:
                remark = f"the private state of this replica is lost: {error}"
            if remark:
                self._emit("checkpoint", {"detail": remark})
        others = {name: one for name, one in private.tensors.items() if not name.startswith(_OWN)}
        return PrivateState(others, private.values) if others or private.values else None

    def begin(self, replica: Replica, layout: Layout, private: PrivateState | None) -> bool:
        """Begin a checkpoint: copy the private state of training, and take a twin of the replica.

        Return False, with nothing begun, if the machine would have less memory left after a copy of the replica than the copy
        takes, or had none for it while the last checkpoint was written: then `save`. If there is not enough for a copy of both,
        nothing is copied, and training `waits` until `write` has called `private_written`. Nothing may change the state
        meanwhile, so call in `work`.
        """
        self._begun = None
        self._sizes = self._sizes if any(self._sizes) else _sizes(replica, layout, private)
        shared, copied = self._sizes
        spare = self._environment.spare()
        overtaken, self._overtaken = self._overtaken, False
        if spare < 2 * shared or overtaken or _torn(replica, layout):
            return False
        self.waits = private is not None and spare < 2 * (shared + copied)
        if private is not None and not self.waits:
            try:
                tensors = {name: np.array(tensor) for name, tensor in private.tensors.items()}
                private = PrivateState(tensors, dict(private.values))
            except MemoryError:
                self.waits = True
        own = {number: one.private_state(inner) for number, one, inner in replica.each(layout)}
        twin = replica.with_fragments({number: one.twin(private=True) for number, one, _ in replica.each(layout)})
        self._begun = twin, own, private
        return True

    async def write(self, layout: Layout, private_written: Callable[[], object] = lambda: None) -> SaveOutcome:
        """Write the checkpoint that `begin` has begun, in `Environment.write`.

        `private_written`: called there once the private state is written, if training `waits` for that.

        The replica may change meanwhile. If it has no memory for a copy of what is not written yet, that is a SaveFailed.
        """
        assert self._begun is not None
        (twin, own, private), self._begun, save = self._begun, None, self._saver()
        if private is not None and self.waits:

            def release() -> None:
                for _, one, _ in twin.each(layout):
                    one.release_private()
                private_written()

            private = replace(private, release=release)

        def write() -> tuple[SaveOutcome, Digest]:
            for _, one, _ in twin.each(layout):
                one.compute_digest()
            snapshot = self._snapshot(twin, layout, own, private, lent=True)
            return save(
                replace(snapshot, lost=lambda: any(one.lost for _, one, _ in twin.each(layout)))
            ), snapshot.digest

        saved: SaveOutcome
        saved, digest = await self._environment.write(write)
        if isinstance(saved, Saved):
            self.digest = digest
        self._overtaken = any(one.lost for _, one, _ in twin.each(layout))
        return saved

    def save(self, replica: Replica, layout: Layout, private: PrivateState | None) -> SaveOutcome:
        """Write a checkpoint without a copy.

        Blocks for the disk; the replica must not change meanwhile, so call in `work` or while it is idle. A state that a
        failed change has left is not written.
        """
        if _torn(replica, layout):
            return SaveFailed("a change of the state has failed half-way; the checkpoint before it stays")
        own = {number: one.private_state(inner) for number, one, inner in replica.each(layout)}
        snapshot = self._snapshot(replica, layout, own, private)
        saved = self._saver()(snapshot)
        if isinstance(saved, Saved):
            self.digest = snapshot.digest
        return saved

    def _saver(self) -> Callable[[Snapshot], SaveOutcome]:
        suffix = f"{self._environment.rng.getrandbits(32):08x}"
        return partial(self._store.save, now=self._environment.wall(), suffix=suffix)

    def _snapshot(
        self,
        replica: Replica,
        layout: Layout,
        own: Mapping[int, Tensors],
        private: PrivateState | None,
        *,
        lent: bool = False,
    ) -> Snapshot:
        """Describe a state.

        `own`: private tensors of the replica, by fragment number. `lent`: `replica` is a twin, released when written.
        """
        fragments, standings, tensors = dict[int, FragmentState](), {}, dict[str, Array]()
        for number, one, inner in replica.each(layout):
            momentum = inner.split(one.momentum) if one.momentum.size else {}
            if one.extra.size:
                momentum[_EXTRA] = one.extra
            weights = inner.split(one.theta)
            release = (partial(_release, one, weights, momentum),) if lent else ()
            fragments[number] = FragmentState(weights, momentum, *release)
            tensors |= {f"{_own(one, replica, number)}{name}": tensor for name, tensor in own[number].items()}
            if one is not replica:
                standings[number] = (one.round, one.members, one.lives, one.chain)
        if tensors:
            private = private or PrivateState({}, {})
            # Not one dict: it would fetch all moments from a GPU at once.
            private = replace(private, tensors=ChainMap(tensors, cast(dict[str, Array], private.tensors)))
        return Snapshot(
            self._run_id,
            replica.round,
            replica.digest,
            replica.members,
            fragments,
            private,
            standings or None,
            b"" if standings else replica.lives,
            () if standings else replica.chain,
        )


def _sizes(replica: Replica, layout: Layout, private: PrivateState | None) -> tuple[int, int]:
    """Return the sizes of the two parts of a checkpoint in bytes.

    The first is what rounds replace meanwhile, at most, the second the private state of training.
    """
    own = [tensor for _, one, inner in replica.each(layout) for tensor in one.private_state(inner).values()]
    shared = sum(one.state.nbytes for _, one, _ in replica.each(layout)) + sum(tensor.nbytes for tensor in own)
    return shared, sum(tensor.nbytes for tensor in private.tensors.values()) if private is not None else 0


def _torn(replica: Replica, layout: Layout) -> bool:
    return any(one.torn for _, one, _ in replica.each(layout))


def _release(twin: Replica, *views: dict[str, Array]) -> None:
    """End the use of a state: the replica changes it from now on."""
    for tensors in views:
        tensors.clear()
    twin.release()


def _own(one: Replica, whole: Replica, number: int) -> str:
    return _OWN if one is whole else f"{_OWN}{number}/"


def _install(snapshot: Snapshot, whole: Replica, layout: Layout) -> None:
    """Restore all of a snapshot, or nothing."""
    missing = [number for number, _, _ in whole.each(layout) if number not in snapshot.fragments]
    if missing:
        raise ValueError(f"it has no fragment {missing[0]}")
    found = [
        (one, _state(snapshot.fragments[number], one, inner), _place(snapshot, None if one is whole else number))
        for number, one, inner in whole.each(layout)
    ]
    for one, state, (round, members, lives, chain) in found:
        one.state[:] = state
        one.round, one.members, one.lives, one.chain = round, members, lives, chain
        one.seal()
        one.reset()


def _place(snapshot: Snapshot, number: int | None) -> Standing:
    """Return the standing of a fragment with separate rounds, or of the whole replica."""
    whole = (snapshot.round, snapshot.members, snapshot.lives, snapshot.chain)
    standings = snapshot.standings or {}
    if number is not None and number not in standings:
        raise ValueError(f"it has no round of fragment {number}")
    return whole if number is None else standings[number]


def _state(fragment: FragmentState, replica: Replica, layout: Layout) -> Array:
    shapes = {piece.name: tuple(piece.shape) for piece in layout.pieces}
    found = {name: np.asarray(tensor).shape for name, tensor in fragment.weights.items() if name != _EXTRA}
    if found != shapes:
        name = min(name for name in {*found, *shapes} if found.get(name) != shapes.get(name))
        if name not in found:
            raise ValueError(f"it lacks parameter {name!r}")
        if name not in shapes:
            raise ValueError(f"the model lacks its parameter {name!r}")
        raise ValueError(f"its parameter {name!r} has shape {found[name]}, that of the model {shapes[name]}")
    parts = (fragment.weights, fragment.momentum)[: replica.vectors]
    missing = [name for part in parts for name in shapes if name not in part]
    if missing or (replica.extra.size and _EXTRA not in fragment.momentum):
        raise ValueError(f"it has no momentum of {missing[0] if missing else 'the buffers'}")
    extra = [np.asarray(fragment.momentum[_EXTRA], np.float32)] if replica.extra.size else []
    state = np.concatenate([*(layout.flat(tensors) for tensors in parts), *extra])
    if state.size != replica.state.size:
        raise ValueError(f"it has {state.size // len(parts)} parameters, the model {layout.total}")
    return state
