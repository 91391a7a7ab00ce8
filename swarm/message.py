"""What all messages have in common: the base, its limits, and the types of fields.

A message is a frozen struct, encoded as a fixed-order msgpack array, so that one message has one encoding and a signature
can be checked by encoding again. Numbers, lengths and counts are bounded in the schema; `frame.decode` checks the limits of
the type before it allocates anything. The messages are in `greetings`, `ballots` and `transfers`, their numbers in `protocol`.
"""

from __future__ import annotations

from typing import Annotated, ClassVar, TypeAlias

import msgspec
from msgspec import Meta

PeerId: TypeAlias = bytes
"""blake2b-256 of a peer's Ed25519 public key, 32 bytes."""

MAX_GROUP = 256
"""Most peers in one round's group."""

MAX_CHUNKS = 1024
"""Most chunks in one fragment's grid (with 1 MiB chunks: 1 GiB of encoded payload a fragment)."""

CHUNK_BYTES = 1 << 20
"""Largest raw payload of a frame: 1 MiB and a little for a codec's scales (see `Limits.payload`)."""

Id = Annotated[bytes, Meta(min_length=32, max_length=32)]
Digest = Annotated[bytes, Meta(min_length=32, max_length=32)]
Signature = Annotated[bytes, Meta(min_length=64, max_length=64)]
U16 = Annotated[int, Meta(ge=0, le=2**16 - 1)]
U32 = Annotated[int, Meta(ge=0, le=2**32 - 1)]
U53 = Annotated[int, Meta(ge=0, le=2**53 - 1)]
Reason = Annotated[str, Meta(max_length=64)]
Site = Annotated[str, Meta(max_length=64)]
"""Name of a network that some peers share."""

Text = Annotated[str, Meta(max_length=512)]
Blob = Annotated[bytes, Meta(max_length=2048)]
"""A signed record or a signed gossip item, opaque until its own signature is checked."""


class Message(msgspec.Struct, array_like=True, frozen=True, forbid_unknown_fields=True):
    """Base of all messages.

    Class variables: `limit`, the largest encoded body in bytes; `payload`, the largest raw payload that may follow it;
    `signed`, whether the frame carries an Ed25519 signature (all control messages do; bulk is sealed by its stream).
    """

    limit: ClassVar[int] = 1024
    payload: ClassVar[int] = 0
    signed: ClassVar[bool] = True
