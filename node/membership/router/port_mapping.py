"""Mappings of our ports at the router, so that peers outside can dial us.

A peer dials the gate and then ports for a link and for its streams, with the same numbers as inside. So the router maps
a block of ports to themselves, or nothing. Mappings end by themselves after LEASE seconds, are renewed after half of that,
or when this machine gets another address, and are removed at the end of the process. A failure is one alarm and never
ends a peer.
"""

from __future__ import annotations

import asyncio
import ipaddress
from collections.abc import Callable, Sequence
from contextlib import suppress
from typing import Protocol

from thinwire.node.runtime.event_log import Emit
from thinwire.swarm.identity.address import join_address, scope_of

LEASE = 3600
"""Seconds for which a router is asked to keep a mapping."""

AGAIN_SECONDS = 300.0
"""Seconds until the next attempt after a failure."""

LOOK_SECONDS = 2.0
"""Seconds between two looks whether this machine has other addresses: then the mappings lead nowhere."""

RELEASE_SECONDS = 15.0
"""Longest time for the removal of the mappings at the end."""


class MappingFailed(Exception):
    """The router does not map the ports; the text has the reason, in one line."""


class Router(Protocol):
    """Protocol to ask a router for mappings. `name`: for people."""

    name: str

    async def map(self, ports: Sequence[int], seconds: int) -> str:
        """Map these TCP ports to themselves; return the outside host.

        Raises MappingFailed; then some may be mapped, and the caller removes them.
        """
        ...

    async def unmap(self, ports: Sequence[int]) -> None:
        """Remove the mappings of these ports. Raises MappingFailed."""
        ...


async def map_by_any(routers: Sequence[Router], ports: Sequence[int], seconds: int) -> tuple[Router, str]:
    """Map the ports by the first protocol that the router speaks.

    Return the protocol and the outside address of the first port. Raises MappingFailed.
    """
    reasons = []
    for router in routers:
        try:
            outside = await router.map(ports, seconds)
            host = str(ipaddress.ip_address(outside))  # Raises for a name, which could be that of another machine.
            address = join_address(host, ports[0])
            if scope_of(address) == "internet":
                return router, address
            reasons.append(f"{router.name}: its outside address {host} is not on the internet: another router follows")
        except MappingFailed as error:
            reasons.append(f"{router.name}: {error}")
        except ValueError:
            reasons.append(f"{router.name}: it has no outside address")
        with suppress(MappingFailed):
            await router.unmap(ports)
    raise MappingFailed("; ".join(reasons))


class PortMapping:
    """Renewal of the mappings of `ports`, the first of which is the gate's.

    `mapped` receives the outside address of the gate, "" if it is lost. `own` returns the addresses of this
    machine, or nothing if they are unknown.
    """

    def __init__(
        self,
        routers: Sequence[Router],
        ports: Sequence[int],
        emit: Emit,
        mapped: Callable[[str], None],
        own: Callable[[], Sequence[str]],
    ) -> None:
        self._routers, self._ports, self._emit, self._mapped, self._own = routers, ports, emit, mapped, own
        self._router: Router | None = None
        self._asked = False

    async def keep(self) -> None:
        """Map and renew until cancelled."""
        shown = reported = ""
        own = self._own()
        while True:
            own = self._own() or own
            try:
                # Ask only the protocol that has worked, if any: with another one the first one's mappings would stay.
                known = [self._router] if self._router is not None else self._routers
                self._asked = True
                self._router, address = await map_by_any(known, self._ports, LEASE)
                failure = ""
            except MappingFailed as error:
                self._router, address, failure = None, "", str(error)
            if address != shown:
                shown = address
                self._mapped(address)
                if self._router is not None:
                    last = max(self._ports)
                    self._emit("mapped", {"address": address, "ports": f"to {last}", "protocol": self._router.name})
            if failure and failure != reported:
                self._emit("alarm", {"detail": f"the router maps no ports: {failure}"})
            reported = failure
            left = LEASE / 2 if address else AGAIN_SECONDS
            while left > 0 and (self._own() or own) == own:
                await asyncio.sleep(LOOK_SECONDS)
                left -= LOOK_SECONDS
            if left > 0:
                self._router = None  # There may be another router.

    async def release(self) -> None:
        """Remove the mappings, also those of an attempt that has failed or was cancelled."""
        routers = [self._router] if self._router is not None else self._routers if self._asked else ()
        for router in routers:
            with suppress(MappingFailed, TimeoutError):
                async with asyncio.timeout(RELEASE_SECONDS):
                    await router.unmap(self._ports)
