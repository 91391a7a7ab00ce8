"""Fuzzing targets for what strangers and members send: frames, records, tokens, gossip items, chains, invites.

Each target refuses an input with CodecError, or accepts it; an accepted input must be the only encoding of its content.
"""

from __future__ import annotations

import re
import zlib
from base64 import b32decode, b32encode
from collections.abc import Callable
from typing import Any

from kit.planted.cards import NOW, RUN, identity, record
from msgspec import inspect
from thinwire.collectives.consensus import chain
from thinwire.compression.core.codec import CodecError
from thinwire.swarm import evidence, frame
from thinwire.swarm.frame import HEADER, MAGIC, FrameError
from thinwire.swarm.identity import admission_token, invite, peer_record
from thinwire.swarm.identity.admission_token import TokenError
from thinwire.swarm.identity.identity import SIGNATURE_BYTES
from thinwire.swarm.identity.invite import Invite, InviteError, Seed
from thinwire.swarm.identity.peer_record import PeerRecord, RecordError
from thinwire.swarm.membership import gossip_items
from thinwire.swarm.messages import wire_form
from thinwire.swarm.messages.registry import NUMBERS, TYPES, VERSION, ChainEntry, Evidence

MODULES = (frame, wire_form, peer_record, admission_token, gossip_items, evidence, chain, invite)
"""Modules whose functions are instrumented."""

Target = tuple[str, Callable[[bytes], None], list[bytes]]

KINDS = sorted(TYPES.values(), key=NUMBERS.__getitem__)


def example(info: inspect.Type) -> Any:
    """Return a small valid value of a type: the least numbers, one item in each sequence."""
    match info:
        case inspect.IntType():
            return info.ge or 0
        case inspect.FloatType():
            return 0.5
        case inspect.BoolType():
            return True
        case inspect.NoneType():
            return None
        case inspect.StrType():
            return "a" * max(1, info.min_length or 0)
        case inspect.BytesType():
            return b"\1" * (info.min_length or 0)
        case inspect.VarTupleType():
            return (example(info.item_type),)
        case inspect.TupleType():
            return tuple(map(example, info.item_types))
        case inspect.UnionType():
            return example(next(one for one in info.types if not isinstance(one, inspect.NoneType)))
        case inspect.StructType():
            return info.cls(*(example(field.type) for field in info.fields))
    raise AssertionError(f"no example for {info}")


def targets() -> list[Target]:
    """Every decoder of the wire."""
    return [_frames(), _records(), _tokens(), _items(), _evidence(), _chains(), _invites()]


def _frames() -> Target:
    """The first byte picks the message type; header and body follow from the rest."""

    def take(data: bytes) -> None:
        if not data:
            raise CodecError("empty")
        kind, body = KINDS[data[0] % len(KINDS)], data[1:]
        rest = body + bytes(SIGNATURE_BYTES if kind.signed else 0)
        head = HEADER.pack(MAGIC, VERSION, NUMBERS[kind], 0, len(body), 0)
        try:
            header = frame.parse_header(head)
            found = frame.decode(header, rest, b"", public_key=bytes(32), run_id=RUN, verify_later=True)
        except FrameError as error:
            raise CodecError(str(error)) from None
        assert type(found.message) is kind and wire_form.encode(found.message) == body

    def seed(number: int) -> bytes:
        return bytes([number]) + wire_form.encode(example(inspect.type_info(KINDS[number])))

    return "frame", take, [*map(seed, range(len(KINDS)))]


def _records() -> Target:
    """The input is a body, which its owner signs, so that inputs come past the signature."""
    signer = identity(1)

    def take(body: bytes) -> None:
        try:
            found = PeerRecord.parse(body + signer.sign("record", body), run_id=RUN, now=NOW)
        except RecordError as error:
            raise CodecError(str(error)) from None
        assert found.public_key == signer.public_key and len(found.addresses) <= 8

    made = [record(1), record(1, addresses=()), record(1, addresses=("[2001:db8::1]:7400", "peer.example:7400"))]
    return "record", take, [one.wire[:-SIGNATURE_BYTES] for one in made]


def _tokens() -> Target:
    def take(token: bytes) -> None:
        try:
            grants = admission_token.decode(token)
        except TokenError as error:
            raise CodecError(str(error)) from None
        assert admission_token.encode(grants) == token
        admission_token.expiry(token)

    grant = example(inspect.type_info(admission_token.Grant))
    return "token", take, [admission_token.encode((grant,) * count) for count in (1, 2, 3)]


def _items() -> Target:
    def take(item: bytes) -> None:
        found = (
            gossip_items.read(item),
            gossip_items.read_proof(item, RUN, NOW),
            gossip_items.read_evidence(item),
        )
        if not any(one is not None for one in found):
            raise CodecError("no item")

    one, other = record(1), record(1, addresses=())
    statements = (gossip_items.Accusation(False, bytes(32), bytes(32), 1), gossip_items.Departure(bytes(32), 1))
    made = [gossip_items.sign(statement, identity(1), RUN) for statement in statements]
    shown = gossip_items.evidence_item(example(inspect.type_info(Evidence)))
    return "item", take, [*made, gossip_items.proof_item(one, other), shown]


def _evidence() -> Target:
    def take(data: bytes) -> None:
        found = evidence.decode(data)
        if found is None:
            raise CodecError("no evidence")
        assert evidence.encode(found) == data
        evidence.is_valid(found, RUN)

    return "evidence", take, [evidence.encode(example(inspect.type_info(Evidence)))]


def _chains() -> Target:
    """All signatures and tokens count as valid, so that inputs come to the other checks."""
    valid = {"verifier": lambda keys: lambda *signed: True, "admits": lambda peer, token: True}

    def take(data: bytes) -> None:
        try:
            found = chain.decode(data)
        except ValueError as error:
            raise CodecError(str(error)) from None
        for _ in chain.checked(found, 0, lambda fork: True, fraction=0.5, **valid):
            pass

    entries = [example(inspect.type_info(ChainEntry)), example(inspect.type_info(ChainEntry))]
    return "chain", take, [chain.encode(tuple(entries[:count])) for count in (1, 2)]


def _invites() -> Target:
    """The input is the content, to which the target adds a correct checksum."""

    def take(data: bytes) -> None:
        text = b32encode(data + zlib.crc32(data).to_bytes(4, "big")).decode().rstrip("=").lower()
        try:
            found = Invite.parse(invite.PREFIX + text)
        except InviteError as error:
            raise CodecError(str(error)) from None
        assert re.sub("-", "", found.code()) == invite.PREFIX + text

    made = [Invite(RUN, (Seed("192.0.2.1:7400", bytes(32)), Seed("[2001:db8::1]:1", bytes(32))))]
    made.append(Invite(RUN, (Seed("peer.example:7400", bytes(32)),), b"\1" * 40, bytes(32)))
    return "invite", take, [_content(one) for one in made]


def _content(one: Invite) -> bytes:
    letters = one.code().replace("-", "")[len(invite.PREFIX) :].upper()
    return b32decode(letters + "=" * (-len(letters) % 8))[:-4]
