"""When there is a new plan, and that it is one for those that are there."""

import asyncio

import numpy as np
import pytest
from thinwire.node.pipeline.checker import violations
from thinwire.node.pipeline.crew import Crew
from thinwire.node.pipeline.pilot import Pilot
from thinwire.node.pipeline.survey import Survey
from thinwire.node.waiting import at_once

HOSTS = {stage: [bytes([stage, n]) * 16 for n in range(2)] for stage in range(1, 6)}
TRIES = 400


class Told(Survey):
    """Knows what it is told."""

    def __init__(self):
        super().__init__(lambda: 0.0)
        self.works, self.delays = {}, {}

    def work(self, peer):
        return self.works.get(peer)

    def delay(self, a, b):
        return self.delays.get((a, b), self.delays.get((b, a)))


def scene(holders=HOSTS, **options):
    survey, log = Told(), []
    settings = {"skip": 1 / 3, "room": 3, "every": 5, "tries": TRIES, **options}
    pilot = Pilot(survey, emit=lambda name, fields: log.append((name, fields.get("why"))), **settings)
    return pilot, survey, Crew(holders), log


def ask(pilot, crew, micros=12, step=0):
    return asyncio.run(pilot.course(micros, crew, at_once, step))


def check(course, crew, micros, length, swaps=2):
    """Every micro-batch goes once, over peers that are there, by the rules."""
    assert (
        sorted(micro for lane in course.lanes for micro in lane) == list(range(micros)) and len(course.visits) == micros
    )
    for lane in course.lanes:
        assert list(lane) == sorted(lane)
        assert all(course.visits[micro] == course.visits[lane[0]] for micro in lane)
    stages = [[]] + [[p for p in crew.holders[s] if p not in crew.lost] for s in sorted(crew.holders)]
    numbers = {peer: n for n, peer in enumerate((p for s in stages for p in s), 1)}
    paths = []
    for lane in course.lanes:
        way = course.visits[lane[0]]
        assert all(peer in crew.holders[stage] and peer not in crew.lost for stage, peer in way)
        paths.append((0, *(numbers[peer] for _, peer in way)))
    survey = Survey(lambda: 0.0)
    ruled = survey.instance(stages[1:], length=length, paths=len(paths), rounds=1, room=3, swaps=swaps)
    assert not violations(ruled, paths), violations(ruled, paths)
    assert 0 < course.seconds < np.inf
    return paths


@pytest.mark.parametrize("micros", [1, 5, 12, 30])
@pytest.mark.parametrize(("skip", "length"), [(0.0, 6), (1 / 3, 4), (0.5, 3), (0.9, 2)])
def test_ways_are_for_all_micro_batches_and_by_the_rules(micros, skip, length):
    pilot, _, crew, _ = scene(skip=skip)
    check(ask(pilot, crew, micros), crew, micros, length)


def test_without_swaps_every_path_goes_forward():
    pilot, survey, crew, _ = scene(swaps=0, tries=4000)
    for stage in (1, 3, 5):  # what comes before is far away
        survey.delays[b"", HOSTS[stage][0]] = 9.0
    for path in check(ask(pilot, crew), crew, 12, 4, swaps=0):
        assert list(path) == sorted(path)


def test_there_is_a_new_plan_when_something_calls_for_one_and_only_then():
    pilot, survey, crew, log = scene()
    first = ask(pilot, crew)
    for _ in range(4):
        assert ask(pilot, crew) == first
    assert log == [("planned", "first")]
    ask(pilot, crew)
    assert log[1:] == [("planned", "age")]
    used = ask(pilot, crew).visits[0][0][1]
    survey.works[used] = 1.1
    ask(pilot, crew)
    assert len(log) == 2, "a tenth is no matter"
    survey.works[used] = 1.5
    ask(pilot, crew)
    assert log[2:] == [("planned", "moved")]
    course = ask(pilot, crew)
    a, b = (course.visits[0][place][1] for place in (0, 1))
    survey.delays[a, b] = 6.0
    ask(pilot, crew)
    assert log[3:] == [("planned", "moved")]
    ask(pilot, crew, 11)
    ask(pilot, crew, 12)
    assert log[4:] == [("planned", "peers")] * 2 and pilot.plans == 6


def test_measurements_that_never_rest_do_not_make_planning_the_work():
    """A plan takes a second; after the second one only who comes or goes calls for another in the next twenty."""
    pilot, survey, crew, log = scene()
    now = 0.0
    survey.now = lambda: now

    async def slow(function):
        nonlocal now
        now += 1.0
        return function()

    def again(seconds, works):
        nonlocal now
        now += seconds
        survey.works = {peer: works for stage in HOSTS.values() for peer in stage} | {b"": works}
        asyncio.run(pilot.course(12, crew, slow, 0))
        return [why for _, why in log]

    assert again(0.0, 0.1) == ["first"]
    assert again(0.0, 0.2) == ["first", "moved"]
    assert again(8.0, 0.4) == ["first", "moved"]
    assert again(8.0, 0.8) == ["first", "moved"]
    assert again(8.0, 0.8) == ["first", "moved", "moved"]
    crew.lost.add(ask(pilot, crew).visits[0][0][1])
    assert again(0.0, 1.6)[3:] == ["mended"]
    crew.lost.clear()
    assert again(0.0, 1.6)[4:] == ["peers"] and pilot.plans == len(log) == pilot.whys.total()


def test_what_is_slow_is_gone_past():
    pilot, survey, crew, _ = scene(room=12, tries=4000)
    slow = HOSTS[2][0]
    survey.works = {peer: 0.1 for stage in HOSTS.values() for peer in stage} | {b"": 0.1, slow: 50.0}
    course = ask(pilot, crew)
    assert all(peer != slow for way in course.visits for _, peer in way)


def test_after_a_loss_the_plan_is_mended_and_who_comes_back_is_planned_for():
    pilot, _, crew, log = scene()
    before = ask(pilot, crew)
    gone = before.visits[0][1][1]
    crew.lost.add(gone)
    check(ask(pilot, crew), crew, 12, 4)
    assert log[1:] == [("planned", "mended")]
    assert ask(pilot, crew).seconds > 0 and len(log) == 2
    crew.lost.clear()
    check(ask(pilot, crew), crew, 12, 4)
    assert log[2:] == [("planned", "peers")]
    crew.lost.update(HOSTS[3])
    check(ask(pilot, crew), crew, 12, 4)
    crew.lost.update(HOSTS[1] + HOSTS[2])
    assert len(check(ask(pilot, crew), crew, 12, 3)[0]) == 3, "the origin, and the two stages that are left"


def test_who_rests_is_not_planned_for():
    pilot, _, crew, log = scene()
    slow = ask(pilot, crew).visits[0][0][1]
    crew.rest(slow, 0)
    crew.rest(slow, 1)
    course = ask(pilot, crew, step=2)
    assert log[1:] == [("planned", "mended")] and all(peer != slow for way in course.visits for _, peer in way)
    ask(pilot, crew, step=3)
    assert log[2:] == [("planned", "peers")]


def test_where_there_is_nothing_to_choose_there_is_no_plan():
    pilot, _, crew, log = scene()
    crew.lost.update(peer for peers in HOSTS.values() for peer in peers)
    assert ask(pilot, crew) is None
    assert ask(*scene(holders={})[::2]) is None and not log


def test_a_gap_that_no_path_may_jump_is_said():
    far = {stage: HOSTS.get(stage, []) for stage in range(1, 8)}
    far[7] = [bytes([7]) * 32]
    pilot, _, crew, log = scene(holders=far)
    crew.lost.update(peer for stage in range(1, 7) for peer in far[stage])
    assert ask(pilot, crew) is None and log == [("no plan", None)]
    assert ask(pilot, crew) is None and len(log) == 1, "once"


def test_a_plan_that_cannot_be_asked_for():
    for wrong in ({"skip": 1.0}, {"skip": -0.1}, {"room": 0}, {"every": 0}, {"swaps": 3}):
        with pytest.raises(ValueError, match="no plan"):
            scene(**wrong)
