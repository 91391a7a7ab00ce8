"""Port mapping of a daemon, if its settings ask for it (`map_port`)."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Sequence

from thinwire.node.membership.port_file import PortFile
from thinwire.node.membership.router.mapping_protocols import mapped_ports, routers
from thinwire.node.membership.router.port_mapping import PortMapping
from thinwire.node.peer.peer import Peer
from thinwire.node.runtime.asyncio_extra import cancelled
from thinwire.node.runtime.disk import RealDisk
from thinwire.node.runtime.event_log import Emit
from thinwire.node.runtime.load_settings import Config

LOOK_SECONDS = 0.1
"""Seconds between two checks whether the peer has opened its port."""


class Mapping:
    """Task that maps the ports of a daemon's peer. Does nothing if the settings do not ask for it."""

    def __init__(self, config: Config, emit: Emit) -> None:
        self._config, self._emit = config, emit
        self._task: asyncio.Task[None] | None = None
        self._mapping: PortMapping | None = None

    def begin(self, peer: Callable[[], Peer]) -> None:
        """Map the ports of `peer()` as soon as it listens."""
        if self._config.map_port:
            self._task = asyncio.create_task(self._run(peer))

    async def _run(self, peer: Callable[[], Peer]) -> None:
        try:
            await self._keep(peer)
        except Exception as error:
            self._emit("alarm", {"detail": f"the mapping of ports has ended: {type(error).__name__}: {error}"})

    async def _keep(self, peer: Callable[[], Peer]) -> None:
        while peer().admission.running is None:
            await asyncio.sleep(LOOK_SECONDS)
        gate = PortFile(self._config.directories.run(peer().run_id).port, RealDisk()).load()
        ports = mapped_ports(self._config, gate)
        if not ports:
            detail = "map_port needs known ports for links: give --port or --ports; no port is mapped"
            self._emit("alarm", {"detail": detail})
            return

        def own() -> Sequence[str]:
            admission = (
                peer().admission
            )  # A daemon that has changed its stage has another peer, which may not listen yet.
            return admission.reachability.own if admission.running is not None else ()

        self._mapping = PortMapping(
            routers(self._config.host),
            ports,
            self._emit,
            lambda address: peer().admission.reachability.map(address),
            own,
        )
        await self._mapping.keep()

    async def end(self) -> None:
        """Remove the mappings."""
        if self._task is not None:
            await cancelled(self._task)
        if self._mapping is not None:
            await self._mapping.release()
