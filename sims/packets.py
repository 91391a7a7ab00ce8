"""Frames as they travel in a simulation: as bytes, or by reference when the swarm is large."""

from __future__ import annotations

import msgspec
from thinwire.swarm import frame as frames
from thinwire.swarm.frame import Frame
from thinwire.swarm.identity import SIGNATURE_BYTES, Identity
from thinwire.swarm.protocol import Ask, Vote

UNSIGNED = bytes(SIGNATURE_BYTES)
"""In place of a signature that nobody looks at."""

_size = msgspec.msgpack.Encoder().encode


class Packet(msgspec.Struct, eq=False, gc=False):
    """A frame on its way: wire bytes with the payload beside them, or the Frame itself when encoding is off.

    `done` is when its last byte arrives, `number` its place among the packets of its pipe. `spoiled`: not as it was sent.
    """

    wire: bytes
    payload: bytes
    frame: Frame | None
    size: int
    done: float = 0.0
    number: int = 0
    spoiled: bool = False


class Packer:
    """Makes packets of one peer's frames."""

    def __init__(self, identity: Identity, run_id: bytes, *, encode: bool) -> None:
        self._identity, self._run_id, self._encode = identity, run_id, encode
        self._last = Frame(Ask(0, 0))
        self._size = 0

    def pack(self, frame: Frame) -> Packet:
        """A packet with a copy of the payload: the caller may reuse its buffer."""
        message, payload = frame.message, frame.payload
        if not isinstance(payload, bytes):
            payload = bytes(memoryview(payload))
        if self._encode:
            wire = frames.encode(Frame(message, payload), self._identity, self._run_id)
            return Packet(wire, payload, None, len(wire) + len(payload))
        if message is not self._last.message:  # most are sent to many
            signature = b""
            self._size = frames.HEADER_BYTES + len(_size(message)) + (SIGNATURE_BYTES if message.signed else 0)
            if isinstance(message, Vote):  # shown to others as a proof; of all else it matters only that it is signed
                signature = frames.sign_message(message, b"", self._identity, self._run_id)
            elif message.signed:
                signature = UNSIGNED
            self._last = Frame(message, b"", signature)
        shown = Frame(message, payload, self._last.signature) if payload else self._last
        return Packet(b"", b"", shown, self._size + len(payload))
