"""Messages that form a group for an average outside of training rounds.

See collectives/allreduce/operation.py. Once a group is formed, the messages of a round follow, with fragment numbers
from OPERATIONS on.
"""

from __future__ import annotations

from typing import Annotated, ClassVar

import msgspec
from msgspec import Meta
from thinwire.swarm.messages.base import MAX_GROUP, U16, U32, U53, Digest, Id, Message

OPERATIONS = 0x8000
"""First fragment number of separate averages; lower numbers are fragments of the trained model."""

MAX_TENSORS = 32
"""Maximum number of tensors that a call lists; for more, only their number and a digest are sent."""

Word = Annotated[str, Meta(max_length=128)]


class Tensor(msgspec.Struct, array_like=True, frozen=True, forbid_unknown_fields=True):
    """One tensor of a call: its key (empty if tensors have none) and its shape."""

    key: Word
    shape: Annotated[tuple[U53, ...], Meta(max_length=32)]


class AveragePlan(msgspec.Struct, array_like=True, frozen=True, forbid_unknown_fields=True):
    """Definition of an average, equal for all peers that take part in it.

    `op`, `element` (the type of all elements), `codec` and `least` (minimum number of contributors); `total` elements
    in `count` tensors, of which the first are listed in `tensors`; `digest` covers the keys and shapes of all.
    """

    op: Word
    element: Word
    codec: Word
    least: U16
    total: U53
    count: U32
    tensors: Annotated[tuple[Tensor, ...], Meta(max_length=MAX_TENSORS)]
    digest: Digest


class Call(Message, frozen=True):
    """Request for average `number` of those called `name`.

    `group` (sorted): the members that vote in it, once that is settled. `fresh`: the sender has never finished an
    average of that name and does not know the next number.
    """

    limit: ClassVar[int] = 48_000

    name: Word
    number: U32
    fresh: bool
    plan: AveragePlan
    group: Annotated[tuple[Id, ...], Meta(max_length=MAX_GROUP)]


class NextNumber(Message, frozen=True):
    """Answer to a Call: for the sender, all averages of that name before `number` are over.

    `withdrawn`: the sender had called one of them and no longer waits for it.
    """

    name: Word
    number: U32
    withdrawn: bool


class WallClock(Message, frozen=True):
    """Wall clock of the sender, in seconds since 1970, to detect wrong clocks."""

    wall: U53
