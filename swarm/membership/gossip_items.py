"""Gossip items: signed, so that any peer may relay them.

An item is one byte of kind, then: a PeerRecord ("I am here"); an accusation ("I cannot reach it"), signed by the
accuser; a departure ("I leave"), signed by the departing peer; a proof that a peer signed two records with the same
sequence; evidence that it signed two statements about one ballot (swarm/evidence.py); or the author's revocation of an
admission (swarm/identity/admission_token.py).

An item with a Verdict is only stored on disk: it has no signature, because each peer judges by the members that state it.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from typing import TypeAlias

import msgspec
from thinwire.swarm import evidence
from thinwire.swarm.identity.identity import SIGNATURE_BYTES, Identity, verify
from thinwire.swarm.identity.peer_record import ITEM, PeerRecord, RecordError, claimed_peer
from thinwire.swarm.messages.registry import U53, Evidence, Id, PeerId, Verdict

MAX_BYTES = 3072
"""Maximum size of an item."""

PAGE_BYTES, PAGE_ITEMS = 50_000, 32
"""Most bytes and items of one PushPull."""

RECORD, ACCUSATION, DEPARTURE, PROOF, EVIDENCE, REVOCATION, VERDICT = ITEM, 2, 3, 4, 5, 6, 7

_PROOF = bytes([PROOF])


class Accusation(msgspec.Struct, array_like=True, frozen=True, forbid_unknown_fields=True):
    """Statement that `accuser` could not reach `target`, whose record had this sequence.

    `dead`: the accuser's suspicion has timed out.
    """

    dead: bool
    accuser: Id
    target: Id
    sequence: U53


class Departure(msgspec.Struct, array_like=True, frozen=True, forbid_unknown_fields=True):
    """Statement that `peer` leaves; all its records up to `sequence` are void."""

    peer: Id
    sequence: U53


Statement: TypeAlias = Accusation | Departure


class StoredVerdict(msgspec.Struct, array_like=True, frozen=True, forbid_unknown_fields=True):
    """Verdict of a quorum, with lineage and round of the state that this peer had then.

    Lineage and round are those of the quorum, not of the false result: the verdict belongs to this history, and ends with it.
    """

    verdict: Verdict
    lineage: bytes
    round: int


_stored = msgspec.msgpack.Decoder(StoredVerdict)
_KINDS: dict[int, type[Statement]] = {ACCUSATION: Accusation, DEPARTURE: Departure}
_encode = msgspec.msgpack.Encoder().encode
_decoders = {kind: msgspec.msgpack.Decoder(schema) for kind, schema in _KINDS.items()}


def sign(statement: Statement, identity: Identity, run_id: bytes) -> bytes:
    """Return the item that spreads an accusation or departure made by this peer."""
    kind = ACCUSATION if isinstance(statement, Accusation) else DEPARTURE
    body = _encode(statement)
    return bytes([kind]) + body + identity.sign(_domain(kind), run_id, body)


def read(item: bytes) -> Statement | None:
    """Return the statement of an item without checking its signature.

    Returns None for a malformed item or another kind.
    """
    decoder = _decoders.get(item[0]) if SIGNATURE_BYTES < len(item) <= MAX_BYTES else None
    if decoder is None:
        return None
    body = item[1:-SIGNATURE_BYTES]
    try:
        statement: Statement = decoder.decode(body)
    except (msgspec.MsgspecError, UnicodeDecodeError, RecursionError):
        return None
    return statement if _encode(statement) == body else None


def is_signed(item: bytes, public_key: bytes, run_id: bytes) -> bool:
    """Return True if the owner of the key made this statement in this run."""
    return verify(public_key, _domain(item[0]), item[-SIGNATURE_BYTES:], run_id, item[1:-SIGNATURE_BYTES])


def proof_item(one: PeerRecord, other: PeerRecord) -> bytes:
    """Return the proof that two different records have the same sequence.

    The size limit is sufficient: a record with 8 addresses and the longest token has less than 1,300 bytes.
    """
    first, second = sorted((one.wire, other.wire))
    return bytes([PROOF]) + len(first).to_bytes(2, "big") + first + second


def is_proof(item: bytes) -> bool:
    """Return True if an item is a proof of two records with one sequence."""
    return item[:1] == _PROOF


def accused(proof: bytes) -> PeerId | None:
    """Return the peer that a proof is about, before it is checked; None if it is malformed."""
    return claimed_peer(proof[3 : 3 + int.from_bytes(proof[1:3], "big")])


def read_proof(item: bytes, run_id: bytes, now: int) -> tuple[PeerRecord, PeerRecord] | None:
    """Return the two validated records of a valid proof, else None."""
    cut = 3 + int.from_bytes(item[1:3], "big")
    try:
        one = PeerRecord.parse(item[3:cut], run_id=run_id, now=now)
        other = PeerRecord.parse(item[cut:], run_id=run_id, now=now)
    except RecordError:
        return None
    if one.peer_id != other.peer_id or one.sequence != other.sequence or one.wire == other.wire:
        return None
    return one, other


def evidence_item(found: Evidence) -> bytes:
    """Return the item that spreads evidence; it has less than 600 bytes."""
    return bytes([EVIDENCE]) + evidence.encode(found)


def revocation_item(statement: bytes) -> bytes:
    """Return the item that spreads a revocation, see admission_token.revoke."""
    return bytes([REVOCATION]) + statement


def verdict_item(verdict: Verdict, lineage: bytes, round: int) -> bytes:
    """Return the item that stores a verdict on an owner of chunks, see StoredVerdict. It is not spread."""
    return bytes([VERDICT]) + _encode(StoredVerdict(verdict, lineage, round))


def read_stored(item: bytes) -> StoredVerdict | None:
    """Return the content of a stored item; None for a malformed item or another kind."""
    if item[:1] != bytes([VERDICT]) or len(item) > MAX_BYTES:
        return None
    try:
        return _stored.decode(item[1:])
    except (msgspec.MsgspecError, UnicodeDecodeError, RecursionError):
        return None


def read_verdict(item: bytes) -> Verdict | None:
    """Return the verdict of a stored item; None for a malformed item or another kind."""
    stored = read_stored(item)
    return None if stored is None else stored.verdict


def read_evidence(item: bytes) -> Evidence | None:
    """Return the evidence of an item without checking it; None for a malformed item or another kind."""
    return evidence.decode(item[1:]) if item[:1] == bytes([EVIDENCE]) and len(item) <= MAX_BYTES else None


def _domain(kind: int) -> str:
    return {ACCUSATION: "accusation", DEPARTURE: "departure"}[kind]


def pages(items: Iterable[bytes]) -> Iterator[tuple[bytes, ...]]:
    """Yield items in pages that each fit in one PushPull; one empty page if there are no items."""
    page: list[bytes] = []
    size = 0
    for item in items:
        if len(page) == PAGE_ITEMS or size + len(item) > PAGE_BYTES:
            yield tuple(page)
            page, size = [], 0
        page.append(item)
        size += len(item)
    yield tuple(page)
