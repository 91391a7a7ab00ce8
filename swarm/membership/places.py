"""Places in the table of members: identities are free, and must not take all of them.

A place belongs to a peer from which messages have arrived over a link. A peer on trial that has only knocked, with any
address in its record, gives its place to the next one that knocks. If the whole table is full, a peer that is only known
from others gives its place to one that has proved its keys here.
"""

from __future__ import annotations

import random
from collections.abc import Collection, Mapping, Sequence

from thinwire.swarm.identity.address import split_address, subnet_of
from thinwire.swarm.identity.admission_token import AdmissionPolicy
from thinwire.swarm.identity.peer_record import PeerRecord
from thinwire.swarm.membership.member import Member
from thinwire.swarm.messages.registry import MAX_ENDORSED, PeerId


def rivals(
    table: Mapping[PeerId, Member], record: PeerRecord, policy: AdmissionPolicy | None, kept: Collection[PeerId]
) -> list[PeerId]:
    """Return the peers on trial that have all places for which a new peer qualifies.

    Return none if there is a place.

    At most MAX_ENDORSED live peers are on trial, a quarter of the largest group, and `policy.per_network` (0: no limit) of
    one network, by the first addresses in their records. `kept`: peers that are not on trial any more.
    """
    if policy is None or record.peer_id in kept or not policy.on_trial(record.token, record.peer_id):
        return []
    others = [
        peer
        for peer, member in table.items()
        if member.live and peer not in kept and policy.on_trial(member.record.token, peer)
    ]
    network = _network(record)
    near = [peer for peer in others if _network(table[peer].record) == network]
    if len(near) >= policy.per_network > 0:
        return near
    return others if len(others) >= MAX_ENDORSED else []


def displaced(table: Mapping[PeerId, Member], taken: Sequence[PeerId], rng: random.Random) -> PeerId | None:
    """Return the one of these peers that loses its place; None if all of them have had a link.

    Peers that are only known from others come first. The peer is drawn at random: if the oldest one lost its place, a flood
    of knocks would always push out an honest newcomer before its link is open.
    """
    unlinked = [peer for peer in taken if not table[peer].linked]
    told = [peer for peer in unlinked if not table[peer].met]
    return rng.choice(told or unlinked) if unlinked else None


def forgettable(table: Mapping[PeerId, Member], kept: Collection[PeerId]) -> PeerId | None:
    """Return a peer that may lose its place in a full table; None if there is none.

    It is a peer outside `kept` that is only known from others, is dead, or has left. If records reported by others could fill
    the table, peers that connect themselves would find no room; if any peer could lose its place, members would be lost.
    """
    for peer, member in table.items():
        if peer not in kept and (not member.met or member.state in ("dead", "left")):
            return peer
    return None


def _network(record: PeerRecord) -> str:
    host = split_address(record.addresses[0])[0] if record.addresses else ""
    try:
        return subnet_of(host)
    except ValueError:
        return ""  # All peers without an address, or with a name, count as one network.
