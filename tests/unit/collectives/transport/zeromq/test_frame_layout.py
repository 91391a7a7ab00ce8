"""Layout of frames as docs/reference/frames.md states it, read without the code that writes them."""

import re
from pathlib import Path

import blake3
import msgpack
import pytest
from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PublicKey
from cryptography.hazmat.primitives.ciphers.aead import AESGCM
from cryptography.hazmat.primitives.hashes import SHA256
from cryptography.hazmat.primitives.kdf.hkdf import HKDF
from thinwire.collectives.transport.zeromq.streams.record_crypto import OPENING, record_size, session_of, stream_keys
from thinwire.swarm.frame import Frame, encode
from thinwire.swarm.identity.identity import Identity
from thinwire.swarm.messages.registry import Chunk, Vote

PAGE = Path(__file__).parents[5] / "docs" / "reference" / "frames.md"
RUN, SECRET = b"r" * 32, b"s" * 32


def tables():
    """Return (offset, bytes, part) of the rows of each table of the page."""
    found = []
    for block in PAGE.read_text().split("\n\n"):
        rows = re.findall(r"^\| (\d+) \| (\d+) \| ([a-z ]+) \|", block, re.MULTILINE)
        if rows:
            found.append([(int(at), int(size), part) for at, size, part in rows])
    return found


def cut(data, rows, **sizes):
    """Return the parts of data by name, in the order and with the sizes of a table; `sizes` replace those of examples."""
    parts, at = {}, 0
    for _, size, name in rows:
        size = sizes.get(name, size)
        parts.setdefault(name, []).append(data[at : at + size])
        at += size
    assert at == len(data)
    return {name: pieces[0] if len(pieces) == 1 else pieces for name, pieces in parts.items()}


def number(data):
    return int.from_bytes(data, "big")


def derived(info, size):
    return HKDF(SHA256(), size, salt=None, info=info).derive(SECRET)


def test_tables_have_no_gaps():
    assert len(tables()) == 4
    for rows in tables():
        assert [at for at, _, _ in rows] == [sum(size for _, size, _ in rows[:count]) for count in range(len(rows))]


def test_signed_frame_is_read_and_its_signature_checked():
    identity, vote = Identity.generate(), Vote(9, 0, (5, b"l" * 32), b"d" * 32, b"v" * 32)
    data = encode(Frame(vote), identity, RUN)
    parts = cut(data, tables()[0], body=number(data[8:12]))
    assert (
        parts["magic"] == bytes.fromhex("7477f71e") and number(parts["flags"]) == number(parts["payload length"]) == 0
    )
    assert msgpack.unpackb(parts["body"])[:3] == [16, 9, 0], "the number of a Vote precedes its fields"
    four = RUN, b"\0" + parts["type"], parts["body"], blake3.blake3(b"").digest()
    statement = b"thinwire/message/1\0" + b"".join(len(part).to_bytes(8, "big") + part for part in four)
    Ed25519PublicKey.from_public_bytes(identity.public_key).verify(parts["signature"], statement)


@pytest.mark.parametrize("payload", [b"", b"p" * 1000])
def test_sealed_record_is_opened_with_keys_from_the_secret(payload):
    opening, proof, head, records = written(payload)
    _, bulk, first, record = tables()
    keys = derived(b"thinwire bulk stream 1\x03", 64)
    start = cut(opening + proof, first)
    assert start["session"] == derived(b"thinwire bulk session 1", 16) and start["stream"] == b"\3"
    AESGCM(keys[:32]).decrypt(bytes(12), start["proof"], opening)
    for count, sealed in enumerate(records):
        parts = cut(sealed, record, head=number(sealed[:4]), payload=number(sealed[4:8]))
        opened = [
            AESGCM(keys[:32]).decrypt(
                (1 + 2 * count + at).to_bytes(12, "big"), parts[name] + parts["tag"][at], sealed[:8]
            )
            for at, name in enumerate(("head", "payload"))
        ]
        assert opened == [head, payload]
        whole = b"".join(opened)
        frame = cut(whole, bulk, body=number(whole[8:12]), payload=number(whole[12:16]))
        assert frame["payload"] == payload and msgpack.unpackb(frame["body"]) == [3, 0, 1, 5]


def written(payload):
    """Return opening, proof, head and two records of stream 3, made by the code."""
    sealer, _ = stream_keys(SECRET, 3)
    opening = OPENING.pack(session_of(SECRET), 3)
    proof, head = sealer.prove(opening), encode(Frame(Chunk(3, 0, 1, 5), payload), None, RUN)
    records = []
    for _ in range(2):
        record = bytearray(record_size(len(head), len(payload)))
        sealer.seal(head, payload, memoryview(record))
        records.append(bytes(record))
    return opening, proof, head, records
