"""The order in which the chunks of a ring pass the peers."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st
from thinwire.collectives.rounds.data_planes.ring_schedule import RingPosition, joined, paths, result, ring
from thinwire.swarm.messages.registry import Ballot, Contribution, Proposal

IDS = [bytes([i]) * 32 for i in range(9)]


@st.composite
def opens(draw):
    """Ballots with a ring, with some peers outside it and some without a contribution."""
    alive = sorted(draw(st.sets(st.sampled_from(IDS), min_size=2)))
    places = list(range(len(alive)))
    inside = draw(st.permutations(places).flatmap(lambda p: st.integers(1, len(p)).map(lambda n: p[:n])))
    entries = draw(st.sets(st.sampled_from(alive), min_size=1))
    contributors = tuple(Contribution(peer, 1, 1 + IDS.index(peer)) for peer in sorted(entries))
    idle = tuple(peer for at, peer in enumerate(alive) if at not in inside)
    group = tuple(alive)
    return Proposal(1, 0, Ballot(1, alive[0]), group, group, contributors, (), None, (), idle, order=tuple(inside))


@given(opens())
def test_each_contribution_is_added_once_and_owner_is_last(proposal):
    peers = ring(proposal)
    found = paths(proposal)
    assert list(found) == list(peers)
    for owner, path in found.items():
        assert path.stations[-1] == owner
        added = [entry for entries in path.adds for entry in entries]
        assert sorted(added, key=lambda entry: entry.peer) == list(proposal.contributors)
        weights = [sum(entry.weight for entry in entries) for entries in path.adds]
        assert list(path.before) == [sum(weights[:at]) for at in range(len(weights))]
        assert path.adds[0], "it begins with somebody who has something"
        at = peers.index(owner)
        turned = [*peers[at + 1 :], *peers[: at + 1]]
        assert list(path.stations) == turned[len(turned) - len(path.stations) :], (
            "each sends to the next one of the ring"
        )
        for station, entries in zip(path.stations[1:], path.adds[1:], strict=True):
            assert {entry.peer for entry in entries} <= {station}
        assert {entry.peer for entry in path.adds[0]} <= {path.stations[0], *proposal.idle}


@given(opens(), st.integers(0, 40))
def test_neighbours_agree_on_source_and_target_of_each_chunk(proposal, count):
    laps = {peer: RingPosition(peer, proposal, count) for peer in proposal.alive}
    peers = ring(proposal)
    for peer, position in laps.items():
        assert position.owners == laps[peers[0]].owners and position.outside == proposal.idle
        if peer in peers:
            assert laps[position.right].left == peer and laps[position.left].right == peer
        else:
            assert position.left is None and position.right is None
        for index in range(count):
            path, place = position.path(index)
            assert (place is None) == (peer not in path.stations) and (
                not place or path.stations[place - 1] == position.left
            )
            assert (place == 0) == (position.collectors[index] == peer)
    if count >= len(peers):
        assert set(laps[peers[0]].owners) == set(peers)


class Sum:
    """Reducer that returns its arguments."""

    def result(self, payloads, weights, size):
        return [*payloads, *weights, size]


def test_single_payload_of_a_station_stays_as_it_is():
    assert joined(Sum(), None, 0.0, [b"own"], [3.0], 4) == b"own"
    assert joined(Sum(), b"sum", 5.0, [], [], 4) == b"sum"


def test_station_joins_the_received_mean_with_its_weight():
    assert joined(Sum(), b"sum", 5.0, [b"own"], [3.0], 4) == [b"sum", b"own", 5.0, 3.0, 4]
    assert joined(Sum(), None, 0.0, [b"own", b"leaf"], [3.0, 2.0], 4) == [b"own", b"leaf", 3.0, 2.0, 4]


def test_owners_alone_begin_their_chunks_if_all_contributors_are_outside_the_ring():
    group = tuple(IDS[:4])
    proposal = Proposal(
        1, 0, Ballot(1, IDS[0]), group, group, (Contribution(IDS[3], 1, 5),), (), None, (), order=(0, 1, 2)
    )
    for owner, path in paths(proposal).items():
        assert path.stations == (owner,) and path.adds == (proposal.contributors,) and path.before == (0.0,)


def test_result_computed_locally_joins_the_stations_as_the_ring_does():
    group = tuple(IDS[:3])
    entries = tuple(Contribution(peer, 1, weight) for peer, weight in zip(group, (5, 6, 7), strict=True))
    proposal = Proposal(1, 0, Ballot(1, IDS[0]), group, group, entries, (), None, (), order=(0, 1, 2))
    payloads = {peer: [f"payload {at}"] for at, peer in enumerate(group)}
    first = joined(Sum(), payloads[IDS[1]], 6.0, [payloads[IDS[2]]], [7.0], 4)
    whole = joined(Sum(), first, 13.0, [payloads[IDS[0]]], [5.0], 4)
    assert result(paths(proposal)[IDS[0]], payloads, Sum(), 4) == whole
