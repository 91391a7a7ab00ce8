"""Our own contributions to the last rounds, for members that ask for them.

Members score them (trials.py), or audit the owner of a chunk with them (owner_audits.py).
"""

from __future__ import annotations

from collections import Counter, deque
from collections.abc import Sequence

import blake3
from thinwire.collectives.state_sync.chunk_transfer import IN_FLIGHT
from thinwire.collectives.transport.sending.send_queue import SendQueue
from thinwire.compression.core.types import Buffer
from thinwire.node.state.replica import Replica
from thinwire.swarm.frame import Frame
from thinwire.swarm.messages.registry import Chunk, Digest, Fetch, PeerId, Ready

TIMES = 2
"""Maximum number of times a member gets the same chunk: to score it, and to audit its owner."""

LENT = 2
"""Stored contributions: those to the round in progress and to the last one."""


def name_of(hashes: bytes) -> Digest:
    """Return the name by which members ask for contributions with these hashes.

    It is not the hash of the hashes alone, which is the digest of a round's results: the results of a sole contributor may
    be its contribution, and a request for them must not be taken for one of an audit.
    """
    return blake3.blake3(b"thinwire/contribution\0" + hashes).digest()


class OwnContributions:
    """Announced contributions of this peer to rounds of one fragment.

    A member asks for chunks by the name of the hashes that we have announced. `needed`: whether members of this
    run ask; if not, none are stored.
    """

    def __init__(self, replica: Replica, send_queue: SendQueue, fragment: int, *, needed: bool) -> None:
        self._replica, self._send_queue, self._fragment, self._needed = replica, send_queue, fragment, needed
        self._lent: deque[tuple[Ready, Sequence[Buffer], Counter[tuple[PeerId, int]]]] = deque(maxlen=LENT)
        """Announcements, their chunks, and how often each member got a chunk."""

    def announced(self, ready: Ready, source: Sequence[Buffer]) -> None:
        """Store the encoded chunks of an announcement."""
        if self._needed and source:
            self._lent.append((ready, source, Counter()))

    def make_room(self) -> None:
        """Drop all but the newest contribution, before another one is encoded.

        Otherwise three would be in memory until the next announcement, which drops the oldest.
        """
        while len(self._lent) >= LENT:
            self._lent.popleft()

    def drop(self, round: int) -> None:
        """Drop the contributions to rounds up to this one: no member will ask for them."""
        self._lent = deque((one for one in self._lent if one[0].round > round), LENT)

    def of(self, round: int) -> Sequence[Buffer]:
        """Return the chunks that we have announced last in a round; none if they are not here."""
        return next((source for ready, source, _ in reversed(self._lent) if ready.round == round), ())

    def takes(self, peer: PeerId, frame: Frame) -> bool:
        """Send chunks to a member that asks for them; return True if the frame is such a request."""
        message = frame.message
        if not isinstance(message, Fetch):
            return False
        for ready, source, times in self._lent:
            if (message.round, message.digest) == (ready.round, name_of(ready.hashes)):
                # A member that asks for more than its link carries is not answered.
                if peer in self._replica.members and self._send_queue.requested(peer) <= 2 * IN_FLIGHT:
                    for index in dict.fromkeys(message.indices):
                        times[peer, index] += 1
                        if index < len(source) and times[peer, index] <= TIMES:
                            chunk = Chunk(ready.round, self._fragment, ready.attempt, index)
                            self._send_queue.bulk(peer, Frame(chunk, source[index]), requested=True)
                return True
        return False
