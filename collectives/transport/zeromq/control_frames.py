"""Checks of the control frames of one peer: kinds that belong on a channel, form, and signature."""

from __future__ import annotations

from collections.abc import Collection, Sequence

from thinwire.collectives.transport.zeromq.streams.record_crypto import EXPRESS_KINDS
from thinwire.swarm import frame as frames
from thinwire.swarm.frame import HEADER_BYTES, Frame, FrameError, verify_message
from thinwire.swarm.messages.registry import TYPES, Found, Hello, Message, Promise, Ready, Refuse, Vote, Welcome

CONTROL_KINDS = frozenset(
    kind for kind in TYPES.values() if kind not in (Hello, Welcome, Refuse) and not (kind.payload and not kind.signed)
)
"""Messages of control connections."""

PROOFS = frozenset((Vote, Promise, Found, Ready))
"""Messages with signatures that are shown to other peers."""


class ControlFrames:
    """Checks of the control frames of the peer with this public key. They raise FrameError."""

    def __init__(self, public_key: bytes, run_id: bytes) -> None:
        self._public_key, self._run_id = public_key, run_id

    def from_control(self, parts: Sequence[memoryview]) -> Frame:
        """Return the checked frame of a message on the control connection: its head and maybe a payload."""
        return self._decode(parts, CONTROL_KINDS)

    def from_express(self, head: bytes) -> Frame:
        """Return a frame of the express stream, which proves the sender.

        The signatures of PROOFS are checked; check those of other messages with `signature_fits` once they are handled.
        """
        return self._decode([memoryview(head)], EXPRESS_KINDS, unproved=EXPRESS_KINDS - PROOFS)

    def signature_fits(self, frame: Frame) -> bool:
        """Return True if the signature of a frame is valid."""
        return verify_message(frame.message, frame.signature, self._public_key, self._run_id)

    def _decode(
        self,
        parts: Sequence[memoryview],
        kinds: Collection[type[Message]],
        unproved: Collection[type[Message]] = (),
    ) -> Frame:
        head, payload = parts[0], parts[1] if len(parts) == 2 else memoryview(b"")
        header = frames.parse_header(head[:HEADER_BYTES])
        if header.kind not in kinds or len(parts) > 2:
            raise FrameError(f"{header.kind.__name__} does not belong on this channel")
        return frames.decode(
            header,
            head[HEADER_BYTES:],
            payload,
            public_key=self._public_key,
            run_id=self._run_id,
            verify_later=header.kind in unproved,
        )
