"""Messages of a replica that several peers hold together, as stages of a pipeline (see node/pipeline/origin.py).

The origin, stage 0, drives: it says which way each micro-batch takes. Activations go from stage to stage along that way.
"""

from __future__ import annotations

from typing import Annotated, ClassVar

import msgspec
from msgspec import Meta

from .message import CHUNK_BYTES, U16, U32, U53, Id, Message, Reason

MAX_HOPS = 64
"""Most stages that a micro-batch goes through."""

MAX_MICROS = 1024
"""Most micro-batches of one step."""

Micro = Annotated[int, Meta(ge=0, le=MAX_MICROS - 1)]


class Hop(msgspec.Struct, array_like=True, frozen=True, forbid_unknown_fields=True):
    """One stage on the way of a micro-batch, and the peer that does its work. `counts`: whether its gradient counts there."""

    stage: U16
    peer: Id
    counts: bool


class Route(Message, frozen=True):
    """The way of a micro-batch of `batch` sequences of `length` tokens in its attempt `attempt`, origin → every peer on it.

    A later attempt replaces an earlier one.
    """

    limit: ClassVar[int] = 4096

    step: U32
    micro: Micro
    attempt: U16
    batch: U16
    length: U32
    path: Annotated[tuple[Hop, ...], Meta(max_length=MAX_HOPS)]


class Activation(Message, frozen=True):
    """Piece `piece` of a micro-batch's encoded activations, or `backward` of their gradients, to the next peer of its way."""

    limit: ClassVar[int] = 128
    payload: ClassVar[int] = CHUNK_BYTES
    signed: ClassVar[bool] = False

    step: U32
    micro: Micro
    attempt: U16
    backward: bool
    piece: U16


class Passed(Message, frozen=True):
    """The sender has passed a micro-batch on, `seconds` after it began to compute; or, with a `reason`, it will not.

    From the origin: nobody waits for that attempt any more.
    """

    step: U32
    micro: Micro
    attempt: U16
    backward: bool
    seconds: float
    reason: Reason


class Close(Message, frozen=True):
    """Origin → stage: the step is over, and your gradient should be that of just these micro-batches (ascending)."""

    limit: ClassVar[int] = 4096

    step: U32
    micros: Annotated[tuple[Micro, ...], Meta(max_length=MAX_MICROS)]


class Tally(Message, frozen=True):
    """The answer: the gradient's squared norm, and of how many tokens it is; with a `reason`: it is given up."""

    step: U32
    squares: float
    tokens: U53
    reason: Reason


class Apply(Message, frozen=True):
    """Origin → stage: make the inner step with the gradient divided by `divisor` and multiplied by `factor` (clipping).

    `divisor` 0: the gradient is given up. `loss`: mean of the step's micro-batches in nats per token, for display.
    """

    step: U32
    divisor: float
    factor: float
    loss: float = 0.0


class Post(Message, frozen=True):
    """Stage → origin: I hold stage `stage`, follow all rounds that I wait for, and am ready for inner steps [step, until).

    From the origin: when these steps are over, go and hold stage `stage`. `frozen`: the tag of the frozen rows that the
    sender has, 0: none. `round`: the last one in its outer state; `source`: where it had that from, if all its holders were
    lost.
    """

    step: U32
    until: U32
    stage: U16
    frozen: U53 = 0
    round: U32 = 0
    source: Reason = ""


class FrozenRows(Message, frozen=True):
    """Piece `piece` of the frozen part of a confined embedding, origin → stage; `tag` is of the whole payload."""

    limit: ClassVar[int] = 128
    payload: ClassVar[int] = CHUNK_BYTES
    signed: ClassVar[bool] = False

    tag: U53
    piece: U16


class Bereft(Message, frozen=True):
    """Who is to hold stage `stage` → who decides: nobody here has its state. May I bring it back?"""

    stage: U16


class Bequest(Message, frozen=True):
    """The answer, to one peer at a time: you bring it back, as the state after round `round`.

    `norms`: of every stage's last gradient, before it was clipped; 0 where it is not known. `others`: who may hold it, as far
    as the sender knows.
    """

    limit: ClassVar[int] = 4096

    stage: U16
    round: U32
    norms: Annotated[tuple[float, ...], Meta(max_length=MAX_HOPS)] = ()
    others: Annotated[tuple[Id, ...], Meta(max_length=MAX_HOPS)] = ()


class Outdated(Message, frozen=True):
    """Origin → stage: while you were away your stage was brought back; another holds its state after round `round`."""

    stage: U16
    round: U32
