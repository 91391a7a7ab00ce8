"""Packets of a simulation: encoded frames, or frames by reference for large swarms."""

from __future__ import annotations

import msgspec
from thinwire.swarm import frame as frames
from thinwire.swarm.frame import Frame
from thinwire.swarm.identity.identity import SIGNATURE_BYTES, Identity
from thinwire.swarm.messages import wire_form
from thinwire.swarm.messages.registry import Ask, Found, Promise, Ready, Vote

UNSIGNED = bytes(SIGNATURE_BYTES)
"""Placeholder for a signature that is never checked."""


class Packet(msgspec.Struct, eq=False, gc=False):
    """Frame in flight: wire bytes and payload, or the Frame itself if encoding is off.

    done: time when its last byte arrives. number: its position among the packets of its pipe. spoiled: damaged by a
    relay.
    """

    wire: bytes
    payload: bytes
    frame: Frame | None
    size: int
    done: float = 0.0
    number: int = 0
    spoiled: bool = False


class Packer:
    """Encoder of one peer's frames into packets.

    `payload_factor`: bytes on the links for each byte of a payload.
    """

    def __init__(self, identity: Identity, run_id: bytes, *, encode: bool, payload_factor: float = 1.0) -> None:
        self._identity, self._run_id, self._encode, self._factor = identity, run_id, encode, payload_factor
        self._last = Frame(Ask(0, 0))
        self._size = 0
        self._wire = b""

    def pack(self, frame: Frame) -> Packet:
        """Return a packet with a copy of the payload, so that the caller may reuse its buffer."""
        message, payload = frame.message, frame.payload
        if not isinstance(payload, bytes):
            payload = bytes(memoryview(payload))
        # The last message is cached, because most messages are sent to many peers.
        if self._encode:
            if message is not self._last.message or payload != self._last.payload or not self._wire:
                self._last = Frame(message, payload)
                self._wire = frames.encode(self._last, self._identity, self._run_id)
            return Packet(self._wire, payload, None, len(self._wire) + self._carried(payload))
        if message is not self._last.message:
            signature = b""
            self._size = (
                frames.HEADER_BYTES + len(wire_form.encode(message)) + (SIGNATURE_BYTES if message.signed else 0)
            )
            # These are shown to others as proofs; the other signatures only need their size.
            if isinstance(message, (Vote, Promise, Found, Ready)):
                signature = frames.sign_message(message, b"", self._identity, self._run_id)
            elif message.signed:
                signature = UNSIGNED
            self._last = Frame(message, b"", signature)
        if not payload:
            return Packet(b"", b"", self._last, self._size)
        return Packet(b"", b"", Frame(message, payload, self._last.signature), self._size + self._carried(payload))

    def _carried(self, payload: bytes) -> int:
        """Return the bytes of a payload on the links."""
        return round(self._factor * len(payload))
