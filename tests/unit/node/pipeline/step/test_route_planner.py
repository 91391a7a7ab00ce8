"""When the origin replans, and which peers a plan includes."""

import asyncio

import numpy as np
import pytest
from thinwire.node.pipeline.planner.constraints import violations
from thinwire.node.pipeline.step.measurements import Measurements
from thinwire.node.pipeline.step.route_planner import RoutePlanner
from thinwire.node.pipeline.step.stage_holders import StageHolders
from thinwire.node.runtime.asyncio_extra import at_once

HOSTS = {stage: [bytes([stage, n]) * 16 for n in range(2)] for stage in range(1, 6)}
TRIES = 400


class Told(Measurements):
    """Measurements with given values."""

    def __init__(self):
        super().__init__(lambda: 0.0)
        self.works, self.delays = {}, {}

    def work(self, peer):
        return self.works.get(peer)

    def delay(self, a, b):
        return self.delays.get((a, b), self.delays.get((b, a)))


def scene(holders=HOSTS, **options):
    measurements, log = Told(), []
    settings = {"skip": 1 / 3, "room": 3, "every": 5, "tries": TRIES, **options}
    route_planner = RoutePlanner(
        measurements, emit=lambda name, fields: log.append((name, fields.get("why"))), **settings
    )
    return route_planner, measurements, StageHolders(holders), log


def ask(route_planner, stage_holders, micros=12, step=0):
    return asyncio.run(route_planner.routes(micros, stage_holders, at_once, step))


def check(routes, stage_holders, micros, length, swaps=2):
    """Check that each micro-batch has one valid path over present peers."""
    assert (
        sorted(micro for sequence in routes.sequences for micro in sequence) == list(range(micros))
        and len(routes.visits) == micros
    )
    for sequence in routes.sequences:
        assert list(sequence) == sorted(sequence)
        assert all(routes.visits[micro] == routes.visits[sequence[0]] for micro in sequence)
    stages = [[]] + [
        [p for p in stage_holders.holders[s] if p not in stage_holders.lost] for s in sorted(stage_holders.holders)
    ]
    numbers = {peer: n for n, peer in enumerate((p for s in stages for p in s), 1)}
    paths = []
    for sequence in routes.sequences:
        way = routes.visits[sequence[0]]
        assert all(peer in stage_holders.holders[stage] and peer not in stage_holders.lost for stage, peer in way)
        paths.append((0, *(numbers[peer] for _, peer in way)))
    measurements = Measurements(lambda: 0.0)
    ruled = measurements.instance(stages[1:], length=length, paths=len(paths), rounds=1, room=3, swaps=swaps)
    assert not violations(ruled, paths), violations(ruled, paths)
    assert 0 < routes.seconds < np.inf
    return paths


@pytest.mark.parametrize("micros", [1, 5, 12, 30])
@pytest.mark.parametrize(("skip", "length"), [(0.0, 6), (1 / 3, 4), (0.5, 3), (0.9, 2)])
def test_planned_paths_cover_all_micro_batches_and_are_valid(micros, skip, length):
    route_planner, _, stage_holders, _ = scene(skip=skip)
    check(ask(route_planner, stage_holders, micros), stage_holders, micros, length)


def test_plan_without_swaps_keeps_stage_order():
    route_planner, measurements, stage_holders, _ = scene(swaps=0, tries=4000)
    for stage in (1, 3, 5):  # the stages before are far away
        measurements.delays[b"", HOSTS[stage][0]] = 9.0
    for path in check(ask(route_planner, stage_holders), stage_holders, 12, 4, swaps=0):
        assert list(path) == sorted(path)


def test_route_planner_plans_only_when_needed():
    route_planner, measurements, stage_holders, log = scene()
    first = ask(route_planner, stage_holders)
    for _ in range(4):
        assert ask(route_planner, stage_holders) == first
    assert log == [("planned", "first")]
    ask(route_planner, stage_holders)
    assert log[1:] == [("planned", "age")]
    used = ask(route_planner, stage_holders).visits[0][0][1]
    measurements.works[used] = 1.1
    ask(route_planner, stage_holders)
    assert len(log) == 2, "a tenth is no matter"
    measurements.works[used] = 1.5
    ask(route_planner, stage_holders)
    assert log[2:] == [("planned", "moved")]
    routes = ask(route_planner, stage_holders)
    a, b = (routes.visits[0][place][1] for place in (0, 1))
    measurements.delays[a, b] = 6.0
    ask(route_planner, stage_holders)
    assert log[3:] == [("planned", "moved")]
    ask(route_planner, stage_holders, 11)
    ask(route_planner, stage_holders, 12)
    assert log[4:] == [("planned", "peers")] * 2 and route_planner.plans == 6


def test_changing_measurements_do_not_cause_constant_replanning():
    """A plan takes a second; after the second plan, for twenty seconds only arrivals or departures cause one."""
    route_planner, measurements, stage_holders, log = scene()
    now = 0.0
    measurements.now = lambda: now

    async def slow(function):
        nonlocal now
        now += 1.0
        return function()

    def again(seconds, works):
        nonlocal now
        now += seconds
        measurements.works = {peer: works for stage in HOSTS.values() for peer in stage} | {b"": works}
        asyncio.run(route_planner.routes(12, stage_holders, slow, 0))
        return [why for _, why in log]

    assert again(0.0, 0.1) == ["first"]
    assert again(0.0, 0.2) == ["first", "moved"]
    assert again(8.0, 0.4) == ["first", "moved"]
    assert again(8.0, 0.8) == ["first", "moved"]
    assert again(8.0, 0.8) == ["first", "moved", "moved"]
    stage_holders.lost.add(ask(route_planner, stage_holders).visits[0][0][1])
    assert again(0.0, 1.6)[3:] == ["mended"]
    stage_holders.lost.clear()
    assert again(0.0, 1.6)[4:] == ["peers"] and route_planner.plans == len(log) == route_planner.reasons.total()


def test_plan_skips_slow_peer():
    route_planner, measurements, stage_holders, _ = scene(room=12, tries=4000)
    slow = HOSTS[2][0]
    measurements.works = {peer: 0.1 for stage in HOSTS.values() for peer in stage} | {b"": 0.1, slow: 50.0}
    routes = ask(route_planner, stage_holders)
    assert all(peer != slow for way in routes.visits for _, peer in way)


def test_plan_is_repaired_after_loss_and_includes_returning_peer():
    route_planner, _, stage_holders, log = scene()
    before = ask(route_planner, stage_holders)
    gone = before.visits[0][1][1]
    stage_holders.lost.add(gone)
    check(ask(route_planner, stage_holders), stage_holders, 12, 4)
    assert log[1:] == [("planned", "mended")]
    assert ask(route_planner, stage_holders).seconds > 0 and len(log) == 2
    stage_holders.lost.clear()
    check(ask(route_planner, stage_holders), stage_holders, 12, 4)
    assert log[2:] == [("planned", "peers")]
    stage_holders.lost.update(HOSTS[3])
    check(ask(route_planner, stage_holders), stage_holders, 12, 4)
    stage_holders.lost.update(HOSTS[1] + HOSTS[2])
    assert len(check(ask(route_planner, stage_holders), stage_holders, 12, 3)[0]) == 3, (
        "the origin, and the two stages that are left"
    )


def test_resting_peer_is_not_planned():
    route_planner, _, stage_holders, log = scene()
    slow = ask(route_planner, stage_holders).visits[0][0][1]
    stage_holders.rest(slow, 0)
    stage_holders.rest(slow, 1)
    routes = ask(route_planner, stage_holders, step=2)
    assert log[1:] == [("planned", "mended")] and all(peer != slow for way in routes.visits for _, peer in way)
    ask(route_planner, stage_holders, step=3)
    assert log[2:] == [("planned", "peers")]


def test_no_plan_is_made_without_alternatives():
    route_planner, _, stage_holders, log = scene()
    stage_holders.lost.update(peer for peers in HOSTS.values() for peer in peers)
    assert ask(route_planner, stage_holders) is None
    assert ask(*scene(holders={})[::2]) is None and not log


def test_plan_with_unbridgeable_gap_is_reported():
    far = {stage: HOSTS.get(stage, []) for stage in range(1, 8)}
    far[7] = [bytes([7]) * 32]
    route_planner, _, stage_holders, log = scene(holders=far)
    stage_holders.lost.update(peer for stage in range(1, 7) for peer in far[stage])
    assert ask(route_planner, stage_holders) is None and log == [("plan_failed", None)]
    assert ask(route_planner, stage_holders) is None and len(log) == 1, "once"


def test_impossible_plan_request_is_refused():
    for wrong in ({"skip": 1.0}, {"skip": -0.1}, {"room": 0}, {"every": 0}, {"swaps": 3}):
        with pytest.raises(ValueError, match="no plan"):
            scene(**wrong)
