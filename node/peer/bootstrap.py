"""Construction of a real peer: key, environment, transport, and the way into a run."""

from __future__ import annotations

import asyncio
import os
import random
import textwrap
import time
from collections.abc import Awaitable, Callable
from contextlib import suppress
from dataclasses import dataclass, replace
from pathlib import Path

from thinwire.collectives.transport.interface import Admit, Loan, Transport
from thinwire.collectives.transport.shared_memory.local_sockets import usual_folder
from thinwire.collectives.transport.zeromq.sockets.listener import PortTaken
from thinwire.collectives.transport.zeromq.transport import ListenAddress, ZmqTransport
from thinwire.node.membership.join import SEARCH_SECONDS
from thinwire.node.membership.port_file import PortFile
from thinwire.node.methods.registry import check_codec
from thinwire.node.peer.peer import Peer
from thinwire.node.runtime.device import spare_memory
from thinwire.node.runtime.directories import Directories, RunDirectory
from thinwire.node.runtime.disk import RealDisk
from thinwire.node.runtime.environment import Environment, OpenTransport
from thinwire.node.runtime.event_log import Emit
from thinwire.node.runtime.load_settings import Config, advertised, member_ports
from thinwire.node.state.checkpoint_store import LATEST, step_name
from thinwire.swarm.identity.identity import Identity, IdentityError
from thinwire.swarm.identity.invite import Invite
from thinwire.swarm.manifest.manifest import Manifest, ManifestError, ManifestMismatch
from thinwire.swarm.manifest.parser import parse, sign
from thinwire.swarm.membership.presets import LAN, WAN, Preset

MOST_CHANGES = 8
"""Changed keys that an error names."""


@dataclass(frozen=True, slots=True)
class RunEntry:
    """Run to take part in: this peer's identity there, and `begin`, which opens the peer's first stage.

    `begin` returns True if there is a swarm to join, False if this peer starts it. preset: timing of membership; None: that
    of the network of the configured host.
    """

    identity: Identity
    run_id: bytes
    config: Config
    begin: Callable[[Peer], Awaitable[bool]]
    preset: Preset | None = None

    def peer(self, emit: Emit) -> Peer:
        """Return the peer, with nothing open yet."""
        environment = Environment(
            time.monotonic,
            time.time,
            random.Random(os.urandom(16)),
            RealDisk(),
            aside=asyncio.to_thread,
            write=asyncio.to_thread,
            spare=spare_memory,
        )
        preset = self.preset or (LAN if self.config.host.startswith("127.") else WAN)
        config, directory = self.config, self.config.directories.run(self.run_id)
        # The default is the name of the machine, which its owner may not want to publish.
        name = "" if config.sources["name"] == "default" else config.name
        return Peer(self.identity, self.run_id, environment, directory, preset, emit, config.site, name)


def founding(toml: bytes, config: Config, name: str, *, new: bool = False) -> RunEntry:
    """Return the entry to the run of a manifest from the file `name`: as its founder, or to return to it.

    new: the manifest may differ from that of an earlier run with the same run.name. Raises ManifestError, ConfigError,
    ManifestMismatch, IdentityError.
    """
    home = config.directories
    if not new and not os.path.lexists(home.key):
        _refuse_lost_key(parse(toml), home)
    identity = Identity.load_or_create(home.key)
    signed = sign(toml, identity)
    manifest = signed.verify()
    check_codec(manifest, name)
    run_id = manifest.run_id(identity.public_key)
    if not new:
        _refuse_changes(manifest, run_id, identity, home, name)
    opener = _transport_opener(identity, run_id, config)

    async def begin(peer: Peer) -> bool:
        return await peer.found(signed, opener)

    return RunEntry(identity, run_id, config, begin)


def _refuse_lost_key(manifest: Manifest, home: Directories) -> None:
    """Raise IdentityError if this home, which has no key, has founded and trained a run of this name."""
    for path in home.runs.glob("*/run.toml"):
        folder = RunDirectory(path.parent)
        with suppress(OSError, ManifestError):
            same = parse(path.read_bytes()).run.name == manifest.run.name
            if same and _trained(folder) and not folder.token.exists():  # A peer that joins gets a token.
                raise IdentityError(
                    f"{home.key} is missing, and only that key continues run {manifest.run.name!r} of this home",
                    "put the key file back, or begin another run with --new (Python: new=True)",
                )


def _refuse_changes(manifest: Manifest, run_id: bytes, identity: Identity, home: Directories, name: str) -> None:
    """Raise ManifestMismatch if this machine has trained another run of this name, and not yet this one."""
    if _trained(home.run(run_id)):
        return
    earlier = []
    for path in home.runs.glob("*/run.toml"):
        folder = RunDirectory(path.parent)
        with suppress(OSError, ManifestError):  # a manifest of another version
            older = parse(path.read_bytes())
            ours = folder.path.name == home.run(older.run_id(identity.public_key)).path.name
            if ours and older.run.name == manifest.run.name and (checkpoint := _trained(folder)):
                earlier.append((checkpoint.stat().st_mtime, checkpoint, older))
    if earlier:
        _, checkpoint, older = max(earlier, key=lambda one: one[0])
        changes = [textwrap.shorten(change, 160) for change in manifest.changes_since(older)]
        more = [f"and {len(changes) - MOST_CHANGES} more keys"] if len(changes) > MOST_CHANGES else []
        weights = "" if manifest.model.kind == "custom" else f", or from trained weights with --from {checkpoint}"
        raise ManifestMismatch(
            f"{name} has changed since this machine trained run {manifest.run.name!r}, so it is another run: "
            + "; ".join(changes[:MOST_CHANGES] + more),
            f"begin it at round 0 with --new (Python: new=True) or another run.name{weights}; "
            "or undo the change to continue the old run",
        )


def _trained(run: RunDirectory) -> Path | None:
    """Return the newest checkpoint of a run after its first round."""
    with suppress(OSError, ValueError):  # the file may be damaged
        name = (run.checkpoints / LATEST).read_text().strip()
        if name != step_name(0) and (run.checkpoints / name).is_dir():
            return run.checkpoints / name
    return None


def arriving(invite: str | Invite, config: Config, search: float = SEARCH_SECONDS) -> RunEntry:
    """Return the entry to the run of an invite (or its text); the search takes at most `search` seconds.

    Raises InviteError, ConfigError.
    """
    parsed = Invite.parse(invite) if isinstance(invite, str) else invite
    identity = Identity.load_or_create(config.directories.key)
    opener = _transport_opener(identity, parsed.run_id, config)

    async def begin(peer: Peer) -> bool:
        return await peer.arrive(parsed, opener, search)

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
                listen=ListenAddress(config.host, port, member_ports(config), advertise),
                admit=admit,
                wall=lambda: int(time.time()),
                up=int(config.up or 0),  # Messages contain it, and refuse a subclass.
                loan=Loan(config.relay, config.relay_circuits, config.relay_limit),
                shared=usual_folder() if config.shared_memory else None,
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
