"""Screening of partner contributions before they are used."""

from __future__ import annotations

import asyncio
from types import SimpleNamespace

import numpy as np
import pytest
from thinwire.collectives.gossip.pair import PairResult
from thinwire.collectives.gossip.pair_codec import parse_pair_codec
from thinwire.collectives.topology.shards import Grid
from thinwire.node.methods.noloco.loop import GossipLoop
from thinwire.swarm.manifest.parser import parse


@pytest.mark.parametrize("usual", [0.0, 1.0])
@pytest.mark.parametrize("lie", [1e-6, 1e6])
def test_one_liar_does_not_make_honest_partners_refuse_each_other(usual, lie):
    """For any length of its contributions, round after round."""

    async def at_once(work):
        return work()

    async def change(work, how):
        return how()

    async def average(payloads, **announced):
        return results

    refused, me = [], bytes(32)
    replica = SimpleNamespace(
        momentum=np.zeros(1),
        theta=np.zeros(1),
        digest=bytes(32),
        round=0,
        lengths=lambda payloads, grid, codec: [1.0, *[1.0] * 6, lie],
        offer=lambda read, grid, codec: [b"ours"],
        step=lambda *given, **rest: None,
    )
    session = SimpleNamespace(
        me=me,
        usual=usual,
        replica=replica,
        grid=Grid(1, 1),
        codec=parse_pair_codec("fp32", lr=0.7, gamma=0.7),
        current=SimpleNamespace(round=1, attempt=1, base=()),
        catch_up=SimpleNamespace(reached=None),
        average=average,
        change=change,
        advance=lambda: None,
        refuse=lambda peer, reason: refused.append(peer),
    )
    manifest = parse('[outer]\nmethod = "noloco"\n[exchange]\ngossip_group_size = 8\n')
    rounds = GossipLoop(session, manifest, read=None, write=lambda theta: None, work=at_once)
    partners = [bytes([index]) * 32 for index in range(1, 8)]
    results = [PairResult(peer, (b"x",), 1, 1) for peer in partners]
    for _ in range(100):
        refused.clear()
        outcome = asyncio.run(rounds.sync(weight=1, loss=0.0, speed=0.0))
        assert set(partners[:6]) < set(outcome.contributors)
        assert outcome.missing == ({partners[-1]: "norm"} if lie > 1 else {})
        assert refused == ([partners[-1]] if lie > 1 else [])
