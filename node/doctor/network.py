"""Checks of the network: our port, how peers see us, their clocks, and the rate from one of them."""

from __future__ import annotations

import statistics
from collections.abc import Callable, Iterable, Sequence

from thinwire.collectives.transport.addresses.observed_addresses import Sighting, judge
from thinwire.collectives.transport.interface import Contact
from thinwire.collectives.transport.zeromq.sockets.listener import PortTaken
from thinwire.collectives.transport.zeromq.transport import ListenAddress, ZmqTransport
from thinwire.node.doctor.check import Check, failed, passed, skipped
from thinwire.node.membership.join import ADVICE
from thinwire.node.membership.router.port_mapping import MappingFailed, Router, map_by_any
from thinwire.node.runtime.load_settings import Config, member_ports
from thinwire.node.runtime.settings import SLOWEST, Rate
from thinwire.swarm.identity.identity import Identity
from thinwire.swarm.identity.invite import Invite
from thinwire.swarm.messages.registry import BALLAST, Refuse

FARTHEST = 60
"""Seconds by which our clock may differ from those of others: half of what records allow."""

MAPPED_SECONDS = 120
"""Seconds after which the mapping of a check ends, if its removal fails."""

_NEEDS_PEER = "no peer to ask: give an invite, or start a daemon first"
_UNREACHED = "ask for a new invite, or allow outgoing connections in the firewall"


async def check_network(
    config: Config, invite: Invite | None, listening: int, wall: Callable[[], float]
) -> list[Check]:
    """Return the checks of the network.

    `invite`: run and peers to ask. `listening`: port of the gate of a daemon that runs here with this configuration, 0:
    none. `wall`: seconds since 1970.
    """
    key = config.directories.key
    identity = Identity.load(key) if key.exists() else Identity.generate()
    transport = ZmqTransport(
        identity,
        run_id=invite.run_id if invite is not None else bytes(32),
        admit=lambda hello, record, source: Refuse("busy", "this is only a check of the network"),
        wall=lambda: int(wall()),
        listen=ListenAddress(config.host)
        if listening
        else ListenAddress(config.host, config.port, member_ports(config)),
    )
    try:
        await transport.open()
    except PortTaken as error:
        return [failed("port", str(error), error.hint), *(skipped(name, "no port") for name in _OTHERS)]
    port = listening or transport.port
    found = [passed("port", f"{port}, where the daemon listens" if listening else f"{port} on {config.host} is free")]
    try:
        seeds = invite.seeds if invite is not None else ()
        contacts = [Contact(seed.address, seed.transport_key) for seed in seeds]
        others = [contact for contact in contacts if contact.transport_key != identity.transport_public]
        if not others:
            return [*found, *(skipped(name, _NEEDS_PEER) for name in _OTHERS)]
        answers = await transport.observe(others, port=listening)
        ballast: Sequence[Sighting | Refuse] = ()
        best = next((one for one, answer in zip(others, answers, strict=True) if isinstance(answer, Sighting)), None)
        if best is not None:
            ballast = await transport.observe([best], port=-1, size=BALLAST)
    finally:
        await transport.close()
    sightings = [answer for answer in answers if isinstance(answer, Sighting)]
    if not sightings:
        refusals = sorted((one for one in answers if isinstance(one, Refuse)), key=lambda one: one.code not in ADVICE)
        refusal = refusals[0]
        fault = f"no peer of the invite answers: {refusal.detail or refusal.code}"
        rest = (skipped(name, "no peer answers") for name in _OTHERS[1:])
        return [
            *found,
            failed("reached", fault, ADVICE.get(refusal.code, _UNREACHED)),
            *rest,
        ]
    return [*found, *judged(sightings, port, wall()), check_rate(ballast)]


async def check_mapping(config: Config, gate: int, *, listening: bool, by: Sequence[Router]) -> Check:
    """Return the check of the port mapping.

    The port of the gate is mapped and released, unless a daemon listens.
    """
    if not config.map_port:
        return skipped("mapping", "not asked for; --map-port asks")
    if not gate:  # NAT-PMP's request to remove the mapping of port 0 removes all mappings of this machine.
        return skipped("mapping", "no port is set: give --port")
    if listening:
        return skipped("mapping", "the daemon keeps its own; its address is in `thinwire status`")
    try:
        router, address = await map_by_any(by, (gate,), MAPPED_SECONDS)
        await router.unmap((gate,))
    except MappingFailed as error:
        return failed("mapping", str(error), "switch on UPnP or PCP at the router, or forward the ports by hand")
    return passed("mapping", f"the router forwards {address} ({router.name})")


_OTHERS = ("reached", "nat", "clock", "rate")
"""Names of the checks that need a peer."""


def judged(sightings: Sequence[Sighting], port: int, wall: float) -> Iterable[Check]:
    """Yield the checks that follow from sightings at `wall` seconds since 1970; our gate is at `port`."""
    reach = judge(sightings)
    if reach.reached is None:
        yield skipped("reached", "no peer tried")
    elif reach.reached:
        yield passed("reached", f"others reach this machine at {reach.address}")
    else:
        yield failed(
            "reached",
            f"others do not reach this machine at {reach.address}",
            f"forward TCP {port} and the ports for links at the router, let the firewall pass them (docs/guides/operations.md)",
        )
    if reach.nat == "unknown":
        yield skipped("nat", "this check needs answers of peers in two networks")
    else:
        kinds = {"none": "no address translation", "cone": "cone (one outside port for all peers)"}
        yield passed("nat", kinds.get(reach.nat, "symmetric (another outside port for each peer)"))
    ahead = statistics.median(wall - sighting.wall for sighting in sightings)
    difference = f"{abs(ahead):.0f} s {'ahead of' if ahead > 0 else 'behind'} the clocks of peers"
    if abs(ahead) > FARTHEST:
        yield failed("clock", difference, "set the clock, for example with `timedatectl set-ntp true`")
    else:
        yield passed("clock", "agrees with the clocks of peers" if abs(ahead) <= 2 else difference)


def check_rate(answers: Sequence[Sighting | Refuse]) -> Check:
    """Return the check of the rate at which a peer sent ballast."""
    sent = [answer for answer in answers if isinstance(answer, Sighting) and answer.rate > 0]
    if not sent:
        return skipped("rate", "the peer has no room for a measurement now; try again in a minute")
    detail = f"at least {Rate(sent[0].rate)} from {sent[0].by}"
    if sent[0].rate < SLOWEST:
        return failed("rate", detail, "use a faster line, or stop other traffic on it")
    return passed("rate", detail)
