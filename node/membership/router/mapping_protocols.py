"""Protocols and ports of a port mapping, by the settings of this machine."""

from __future__ import annotations

from collections.abc import Sequence

from thinwire.node.membership.router.nat_pmp import NatPmp
from thinwire.node.membership.router.pcp import Pcp
from thinwire.node.membership.router.port_mapping import Router
from thinwire.node.membership.router.upnp import Upnp
from thinwire.node.runtime.load_settings import Config, member_ports


def routers(host: str) -> tuple[Router, ...]:
    """Return the protocols to try, in order, for a daemon that listens on `host`."""
    return Pcp(), NatPmp(), Upnp("" if host in ("0.0.0.0", "::") else host)


def mapped_ports(config: Config, gate: int) -> Sequence[int]:
    """Return the ports to map: the gate's, and those for links. Empty if links may use any port."""
    links = member_ports(config)
    return (gate, *(port for port in links if port != gate)) if links is not None else ()
