"""`thinwire doctor`: all checks, in the order in which they matter."""

from __future__ import annotations

import asyncio
import time
from contextlib import suppress

from thinwire.node.doctor.check import Check, failed
from thinwire.node.doctor.machine import check_machine
from thinwire.node.doctor.network import check_mapping, check_network
from thinwire.node.membership.port_file import PortFile
from thinwire.node.membership.router.mapping_protocols import routers
from thinwire.node.peer.status import Status, alive, read_status, unresponsive
from thinwire.node.runtime.disk import RealDisk
from thinwire.node.runtime.load_settings import Config
from thinwire.swarm.identity.invite import Invite


def examine(config: Config, invite: Invite | None) -> list[Check]:
    """Return all checks. Without an invite, the peers are asked that the daemon here names, if one runs."""
    status, listening, stuck = None, 0, list[Check]()
    with suppress(PermissionError):  # a check of the machine reports it
        status = read_status(config.directories.status)
    if status is not None and alive(status, config.directories.lock):
        stuck = check_daemon(status, time.time())
        listening = PortFile(config.directories.run(bytes.fromhex(status.run)).port, RealDisk()).load()
        if invite is None and status.invite:
            invite = Invite.parse(status.invite)
    network = asyncio.run(check_network(config, invite, listening, time.time))
    by = routers(config.host)
    mapping = asyncio.run(check_mapping(config, listening or config.port, listening=bool(listening), by=by))
    return [*stuck, *network, mapping, *check_machine(config, time.monotonic)]


def check_daemon(status: Status, wall: float) -> list[Check]:
    """Return a failed check of a running daemon that does not respond; none if it does.

    `wall`: seconds since 1970.
    """
    fault = unresponsive(status, wall)
    remedy = f"continue it if it is suspended (kill -CONT {status.process}), else end it and start it again"
    return [failed("daemon", fault, remedy)] if fault else []
