"""Messages by which peers find together for an average that is no training round (see collectives/operation.py).

What follows, once a group is formed, are the messages of a round, with a fragment number from OPERATIONS on.
"""

from __future__ import annotations

from typing import Annotated, ClassVar

import msgspec
from msgspec import Meta

from .message import MAX_GROUP, U16, U32, U53, Digest, Id, Message

OPERATIONS = 0x8000
"""Fragment numbers from here on are of averages of their own; those below are of the model that is trained."""

MAX_TENSORS = 32
"""Tensors that a call names; of more only the number and a digest are told."""

Word = Annotated[str, Meta(max_length=128)]


class Tensor(msgspec.Struct, array_like=True, frozen=True, forbid_unknown_fields=True):
    """One tensor of a call: its key (empty where tensors have none) and its shape."""

    key: Word
    shape: Annotated[tuple[U53, ...], Meta(max_length=32)]


class Plan(msgspec.Struct, array_like=True, frozen=True, forbid_unknown_fields=True):
    """What is averaged, and how: equal for all who do it together.

    `op`, `element` (the type of all elements), `codec` and `least` (fewest contributors); `total` elements in `count`
    tensors, of which the first are named; `digest` is of the keys and shapes of all.
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
    """The sender wants average `number` of those called `name`. `group` (sorted): who has a say in it, once that is settled.

    `fresh`: the sender has never finished one of that name, and does not know which number is next.
    """

    limit: ClassVar[int] = 48_000

    name: Word
    number: U32
    fresh: bool
    plan: Plan
    group: Annotated[tuple[Id, ...], Meta(max_length=MAX_GROUP)]


class Over(Message, frozen=True):
    """For the sender all averages of that name before `number` are over: the answer to a Call.

    `withdrawn`: it had called one of them and does not wait any more.
    """

    name: Word
    number: U32
    withdrawn: bool


class Hour(Message, frozen=True):
    """What the sender's wall clock says, in seconds since 1970: so clocks that are wrong are found."""

    wall: U53
