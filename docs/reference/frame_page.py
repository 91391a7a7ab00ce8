"""The page of the layout of a frame, byte by byte."""

from __future__ import annotations

from collections.abc import Sequence

from page_text import NOTE, paragraph, table
from thinwire.collectives.transport.zeromq import link
from thinwire.collectives.transport.zeromq.streams import record_crypto as crypto
from thinwire.swarm.frame import HEADER_BYTES, Frame, encode
from thinwire.swarm.identity.identity import Identity
from thinwire.swarm.messages import registry

RUN, SECRET = bytes([0x11]) * 32, bytes(range(32))
"""Run id in the examples of frames, and the secret of their link, which is the seed of their key, too."""


def _layout(pieces: Sequence[tuple[str, bytes, str]], whole: bytes) -> str:
    """Return a table of consecutive pieces with their offsets. Raises ValueError if they are not `whole`."""
    if (found := b"".join(piece for _, piece, _ in pieces)) != whole:
        raise ValueError(f"the code makes {whole.hex()}, and the page {found.hex()}")
    rows, at = [], 0
    for name, piece, text in pieces:
        shown = piece.hex() if len(piece) <= 32 else f"{piece[:8].hex()}…{piece[-8:].hex()}"
        rows.append((str(at), str(len(piece)), name, f"`{shown}`", text))
        at += len(piece)
    return table(("offset", "bytes", "part", "in the example", "meaning"), rows)


def _header(frame: bytes, kind: type[registry.Message]) -> list[tuple[str, bytes, str]]:
    """Return the pieces of the header of a frame."""
    body, payload = f"1 to {kind.limit}" if kind.limit else "", f"at most {kind.payload}" if kind.payload else "0"
    return [
        ("magic", frame[:4], "the same in every frame"),
        ("version", frame[4:5], f"protocol version, {registry.VERSION}; another one ends the link"),
        ("type", frame[5:6], f"number of the message, {kind.__name__} here"),
        ("flags", frame[6:8], "0; bit 0: a receiver that does not know the type may ignore the frame"),
        ("body length", frame[8:12], f"{body} for this type, without the signature"),
        ("payload length", frame[12:16], f"{payload} for this type"),
    ]


def frames() -> str:
    """Return the page of the layout of a frame, byte by byte; its examples are made by the code."""
    parts = [
        NOTE,
        "# Frames\n",
        paragraph(
            """Byte by byte: what two peers send each other. Numbers are unsigned and big endian; the limits and the
            examples come from the code. A frame is a header, the body of one [message](messages.md), a signature for signed
            types, and a payload for some types. A receiver checks each length against the limit of the type before it
            allocates memory."""
        ),
        *_signed_frame(),
        *_sealed_frame(),
        "## Keys\n",
        paragraph(
            f"""The acceptor of a link draws its secret (32 bytes) and sends it inside CURVE, in `Welcome`; the examples have
            00 01 … 1f. HKDF-SHA256 (RFC 5869) without salt makes of it the session (16 bytes, info "thinwire bulk session
            1") and, for each stream, 64 bytes (info "thinwire bulk stream 1" and the number of the stream as one byte): the
            key from dialler to acceptor, and the key back. Each seal is AES-256-GCM (NIST SP 800-38D); its nonce is the
            number of earlier seals with the key, in 12 bytes, and its associated data are the two lengths of the record (8
            bytes). The acceptor sends no proof, so its first nonce is 0. A key makes {crypto.MAX_SEALS} seals at most."""
        ),
    ]
    return "\n".join(parts)


def _signed_frame() -> list[str]:
    """Return the section about a frame with a signature."""
    frame = encode(Frame(registry.Ping(7, 3, ())), Identity.generate(SECRET), RUN)
    end = HEADER_BYTES + int.from_bytes(frame[8:12], "big")
    return [
        "## Signed frame\n",
        paragraph(
            f"A `Ping` of the peer whose key is made from the seed 00 01 … 1f, in the run whose id is 32 times {RUN[:1].hex()}:"
        ),
        _layout(
            [
                *_header(frame, registry.Ping),
                ("body", frame[HEADER_BYTES:end], "msgpack array of the fields in order; only the shortest encoding"),
                ("signature", frame[end:], "Ed25519 (RFC 8032) of the sender"),
            ],
            frame,
        ),
        paragraph(
            r"""The signature is over `thinwire/message/1\0` and four parts, each after its length in 8 bytes: the run id (32
            bytes), the type number (2 bytes), the body, and the BLAKE3 hash of the payload (32 bytes), also of an empty
            one. A `Ready` has the signature of its [Announced](messages.md#announced): two of these are short evidence."""
        ),
        paragraph(
            f"""A signed frame travels on the control connection, or on the express stream if rounds wait for it. The control
            connection is ZeroMQ (ZMTP 3.1) with CURVE: each frame is one message, whose second part is the payload, if there
            is one. A message of no bytes ends the handshake; the byte {link.SWITCH.hex()} announces that messages of
            rounds now use the express stream; a message that begins with the byte {link.BYE.hex()} has the reason why the link
            ends."""
        ),
    ]


def _sealed_frame() -> list[str]:
    """Return the section about a frame without a signature and its seal on a stream."""
    payload = b"sixteen bytes..."
    head = encode(Frame(registry.Chunk(3, 0, 1, 5), payload), None, RUN)
    sealer, _ = crypto.stream_keys(SECRET, 0)
    opening = crypto.OPENING.pack(crypto.session_of(SECRET), 0)
    proof = sealer.prove(opening)
    record = bytearray(crypto.record_size(len(head), len(payload)))
    sealer.seal(head, payload, memoryview(record))
    sealed, first = bytes(record), crypto.LENGTHS.size
    middle = first + len(head) + crypto.TAG
    heads = f"{HEADER_BYTES + 1} to {crypto.MAX_BULK[0]}, on the express stream to {crypto.MAX_EXPRESS[0]}"
    numbered = f"number of the stream, {crypto.EXPRESS} for the express stream; each once in a session"
    return [
        "## Frame without signature, sealed for a stream\n",
        paragraph(
            f"""A `Chunk` with a payload of {len(payload)} bytes. Bulk data is not signed: the sealed stream shows who sends,
            and a signed message before has the hash of the payload. First the frame itself:"""
        ),
        _layout(
            [
                *_header(head, registry.Chunk),
                ("body", head[HEADER_BYTES:], "as above"),
                ("payload", payload, "encoded values; not msgpack"),
            ],
            head + payload,
        ),
        "A stream is a separate TCP connection. The dialler begins it with\n",
        _layout(
            [
                ("session", opening[:16], "names the link: from its secret"),
                ("stream", opening[16:], numbered),
                ("proof", proof, "tag of no bytes, with the 17 bytes before as associated data; nonce 0"),
            ],
            opening + proof,
        ),
        "Records follow, in both directions. The record of the frame above is\n",
        _layout(
            [
                ("head length", sealed[:4], heads),
                ("payload length", sealed[4:first], f"at most {crypto.MAX_BULK[1]}, on the express stream 0"),
                ("head", sealed[first : middle - crypto.TAG], "sealed: header, body, and signature of a signed type"),
                ("tag", sealed[middle - crypto.TAG : middle], "of the head; nonce 1"),
                ("payload", sealed[middle : -crypto.TAG], "sealed"),
                ("tag", sealed[-crypto.TAG :], "of the payload, also of an empty one; nonce 2"),
            ],
            sealed,
        ),
    ]
