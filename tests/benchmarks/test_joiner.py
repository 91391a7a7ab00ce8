"""A joiner costs less than a tenth of the members' uplinks, and no round; it takes part however short the rounds are."""

from __future__ import annotations

import pytest
from thinwire.swarm.messages.registry import CHUNK_BYTES

from benchmarks.swarms.joiner import BEFORE, measure

UPLINK = 20e6 / 8


@pytest.mark.trial
@pytest.mark.parametrize("members", [4, pytest.param(8, marks=pytest.mark.soak)])
def test_joiner_takes_less_than_a_tenth_of_the_uplinks_and_delays_no_round(members):
    """Bounds: the share is that of the issue. A round is one frame of state longer at most; usually none is in its way."""
    cost = measure(
        members,
        joins=True,
        parameters=1_500_000,
        rounds=BEFORE + 16,
        uplink=UPLINK,
        training=4.0,
        codec="topk(k=256,chunk=4096)|2bit|rice",
    )
    assert cost.state == 4 * 1_500_000 and cost.sent >= cost.state
    assert cost.share < 0.1
    assert cost.longest <= cost.normal + CHUNK_BYTES / UPLINK
    # The members send at least half of their part, and half of them are sources.
    assert cost.fetched <= cost.normal + 4 * 12 * cost.state / (members * UPLINK)


@pytest.mark.soak
@pytest.mark.parametrize("apart", [0.0, 4.5, 6.0])
def test_several_joiners_share_what_one_may_take_and_fetch_one_state_each(apart):
    """They come in one round or in different ones, and no source is given up because it serves others, too."""
    cost = measure(
        4,
        joins=True,
        joiners=4,
        apart=apart,
        parameters=1_500_000,
        rounds=BEFORE + 30,
        uplink=UPLINK,
        training=4.0,
        codec="topk(k=256,chunk=4096)|2bit|rice",
    )
    assert cost.fetches == 4 and cost.state == 4 * 4 * 1_500_000
    # A pause follows what was sent: each source is a frame ahead at most. The round that makes them members has no pauses,
    # and brings each of them less than half a frame.
    assert cost.sent < 0.1 * 4 * UPLINK * cost.seconds + 4 * 1.5 * CHUNK_BYTES


@pytest.mark.trial
def test_joiner_of_short_dense_rounds_takes_part_although_it_costs_more():
    """A tenth of the uplinks of four peers is less than the results of such rounds: the pauses end.

    The joiner gets the results after the members, so it would be too late in each round if none waited for it.
    """
    cost = measure(
        4,
        joins=True,
        parameters=600_000,
        rounds=BEFORE + 40,
        uplink=UPLINK,
        training=0.1,
        codec="int8(block=256)",
        outer='method = "diloco"\n',
    )
    assert cost.rounds < 20
