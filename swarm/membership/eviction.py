"""Eviction from the table of peers: one attacker must not fill it, although identities are free.

A peer from which messages have arrived over a link keeps its entry, unless it has failed on trial. A peer on trial that has
only sent a Hello, with any address in its record, is evicted when the limit is reached and another one sends a Hello. If the
whole table is full, a peer that is only known from others, or is not present, is evicted for one that has proved its keys here.
"""

from __future__ import annotations

import ipaddress
import random
from collections.abc import Sequence
from functools import lru_cache
from typing import NamedTuple

from thinwire.swarm.identity.address import is_ip, scope_of, split_address, subnet_of
from thinwire.swarm.identity.admission_token import AdmissionPolicy
from thinwire.swarm.identity.peer_record import PeerRecord
from thinwire.swarm.membership.peer_table import PeerEntry, PeerTable
from thinwire.swarm.messages.registry import MAX_ENDORSED, PeerId

MAX_PEERS = 4096
"""Maximum number of peers in a table, departed ones included.

Larger swarms would need another protocol.
"""


class Place(NamedTuple):
    """Place in the view for a peer of this `network`.

    evicted: peer that loses its place to it, for this `reason`; None if a place is free.
    """

    network: str
    evicted: PeerId | None = None
    reason: str = ""


def needs_place(entry: PeerEntry, record: PeerRecord, source: str) -> bool:
    """Return True if a known peer needs a place. Every unknown peer needs one.

    A known peer needs a place if it comes back into the view, or if it comes to our gate and has no link yet. In the second
    case it already has a place, but for the network that its record or another peer has stated.
    """
    if entry.live:
        return bool(source) and not entry.linked
    return entry.state != "banned" and entry.is_older_than(record)


def find_place(
    table: PeerTable,
    record: PeerRecord,
    policy: AdmissionPolicy | None,
    rng: random.Random,
    *,
    source: str,
    authenticated: bool,
) -> Place | None:
    """Return the place that a peer may take; None if there is none.

    An authenticated peer may evict another one.
    """
    peer, entry = record.peer_id, table.entries.get(record.peer_id)
    network = entry.network if entry is not None and not source else ""
    network = network or _network_of(record.addresses, source, authenticated=authenticated)
    may_evict = authenticated and peer not in table.failed
    if rivals := _rivals(table, record, network, policy):
        evicted = _evicted_rival(table, rivals, rng) if may_evict else None
        if evicted is None:
            return None
        failed = table.entries[evicted].linked
        return Place(
            network, evicted, "forgotten: it has failed on trial" if failed else "forgotten: it has not connected"
        )
    if entry is not None or len(table.entries) < MAX_PEERS:
        return Place(network)
    evicted = _evicted_from_full_table(table) if may_evict else None
    return Place(network, evicted, "forgotten: the table is full") if evicted is not None else None


def _rivals(table: PeerTable, record: PeerRecord, network: str, policy: AdmissionPolicy | None) -> list[PeerId]:
    """Return the peers on trial of which one must go before another one may enter; none if there is room.

    At most MAX_ENDORSED live peers are on trial, a quarter of the largest group, and `policy.per_network` (0: no limit) of
    one known `network`. Protected peers are not on trial any more.
    """
    if policy is None or record.peer_id in table.protected or not policy.on_trial(record.token, record.peer_id):
        return []
    others = [
        peer
        for peer, entry in table.entries.items()
        if entry.live
        and peer not in table.protected
        and peer != record.peer_id
        and policy.on_trial(entry.record.token, peer)
    ]
    near = [peer for peer in others if table.entries[peer].network == network]
    if network and len(near) >= policy.per_network > 0:
        return near
    return others if len(others) >= MAX_ENDORSED else []


def _evicted_rival(table: PeerTable, among: Sequence[PeerId], rng: random.Random) -> PeerId | None:
    """Return the one of these peers to evict; None if all of them have had a link, and none has failed.

    Peers that are only known from others come first, those that have had a link and have failed on trial last. The peer is
    drawn at random: if it were the oldest one, a flood of Hello messages would always push out an honest newcomer before its
    link is open.
    """
    unlinked = [peer for peer in among if not table.entries[peer].linked]
    reported = [peer for peer in unlinked if not table.entries[peer].authenticated]
    evictable = reported or unlinked or [peer for peer in among if peer in table.failed]
    return rng.choice(evictable) if evictable else None


def _evicted_from_full_table(table: PeerTable) -> PeerId | None:
    """Return a peer to evict from a full table, the one banned last if possible; None if there is none.

    It is an unprotected peer that is only known from others, or is not present: dead, gone or banned. If made-up or
    banned keys could fill the table, peers that connect themselves would find no room; if any peer could be evicted,
    members would be lost.
    """
    evictable = [
        peer
        for peer, entry in table.entries.items()
        if peer not in table.protected and not (entry.authenticated and entry.live)
    ]
    banned = [peer for peer in evictable if table.entries[peer].state == "banned"]
    return max(banned, key=lambda peer: table.entries[peer].since, default=evictable[0] if evictable else None)


@lru_cache(maxsize=8192)
def _network_of(addresses: tuple[str, ...], source: str, *, authenticated: bool) -> str:
    """Return the network of a peer with these addresses in its record; empty if it is unknown.

    It is the network of `source`, from where the peer has come to our gate. The first public address in its record counts if
    there is no source, or if that is private, since then the peer has come through a proxy of ours. Private addresses in a
    record are the same in many homes. They count for a peer that only others have reported, until it comes to our gate. A
    peer that comes over a relay (`authenticated` without a source) never does, so its network is unknown.
    """
    public = [address for address in addresses if is_ip(address) and scope_of(address) == "internet"]
    claimed = public or (() if authenticated else addresses)
    host = split_address(claimed[0])[0] if claimed else ""
    try:
        return subnet_of(source if source and not (public and _private(source)) else host)
    except ValueError:
        return ""


def _private(host: str) -> bool:
    return not ipaddress.ip_address(host).is_global
