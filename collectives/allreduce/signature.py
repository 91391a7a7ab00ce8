"""The plan that peers must agree on for an operation, and the description of differences."""

from __future__ import annotations

from collections.abc import Sequence
from math import prod

import blake3
import msgspec
from thinwire.swarm.identity.identity import short
from thinwire.swarm.messages.registry import MAX_TENSORS, AveragePlan, PeerId, Tensor

LONGEST_KEY = 128
"""Most characters of a tensor's key."""

MOST_DIMENSIONS = 32


def plan_of(
    op: str, element: str, codec: str, least: int, tensors: Sequence[tuple[str, tuple[int, ...]]]
) -> AveragePlan:
    """Return the plan for tensors with these keys and shapes.

    Raises ValueError if a key or shape is too long.
    """
    for key, shape in tensors:
        if len(key) > LONGEST_KEY or len(shape) > MOST_DIMENSIONS:
            raise ValueError(
                f"a tensor's key has at most {LONGEST_KEY} characters, its shape {MOST_DIMENSIONS} dimensions"
            )
    whole = blake3.blake3(msgspec.msgpack.encode(list(tensors))).digest()
    named = tuple(Tensor(key, shape) for key, shape in tensors[:MAX_TENSORS])
    return AveragePlan(op, element, codec, least, sum(prod(shape) for _, shape in tensors), len(tensors), named, whole)


def difference(ours: AveragePlan, theirs: AveragePlan, peer: PeerId) -> str:
    """Return a readable description of the difference between two plans."""
    who = f"peer {short(peer)}"
    for what, mine, other in (
        ("op", ours.op, theirs.op),
        ("element type", ours.element, theirs.element),
        ("codec", ours.codec, theirs.codec),
        ("least number of peers", ours.least, theirs.least),
        ("number of tensors", ours.count, theirs.count),
    ):
        if mine != other:
            return f"{what}: {who} has {other!r}, here it is {mine!r}"
    for at, (one, two) in enumerate(zip(ours.tensors, theirs.tensors, strict=False)):
        name = repr(one.key) if one.key else f"number {at}"
        if one.key != two.key:
            return f"tensor {name}: {who} has {two.key!r} in its place"
        if one.shape != two.shape:
            return f"shape of tensor {name}: {who} has {_shape(two.shape)}, here it is {_shape(one.shape)}"
    return f"{who} has other keys or shapes after the first {len(ours.tensors)} tensors"


def _shape(shape: Sequence[int]) -> str:
    return "×".join(map(str, shape)) if shape else "a single number"
