"""Places of peers on trial in the table of a peer: identities are free, and must not take all of them.

A place belongs to a peer from which messages have arrived over a link. One that has only knocked, with whatever address in
its record, gives its place to the next one that knocks.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping

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


def _network(record: PeerRecord) -> str:
    host = split_address(record.addresses[0])[0] if record.addresses else ""
    try:
        return subnet_of(host)
    except ValueError:
        return ""  # All peers without an address, or with a name, count as one network.
