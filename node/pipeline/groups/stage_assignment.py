"""Assignment of stages to weak peers: the most needed stage among those that fit into memory.

All waiting peers compute the same assignment from the same records, so that they take different places.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping

from thinwire.node.pipeline.model.staged_model import StagedModel
from thinwire.swarm.identity.stage_claim import Seat, Seating
from thinwire.swarm.messages.registry import PeerId

PER_PARAMETER = 4 * 8
"""Bytes per parameter: value, gradient, two moments of AdamW, outer value and momentum, two buffers."""

PER_COPY = 4 * 4
"""Bytes per parameter of a backup: outer parameters and momentum, and their replacements."""


HEAD_WIDTH = 64
"""Usual values of an attention head, for models whose number of heads is not known."""


def memory(model: StagedModel, stage: int | None) -> int:
    """Return roughly the bytes for training a stage (None: the whole model), with the next one's backup.

    Activations of a layer are s·b·h·(34 + 5·a·s / h) values of two bytes (Korthikanti et al., arXiv 2205.05198, eq. 1),
    here of four; a stage holds those of as many micro-batches as are in progress. A model of the user has all its weights
    for a moment when the stage is made.
    """
    manifest, width, context = model.manifest, model.width, model.manifest.model.context
    shape, pipeline, built_in = manifest.model, manifest.pipeline, manifest.model.kind == "transformer"
    heads, under_way = shape.heads if built_in else -(-width // HEAD_WIDTH), 1
    if stage is not None:
        under_way = manifest.host_capacity
    tokens = manifest.inner.batch * context
    values = tokens * (34 * width + 5 * heads * context) * len(model.layers(stage)) * under_way
    logits = 3 * 4 * tokens * model.vocab if not stage else 0
    # Every stage of a subspace model adds the frozen embedding rows to its input.
    frozen = 4 * model.vocab * width if stage and pipeline.codec.startswith("subspace") else 0
    copied = 0
    if stage is not None and pipeline.backup_every:
        copied = PER_COPY * model.parameters((stage + 1) % pipeline.stages)
    training = PER_PARAMETER * model.parameters(stage) + copied + 2 * values + logits + frozen
    return training if built_in else max(training, 4 * model.parameters(None))


def assign(seats: Seating, stages: int, holders: int = 1) -> Mapping[PeerId, Seat]:
    """Return a seat for every waiting peer, assigned one after the other in the order of their ids.

    First the missing stages, in the group that lacks fewest; then a stage with fewer than `holders` holders; then a
    new group, if enough peers wait to fill one or hosts have lost their origin; else the stage with fewest
    holders.
    """
    groups = {origin: {stage: list(peers) for stage, peers in held.items()} for origin, held in seats.groups.items()}
    orphans, found = bool(seats.orphans), dict[PeerId, Seat]()
    for done, peer in enumerate(seats.waiting):
        missing = {origin: [stage for stage, peers in held.items() if not peers] for origin, held in groups.items()}
        least = min((origin for origin in groups if missing[origin]), key=lambda o: (len(missing[o]), o), default=None)
        if least is not None:
            seat = Seat(missing[least][0], least)
        elif not groups or orphans or (len(seats.waiting) - done >= stages and _full(groups, holders)):
            seat, orphans = Seat(0, peer), False
            groups[peer] = {stage: [] for stage in range(1, stages)}
        else:
            seat = _weakest(groups)
        if seat.stage:
            groups[seat.origin][seat.stage].append(peer)
        found[peer] = seat
    return found


def _full(groups: Mapping[PeerId, Mapping[int, Collection[PeerId]]], holders: int) -> bool:
    """Return True if every stage has the holders that it needs before another group is founded."""
    return all(len(peers) >= holders for held in groups.values() for peers in held.values())


def _weakest(groups: Mapping[PeerId, Mapping[int, Collection[PeerId]]]) -> Seat:
    """Return the stage with fewest holders."""
    return min(
        (Seat(stage, origin) for origin, held in groups.items() for stage in held),
        key=lambda seat: (len(groups[seat.origin][seat.stage]), -seat.stage, seat.origin),
    )


def fitting(seats: Seating, stages: int, fits: Collection[int], me: PeerId, holders: int = 1) -> Seat | None:
    """Return the seat of `me`, which waits and can hold only the stages `fits`; None if there is none.

    If the assigned stage does not fit: a missing stage that fits, else the fitting stage with fewest holders, else a
    new group.
    """
    seat = assign(seats, stages, holders).get(me)
    if seat is not None and seat.stage in fits:
        return seat
    groups = {
        origin: {stage: peers for stage, peers in held.items() if stage in fits}
        for origin, held in seats.groups.items()
    }
    if any(groups.values()):
        return _weakest(groups)
    return Seat(0, me) if 0 in fits else None


def gaps(seats: Seating, fits: Collection[int], me: PeerId) -> list[Seat]:
    """Return fitting vacant places, fullest groups first; for an origin, those before its own group."""
    found = []
    for origin, held in sorted(seats.groups.items(), key=lambda one: (sum(not p for p in one[1].values()), one[0])):
        if origin == me:
            break
        found += [Seat(stage, origin) for stage, peers in held.items() if not peers and stage in fits]
    return found


def home(seats: Seating, stage: int) -> PeerId | None:
    """Return the group for a host of `stage` without an origin: the one with fewest holders of it."""
    return min(seats.groups, key=lambda origin: (len(seats.groups[origin].get(stage, ())), origin), default=None)


def share(model: StagedModel, limit: float) -> tuple[bool, tuple[int, ...]]:
    """Return True if the whole model fits into `limit` bytes, and the stages that fit."""
    stages = range(model.manifest.pipeline.stages)
    return memory(model, None) <= limit, tuple(stage for stage in stages if memory(model, stage) <= limit)
