"""The event simulation of plans: published figures, handmade sums, and deadlocks."""

from collections import defaultdict

import numpy as np
import pytest
from thinwire.node.pipeline.planner.initial_plan import build
from thinwire.node.pipeline.planner.makespan import full, makespan, play
from thinwire.node.pipeline.planner.problem import Problem

# The two plans of schedule.json in the public repository gensyn-ai/skippipe (commit 4cdf65d).
COLLISION_AWARE = [(0, 6, 12, 5), (3, 14, 2, 18), (4, 1, 15, 19), (10, 13, 17, 7), (11, 8, 16, 9)]
PLAIN = [
    *((0, 12, 5, 19), (0, 1, 19, 18), (0, 6, 18, 17), (3, 12, 6, 2), (3, 14, 12, 2), (3, 6, 14, 13), (4, 15, 13, 7)),
    *((4, 15, 5, 17), (4, 15, 13, 7), (10, 1, 17, 5), (10, 1, 7, 2), (10, 14, 18, 19)),
    *((11, 8, 16, 9), (11, 8, 16, 9), (11, 8, 16, 9)),
]


def line(count=3, work=1.0, delay=0.0, memory=4, per_start=1, rounds=1, gap=0.0):
    delays = np.full((count, count), delay)
    stages = tuple((peer,) for peer in range(count))
    return Problem(
        "", delays, stages, np.full(count, work), np.full(count, memory), count, per_start, rounds=rounds, gap=gap
    )


def test_shipped_plans_have_published_makespan(published):
    shipped = published("shipped20")
    aware = [path for path in COLLISION_AWARE for _ in range(3)]
    assert makespan(shipped, aware) == pytest.approx(33.25, rel=3e-3)
    assert makespan(shipped, PLAIN) == pytest.approx(35.37, rel=3e-3)


@pytest.mark.parametrize(("name", "seconds"), [("shipped20", 89.50), ("gcp8_25m2", 60.10), ("5c20_33", 108.1)])
def test_full_pipelines_have_published_makespan(published, name, seconds):
    made = published(name)
    assert makespan(made, full(made)) == pytest.approx(seconds, rel=3e-3)


def test_one_microbatch_takes_the_sum_of_its_path():
    made = line(work=2.0, delay=0.5)
    # Three forwards, the loss, three backwards; three hops there and three back.
    assert makespan(made, [(0, 1, 2)]) == pytest.approx(3 * 2 + 0.5 + 3 * 3 + 6 * 0.5)
    assert makespan(line(work=2.0, delay=0.5, rounds=2), [(0, 1, 2)]) == pytest.approx(2 * 18.5)


def test_stage_slot_is_held_until_backward_ends():
    free, held = line(count=2, memory=2, per_start=2), line(count=2, memory=1, per_start=2)
    one = 2 * 1 + 0.25 + 2 * 1.5
    assert makespan(held, [(0, 1)] * 2) == pytest.approx(2 * one)
    assert makespan(free, [(0, 1)] * 2) < 1.6 * one


def test_gap_follows_every_operation():
    # The second forward of peer 0 begins after the first one and the gap, and all its operations are that much later.
    made = line(count=2, memory=2, per_start=2, gap=0.1)
    operations = [op for op in play(made, [(0, 1)] * 2).operations if op.kind == "forward" and op.peer == 0]
    assert [op.start for op in operations] == pytest.approx([0.0, 1.1])


def test_deadlocked_microbatches_never_end():
    made = line(count=3, memory=1, per_start=2)
    stages = ((0, 1), (2,), (3,))
    four = Problem("", np.zeros((4, 4)), stages, np.ones(4), np.ones(4, np.int64), 3, 1, rounds=1, gap=0.0)
    assert makespan(four, [(0, 2, 3), (1, 3, 2)]) == np.inf
    with pytest.raises(ValueError, match="wait for each other"):
        play(four, [(0, 2, 3), (1, 3, 2)])
    assert np.isfinite(makespan(made, [(0, 1, 2)] * 2))


@pytest.mark.parametrize("name", ["shipped20", "gcp8_25m2", "5c20_33"])
@pytest.mark.parametrize("whole", [False, True])
def test_stage_runs_one_operation_at_a_time(published, name, whole):
    made = published(name)
    paths = full(made) if whole else build(made)
    timeline = play(made, paths)
    assert timeline.makespan == pytest.approx(max(op.end for op in timeline.operations))
    assert len(timeline.operations) == len(paths) * made.rounds * (2 * len(paths[0]) + 1)
    by_peer, by_way = defaultdict(list), defaultdict(list)
    for op in timeline.operations:
        by_peer[op.peer].append(op)
        by_way[op.path, op.round].append(op)
    for peer, operations in by_peer.items():
        held = 0
        for before, after in zip(operations, operations[1:], strict=False):
            assert after.start >= before.end + made.gap - 1e-9
        for op in operations:
            held += (op.kind == "forward") - (op.kind == "backward")
            assert 0 <= held <= made.memory[peer]
        assert held == 0
    for (number, turn), operations in by_way.items():
        visited = [op.peer for op in operations]
        path = list(paths[number])
        assert visited == [*path, path[0], *path[::-1]]
        for before, after in zip(operations, operations[1:], strict=False):
            assert after.start >= before.end + made.delays[before.peer, after.peer] - 1e-9
        if turn:
            assert operations[0].start >= by_way[number, turn - 1][-1].end - 1e-9
