"""Parts of a peer that need no swarm; whole ones run in tests/sim and tests/e2e."""

from types import SimpleNamespace

import pytest
from thinwire.node.peer import Peer

ME, OTHER, THIRD = (bytes([n]) * 32 for n in (1, 2, 3))


def place(round, members, alike=True):
    view = SimpleNamespace(peers=(ME, OTHER, THIRD))
    peer = SimpleNamespace(
        replica=SimpleNamespace(round=round, members=members, alike=alike),
        identity=SimpleNamespace(peer_id=ME),
        session=SimpleNamespace(roster=SimpleNamespace(view=view)),
    )
    return Peer.place(peer)


@pytest.mark.parametrize(
    "round, members, group",
    [
        (0, (ME,), (ME, OTHER, THIRD)),  # the founder shares the data from the first round on
        (3, (ME, OTHER), (ME, OTHER)),
        (3, (OTHER, THIRD), (ME, OTHER, THIRD)),  # not yet a member: as if we were already counted
    ],
)
def test_who_shares_the_data(round, members, group):
    assert place(round, members) == group


def test_where_replicas_differ_all_share_the_data():
    assert place(3, (ME, OTHER), alike=False) == (ME, OTHER, THIRD)
