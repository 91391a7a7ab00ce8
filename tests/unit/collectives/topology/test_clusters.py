"""Clusters of nearby peers and the routes of chunks: pure functions of a ballot."""

from collections import Counter

from hypothesis import given, settings
from hypothesis import strategies as st
from msgspec import structs
from thinwire.collectives.topology.clusters import NEAR, clusters, kept, near, sound
from thinwire.collectives.topology.hierarchy_routes import Routes
from thinwire.swarm.messages.registry import Ballot, Contribution, Proposal

PEERS = [bytes([i]) * 32 for i in range(12)]
SITES = st.lists(st.sampled_from(["", "a", "b", "c"]), min_size=1, max_size=12)


def ballot(names, *, dead=(), idle=(), silent=()):
    group = tuple(PEERS[: len(names)])
    alive = tuple(p for i, p in enumerate(group) if i not in dead)
    return Proposal(
        1,
        0,
        Ballot(1, group[0]),
        group,
        alive,
        tuple(Contribution(p, 1, 10) for i, p in enumerate(group) if i not in {*dead, *silent}),
        (),
        None,
        (),
        tuple(p for i, p in enumerate(group) if i in idle and i not in dead),
        sites=clusters(group, dict(zip(group, names, strict=True))),
    )


def test_peers_with_same_site_are_together_and_others_alone():
    names = ["x", "", "y", "x", "", "y"]
    assert clusters(PEERS[:6], dict(zip(PEERS, names, strict=False))) == (0, 1, 2, 0, 3, 2)
    assert clusters(PEERS[:3], {}) == (0, 1, 2)


@given(SITES)
def test_only_canonical_cluster_numbers_are_sound(names):
    group = PEERS[: len(names)]
    numbers = clusters(group, dict(zip(group, names, strict=True)))
    assert sound(numbers, len(names)) and not sound(numbers, len(names) + 1)
    for i, one in enumerate(names):
        for j, other in enumerate(names):
            assert (numbers[i] == numbers[j]) == (i == j or one == other != "")
    assert not sound([number + 1 for number in numbers], len(names))
    if len(set(numbers)) > 1:
        assert not sound(list(reversed(range(len(names)))), len(names))


@given(SITES, st.sets(st.integers(0, 11)))
def test_later_ballot_keeps_clusters_and_newcomers_are_alone(names, gone):
    """A new peer is alone, with any announced site: equal contributions must give equal results."""
    before = [p for i, p in enumerate(PEERS[: len(names)]) if i not in gone]
    numbers = clusters(before, dict(zip(PEERS, names, strict=False)))
    after = kept(before, numbers, PEERS)
    assert sound(after, len(PEERS))
    old, new = dict(zip(before, numbers, strict=True)), dict(zip(PEERS, after, strict=True))
    for one in PEERS:
        for other in PEERS:
            together = one in old and other in old and old[one] == old[other]
            assert (new[one] == new[other]) == (one == other or together)


@settings(max_examples=50)
@given(SITES, st.sets(st.integers(0, 11)), st.sets(st.integers(0, 11)), st.sets(st.integers(0, 11)), st.integers(0, 40))
def test_every_chunk_has_routes_to_its_owner_and_back(names, dead, idle, silent, count):
    peers = set(range(len(names)))
    if not (peers - dead) - idle or not (peers - dead) - silent:
        return
    proposal = ballot(names, dead=dead, idle=idle, silent=silent)
    routes = Routes(proposal, count, b"seed")
    working = set(proposal.alive) - set(proposal.idle)
    assert len(routes.owners) == count and set(routes.owners) <= working
    for index, owner in enumerate(routes.owners):
        collected = []
        for peer in proposal.alive:
            for cluster in routes.collected(peer, index):
                collected += [entry.peer for entry in cluster.entries]
                assert peer in working
                assert peer == owner or (peer in cluster.working and cluster.sums)
        assert sorted(collected) == [entry.peer for entry in proposal.contributors]
        reached = list(routes.receivers(owner, index))
        for peer in list(reached):
            reached += routes.receivers(peer, index)
            assert routes.sources(peer, index)[-1] == owner
        assert sorted([owner, *reached]) == list(proposal.alive), "everybody once"
        for peer in proposal.alive:
            if peer != owner:
                giver = routes.sources(peer, index)[0]
                assert peer in routes.receivers(giver, index)
    assert sum(value.weight for value in routes.inputs) == 10 * len(proposal.contributors)


def test_work_is_shared_over_and_within_sites():
    routes = Routes(ballot(["a", "a", "a", "a", "b", "b", "", ""]), 96, b"seed")
    owned = Counter(routes.owners)
    assert [owned[peer] for peer in PEERS[:8]] == [6] * 4 + [12] * 2 + [24] * 2
    relayed = Counter(routes.relay(0, index) for index in range(96))
    assert set(relayed.values()) == {24}


@given(SITES, st.integers(0, 11), st.integers(1, 64))
def test_departure_changes_no_other_duties(names, gone, count):
    gone %= len(names)
    if len(names) == 1:
        return
    whole, less = Routes(ballot(names), count, b"s"), Routes(ballot(names, idle={gone}), count, b"s")
    for index in range(count):
        if whole.owners[index] != PEERS[gone]:
            assert less.owners[index] == whole.owners[index]
        for number in range(len(whole.clusters)):
            if whole.relay(number, index) != PEERS[gone]:
                assert less.relay(number, index) == whole.relay(number, index)


@settings(max_examples=40)
@given(SITES, st.sets(st.integers(0, 11)), st.sets(st.integers(0, 11)))
def test_results_depend_only_on_contributors(names, silent, absent):
    """Peers without contributions, and absent ones, change neither values nor their order."""
    giving = [i for i in range(len(names)) if i not in silent]
    if not giving:
        return
    proposal = ballot(names, silent=silent)
    group = tuple(p for i, p in enumerate(proposal.group) if i in giving or i not in absent)
    sites = clusters(group, dict(zip(proposal.group, names, strict=True)))
    fewer = structs.replace(proposal, group=group, alive=group, sites=sites)
    assert Routes(fewer, 3, b"s").inputs == Routes(proposal, 3, b"s").inputs


def test_site_mean_name_identifies_its_contributors():
    """An excluded peer changes only the names of its own site."""
    whole, less = (
        Routes(ballot(["a", "a", "b", "b"]), 4, b"s"),
        Routes(ballot(["a", "a", "b", "b"], silent={3}), 4, b"s"),
    )
    assert whole.clusters[0].name == less.clusters[0].name and whole.clusters[1].name != less.clusters[1].name
    assert whole.clusters[1].sums and not less.clusters[1].sums


def trips(*groups, far=0.05):
    """Seconds between peers, by index: near within a group, far between two."""
    place = {PEERS[i]: number for number, group in enumerate(groups) for i in group}
    return lambda one, other: NEAR / 2 if place[one] == place[other] else far


def test_nearby_peers_are_clustered():
    assert near(PEERS[:5], trips({0, 3}, {1, 2}, {4})) == {
        PEERS[0]: PEERS[0], PEERS[3]: PEERS[0], PEERS[1]: PEERS[1], PEERS[2]: PEERS[1],
    }  # fmt: skip
    assert near(PEERS[:3], lambda one, other: 0.0) == {}, "nothing is known"
    assert near(PEERS[:3], lambda one, other: 0.1) == {}
    assert near(PEERS[:4], trips({0, 1, 2, 3})) == {}, "no wide area is between them"
    assert near([], trips()) == near(PEERS[:1], trips({0})) == {}


def test_chain_of_neighbours_is_not_one_cluster():
    """Each is near the next, but the first is far from the last: the nearest pairs are clusters."""
    at = dict(zip(PEERS, (0.0, 4e-3, 7e-3, 11e-3), strict=False))
    assert near(PEERS[:4], lambda one, other: abs(at[one] - at[other])) == {PEERS[1]: PEERS[1], PEERS[2]: PEERS[1]}


@given(st.lists(st.floats(0.0, 0.03), min_size=2, max_size=8), st.randoms())
def test_cluster_members_are_mutually_near_in_any_order(places, random):
    at = dict(zip(PEERS, places, strict=False))
    peers = list(at)

    def trip(one, other):
        return abs(at[one] - at[other])

    found = near(peers, trip)
    for one in peers:
        for other in peers:
            if one != other and found.get(one, one) == found.get(other, other):
                assert 0 < trip(one, other) <= NEAR
    random.shuffle(peers)
    assert near(peers, trip) == found
