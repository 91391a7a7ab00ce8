"""The local network as a directory: cards in the TXT records of a DNS-SD service, with zeroconf.

Sources: RFC 6762 (multicast DNS), RFC 6763 (DNS-SD).
"""

from __future__ import annotations

import asyncio
import importlib.util
from collections.abc import Sequence
from contextlib import suppress
from typing import TYPE_CHECKING, Any

from thinwire.node.discovery.public_runs import DirectoryError
from thinwire.swarm.identity.address import split_address
from thinwire.swarm.identity.errors import NotInstalled
from thinwire.swarm.identity.run_card import CARD_BYTES, RunCard

if TYPE_CHECKING:
    from zeroconf.asyncio import AsyncServiceInfo, AsyncZeroconf

SERVICE = "_thinwire._tcp.local."
LOOK_SECONDS = 2.0
"""Seconds for which answers of the network are awaited."""

MOST_SERVICES = 256
_PART = 250
"""Bytes of a card in one string of a TXT record; the string, key included, has at most 255 bytes."""


class LanSource:
    """Source of the local network.

    `host`: address of this machine whose network is used; "0.0.0.0": all networks.

    Raises NotInstalled if zeroconf is not installed.
    """

    name = "LAN"

    def __init__(self, host: str) -> None:
        if importlib.util.find_spec("zeroconf") is None:
            raise NotInstalled("the LAN directory needs the package zeroconf", "pip install 'thinwire[lan]'")
        self._host = host
        self._zeroconf: AsyncZeroconf | None = None
        """Announces our service, once there is one."""
        self._published: AsyncServiceInfo | None = None

    def _open(self) -> AsyncZeroconf:
        from zeroconf import InterfaceChoice
        from zeroconf.asyncio import AsyncZeroconf

        chosen: Any = InterfaceChoice.All if self._host in ("0.0.0.0", "::") else [self._host]
        try:
            return AsyncZeroconf(interfaces=chosen)
        except (OSError, RuntimeError) as error:
            raise DirectoryError(
                f"no multicast from {self._host}: {error}", "choose --host, or leave out --lan"
            ) from None

    async def publish(self, card: RunCard) -> None:
        """Register the service, or update its TXT record."""
        from zeroconf import Error
        from zeroconf.asyncio import AsyncServiceInfo

        zeroconf = self._zeroconf = self._zeroconf or self._open()
        info = AsyncServiceInfo(
            SERVICE,
            f"{card.record.peer_id.hex()[:24]}-{card.run_id.hex()[:24]}.{SERVICE}",
            port=split_address(card.record.addresses[0])[1] if card.record.addresses else 0,
            properties=txt_strings(card.wire),
            server=f"thinwire-{card.record.peer_id.hex()[:24]}.local.",
        )
        try:
            if self._published is None:
                sent = await zeroconf.async_register_service(info)
            else:
                sent = await zeroconf.async_update_service(info)
            self._published = info
            await sent
        except (Error, OSError) as error:
            raise DirectoryError(
                f"cannot announce the run: {type(error).__name__}: {error}", "is the network up?"
            ) from None

    async def find(self, run_id: bytes) -> Sequence[bytes]:
        """Return all cards; the directory selects those of the run."""
        return await self.cards()

    async def cards(self) -> Sequence[bytes]:
        """Return the cards of the services that answer within LOOK_SECONDS.

        Each call begins without stored answers: otherwise a flood of made-up names would hide all others for an hour.
        """
        zeroconf = self._open()
        try:
            return await self._cards(zeroconf)
        finally:
            await zeroconf.async_close()

    async def _cards(self, zeroconf: AsyncZeroconf) -> Sequence[bytes]:
        from zeroconf import Error, ServiceStateChange
        from zeroconf.asyncio import AsyncServiceBrowser, AsyncServiceInfo

        names = set[str]()

        def seen(zeroconf: object, service_type: str, name: str, state_change: ServiceStateChange) -> None:
            if len(names) < MOST_SERVICES:
                names.add(name)

        browser = AsyncServiceBrowser(zeroconf.zeroconf, SERVICE, handlers=[seen])
        try:
            await asyncio.sleep(LOOK_SECONDS)
        finally:
            await browser.async_cancel()
        infos = []
        for name in names:
            with suppress(Error):  # Anyone in the network can announce names that no service may have.
                infos.append(AsyncServiceInfo(SERVICE, name))
        await asyncio.gather(*(info.async_request(zeroconf.zeroconf, LOOK_SECONDS * 1000) for info in infos))
        return [wire for info in infos if (wire := card_in(info.properties))]

    async def close(self) -> None:
        """Withdraw the service."""
        if self._zeroconf is not None:
            await self._zeroconf.async_unregister_all_services()
            await self._zeroconf.async_close()
            self._zeroconf = self._published = None


def txt_strings(wire: bytes) -> dict[str, bytes]:
    """Divide a card among strings of a TXT record."""
    return {f"c{start // _PART}": wire[start : start + _PART] for start in range(0, len(wire), _PART)}


def card_in(strings: dict[bytes, bytes | None]) -> bytes:
    """Join the parts of a card; empty if a part is missing."""
    parts: list[bytes] = []
    while sum(map(len, parts)) <= CARD_BYTES and (part := strings.get(f"c{len(parts)}".encode())):
        parts.append(part)
    return b"".join(parts)
