"""Interface between the product and the network. Each method documents why it has its shape.

Implementations: `ZmqTransport` (collectives/transport/zeromq/transport.py) for real sockets and `SimTransport`
(sims/network/transport.py) for simulations.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Protocol

import msgspec
from thinwire.collectives.transport.addresses.observed_addresses import Sighting
from thinwire.swarm.frame import Frame
from thinwire.swarm.identity.peer_record import PeerRecord
from thinwire.swarm.messages.registry import Hello, PeerId, Refuse, Welcome

RESET = "reset"
"""Reason of an Arrival after a link reset.

The process ended, or something on the path broke the connection.
"""

SAME_KEY, OWN_GATE = "a daemon with this identity runs here", "this is the gate of the process that asks"
"""Details of the refusal "busy" by a gate with the key of the visitor.

The gate is that of another process, or of the process that visits it.
"""

REFUSED = "refused"
"""Reason of an Arrival when the peer's machine refuses connections to its address.

The process is dead.
"""

RELAY_DEAD = "its relay is dead"
"""Reason of an Arrival after `leave_relay`."""

RELAY_STUCK = "its relay passes on no data"
"""Reason of an Arrival after `leave_circuit`; also part of the reason at the other end."""


class Contact(msgspec.Struct, frozen=True, gc=False):
    """Where to reach a peer before its record is known: gate address ("host:port") and transport key."""

    address: str
    transport_key: bytes


class Arrival(msgspec.Struct, frozen=True, gc=False):
    """Result of `recv`: a frame or the loss of a link.

    The frame was checked, and its sender authenticated. After a loss `frame` is None, and `relay` is the peer that spliced
    the link (b"": none).
    """

    peer: PeerId
    frame: Frame | None
    reason: str = ""
    relay: PeerId = b""

    @property
    def gone(self) -> bool:
        """True if the peer's machine reported the process dead; False for silence or a broken connection."""
        return self.frame is None and self.reason == REFUSED


@dataclass(frozen=True, slots=True)
class Loan:
    """Circuits and bytes that the owner of a machine lends to others.

    They are the settings `relay`, `relay_circuits` and `relay_limit`. `willing`: False lends nothing. `circuits`: most of them
    at one time. `daily`: most bytes a day, each counted once; 0: no limit.
    """

    willing: bool = True
    circuits: int = 512
    daily: int = 20 * 10**9


@dataclass(frozen=True, slots=True)
class Lent:
    """Use that others make of a peer's loan.

    `circuits`: those that are open; `carried`: bytes since the start, each counted once; `left`: bytes that may still be
    relayed (None: no limit); `refused`: refusals since the start by reason.
    """

    circuits: int = 0
    carried: int = 0
    left: int | None = None
    refused: Mapping[str, int] = field(default_factory=dict)


Admit = Callable[[Hello, PeerRecord, str], Welcome | Refuse]
"""Decides about a stranger after its record's signature and transport key were checked.

The last argument is the IP address from which it has come; empty if that is unknown, as over a relay.
The transport fills in `endpoint`, `bulk` and `secret` of a Welcome.
"""


class Transport(Protocol):
    """Moves frames between this peer and others. A remote failure is a return value, never an exception."""

    @property
    def peer_id(self) -> PeerId:
        """Own peer id."""
        ...

    @property
    def up_limit(self) -> int:
        """Bytes/s of bulk data that the owner of this peer allows it to send; 0: no limit."""
        ...

    def addresses(self) -> tuple[str, ...]:
        """Return the gate addresses ("host:port") at which others may reach us.

        They are known once the transport is open, and may change with the addresses of this machine.
        """
        ...

    async def meet(self, contact: Contact, hello: Hello) -> Welcome | Refuse:
        """Knock at a stranger's gate, to bootstrap from an invite, when only address and key are known.

        Returns Refuse("unreachable", …) if the gate cannot be reached or its record does not match its transport key,
        and Refuse("refused", …) if the machine answers but nothing listens there.
        """
        ...

    async def observe(self, contacts: Sequence[Contact], *, port: int = 0, size: int = 0) -> list[Sighting | Refuse]:
        """Ask gates, all from one port of ours, for our address and whether our gate is reached.

        `port`: port of the gate to reach, if it is that of another process with our keys; 0: our own; -1: none. `size`:
        bytes of ballast that each answer should carry, to measure a rate. One entry per contact, Refuse as for `meet`.
        """
        ...

    def learn(self, record: PeerRecord) -> None:
        """Store the addresses of a peer. A newer record replaces an older one. Links open on the first `send`.

        Our own record is passed here too: the transport shows it at the gates of others.
        """
        ...

    async def send(self, to: PeerId, frame: Frame) -> bool:
        """Hand a frame to the link to `to`.

        Return True if the link took it, False if the peer is unknown or unreachable. If the peer's machine refuses the
        connection, `recv` also returns an Arrival with the reason REFUSED. Waits while the link's buffer is full
        (back-pressure), so that callers need not bound the memory in flight. Control frames never wait behind bulk data. The
        caller may reuse the payload once this returns.
        """
        ...

    def offer(self, to: PeerId, frame: Frame) -> bool:
        """Send without waiting. True: a link was up and took the frame. False: nothing happened, use `send`."""
        ...

    async def recv(self) -> Arrival:
        """Return the next checked frame of any peer, or the loss of a link.

        A reset is reported at once, not after a time-out.
        """
        ...

    def drop(self, peer: PeerId, reason: str, *, ban: bool = False) -> None:
        """Close the link to a peer and forget the peer.

        With `ban` refuse its keys from now on, before any allocation.
        """
        ...

    def allow(self, peer: PeerId) -> None:
        """Accept the keys of a banned peer again."""
        ...

    def totals(self) -> tuple[int, int]:
        """Return the bytes sent and received on all links since the transport opened, as counted on the wire."""
        ...

    def inside(self) -> tuple[int, int]:
        """Return the bytes sent and received inside this machine.

        `totals` does not count them: no uplink moves them.
        """
        ...

    def shares(self, peer: PeerId) -> bool:
        """Return True if bulk data to a peer goes through the memory of this machine."""
        ...

    def by_peer(self) -> Mapping[PeerId, tuple[int, int]]:
        """Return the bytes to and from each peer, on the wire and inside this machine."""
        ...

    def pauses(self) -> Mapping[PeerId, int]:
        """Return how often each peer was not read for a while because it sent too many small frames.

        Its frames are not lost: they wait with the sender, which must not take up more time than the others.
        """
        ...

    def bulk_received(self, peer: PeerId) -> int:
        """Return the bulk bytes received over the link to a peer, including those of incomplete frames."""
        ...

    def delivered(self, peer: PeerId) -> tuple[int, int]:
        """Return the bulk bytes that the link to a peer has taken, and those that have arrived.

        Without a link both are 0. Bytes have arrived once the machine at the other end of the connection has them, which is
        the peer's, or its relay's. Where that is unknown, they have arrived once they have left our process.
        """
        ...

    def relay_of(self, peer: PeerId) -> PeerId | None:
        """Return the peer that relays between us and a peer; None if the link is direct or there is none."""
        ...

    def leave_relay(self, relay: PeerId) -> None:
        """End the links that a peer relays, because it is dead. `recv` returns each loss."""
        ...

    def leave_circuit(self, peer: PeerId) -> None:
        """End the link to a peer if it has a relay, because that passes on no bulk data.

        `recv` returns the loss. Both ends ask other relays for a while.
        """
        ...

    def no_sharing(self) -> str:
        """Return why this peer shares no memory with other peers of its machine; empty if it can."""
        ...

    def rest(self) -> None:
        """Free memory that only exchanges need: inner steps begin."""
        ...

    def obstacle(self, peer: PeerId) -> str:
        """Return why the last attempt to open a link to a peer failed; empty if there is a link."""
        ...

    def lent(self) -> Lent:
        """Return the use that other peers make of us as their relay."""
        ...

    async def close(self) -> None:
        """Close every link and socket. Frames that `send` accepted may be lost."""
        ...
