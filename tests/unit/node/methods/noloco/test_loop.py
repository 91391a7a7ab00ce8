"""Screening of partner contributions before they are used."""

from __future__ import annotations

import asyncio
from types import SimpleNamespace

import numpy as np
import pytest
from thinwire.collectives.gossip.pair import PairResult
from thinwire.node.methods.noloco.loop import GossipLoop
from thinwire.swarm.manifest.parser import parse


@pytest.mark.parametrize("usual", [0.0, 1.0])
@pytest.mark.parametrize("lie", [1e-6, 1e6])
def test_one_liar_does_not_make_honest_partners_refuse_each_other(usual, lie):
    """For any length of its contributions, round after round."""

    async def at_once(work):
        return work()

    refused = []
    replica = SimpleNamespace(
        momentum=np.zeros(1), lengths=lambda payloads, grid, codec: [1.0, *[1.0] * 6, lie], members=()
    )
    session = SimpleNamespace(
        me=bytes(32),
        usual=usual,
        replica=replica,
        grid=None,
        codec=None,
        refuse=lambda peer, reason: refused.append(peer),
    )
    manifest = parse('[outer]\nmethod = "noloco"\n[exchange]\ngossip_group_size = 8\n')
    rounds = GossipLoop(session, manifest, read=None, write=None, work=at_once)
    partners = [bytes([index]) * 32 for index in range(1, 8)]
    results = [PairResult(peer, (b"x",), 1, 1) for peer in partners]
    for _ in range(100):
        refused.clear()
        found = asyncio.run(rounds._screen([], results))
        assert all(found[at].theirs for at in range(6))
        assert refused == ([partners[-1]] if lie > 1 else [])
