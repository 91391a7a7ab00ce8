"""Which stage a weak peer takes: what the swarm lacks most, and what fits it.

All who wait for a place draw the same conclusion from the same records, so that they come to different places.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping

from thinwire.swarm.manifest import Manifest
from thinwire.swarm.protocol import PeerId
from thinwire.swarm.seat import Seat, Seating

from ..model import ModelConfig
from ..parts import shares

PER_PARAMETER = 4 * 8
"""Bytes: a parameter, its gradient, AdamW's two moments, outer parameters and momentum, what is sent and what comes back."""

PER_COPY = 4 * 4
"""Bytes of the stage that a copy is kept of: outer parameters and momentum, and those that are to replace them."""


def parameters(config: ModelConfig, layers: int, *, ends: bool) -> int:
    """Parameters of so many layers of a Transformer, and of what belongs to no layer where there are `ends`."""
    width, hidden = config.width, config.hidden
    block = 2 * width + 4 * width * width + 3 * width * hidden
    vocabulary = config.vocab * width * (1 if config.tied else 2)
    return layers * block + ends * (vocabulary + width)


def memory(manifest: Manifest, vocab: int, stage: int | None) -> int:
    """Bytes that a peer needs for training a stage, about, with a copy of the next one; None: all of the model.

    Activations of a layer are s·b·h·(34 + 5·a·s / h) values of two bytes (Korthikanti et al., arXiv 2205.05198, eq. 1), here of
    four; a stage holds those of as many micro-batches as are under way.
    """
    shape, pipeline = manifest.model, manifest.pipeline
    config = ModelConfig(vocab, shape.layers, shape.width, shape.heads, shape.context, shape.mlp, shape.tied)
    layers, under_way = shape.layers, 1
    if stage is not None:
        layers = shares(shape.layers, pipeline.stages)[stage]
        under_way = manifest.room
    tokens = manifest.inner.batch * shape.context
    values = tokens * (34 * shape.width + 5 * shape.heads * shape.context) * layers * under_way
    logits = 3 * 4 * tokens * vocab if not stage else 0
    # What every stage of a confined model adds to what comes to it.
    frozen = 4 * vocab * shape.width if stage and pipeline.codec.startswith("subspace") else 0
    copied = 0
    if stage is not None and pipeline.buddy:
        kept = (stage + 1) % pipeline.stages
        copied = PER_COPY * parameters(config, shares(shape.layers, pipeline.stages)[kept], ends=not kept)
    return PER_PARAMETER * parameters(config, layers, ends=not stage) + copied + 2 * values + logits + frozen


def assign(seats: Seating, stages: int, holders: int = 1) -> Mapping[PeerId, Seat]:
    """A seat for everybody who waits, one after the other in the order of their ids.

    First what is missing, in the group that lacks least; then a stage that has fewer than `holders`; then, where enough wait to
    fill a group, or where hosts have lost their origin, a group of one's own; else the stage that has fewest holders.
    """
    groups = {origin: {stage: list(peers) for stage, peers in held.items()} for origin, held in seats.groups.items()}
    orphans, found = bool(seats.orphans), dict[PeerId, Seat]()
    for done, peer in enumerate(seats.waiting):
        lacking = {origin: [stage for stage, peers in held.items() if not peers] for origin, held in groups.items()}
        least = min((origin for origin in groups if lacking[origin]), key=lambda o: (len(lacking[o]), o), default=None)
        if least is not None:
            seat = Seat(lacking[least][0], least)
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
    """Whether every stage has as many as it is to have before there is another group."""
    return all(len(peers) >= holders for held in groups.values() for peers in held.values())


def _weakest(groups: Mapping[PeerId, Mapping[int, Collection[PeerId]]]) -> Seat:
    """The stage that has fewest holders."""
    return min(
        (Seat(stage, origin) for origin, held in groups.items() for stage in held),
        key=lambda seat: (len(groups[seat.origin][seat.stage]), -seat.stage, seat.origin),
    )


def fitting(seats: Seating, stages: int, fits: Collection[int], me: PeerId, holders: int = 1) -> Seat | None:
    """The seat of `me`, who waits and can hold the stages `fits` only; None when none can be had.

    Where what it is assigned does not fit: what is missing and fits, else the fitting stage with fewest holders, else a group
    of its own.
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
    """Places that fit and nobody has, first in the groups that lack least; for one that drives a group, of those before it."""
    found = []
    for origin, held in sorted(seats.groups.items(), key=lambda one: (sum(not p for p in one[1].values()), one[0])):
        if origin == me:
            break
        found += [Seat(stage, origin) for stage, peers in held.items() if not peers and stage in fits]
    return found


def home(seats: Seating, stage: int) -> PeerId | None:
    """Whose group a host of `stage` joins that has lost its origin: one that lacks it, else the one with fewest of it."""
    return min(seats.groups, key=lambda origin: (len(seats.groups[origin].get(stage, ())), origin), default=None)


def share(manifest: Manifest, vocab: int, limit: float) -> tuple[bool, tuple[int, ...]]:
    """Whether the whole model fits `limit` bytes, and which stages do."""
    whole = memory(manifest, vocab, None) <= limit
    stages = range(manifest.pipeline.stages)
    return whole, tuple(stage for stage in stages if memory(manifest, vocab, stage) <= limit)
