"""Signed description of a run for public directories: name, model, method, progress, and a peer.

A directory is written by strangers, so each card is judged on its own: `parse` accepts canonical bytes with a valid
signature during the validity that they state. A valid card proves only that its publisher states this: the description may
be false. The run id is what a joiner checks the manifest against (see Manifest.run_id).
"""

from __future__ import annotations

import math
from dataclasses import asdict, dataclass
from typing import Annotated

import msgspec
from msgspec import Meta
from thinwire.swarm.identity.identity import SIGNATURE_BYTES, Identity, verify
from thinwire.swarm.identity.peer_record import BODY_BYTES, MAX_TTL, SKEW, PeerRecord, RecordError
from thinwire.swarm.messages.registry import Id

CARD_BYTES = 2048
"""Longest card, signature included."""

_DOMAIN = "card"
_FORMAT = 1
_Word = Annotated[str, Meta(pattern=r"^[a-z0-9][a-z0-9._-]{0,31}\Z")]


class _Body(msgspec.Struct, array_like=True, frozen=True, forbid_unknown_fields=True):
    format: Annotated[int, Meta(ge=_FORMAT, le=_FORMAT)]
    run_id: Id
    name: Annotated[str, Meta(pattern=r"^[A-Za-z0-9][A-Za-z0-9._-]{0,63}\Z")]
    model: _Word
    method: _Word
    admission: _Word
    round: Annotated[int, Meta(ge=0, le=2**53 - 1)]
    peers: Annotated[int, Meta(ge=1, le=2**20)]
    loss: float | None
    issued: Annotated[int, Meta(ge=1, le=2**32 - 1)]
    ttl: Annotated[int, Meta(ge=1, le=MAX_TTL)]
    record: Annotated[bytes, Meta(min_length=SIGNATURE_BYTES + 1, max_length=BODY_BYTES + SIGNATURE_BYTES)]


_encode = msgspec.msgpack.Encoder().encode
_decode = msgspec.msgpack.Decoder(_Body).decode


@dataclass(frozen=True, slots=True)
class RunDescription:
    """Description of a run by a publisher.

    round: the newest one. peers: number of live peers. loss: None if unknown.
    """

    name: str
    model: str
    method: str
    admission: str
    round: int
    peers: int
    loss: float | None


@dataclass(frozen=True, slots=True)
class RunCard:
    """Validated card, made by `create` or `parse` only.

    `record`: the publisher, with its addresses and transport key; its key signs the card. `issued` is unix time and `ttl`
    a duration, both in seconds. `wire` is the signed encoding, of at most CARD_BYTES.
    """

    run_id: bytes
    description: RunDescription
    issued: int
    ttl: int
    record: PeerRecord
    wire: bytes

    @classmethod
    def create(
        cls, identity: Identity, record: PeerRecord, description: RunDescription, *, issued: int, ttl: int
    ) -> RunCard:
        """Sign a card of this peer, whose record is `record`. Raises ValueError if a value is out of bounds."""
        stated = asdict(description)
        body = _encode(
            _Body(format=_FORMAT, run_id=record.run_id, **stated, issued=issued, ttl=ttl, record=record.wire)
        )
        return cls.parse(body + identity.sign(_DOMAIN, body), now=issued)

    @classmethod
    def parse(cls, wire: bytes, *, now: int) -> RunCard:
        """Check a card from a directory at unix time `now`. Raises RecordError.

        Both ends of its validity, and of that of its record, are extended by SKEW, because clocks differ.
        """
        if not SIGNATURE_BYTES < len(wire) <= CARD_BYTES:
            raise RecordError(f"card of {len(wire)} bytes")
        wire = bytes(wire)
        data, signature = wire[:-SIGNATURE_BYTES], wire[-SIGNATURE_BYTES:]
        try:
            body = _decode(data)
        except (msgspec.MsgspecError, UnicodeDecodeError, RecursionError) as error:
            raise RecordError(f"malformed card: {error}") from None
        if _encode(body) != data:
            raise RecordError("card is not in canonical form")
        if body.loss is not None and not math.isfinite(body.loss):
            raise RecordError("card with a loss that is not finite")
        if body.issued > now + SKEW:
            raise RecordError(f"card issued {body.issued - now} s in the future")
        if now > body.issued + body.ttl + SKEW:
            raise RecordError(f"card expired {now - body.issued - body.ttl} s ago")
        record = PeerRecord.parse(body.record, run_id=body.run_id, now=now)
        if not verify(record.public_key, _DOMAIN, signature, data):
            raise RecordError("bad signature of a card")
        description = RunDescription(
            body.name, body.model, body.method, body.admission, body.round, body.peers, body.loss
        )
        return cls(body.run_id, description, body.issued, body.ttl, record, wire)
