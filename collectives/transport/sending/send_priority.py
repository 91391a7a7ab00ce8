"""Order of frames that share the uplink: frames of rounds first, then state for joiners.

State waits while frames of a round wait, to any peer. At other times it gets 1/PART of the uplink, with a pause after each
frame, so that the first frame of a round waits for at most one frame of state. Usually it waits for none, because a frame of
state is sent only if it can leave before this peer's next contribution. That contribution is expected after as many seconds of
training as in the last round. At least 1/PART of all bytes are state, so that a joiner makes progress in a swarm that always
exchanges. And state does not wait for frames that make no progress: a peer that takes no data delays no other peer.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable

from thinwire.swarm.messages.registry import PeerId

PART = 12
"""State has 1/PART of the uplink: less than a tenth, because the rate of the uplink is an estimate."""

Reader = tuple[PeerId, int]
"""Peer that reads the state of a fragment."""

STUCK = 2.0
"""Seconds without a sent round frame after which state stops waiting; longer where frames take longer."""

INSTANT = 1e-6
"""Seconds that are too short to wait for."""

SLOW, SLOWEST = 3, 15.0
"""Multiple of the last frame's duration that a frame may take, and the upper limit of that in seconds."""


class SendPriority:
    """Shared by all bulk queues of one peer. `urgent` counts round frames that wait or are being sent.

    `handed` is called after each sent frame. `uplink`: returns the known rate of our uplink in bytes/s, 0 if unknown;
    then state has no pauses.
    """

    def __init__(self, handed: Callable[[], None] = lambda: None, uplink: Callable[[], int] = lambda: 0) -> None:
        self.urgent = 0
        self.paced = 0
        """Bytes of state that were followed by pauses, so that they do not show the rate of the uplink."""
        self.hurried: set[Reader] = set()
        """Readers without pauses."""
        self._handed, self._uplink = handed, uplink
        self._free = 0.0  # time from which a frame of state may be sent
        self._sent = self._mark = 0  # bytes of rounds sent, now and when a frame of state last had its turn
        self._waits = 0  # queues that wait for their turn
        self._training_since: float | None = None  # time when training began, while it continues
        self._usual = 0.0  # seconds of the last training
        self._contribution_at: float | None = None  # time at which our next contribution is expected, or was sent
        self._took, self._last = 0.0, 0.0  # seconds of the last round frame, and when it was handed over
        self._stuck = -1  # value of `_sent` when sending got stuck
        self._change = asyncio.Event()

    def add(self, count: int = 1) -> None:
        """Count more waiting frames of rounds."""
        if not self.urgent and count:
            self._mark, self._last = self._sent, asyncio.get_running_loop().time()
        self.urgent += count
        self._change.set()

    def sent(self, urgent: bool, nbytes: int) -> None:
        """Note that a frame with a payload of `nbytes` bytes was handed to the transport."""
        if urgent:
            self.urgent -= 1
            self._sent += max(1, nbytes)
            now = asyncio.get_running_loop().time()
            self._took, self._last = now - self._last, now
            self._change.set()
        self._handed()

    def note_dropped(self, count: int) -> None:
        """Count fewer waiting frames of rounds: these will not be sent."""
        self.urgent -= count
        self._change.set()

    def begin_training(self) -> None:
        """Note that a round is over: training begins."""
        self._training_since = asyncio.get_running_loop().time()
        self._contribution_at = self._training_since + self._usual if self._usual else None
        self._change.set()

    def end_training(self) -> None:
        """Note that a contribution is sent: training is over."""
        if self._training_since is not None:
            self._contribution_at = asyncio.get_running_loop().time()
            self._usual, self._training_since = self._contribution_at - self._training_since, None

    def hurry(self, reader: Reader, hurried: bool) -> None:
        """Begin or end the time in which there are no pauses for a reader."""
        (self.hurried.add if hurried else self.hurried.discard)(reader)
        self._change.set()

    def free(self, nbytes: int, reader: Reader) -> bool:
        """Return True if a frame of state with `nbytes` bytes may be sent at once."""
        self._note_request()
        return not self.urgent and self._pause(nbytes, reader) <= INSTANT

    def begin_pause(self, nbytes: int, reader: Reader) -> None:
        """Begin the pause after a frame of state with a payload of `nbytes` bytes."""
        rate = self._uplink()
        if not rate or not nbytes or reader in self.hurried:
            return
        self.paced += nbytes
        self._free = max(self._free, asyncio.get_running_loop().time()) + PART * nbytes / rate

    def _note_request(self) -> None:
        """Note that a frame of state is to be sent: if it is the only one, it has not waited yet."""
        if not self._waits:
            self._free = max(self._free, asyncio.get_running_loop().time())

    def _pause(self, nbytes: int, reader: Reader) -> float:
        """Return the seconds until a frame of state may be sent; `begin_training` may end them earlier."""
        rate = self._uplink()
        if not rate or not nbytes or reader in self.hurried:
            return 0.0
        now, took = asyncio.get_running_loop().time(), nbytes / rate
        late = self._contribution_at is not None and max(now, self._free) + took > self._contribution_at
        return self._free - now + (PART * took if late else 0.0)

    async def wait_for_turn(self, withdrawn: Callable[[], bool], nbytes: int, reader: Reader) -> None:
        """Wait until this queue may send a frame of state with `nbytes` bytes.

        withdrawn: returns True if the queue has no such frame any more, which ends the wait, too.
        """
        self._note_request()
        self._waits += 1
        try:
            await self._wait(withdrawn, nbytes, reader)
        finally:
            self._waits -= 1
        if not withdrawn():
            self._mark = self._sent
            self.begin_pause(nbytes, reader)

    async def _wait(self, withdrawn: Callable[[], bool], nbytes: int, reader: Reader) -> None:
        while not withdrawn():
            behind = self.urgent and self._stuck != self._sent < self._mark + (PART - 1) * max(1, nbytes)
            seconds = max(STUCK, min(SLOWEST, SLOW * self._took)) if behind else self._pause(nbytes, reader)
            if seconds <= INSTANT:
                break
            self._change.clear()
            try:
                async with asyncio.timeout(seconds):
                    await self._change.wait()
            except TimeoutError:
                if behind:
                    self._stuck = self._sent
