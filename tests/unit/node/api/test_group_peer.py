"""Peer of several ranks, seen from the first one."""

from __future__ import annotations

from types import SimpleNamespace

import pytest
from thinwire.node.api.group_peer import GroupPeer
from thinwire.node.runtime.loop_thread import SwarmError


class Leading:
    """Stub of the first rank's Ranks that stores the errors that the other ranks are told."""

    first, told = True, ()

    def lead(self, work):
        try:
            return work()
        except SwarmError as error:
            self.told += (error,)
            raise


def test_background_failure_is_told_to_the_other_ranks():
    failure = SwarmError("the disk is full", "free some space")

    def check():
        raise failure

    known = SimpleNamespace(signed=SimpleNamespace(toml=b'[run]\nrounds = 1\n[model]\nkind = "custom"\n'))
    peer = SimpleNamespace(admission=SimpleNamespace(known=known))
    ranks = Leading()
    group = GroupPeer(ranks, lambda: SimpleNamespace(open=lambda: None, peer=peer, check=check))
    group.open()
    assert not group.done, "a failure that only one rank would raise ends its loop, and the others wait for it"
    with pytest.raises(SwarmError, match="the disk is full"):
        group.refresh()
    assert ranks.told == (failure,)
