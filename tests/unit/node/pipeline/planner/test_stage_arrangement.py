"""Assignment of peers to stages against brute force and obvious clusters."""

import itertools

import msgspec
import numpy as np
import pytest
from thinwire.node.pipeline.planner.arrange_kernel import match, shortest_path, stage_distance
from thinwire.node.pipeline.planner.problem import ProblemError, load
from thinwire.node.pipeline.planner.stage_arrangement import arrange, arranged


def symmetric(count, seed):
    delays = np.random.default_rng(seed).uniform(0.1, 3.0, (count, count))
    delays = np.maximum(delays, delays.T)
    np.fill_diagonal(delays, 0)
    return delays


@pytest.mark.parametrize("seed", range(30))
def test_matching_minimizes_the_longest_hop(seed):
    delays = symmetric(10, seed)
    few, many = np.arange(1 + seed % 4), np.arange(5, 10)
    peers, ends = np.concatenate([few, many]), np.array([0, len(few), len(few) + 5])
    partner = np.empty(5, np.int64)
    longest = match(delays, peers, ends, 0, 1, partner)
    assert stage_distance(delays, peers, ends, 0, 1) == stage_distance(delays, peers, ends, 1, 0) == longest
    ways = itertools.permutations(many.tolist(), len(few))
    assert longest == min(max(delays[a, b] for a, b in zip(few, way, strict=True)) for way in ways)
    paired = {index: many[place] for place, index in enumerate(partner) if index >= 0}
    assert sorted(paired) == list(range(len(few)))
    assert max(delays[few[index], other] for index, other in paired.items()) == longest


@pytest.mark.parametrize("seed", range(10))
def test_stage_path_is_the_shortest(seed):
    costs = symmetric(6, seed)
    order = np.empty(6, np.int64)
    length = shortest_path(costs, order)
    ways = [(0, *rest) for rest in itertools.permutations(range(1, 6))]
    assert length == pytest.approx(min(sum(costs[a, b] for a, b in itertools.pairwise(w)) for w in ways))
    assert length == pytest.approx(sum(costs[a, b] for a, b in itertools.pairwise(order))) and sorted(order) == list(
        range(6)
    )


def test_stage_path_visits_every_stage():
    costs = symmetric(20, 0)
    order = np.empty(20, np.int64)
    length = shortest_path(costs, order)
    assert sorted(order) == list(range(20)) and order[0] == 0
    assert length == pytest.approx(sum(costs[a, b] for a, b in itertools.pairwise(order)))


@pytest.mark.parametrize("sync", [0.0, 1.0, 8.0])
def test_arrangement_of_seven_peers_is_optimal(sync):
    delays = symmetric(7, 3)
    found = arrange(delays, (2, 2, 2), sync=sync, tries=3000)
    best = np.inf
    for order in itertools.permutations(range(7)):
        groups = [order[0:2], order[2:4], order[4:6]]
        if any(a > b for a, b in groups):
            continue
        inside = max(delays[a, b] for a, b in groups)
        hops = 0.0
        for (a, b), (c, d) in itertools.pairwise(groups):
            hops += min(max(delays[a, c], delays[b, d]), max(delays[a, d], delays[b, c]))
        best = min(best, sync * inside + 2 * hops)
    assert found.cost == pytest.approx(best)
    assert len({peer for stage in found.stages for peer in stage}) == 6


def test_arrangement_puts_clusters_into_stages():
    place = np.array([0, 1, 2, 0, 1, 2, 0, 1, 2])
    delays = np.where(place[:, None] == place[None, :], 0.1, 2.0)
    found = arrange(delays, (3, 3, 3), sync=50.0)
    assert {frozenset(place[list(stage)]) for stage in found.stages} == {frozenset({0}), frozenset({1}), frozenset({2})}
    spread = arrange(delays, (3, 3, 3), sync=0.0)
    # Without it each lane stays in its cluster.
    assert all(len({place[stage[lane]] for stage in spread.stages}) == 1 for lane in range(3))


def test_delays_match_published_links(published):
    made = published("gcp8_25m2")
    iowa, los_angeles, oregon = (made.places.index(name) for name in ("Iowa", "LA", "Oregon"))
    latency = np.array([[0, 23.4, 19.3], [23.4, 0, 12.4], [19.3, 12.4, 0]]) / 1e3
    rates = np.array([[0, 0.06146240234375, 0.09033203125], [0.06146240234375, 0, 0.1185302734375], [0, 0, 0]])
    rates[2] = [0.09033203125, 0.1185302734375, 0]
    links = ~np.eye(3, dtype=bool)
    # Latency, 32 MiB of activations at the rate of the link in GiB/s, and the overhead of a message, in seconds.
    expected = latency[links] + 32 * 2**20 / (rates[links] * 2**30) + 0.35
    members = [iowa, los_angeles, oregon]
    found = made.delays[np.ix_(members, members)]
    assert found[links] == pytest.approx(expected, abs=1e-12) and not found.diagonal().any()


def file(**changes):
    sound = {"delays": [[0, 1, 2], [1, 0, 1], [2, 1, 0]], "wm": 0.5, "memory": 2, "path_len": 2, "per_start": 1}
    return msgspec.json.encode({**sound, "partitions": [[0], [1, 2]], **changes})


def test_problem_file_is_read():
    made = load(file(wm=[1, 2, 3], memory=[1, 2, 3], rounds=3, gap=0, name="x", locations=["a", "b", "c"]))
    assert made.stages == ((0,), (1, 2)) and made.work.tolist() == [1, 2, 3] and made.microbatches == 3
    assert made.label(2) == "2 c" and made.stage.tolist() == [0, 1, 1] and made.capacity(1) == 5
    sized = load(file(partitions=[], sizes=[1, 2], sync=2.0))
    assert arranged(sized).stages[1:] and sized.sync == 2.0


@pytest.mark.parametrize(
    "changes",
    [
        {"path_length": 3},
        {"delays": [[0, 1], [1, 0, 1], [2, 1, 0]]},
        {"delays": [[0, -1, 2], [1, 0, 1], [2, 1, 0]]},
        {"delays": []},
        {"delays": "no"},
        {"wm": 0},
        {"wm": [1, 2]},
        {"memory": 0},
        {"memory": 1 << 70},
        {"memory": [1, 2]},
        {"path_len": 1},
        {"path_len": 3},
        {"per_start": 0},
        {"rounds": 0},
        {"gap": -1},
        {"partitions": [[0], [1, 1]]},
        {"partitions": [[0], [3]]},
        {"partitions": [[0], []]},
        {"partitions": []},
        {"sizes": [1, 2]},
        {"partitions": [], "sizes": [2, 2]},
        {"partitions": [], "sizes": [0, 2]},
        {"partitions": [], "sizes": [1, 2], "sync": -1},
        {"locations": ["a"]},
    ],
)
def test_invalid_problem_file_is_refused(changes):
    with pytest.raises(ProblemError) as caught:
        load(file(**changes))
    assert caught.value.hint


@pytest.mark.parametrize("data", [b"", b"[]", b"{", b"\xff\xfe", b" " * ((1 << 24) + 1), b'{"delays": [[NaN]]}'])
def test_malformed_problem_file_is_refused(data):
    with pytest.raises(ProblemError):
        load(data)
