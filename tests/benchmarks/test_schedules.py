"""GPipe and 1F1B: the theoretical bubble, stage memory, and the division of layers."""

import itertools

import pytest

from benchmarks.pipeline.schedules import bubble, deal, gpipe, held, one_forward_one_backward, play

SHAPES = [(stages, micros) for stages in (1, 2, 3, 4, 7) for micros in (1, 2, 5, 16)]


@pytest.mark.parametrize("order", [gpipe, one_forward_one_backward])
@pytest.mark.parametrize(("stages", "micros"), SHAPES)
def test_schedule_bubble_matches_theory(order, stages, micros):
    orders = [order(stages, stage, micros) for stage in range(stages)]
    step = play(orders, [1.0] * stages, [2.5] * stages)
    assert step.idle == pytest.approx(bubble(stages, micros))
    assert step.seconds == pytest.approx((micros + stages - 1) * 3.5)


@pytest.mark.parametrize(("stages", "micros"), SHAPES)
def test_schedule_runs_everything_once_and_forward_first(stages, micros):
    for order, stage in itertools.product((gpipe, one_forward_one_backward), range(stages)):
        tasks = order(stages, stage, micros)
        assert sorted(tasks) == sorted((kind, number) for kind in ("forward", "backward") for number in range(micros))
        assert all(tasks.index(("forward", n)) < tasks.index(("backward", n)) for n in range(micros))
    assert [held(gpipe(stages, stage, micros)) for stage in range(stages)] == [micros] * stages
    most = [held(one_forward_one_backward(stages, stage, micros)) for stage in range(stages)]
    assert most == [min(micros, stages - stage) for stage in range(stages)]


def test_schedule_time_includes_links_and_slow_stages():
    orders = [gpipe(2, stage, 1) for stage in range(2)]
    assert play(orders, [1.0, 3.0], [2.0, 6.0], delay=0.5).seconds == pytest.approx(1 + 0.5 + 3 + 6 + 0.5 + 2)
    orders = [one_forward_one_backward(4, stage, 8) for stage in range(4)]
    assert play(orders, [1.0] * 4, [2.0] * 4, delay=0.5).idle > bubble(4, 8)


def test_deadlocked_schedule_is_an_error():
    orders = [[("backward", 0), ("forward", 0)], [("forward", 0), ("backward", 0)]]
    with pytest.raises(ValueError, match="wait for each other"):
        play(orders, [1.0] * 2, [1.0] * 2)


def slowest(parts, speeds, ends):
    return max((part + (0 if stage else ends)) / speeds[stage] for stage, part in enumerate(parts))


@pytest.mark.parametrize("speeds", [(1, 1, 1), (1, 2, 4), (4, 1, 0.5), (1, 1, 3)])
@pytest.mark.parametrize("ends", [0.0, 1.5, 4.0])
def test_layers_are_divided_optimally(speeds, ends):
    parts = deal(9, speeds, ends)
    every = (way for way in itertools.product(range(1, 8), repeat=3) if sum(way) == 9)
    assert sum(parts) == 9 and min(parts) >= 1
    assert slowest(parts, speeds, ends) == pytest.approx(min(slowest(way, speeds, ends) for way in every))


def test_origin_gets_fewer_layers():
    assert deal(12, (1, 1, 1, 1), 0) == (3, 3, 3, 3)
    assert deal(12, (1, 1, 1, 1), 2) == (2, 4, 3, 3)
    with pytest.raises(ValueError, match="2 layers for 3"):
        deal(2, (1, 1, 1), 0)
