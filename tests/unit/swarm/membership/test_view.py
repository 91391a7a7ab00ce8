"""Views of the swarm: the peers that have changed since an earlier one."""

from __future__ import annotations

from thinwire.swarm.membership.view import RECENT, LivePeers

IDS = [number.to_bytes(32, "big") for number in range(RECENT + 2)]


def test_changes_since_a_view_are_the_peers_that_joined_or_departed():
    live = LivePeers(IDS[0])
    live.add(IDS[1])
    number = live.view().number
    assert live.changed_since(number) == []
    live.add(IDS[2])
    live.remove(IDS[1])
    assert live.changed_since(number) == [IDS[1], IDS[2]]


def test_changes_since_a_view_long_ago_are_unknown():
    live = LivePeers(IDS[0])
    number = live.view().number
    for peer in IDS[1 : RECENT + 1]:
        live.add(peer)
    assert set(live.changed_since(number) or ()) == set(IDS[1 : RECENT + 1])
    live.add(IDS[RECENT + 1])
    assert live.changed_since(number) is None
