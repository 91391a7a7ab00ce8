"""Signed description of a peer: keys, addresses, stage claim, admission token and name.

Records are relayed, so each is judged on its own: `parse` accepts a record during the validity that it states.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import lru_cache, partial
from typing import Annotated

import msgspec
from msgspec import Meta
from thinwire.swarm.identity.address import split_address
from thinwire.swarm.identity.identity import SIGNATURE_BYTES, Identity, peer_id_of, verify
from thinwire.swarm.messages.registry import MAX_TOKEN, Id, PeerId

BODY_BYTES = 1280
MAX_ADDRESSES = 8
MAX_TTL = 3600
"""Longest validity of a record in seconds. Peers issue a new record before it ends."""

SKEW = 120
"""Largest difference in seconds between the clocks of honest peers."""

MAX_NAME = 64
"""Bytes of the longest name, in UTF-8."""

ITEM = 1
"""Kind of the gossip item that spreads a record: its first byte, see swarm/membership/gossip_items.py."""

_DOMAIN = "record"
_FORMAT = 1


class RecordError(ValueError):
    """Error for a record that no honest peer would send; the message states the reason."""


class _Body(msgspec.Struct, array_like=True, frozen=True, forbid_unknown_fields=True):
    format: Annotated[int, Meta(ge=_FORMAT, le=_FORMAT)]
    run_id: Id
    public_key: Id
    transport_key: Id
    addresses: Annotated[tuple[Annotated[str, Meta(max_length=64)], ...], Meta(max_length=MAX_ADDRESSES)]
    capabilities: Annotated[int, Meta(ge=0, le=2**32 - 1)]
    # Far below 2**64, so that "one more than any seen" never overflows.
    sequence: Annotated[int, Meta(ge=1, le=2**53 - 1)]
    issued: Annotated[int, Meta(ge=1, le=2**32 - 1)]
    ttl: Annotated[int, Meta(ge=1, le=MAX_TTL)]
    token: Annotated[bytes, Meta(max_length=MAX_TOKEN)]


class _Named(_Body, frozen=True):
    # A record without a name is shorter, because it has no place for one.
    name: Annotated[str, Meta(min_length=1, max_length=MAX_NAME)]


_encode = msgspec.msgpack.Encoder().encode
_decode, _decode_named = (msgspec.msgpack.Decoder(kind).decode for kind in (_Body, _Named))
_NAMED = _encode([None] * len(_Named.__struct_fields__))[:1]
"""First byte of a body with a name: the number of its fields."""


@dataclass(frozen=True, slots=True)
class PeerRecord:
    """Validated record, made by `create` or `parse` only.

    `issued` is unix time and `ttl` a duration, both in seconds. `sequence` orders the records of one peer. `addresses`
    may be empty (a peer that only dials out). `token`: see admission_token.py; members judge it, not `parse`. `name`: for
    display, any text; no proof of anything. `wire` is the signed encoding, and `item` the gossip item that spreads it.
    """

    peer_id: PeerId
    run_id: bytes
    public_key: bytes
    transport_key: bytes
    addresses: tuple[str, ...]
    capabilities: int
    sequence: int
    issued: int
    ttl: int
    wire: bytes
    item: bytes
    token: bytes = b""
    name: str = ""

    @classmethod
    def create(
        cls,
        identity: Identity,
        *,
        run_id: bytes,
        addresses: tuple[str, ...],
        capabilities: int = 0,
        sequence: int,
        issued: int,
        ttl: int = MAX_TTL,
        token: bytes = b"",
        name: str = "",
    ) -> PeerRecord:
        """Sign a record of this peer. Raises ValueError if a value is out of bounds."""
        content = (partial(_Named, name=name) if name else _Body)(
            format=_FORMAT,
            run_id=run_id,
            public_key=identity.public_key,
            transport_key=identity.transport_public,
            addresses=addresses,
            capabilities=capabilities,
            sequence=sequence,
            issued=issued,
            ttl=ttl,
            token=token,
        )
        try:
            body = _encode(content)
        except OverflowError as error:
            raise RecordError(str(error)) from None
        return _checked(body + identity.sign(_DOMAIN, body), run_id)

    @classmethod
    def parse(cls, wire: bytes, *, run_id: bytes, now: int | None) -> PeerRecord:
        """Check a record from the wire at unix time `now`; None: at any time. Raises RecordError."""
        if not SIGNATURE_BYTES < len(wire) <= BODY_BYTES + SIGNATURE_BYTES:
            raise RecordError(f"record of {len(wire)} bytes")
        record = _checked(bytes(wire), run_id)
        if now is not None:
            record.check_time(now)
        return record

    @property
    def first_attempt(self) -> int:
        """Number of the first announcement of its process, above those of the peer's earlier processes.

        Sequences begin with the milliseconds since 1970, so these are seconds; too low only if rounds took less than a second.
        """
        return self.sequence // 1000 % 2**31

    def check_time(self, now: int) -> None:
        """Raise RecordError if the record is not valid at unix time `now`.

        The time to live starts at `issued`. Both ends of the validity are extended by SKEW, because clocks differ.
        """
        if self.issued > now + SKEW:
            raise RecordError(f"record issued {self.issued - now} s in the future")
        if now > self.issued + self.ttl + SKEW:
            raise RecordError(f"record expired {now - self.issued - self.ttl} s ago")


def claimed_peer(wire: bytes) -> PeerId | None:
    """Return the id in a record whose signature was not checked; None if it is malformed."""
    data = wire[:-SIGNATURE_BYTES]
    try:
        body = _decode_named(data) if data[:1] == _NAMED else _decode(data)
    except (msgspec.MsgspecError, UnicodeDecodeError, RecursionError):
        return None
    return peer_id_of(body.public_key)


@lru_cache(maxsize=8192)
def _checked(wire: bytes, run_id: bytes) -> PeerRecord:
    """Check everything that does not depend on time; cached, so that equal bytes are verified once."""
    data, signature = wire[:-SIGNATURE_BYTES], wire[-SIGNATURE_BYTES:]
    if len(data) > BODY_BYTES:
        raise RecordError(f"record body of {len(data)} bytes")
    try:
        body = _decode_named(data) if data[:1] == _NAMED else _decode(data)
    except (msgspec.MsgspecError, UnicodeDecodeError, RecursionError) as error:
        raise RecordError(f"malformed record: {error}") from None
    if _encode(body) != data:
        raise RecordError("record is not in canonical form")
    name = body.name if isinstance(body, _Named) else ""
    if len(name.encode()) > MAX_NAME:
        raise RecordError("the name in a record is too long")
    if body.run_id != run_id:
        raise RecordError("record of another run")
    for address in body.addresses:
        try:
            split_address(address)
        except ValueError as error:
            raise RecordError(str(error)) from None
    if len(set(body.addresses)) != len(body.addresses):
        raise RecordError("record repeats an address")
    if not verify(body.public_key, _DOMAIN, signature, data):
        raise RecordError("bad signature of a record")
    return PeerRecord(
        peer_id=peer_id_of(body.public_key),
        run_id=body.run_id,
        public_key=body.public_key,
        transport_key=body.transport_key,
        addresses=body.addresses,
        capabilities=body.capabilities,
        sequence=body.sequence,
        issued=body.issued,
        ttl=body.ttl,
        wire=wire,
        item=bytes([ITEM]) + wire,
        token=body.token,
        name=name,
    )
