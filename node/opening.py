"""How a peer of life comes to be: its key, its doors to the world, its transport, its way into a run."""

from __future__ import annotations

import asyncio
import functools
import os
import random
import time
from collections.abc import Awaitable, Callable
from dataclasses import dataclass

from thinwire.collectives.transport import Admit, Transport
from thinwire.collectives.wire import ZmqTransport
from thinwire.swarm import manifest as manifests
from thinwire.swarm.identity import Identity
from thinwire.swarm.invite import Invite
from thinwire.swarm.preset import LAN, WAN

from .config import Config, advertised
from .disk import RealDisk
from .knock import SEARCH_SECONDS
from .methods import check_codec
from .peer import Doors, OpenTransport, Peer
from .presence import Emit


@dataclass(frozen=True, slots=True)
class Entry:
    """A run to take part in: who we are there, and `begin`, which opens the peer's first stage.

    `begin` gives True when there is a swarm to join, False when this peer is its beginning.
    """

    identity: Identity
    run_id: bytes
    config: Config
    begin: Callable[[Peer], Awaitable[bool]]

    def peer(self, emit: Emit) -> Peer:
        """The peer, with nothing open yet."""
        doors = Doors(time.monotonic, time.time, random.Random(os.urandom(16)), RealDisk(), asyncio.to_thread)
        preset = LAN if self.config.host.startswith("127.") else WAN
        directory, site = self.config.directories.run(self.run_id), self.config.site
        return Peer(self.identity, self.run_id, doors, directory, preset, emit, site)


def founding(toml: bytes, config: Config, name: str) -> Entry:
    """The run of a manifest of one's own, from the file `name`: found it, or come back to it.

    Raises ManifestError, ConfigError.
    """
    identity = Identity.load_or_create(config.directories.key)
    signed = manifests.sign(toml, identity)
    manifest = signed.verify()
    check_codec(manifest, name)
    run_id = manifest.run_id(identity.public_key)
    opener = _transport_opener(identity, run_id, config)

    async def begin(peer: Peer) -> bool:
        return await peer.found(signed, opener)

    return Entry(identity, run_id, config, begin)


def arriving(invite: str, config: Config, search: float = SEARCH_SECONDS) -> Entry:
    """The run that an invite names, looked for during `search` seconds. Raises InviteError, ConfigError."""
    parsed = Invite.parse(invite)
    identity = Identity.load_or_create(config.directories.key)
    opener = _transport_opener(identity, parsed.run_id, config)

    async def begin(peer: Peer) -> bool:
        await peer.arrive(parsed, opener, search)
        return True

    return Entry(identity, parsed.run_id, config, begin)


def _transport_opener(identity: Identity, run_id: bytes, config: Config) -> OpenTransport:
    """Opens the transport of life with this machine's settings. Raises ConfigError; what it gives raises PortTaken."""
    return functools.partial(_open_transport, identity, run_id, config, advertised(config, config.port))


async def _open_transport(
    identity: Identity, run_id: bytes, config: Config, advertise: tuple[str, ...], admit: Admit
) -> Transport:
    transport = ZmqTransport(
        identity,
        run_id=run_id,
        host=config.host,
        port=config.port,
        ports=range(config.ports[0], config.ports[1] + 1) if config.ports else None,
        advertise=advertise or None,
        admit=admit,
        wall=lambda: int(time.time()),
        up=config.up or 0,
    )
    try:
        await transport.open()
    except BaseException:
        await transport.close()
        raise
    return transport
