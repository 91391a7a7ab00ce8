"""Address translators (NAT) between simulated peers and the network."""

from __future__ import annotations

from typing import Literal, TypeAlias, get_args

Nat: TypeAlias = Literal["none", "full-cone", "restricted", "symmetric", "refusing"]
"""Kind of an address translator, by the connection attempts from outside that it lets in.

Names of RFC 3489; behaviour in the terms of RFC 4787 (sections 4.1 and 5) and RFC 5382:

- none: all. There is no translator, or its router forwards the peer's ports.
- full-cone: all, once the peer has tried to connect to anyone. Mapping and filtering are endpoint-independent.
- restricted: those of addresses that the peer has tried to connect to. Mapping is endpoint-independent, filtering
  address-dependent or address and port-dependent: a machine here has one address and one port.
- symmetric: none. Mapping is address and port-dependent, so the peer's announced address leads to no mapping.
- refusing: none. It is a symmetric one whose router, or another machine at the announced address, refuses at once.

All others are dropped without an answer (RFC 5382, REQ-4, allows an error after six seconds).
"""

KINDS: tuple[Nat, ...] = get_args(Nat)


class Translator:
    """Address translator of one peer, or of all peers of a site, which reach each other behind it.

    Coarser than real ones: a mapping belongs to a machine, not to a port, as if a peer dialled from the port at which it
    listens; it is made by an attempt to connect and never expires, also not when a process restarts. There is one level
    of translators, and no outside address: a peer announces one address, behind a translator or not.
    """

    def __init__(self, kind: Nat) -> None:
        self.kind = kind
        self._sent: set[str] = set()

    def send(self, address: str) -> None:
        """Note an attempt from behind to connect to an address."""
        self._sent.add(address)

    def admits(self, address: str) -> bool:
        """Return True if an attempt to connect that comes from an address gets in."""
        if self.kind == "restricted":
            return address in self._sent
        return self.kind == "none" or (self.kind == "full-cone" and bool(self._sent))
