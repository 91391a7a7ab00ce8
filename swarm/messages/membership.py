"""Messages of the gate and of membership."""

from __future__ import annotations

from typing import Annotated, ClassVar

from msgspec import Meta
from thinwire.swarm.messages.base import U16, U32, U53, Address, Blob, Digest, Id, Message, Reason, Signature, Text

# --- gate: the only messages that a stranger may send or receive


class Hello(Message, frozen=True):
    """Request of a stranger for admission. `record` is its signed PeerRecord, with its admission token."""

    limit: ClassVar[int] = 4096
    signed: ClassVar[bool] = False

    version: U16
    run_id: Digest
    record: Blob


class Welcome(Message, frozen=True):
    """Admission: the manifest (TOML bytes, author's public key, signature), some records, and an endpoint.

    `absent` has gate addresses and transport keys of some peers that the sender cannot reach now. The newcomer dials them,
    because the sender may be in the smaller part of a swarm, and may leave before the parts meet again.

    `endpoint` is a member socket opened for this peer only; `bulk` is the address for bulk streams, and `secret` keys
    the streams between the two peers.
    """

    limit: ClassVar[int] = 60_000
    signed: ClassVar[bool] = False

    record: Blob
    manifest: Annotated[bytes, Meta(max_length=32_768)]
    author: Digest
    manifest_signature: Signature
    records: Annotated[tuple[Blob, ...], Meta(max_length=10)]
    endpoint: Reason
    bulk: Reason
    secret: Digest
    absent: Annotated[tuple[tuple[Address, Digest], ...], Meta(max_length=10)] = ()


class Refuse(Message, frozen=True):
    """Refusal at the gate. `code` is one of: version, run, signature, token, banned, full, busy.

    A transport also returns it locally, with the codes unreachable and refused, if it cannot connect.
    """

    signed: ClassVar[bool] = False

    code: Reason
    detail: Text


BALLAST = 1 << 19
"""Most bytes of `Observed.ballast`, which come in pieces of PIECE."""

PIECE = 1 << 16


class Observe(Message, frozen=True):
    """Question of a stranger or member: from which address does this gate see it?

    `port`: port of the sender to which the gate is to connect in return, at the address that it sees; 0: none. `size`: bytes
    of ballast wanted, in whole pieces, to measure a rate.
    """

    limit: ClassVar[int] = 128
    signed: ClassVar[bool] = False

    version: U16
    run_id: Digest
    port: U16
    size: U32


class Observed(Message, frozen=True):
    """Answer to Observe: the `address` ("host:port") from which the gate sees the sender of the question.

    `wall`: clock of the gate in unix seconds. `reached`: whether a gate with the transport key of that peer answered at the
    port in question; None: not tried. All of this is a claim of one peer.
    """

    limit: ClassVar[int] = BALLAST + 256
    signed: ClassVar[bool] = False

    address: Reason
    wall: U53
    reached: bool | None
    ballast: Annotated[tuple[Annotated[bytes, Meta(max_length=PIECE)], ...], Meta(max_length=BALLAST // PIECE)]


# --- circuits: TCP connections of two peers that a third one splices


class CircuitAsk(Message, frozen=True):
    """Request for a circuit: splice a connection of ours with one of `peer`.

    `port`: the port of `peer` that ours is for; 0: its gate.
    """

    limit: ClassVar[int] = 128

    number: U32
    peer: Id
    port: U16


class Circuit(Message, frozen=True):
    """Answer to the CircuitAsk `number`; with the number 0, an invitation.

    `peer`: the other end, which has asked for the circuit if this is an invitation. A connection to the sender's gate that
    shows `token` within a few seconds is one end. None: refused, for the `reason`.
    """

    limit: ClassVar[int] = 256

    number: U32
    peer: Id
    port: U16
    token: Digest | None
    reason: Reason


# --- membership (SWIM + Lifeguard): `items` are signed gossip items, each checked by its own signature

Items = Annotated[tuple[Blob, ...], Meta(max_length=8)]
ManyItems = Annotated[tuple[Blob, ...], Meta(max_length=32)]


class Ping(Message, frozen=True):
    """Probe. The Ack repeats `sequence`. `progress` is the sender's round, as a sign of work done."""

    limit: ClassVar[int] = 1500

    sequence: U32
    progress: U32
    items: Items


class PingRequest(Message, frozen=True):
    """Request to probe `target` for the sender.

    The receiver answers with Ack or, at 0.8 of the time-out, with Nack.
    """

    limit: ClassVar[int] = 1500

    sequence: U32
    target: Id
    items: Items


class Ack(Message, frozen=True):
    """Answer to the Ping or PingRequest `sequence`."""

    limit: ClassVar[int] = 1500

    sequence: U32
    progress: U32
    items: Items


class Nack(Message, frozen=True):
    """Statement that the indirect probe `sequence` has no answer so far; the prober itself is alive."""

    sequence: U32


class Gossip(Message, frozen=True):
    """Items that are spread without a probe."""

    limit: ClassVar[int] = 9000

    items: ManyItems


class PushPull(Message, frozen=True):
    """Anti-entropy: signed items of the whole table, in pages. The receiver answers once with `reply` set."""

    limit: ClassVar[int] = 60_000

    reply: bool
    items: ManyItems
