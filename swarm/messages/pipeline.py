"""Messages of a pipeline: a replica that several peers hold in stages.

See node/pipeline/step/origin.py. The origin, stage 0, drives the steps and chooses the route of each micro-batch.
Activations travel from stage to stage along this route.
"""

from __future__ import annotations

from typing import Annotated, ClassVar

import msgspec
from msgspec import Meta
from thinwire.swarm.messages.base import CHUNK_BYTES, U16, U32, U53, Id, Message, Reason

MAX_HOPS = 64
"""Maximum number of stages that a micro-batch passes through."""

MAX_MICROS = 1024
"""Maximum number of micro-batches in one step."""

Micro = Annotated[int, Meta(ge=0, le=MAX_MICROS - 1)]


class Hop(msgspec.Struct, array_like=True, frozen=True, forbid_unknown_fields=True):
    """One stage of a route, and the peer that computes it. `counts`: whether its gradient counts there."""

    stage: U16
    peer: Id
    counts: bool


class Route(Message, frozen=True):
    """Route of attempt `attempt` of a micro-batch, from the origin to every peer on it.

    The micro-batch has `batch` sequences of `length` tokens. A later attempt replaces an earlier one.
    """

    limit: ClassVar[int] = 4096

    step: U32
    micro: Micro
    attempt: U16
    batch: U16
    length: U32
    path: Annotated[tuple[Hop, ...], Meta(max_length=MAX_HOPS)]


class Activation(Message, frozen=True):
    """Piece `piece` of a micro-batch's encoded activations, or (`backward`) of their gradients.

    Sent to the next peer of the route.
    """

    limit: ClassVar[int] = 128
    payload: ClassVar[int] = CHUNK_BYTES
    signed: ClassVar[bool] = False

    step: U32
    micro: Micro
    attempt: U16
    backward: bool
    piece: U16


class Passed(Message, frozen=True):
    """Notice that the sender has passed a micro-batch on, `seconds` after it began to compute.

    With a `reason`: that it will not. From the origin: that the attempt is cancelled.
    """

    step: U32
    micro: Micro
    attempt: U16
    backward: bool
    seconds: float
    reason: Reason


class Close(Message, frozen=True):
    """Origin → stage: the step is over. The stage's gradient should cover exactly these micro-batches.

    `micros` is in ascending order.
    """

    limit: ClassVar[int] = 4096

    step: U32
    micros: Annotated[tuple[Micro, ...], Meta(max_length=MAX_MICROS)]


class GradientSummary(Message, frozen=True):
    """Answer to Close: squared norm of the gradient and its number of tokens.

    With a `reason`: the gradient is discarded.
    """

    step: U32
    squares: float
    tokens: U53
    reason: Reason


class Apply(Message, frozen=True):
    """Origin → stage: apply the inner step.

    The gradient is divided by `divisor` and multiplied by `factor` (clipping). `divisor` 0 means that the gradient is
    discarded. `loss`: mean of the step's micro-batches in nats per token, for display.
    """

    step: U32
    divisor: float
    factor: float
    loss: float = 0.0


class StageAssignment(Message, frozen=True):
    """Stage → origin: the sender holds stage `stage` and is ready for the inner steps [step, until).

    It follows all rounds that it waits for. Origin → stage: hold stage `stage` once these steps are over. `frozen`: tag
    of the frozen rows that the sender has; 0 means none. `round`: last round in its outer state. `source`: origin of
    that state if all holders of the stage were lost.
    """

    step: U32
    until: U32
    stage: U16
    frozen: U53 = 0
    round: U32 = 0
    source: Reason = ""


class FrozenRows(Message, frozen=True):
    """Piece `piece` of the frozen part of a confined embedding, origin → stage. `tag` covers all pieces."""

    limit: ClassVar[int] = 128
    payload: ClassVar[int] = CHUNK_BYTES
    signed: ClassVar[bool] = False

    tag: U53
    piece: U16


class RecoveryRequest(Message, frozen=True):
    """Request for permission to recover the state of stage `stage`, which no live peer has.

    Sent by the peer that is to hold the stage to the peer that decides.
    """

    stage: U16


class RecoveryPermit(Message, frozen=True):
    """Answer to RecoveryRequest, to one peer at a time: recover the stage as the state after `round`.

    `norms`: norm of every stage's last gradient before clipping; 0 means unknown. `others`: peers that may hold a copy,
    as far as the sender knows.
    """

    limit: ClassVar[int] = 4096

    stage: U16
    round: U32
    norms: Annotated[tuple[float, ...], Meta(max_length=MAX_HOPS)] = ()
    others: Annotated[tuple[Id, ...], Meta(max_length=MAX_HOPS)] = ()


class Outdated(Message, frozen=True):
    """Origin → stage: the stage was recovered in the receiver's absence.

    Another peer holds its state after round `round`.
    """

    stage: U16
    round: U32
