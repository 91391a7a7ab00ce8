"""Frames: a fixed header, one msgpack message, a signature for control messages, raw payload bytes.

All bytes on a link are frames. The header states how many bytes follow; `parse_header` refuses any length above the limit of
the message's type, so that a false length causes no allocation. Then `decode` checks signature, structure and values.
"""

from __future__ import annotations

import math
import struct
from typing import TYPE_CHECKING, Any, NamedTuple, NoReturn, TypeAlias

import blake3
import msgpack
import msgspec
from thinwire.swarm.identity.identity import SIGNATURE_BYTES, Identity, verify
from thinwire.swarm.messages import wire_form
from thinwire.swarm.messages.registry import NUMBERS, TYPES, VERSION, Message

if TYPE_CHECKING:
    Buffer: TypeAlias = bytes | bytearray | memoryview
    """Any object with the buffer protocol: one contiguous dimension of bytes."""

HEADER = struct.Struct("!4sBBHII")
"""Magic, version, type number, flags, body bytes, payload bytes; big endian.

The body bytes do not include the signature.
"""

HEADER_BYTES = HEADER.size
MAGIC = b"tw\xf7\x1e"
OPTIONAL = 1
"""Flag of a message that a peer may ignore if it does not know its type.

No message type of this version sets it.
"""

MAX_DEPTH = 8
_DOMAIN = "message"


class FrameError(ValueError):
    """Error for bytes that no honest peer of this version sends; the message describes the fault."""


class VersionError(FrameError):
    """Error for a peer that uses another version of the protocol, `theirs`."""

    def __init__(self, theirs: int) -> None:
        super().__init__(f"the peer uses protocol version {theirs}, we use {VERSION}")
        self.theirs = theirs


class UnknownType(FrameError):
    """Error for an unknown type number. An `optional` frame may be skipped; otherwise the link ends."""

    def __init__(self, number: int, optional: bool) -> None:
        super().__init__(f"unknown message type {number}")
        self.optional = optional


class Frame(msgspec.Struct, frozen=True, gc=False):
    """One message with its payload.

    signature: set on received control messages, for code that relays proofs. digest: set on received bulk data; blake3
    of the payload, computed on arrival while the payload was still in the cache.
    """

    message: Message
    payload: Buffer = b""
    signature: bytes = b""
    digest: bytes = b""

    def hashed(self) -> bytes:
        """Return the blake3 hash of the payload."""
        return self.digest or blake3.blake3(_view(self.payload)).digest()

    def __repr__(self) -> str:
        return f"Frame({self.message!r}, {nbytes(self.payload)} bytes)"


class Header(NamedTuple):
    """Validated header: the message's type, and the number of bytes of body and payload that follow."""

    kind: type[Message]
    body: int
    payload: int

    @property
    def rest(self) -> int:
        """Bytes between header and payload: the body and, for a signed type, its signature."""
        return self.body + SIGNATURE_BYTES if self.kind.signed else self.body


def encode(frame: Frame, identity: Identity | None, run_id: bytes) -> bytes:
    """Return header, body and, for signed types, signature. The caller sends the payload after it.

    A signed type is signed with `identity`; if `identity` is None (relaying), the frame's own signature is used. Raises
    ValueError for a message that a receiver would refuse, which is a mistake of the caller.
    """
    kind, payload = type(frame.message), nbytes(frame.payload)
    body = wire_form.encode(frame.message)
    if len(body) > kind.limit or payload > kind.payload:
        raise ValueError(f"{kind.__name__} of {len(body)} + {payload} bytes is over its limits")
    if not _is_bulk(kind):
        _parse(kind, body)
    head = HEADER.pack(MAGIC, VERSION, NUMBERS[kind], 0, len(body), payload)
    if not kind.signed:
        return head + body
    signature = frame.signature
    if identity is not None:
        signature = identity.sign(_DOMAIN, *_stated(frame.message, body, frame.payload, run_id))
    if len(signature) != SIGNATURE_BYTES:
        raise ValueError(f"{kind.__name__} needs an identity to sign it")
    return head + body + signature


def parse_header(data: Buffer) -> Header:
    """Check HEADER_BYTES bytes. Raises FrameError (VersionError, UnknownType)."""
    if nbytes(data) != HEADER_BYTES:
        raise FrameError(f"header of {nbytes(data)} bytes")
    magic, version, number, flags, body, payload = HEADER.unpack(_view(data))
    if magic != MAGIC:
        raise FrameError("not a thinwire frame")
    if version != VERSION:
        raise VersionError(version)
    kind = TYPES.get(number)
    if kind is None:
        raise UnknownType(number, bool(flags & OPTIONAL))
    if flags:
        raise FrameError(f"unknown flags {flags:#x}")
    if not 0 < body <= kind.limit:
        raise FrameError(f"{kind.__name__} with a body of {body} bytes (limit {kind.limit})")
    if payload > kind.payload:
        raise FrameError(f"{kind.__name__} with a payload of {payload} bytes (limit {kind.payload})")
    return Header(kind, body, payload)


def decode(
    header: Header,
    rest: Buffer,
    payload: Buffer,
    *,
    public_key: bytes | None,
    run_id: bytes,
    verify_later: bool = False,
    digest: bytes = b"",
) -> Frame:
    """Check and decode one frame from `rest` (`header.rest` bytes) and `payload` (not copied).

    public_key: Ed25519 key of the authenticated sender; None stands for a stranger, who may send unsigned types only.
    verify_later: the caller knows the sender and checks the signature itself with `verify_message`. digest: blake3 of a bulk
    payload, if the caller has it. Raises FrameError and no other error, whatever the bytes.
    """
    kind = header.kind
    if nbytes(rest) != header.rest or nbytes(payload) != header.payload:
        raise FrameError(f"{kind.__name__}: lengths differ from the header's")
    data = bytes(rest)
    body, signature = data[: header.body], data[header.body :]
    message: Message | None = None
    if kind.signed:
        if public_key is None:
            raise FrameError(f"{kind.__name__} from a stranger")
        if kind.statement is not Message.statement:
            message = _parse(kind, body)  # The signed statement follows from the content.
        if not verify_later:
            parts = _stated(message, body, payload, run_id) if message else _parts(kind, body, payload, run_id)
            if not verify(public_key, _DOMAIN, signature, *parts):
                raise FrameError(f"bad signature of {kind.__name__}")
    message = message or _parse(kind, body)
    return Frame(
        message, payload, signature, (digest or blake3.blake3(_view(payload)).digest()) if _is_bulk(kind) else b""
    )


def sign_message(message: Message, payload: Buffer, identity: Identity, run_id: bytes) -> bytes:
    """Return the signature (64 bytes) that `encode` would put on this message."""
    return identity.sign(_DOMAIN, *_stated(message, wire_form.encode(message), payload, run_id))


def verify_message(message: Message, signature: bytes, public_key: bytes, run_id: bytes, payload: Buffer = b"") -> bool:
    """Return True if the owner of `public_key` signed this message in this run.

    Used for the votes that a Commit cites.
    """
    return verify(public_key, _DOMAIN, signature, *_stated(message, wire_form.encode(message), payload, run_id))


def nbytes(buffer: Buffer) -> int:
    """Return the length of a buffer in bytes.

    Raises ValueError unless it is one contiguous dimension of bytes.
    """
    return _view(buffer).nbytes


def _view(buffer: Any) -> memoryview:  # Any: before Python 3.12 not all stubs declare the buffer protocol
    view = memoryview(buffer)
    if view.ndim != 1 or view.itemsize != 1 or not view.contiguous:
        raise ValueError("a buffer is one contiguous dimension of bytes")
    return view


def _is_bulk(kind: type[Message]) -> bool:
    return kind.payload > 0 and not kind.signed


def _parts(kind: type[Message], body: bytes, payload: Buffer, run_id: bytes) -> tuple[bytes, ...]:
    return run_id, NUMBERS[kind].to_bytes(2, "big"), body, blake3.blake3(_view(payload)).digest()


def _stated(message: Message, body: bytes, payload: Buffer, run_id: bytes) -> tuple[bytes, ...]:
    """Return what the sender of a message signs. body: the encoded message."""
    stated = message.statement()
    return _parts(type(stated), body if stated is message else wire_form.encode(stated), payload, run_id)


def _parse(kind: type[Message], body: bytes) -> Message:
    """Decode a body whose length is within the type's limit.

    A message has exactly one encoding; any other encoding is refused.
    """
    try:
        # Bulk bodies are a few numbers in at most 128 bytes, so the exact schema is a sufficient bound.
        if not _is_bulk(kind):
            _screen(body)
        message = wire_form.decode(kind, body)
        canonical = wire_form.encode(message)
    except FrameError:
        raise
    except (msgspec.MsgspecError, ValueError, RecursionError) as error:
        raise FrameError(f"malformed {kind.__name__}: {error}") from None
    if canonical != body:
        raise FrameError(f"{kind.__name__} is not in canonical form")
    return message


def _screen(body: bytes) -> None:
    """Refuse structure that no message has, before the body is decoded."""
    unpacker = msgpack.Unpacker(
        None,
        raw=False,
        use_list=True,
        strict_map_key=True,
        ext_hook=_refuse_ext,
        max_buffer_size=len(body),
        max_array_len=1024,
        max_map_len=0,
        max_str_len=1024,
        max_bin_len=65536,
        max_ext_len=0,
    )
    try:
        unpacker.feed(body)
        value = unpacker.unpack()
    except (msgpack.exceptions.UnpackException, ValueError, RecursionError) as error:
        raise FrameError(f"malformed msgpack: {str(error) or type(error).__name__}") from None
    if unpacker.tell() != len(body):
        raise FrameError("bytes after the message")
    level: list[Any] = [value]
    for _ in range(MAX_DEPTH + 1):
        inner: list[Any] = []
        for item in level:
            if type(item) is list:
                inner += item
            elif type(item) is float and not math.isfinite(item):
                raise FrameError("a number is not finite")
        if not inner:
            return
        level = inner
    raise FrameError(f"nested deeper than {MAX_DEPTH}")


def _refuse_ext(code: int, data: bytes) -> NoReturn:
    raise FrameError(f"extension type {code}")
