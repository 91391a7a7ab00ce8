"""Data of rounds that this peer sends unasked: which receivers lack some of it."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field

from thinwire.swarm.frame import Frame
from thinwire.swarm.messages.registry import Chunk, Partial, PeerId, Result, Subtotal

ROUND_DATA = (Chunk, Partial, Result, Subtotal)
"""Types of bulk data of rounds."""


def of_round(round: int, fragment: int) -> Callable[[Frame], bool]:
    """Return a function that returns True for a frame with data of this round."""

    def matches(frame: Frame) -> bool:
        message = frame.message
        return isinstance(message, ROUND_DATA) and (message.round, message.fragment) == (round, fragment)

    return matches


@dataclass(slots=True)
class _Outflow:
    """Data of one round. last_sent: time at which its last frame was handed to the transport; 0.0: none."""

    round: int
    receivers: set[PeerId] = field(default_factory=set)
    pending: dict[PeerId, int | None] = field(default_factory=dict)
    """By receiver that may lack data: the number of its link's bulk bytes that includes all of the data.

    None: at the last check the transport did not have all of it yet.
    """
    last_sent: float = 0.0

    @property
    def most_lack(self) -> bool:
        """True if most receivers may lack some of it."""
        return 2 * len(self.pending) > len(self.receivers)


class RoundOutflows:
    """Data of the round in progress of each fragment.

    `delivered(peer)`: bulk bytes of its link that were handed over, and that have arrived. `waits(peer, round, fragment)`:
    True if some of the data waits in our queue.
    """

    def __init__(
        self, delivered: Callable[[PeerId], tuple[int, int]], waits: Callable[[PeerId, int, int], bool]
    ) -> None:
        self._delivered, self._waits = delivered, waits
        self._outflows: dict[int, _Outflow] = {}

    def begin(self, round: int, fragment: int) -> None:
        """Begin a round of a fragment."""
        self._outflows[fragment] = _Outflow(round)

    def queued(self, to: PeerId, frame: Frame) -> None:
        """Note a frame for a receiver, before it is sent."""
        if (outflow := self._of(frame)) is not None:
            outflow.receivers.add(to)
            outflow.pending[to] = None

    def sent(self, frame: Frame, now: float) -> None:
        """Note that the transport has a frame."""
        if (outflow := self._of(frame)) is not None:
            outflow.last_sent = now

    def last_sent(self, round: int, fragment: int) -> float:
        """Return the time at which the transport got the last frame of a round; 0.0 if unknown."""
        outflow = self._find(round, fragment)
        return outflow.last_sent if outflow is not None else 0.0

    def most_lack(self, round: int, fragment: int) -> bool:
        """Return True if most receivers lack some of a round's data.

        Asks the transport about the receivers that may lack some.
        """
        outflow = self._find(round, fragment)
        if outflow is None:
            return False
        for peer, last in list(outflow.pending.items()):
            if not outflow.most_lack:
                break
            taken, arrived = self._delivered(peer)
            if last is None and not self._waits(peer, round, fragment):
                outflow.pending[peer] = last = taken
            if last is not None and arrived >= last:
                del outflow.pending[peer]
        return outflow.most_lack

    def on_link_down(self, peer: PeerId) -> None:
        """Forget what a peer lacks: its next link counts bytes from 0."""
        for outflow in self._outflows.values():
            outflow.pending.pop(peer, None)

    def _of(self, frame: Frame) -> _Outflow | None:
        message = frame.message
        return self._find(message.round, message.fragment) if isinstance(message, ROUND_DATA) else None

    def _find(self, round: int, fragment: int) -> _Outflow | None:
        outflow = self._outflows.get(fragment)
        return outflow if outflow is not None and outflow.round == round else None
