"""Judgement of the addresses at which other peers see this one; kind of the address translator.

A sighting is a claim of one peer. Mappings and their names are those of RFC 4787, section 4.1: a translator whose
mapping does not depend on the destination is a "cone", any other translator is "symmetric".
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Literal, TypeAlias

from thinwire.swarm.identity.address import join_address, scope_of, split_address, subnet_of

Nat: TypeAlias = Literal["none", "cone", "symmetric", "unknown"]


@dataclass(frozen=True, slots=True)
class Sighting:
    """Claim of one peer about a connection that we opened to it; all addresses are "host:port".

    `by`: the peer's address. `local`: our address, as our machine knows it. `seen`: our address as the peer sees it. `reached`:
    whether the peer reached our gate at the host of `seen` and the port `gate`; None: it did not try. `wall`: its clock in unix
    seconds. `rate`: bytes/s at which it sent ballast, data without meaning that measures the link, to us; 0: it sent none.
    """

    by: str
    local: str
    seen: str
    reached: bool | None
    gate: int = 0
    wall: int = 0
    rate: float = 0.0


@dataclass(frozen=True, slots=True)
class Reach:
    """Judgement of several sightings.

    `nat`: translation between us and those peers. `address`: believed address of our gate outside of our network, "" if
    unknown. `reached`: whether a peer has reached our gate there; None: no peer tried.
    """

    nat: Nat = "unknown"
    address: str = ""
    reached: bool | None = None

    def addresses(self, own: tuple[str, ...]) -> tuple[str, ...]:
        """Return the addresses to announce: the believed one first, if our gate answered there, then `own`."""
        return tuple(dict.fromkeys((*((self.address,) if self.address and self.reached else ()), *own)))

    def __str__(self) -> str:
        translation = {"none": "no address translation", "unknown": ""}.get(self.nat, f"{self.nat} address translation")
        answer = {True: "reached there", False: "not reached there by others", None: ""}[self.reached]
        return ", ".join(filter(None, (self.address, answer, translation)))


def judge(sightings: Iterable[Sighting]) -> Reach:
    """Return the address and the kind of translation that follow from several sightings.

    A host is believed if peers of two subnets (see `subnet_of`) claim it, or if no other host is claimed; but if this holds for
    several hosts, none is believed. A peer that sees our private address is in our network, so its claim does not
    concern the address outside. A peer that sees an internet address that our machine itself has counts.
    """
    usable = [sighting for sighting in sightings if _valid(sighting)]
    outside = [one for one in usable if _host(one.seen) != _host(one.local) or scope_of(one.local) == "internet"]
    if not outside:
        return Reach("none", *_gate(usable)) if usable else Reach()
    claims: dict[str, list[Sighting]] = defaultdict(list)
    for sighting in outside:
        claims[_host(sighting.seen)].append(sighting)
    subnets = {host: len({subnet_of(_host(one.by)) for one in sightings}) for host, sightings in claims.items()}
    believed = [host for host in claims if subnets[host] > 1 or len(claims) == 1]
    if len(believed) != 1:
        return Reach()
    sightings = claims[believed[0]]
    if all(believed[0] == _host(one.local) for one in sightings):
        return Reach("none", *_gate(sightings))
    return Reach(_mapping(sightings), *_gate(sightings))


def _gate(sightings: list[Sighting]) -> tuple[str, bool | None]:
    """Return the address of our gate, as one of the peers tried it, and whether one of them reached it."""
    tried = [one for one in sightings if one.reached is not None]
    best = next((one for one in tried if one.reached), tried[0] if tried else sightings[0])
    address = join_address(_host(best.seen), best.gate) if best.gate else ""
    return address, bool(best.reached) if tried else None


def _mapping(sightings: list[Sighting]) -> Nat:
    """Return the kind of the mapping of one local port, from the ports that different peers see."""
    ports: dict[str, dict[str, int]] = defaultdict(dict)
    for one in sightings:
        ports[one.local][one.by] = split_address(one.seen)[1]
    several = [set(seen.values()) for seen in ports.values() if len(seen) > 1]
    if not several:
        return "unknown"
    return "symmetric" if any(len(seen) > 1 for seen in several) else "cone"


def _valid(sighting: Sighting) -> bool:
    """Return True if the three addresses of a sighting are IP addresses that can be dialled."""
    try:
        for address in (sighting.by, sighting.local, sighting.seen):
            subnet_of(split_address(address)[0])
    except ValueError:
        return False
    return True


def _host(address: str) -> str:
    return split_address(address)[0]
