"""Sealed records: encryption of a frame so that only the other end of a stream can read or create it.

The secret of a link (agreed inside CURVE) gives every stream and direction a separate key (HKDF, RFC 5869). A record
consists of the lengths of head and payload, the sealed head, the sealed payload: AES-256-GCM (NIST SP 800-38D) with the
lengths as associated data and a counter as nonce.
"""

from __future__ import annotations

import struct
from typing import TYPE_CHECKING

from cryptography.hazmat.primitives.ciphers.aead import AESGCM
from cryptography.hazmat.primitives.hashes import SHA256
from cryptography.hazmat.primitives.kdf.hkdf import HKDF
from thinwire.swarm.frame import HEADER_BYTES
from thinwire.swarm.identity.identity import SIGNATURE_BYTES
from thinwire.swarm.messages.registry import TYPES, Ack, Gossip, Nack, Ping, PingRequest, PushPull, WallClock

if TYPE_CHECKING:
    from thinwire.swarm.frame import Buffer

TAG = 16
LENGTHS = struct.Struct("!II")
OPENING = struct.Struct("!16sB")
"""Session id and stream number, which a dialler sends first; the proof of TAG bytes follows."""

_BULK = [kind for kind in TYPES.values() if kind.payload and not kind.signed]
MAX_BULK = HEADER_BYTES + max(kind.limit for kind in _BULK), max(kind.payload for kind in _BULK)
"""Most bytes of head and payload of a record, on bulk streams."""

MAX_STREAMS = 16
EXPRESS = MAX_STREAMS
"""Number of the express stream, which carries `EXPRESS_KINDS` only."""

SHARED = MAX_STREAMS + 1
"""Number of the stream that replaces the bulk streams inside one machine."""

_MEMBERSHIP = (Ping, PingRequest, Ack, Nack, Gossip, PushPull, WallClock)
EXPRESS_KINDS = frozenset(
    kind for kind in TYPES.values() if kind.signed and not kind.payload and kind not in _MEMBERSHIP
)
"""Control messages that rounds wait for one after the other.

CURVE and its threads would dominate the time of a small round.
"""

MAX_EXPRESS = HEADER_BYTES + max(kind.limit for kind in EXPRESS_KINDS) + SIGNATURE_BYTES, 0
MAX_SEALS = 1 << 32
"""Most seals with one key; a stream that reaches it ends, and the link is dialled again with new keys."""


class KeyUsedUp(ValueError):
    """The key of a stream has made MAX_SEALS seals; the stream has to end."""


def session_of(secret: bytes) -> bytes:
    """Return the 16 public bytes that name the session of a secret."""
    return HKDF(SHA256(), 16, salt=None, info=b"thinwire bulk session 1").derive(secret)


def stream_keys(secret: bytes, number: int) -> tuple[RecordCipher, RecordCipher]:
    """Return the ciphers of one stream: dialler to acceptor, acceptor to dialler."""
    data = HKDF(SHA256(), 64, salt=None, info=b"thinwire bulk stream 1" + bytes([number])).derive(secret)
    return RecordCipher(data[:32]), RecordCipher(data[32:])


def parse_lengths(data: Buffer, most: tuple[int, int] = MAX_BULK) -> tuple[int, int]:
    """Return the lengths of head and payload. Raises ValueError if they exceed `most`."""
    head, payload = LENGTHS.unpack(data)
    if not HEADER_BYTES < head <= most[0] or payload > most[1]:
        raise ValueError(f"record of {head} + {payload} bytes is over the limits")
    return head, payload


def record_size(head: int, payload: int) -> int:
    """Return the size of a whole record in bytes."""
    return LENGTHS.size + head + TAG + payload + TAG


class RecordCipher:
    """One direction of a stream: its key and the number of seals or openings so far."""

    def __init__(self, key: bytes) -> None:
        self._key = AESGCM(key)
        self._count = 0

    def _nonce(self) -> bytes:
        if self._count >= MAX_SEALS:
            raise KeyUsedUp("the key of a stream is used up")
        self._count += 1
        return (self._count - 1).to_bytes(12, "big")

    def prove(self, opening: bytes) -> bytes:
        """Return TAG bytes that prove knowledge of the key."""
        return self._key.encrypt(self._nonce(), b"", opening)

    def check(self, opening: bytes, proof: bytes) -> None:
        """Check a proof. Raises cryptography's InvalidTag if it differs from `prove`'s."""
        self._key.decrypt(self._nonce(), proof, opening)

    def seal(self, head: bytes, payload: Buffer, record: memoryview) -> None:
        """Write a whole record into `record`, which has the exact size. Raises KeyUsedUp."""
        lengths = LENGTHS.pack(len(head), len(record) - record_size(len(head), 0))
        middle = LENGTHS.size + len(head) + TAG
        record[: LENGTHS.size] = lengths
        self._key.encrypt_into(self._nonce(), head, lengths, record[LENGTHS.size : middle])
        self._key.encrypt_into(self._nonce(), payload, lengths, record[middle:])

    def open(self, head: int, record: memoryview) -> bytes:
        """Open a record whose head has `head` bytes; return the head.

        The payload is decrypted in place and ends TAG bytes before the end. Raises KeyUsedUp, and InvalidTag, after
        which the record must not be read.
        """
        lengths, middle = record[: LENGTHS.size], LENGTHS.size + head + TAG
        opened = self._key.decrypt(self._nonce(), record[LENGTHS.size : middle], lengths)
        sealed = record[middle:]
        if len(sealed) > TAG:
            self._key.decrypt_into(self._nonce(), sealed, lengths, sealed[:-TAG])
        else:
            self._key.decrypt(self._nonce(), sealed, lengths)
        return opened
