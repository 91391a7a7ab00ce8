"""The one seam to the network: what a Transport promises, whatever it is made of.

`ZmqTransport` (collectives/wire.py) is the one of life; `SimTransport` (sims/network.py) the one of simulations. Each
method says why it has its shape.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Protocol

import msgspec
from thinwire.swarm.frame import Frame
from thinwire.swarm.protocol import Hello, PeerId, Refuse, Welcome
from thinwire.swarm.record import PeerRecord

RESET = "reset"
"""The reason of an Arrival when the link was reset: the process ended, or something between us broke the connection."""

REFUSED = "refused"
"""The reason of an Arrival when the peer's machine refuses connections at its address: the process is gone."""


@dataclass(frozen=True, slots=True)
class Contact:
    """Where a stranger can be met before its record is known: its gate address ("host:port") and its transport key."""

    address: str
    transport_key: bytes


class Arrival(msgspec.Struct, frozen=True, gc=False):
    """What `recv` yields: a checked frame from an authenticated peer, or (`frame` is None) the loss of its link."""

    peer: PeerId
    frame: Frame | None
    reason: str = ""

    @property
    def gone(self) -> bool:
        """The peer's machine told us that its process is no more, as against mere silence or a broken connection."""
        return self.frame is None and self.reason == REFUSED


Admit = Callable[[Hello, PeerRecord], Welcome | Refuse]
"""Decides about a stranger whose record's signature and transport key have been checked.

The transport fills in `endpoint`, `bulk` and `secret` of a Welcome.
"""


class Transport(Protocol):
    """Moves frames between this peer and others. A remote failure is a value here, never an exception."""

    @property
    def peer_id(self) -> PeerId:
        """Who we are."""
        ...

    def addresses(self) -> tuple[str, ...]:
        """Gate addresses ("host:port") under which others may reach us; known once the transport is open."""
        ...

    async def meet(self, contact: Contact, hello: Hello) -> Welcome | Refuse:
        """Knock at a stranger's gate. Used to bootstrap from an invite, when only address and key are known.

        A gate that cannot be reached, or whose record does not fit its transport key, answers as Refuse("unreachable", …), or
        Refuse("refused", …) when the machine is there and nobody listens.
        """
        ...

    def learn(self, record: PeerRecord) -> None:
        """Take note of where a peer is reachable. A newer record replaces an older one. Links open on first `send`.

        Our own record is given here too: it is what we show at the gates of others.
        """
        ...

    async def send(self, to: PeerId, frame: Frame) -> bool:
        """Hand a frame to the link to `to`; True when the link took it, False when the peer is unknown or unreachable.

        When the peer's machine refuses the connection, `recv` yields an Arrival with the reason REFUSED as well.

        Waits while the link's buffer is full (back-pressure): memory in flight is bounded by the transport, not by
        its users. Control frames never wait behind bulk. The payload may be reused by the caller once this returns.
        """
        ...

    def offer(self, to: PeerId, frame: Frame) -> bool:
        """`send` without waiting: True when a link was up and took the frame at once; False: nothing happened, use `send`."""
        ...

    async def recv(self) -> Arrival:
        """The next checked frame of any peer, or the news that a link broke (at once on a reset, not after a time-out)."""
        ...

    def drop(self, peer: PeerId, reason: str, *, ban: bool = False) -> None:
        """Close the link to a peer and forget it; with `ban` its keys are refused from now on, before any allocation."""
        ...

    def totals(self) -> tuple[int, int]:
        """Bytes sent and received on all links since the transport was opened, as they were on the wire."""
        ...

    def came(self, peer: PeerId) -> int:
        """Bytes of bulk that have come over the link to a peer, those of a frame that is not whole yet among them."""
        ...

    async def close(self) -> None:
        """Close every link and socket. What was accepted by `send` may be lost."""
        ...
