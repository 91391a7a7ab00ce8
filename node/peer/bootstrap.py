"""Construction of a real peer: key, environment, transport, and the way into a run."""

from __future__ import annotations

import asyncio
import os
import random
import time
from collections.abc import Awaitable, Callable
from dataclasses import dataclass, replace

from thinwire.collectives.transport.interface import Admit, Transport
from thinwire.collectives.transport.zeromq.listener import PortTaken
from thinwire.collectives.transport.zeromq.transport import ZmqTransport
from thinwire.node.membership.join import SEARCH_SECONDS
from thinwire.node.membership.port_file import PortFile
from thinwire.node.methods.registry import check_codec
from thinwire.node.peer.peer import Peer
from thinwire.node.runtime.config import Config, advertised, member_ports
from thinwire.node.runtime.disk import RealDisk
from thinwire.node.runtime.environment import Environment, OpenTransport
from thinwire.node.runtime.event_log import Emit
from thinwire.swarm.identity.identity import Identity
from thinwire.swarm.identity.invite import Invite
from thinwire.swarm.manifest.parser import sign
from thinwire.swarm.membership.presets import LAN, WAN


@dataclass(frozen=True, slots=True)
class RunEntry:
    """Run to take part in: this peer's identity there, and `begin`, which opens the peer's first stage.

    `begin` returns True if there is a swarm to join, False if this peer starts it.
    """

    identity: Identity
    run_id: bytes
    config: Config
    begin: Callable[[Peer], Awaitable[bool]]

    def peer(self, emit: Emit) -> Peer:
        """Return the peer, with nothing open yet."""
        environment = Environment(
            time.monotonic,
            time.time,
            random.Random(os.urandom(16)),
            RealDisk(),
            aside=asyncio.to_thread,
            write=asyncio.to_thread,
        )
        preset = LAN if self.config.host.startswith("127.") else WAN
        directory, site = self.config.directories.run(self.run_id), self.config.site
        return Peer(self.identity, self.run_id, environment, directory, preset, emit, site)


def founding(toml: bytes, config: Config, name: str) -> RunEntry:
    """Return the entry to the run of a manifest from the file `name`: as its founder, or to return to it.

    Raises ManifestError, ConfigError.
    """
    identity = Identity.load_or_create(config.directories.key)
    signed = sign(toml, identity)
    manifest = signed.verify()
    check_codec(manifest, name)
    run_id = manifest.run_id(identity.public_key)
    opener = _transport_opener(identity, run_id, config)

    async def begin(peer: Peer) -> bool:
        return await peer.found(signed, opener)

    return RunEntry(identity, run_id, config, begin)


def arriving(invite: str | Invite, config: Config, search: float = SEARCH_SECONDS) -> RunEntry:
    """Return the entry to the run of an invite, or of its text; the search takes at most `search` seconds.

    Raises InviteError, ConfigError.
    """
    parsed = Invite.parse(invite) if isinstance(invite, str) else invite
    identity = Identity.load_or_create(config.directories.key)
    opener = _transport_opener(identity, parsed.run_id, config)

    async def begin(peer: Peer) -> bool:
        await peer.arrive(parsed, opener, search)
        return True

    return RunEntry(identity, parsed.run_id, config, begin)


def _transport_opener(identity: Identity, run_id: bytes, config: Config) -> OpenTransport:
    """Return a function that opens the real transport with this machine's settings.

    Raises ConfigError; the function raises PortTaken.
    """
    stored = PortFile(config.directories.run(run_id).port, RealDisk())
    # The setting's default gives way to the port that this run had; port 0 prefers that one, but takes any other.
    kept = stored.load()
    if config.sources["port"] == "default" and kept:
        config = replace(config, port=kept)
    advertise = advertised(config, config.port)

    async def open_transport(admit: Admit) -> Transport:
        for port in (kept, 0) if kept and not config.port else (config.port,):
            transport = ZmqTransport(
                identity,
                run_id=run_id,
                host=config.host,
                port=port,
                ports=member_ports(config),
                advertise=advertise or None,
                admit=admit,
                wall=lambda: int(time.time()),
                up=config.up or 0,
                relay=config.relay,
            )
            try:
                await transport.open()
            except PortTaken:
                if port == config.port:
                    raise
            except BaseException:
                await transport.close()
                raise
            else:
                break
        stored.save(transport.port)
        return transport

    return open_transport
