"""Base class of all messages, common limits, and types of fields.

A message is a frozen struct, encoded as a fixed-order msgpack array, so that one message has one encoding and a
signature can be checked by encoding again. The schema bounds numbers, lengths and counts; `frame.decode` checks the
limits of the type before it allocates anything. The other modules of this folder define the messages, and `registry` has
their numbers.
"""

from __future__ import annotations

from typing import Annotated, ClassVar, TypeAlias

import msgspec
from msgspec import Meta

PeerId: TypeAlias = bytes
"""blake2b-256 of a peer's Ed25519 public key, 32 bytes."""

MAX_GROUP = 256
"""Maximum number of peers in the group of one round."""

MAX_CHUNKS = 1024
"""Maximum number of chunks in the grid of a fragment.

With chunks of 1 MiB this is 1 GiB of encoded payload per fragment.
"""

CHUNK_BYTES = 1 << 20
"""Raw payload of a frame: 1 MiB. Chunks and results may add 1/16 for a codec's scales."""

Id = Annotated[bytes, Meta(min_length=32, max_length=32)]
Digest = Annotated[bytes, Meta(min_length=32, max_length=32)]
Signature = Annotated[bytes, Meta(min_length=64, max_length=64)]
U16 = Annotated[int, Meta(ge=0, le=2**16 - 1)]
U32 = Annotated[int, Meta(ge=0, le=2**32 - 1)]
U53 = Annotated[int, Meta(ge=0, le=2**53 - 1)]
Reason = Annotated[str, Meta(max_length=64)]
Site = Annotated[str, Meta(max_length=64)]
"""Name of a network that some peers share."""

LIFE = 16
"""Bytes of a life: a random value that is made with a peer's votes and stored with them."""

MAX_TOKEN = 600
"""Bytes of the longest admission token, see swarm/identity/admission_token.py."""

Address = Annotated[str, Meta(max_length=64)]
"""Gate address "host:port", see swarm/identity/address.py."""

Text = Annotated[str, Meta(max_length=512)]
Blob = Annotated[bytes, Meta(max_length=3072)]
"""A signed record or a signed gossip item, opaque until its own signature is checked."""


class Message(msgspec.Struct, array_like=True, frozen=True, forbid_unknown_fields=True):
    """Base class of all messages.

    Class variables: `limit`, the largest encoded body in bytes; `payload`, the largest raw payload that may follow it;
    `signed`, whether the frame carries an Ed25519 signature (all control messages do; bulk data is encrypted and
    authenticated by its stream).
    """

    limit: ClassVar[int] = 1024
    payload: ClassVar[int] = 0
    signed: ClassVar[bool] = True

    def statement(self) -> Message:
        """Return the message that a sender of this one signs: itself, or a short one for evidence."""
        return self
