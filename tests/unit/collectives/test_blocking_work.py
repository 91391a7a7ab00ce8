"""Functions that run one after the other in threads, with an executor that runs them when asked."""

import asyncio
import threading
from concurrent.futures import ThreadPoolExecutor
from types import SimpleNamespace

import pytest
from kit.real.late_executor import LateExecutor, LateWork
from thinwire.collectives.blocking_work import BURST, MAX_WAITING, RATE, WORTH, LatestWork, OrderedWork, RationedWork


class Lane:
    """An OrderedWork with a log of results and errors."""

    def __init__(self, executor):
        self.found, self.errors, self.begun = [], [], []
        self.work = OrderedWork(executor, self.errors.append)

    def run(self, name, size=WORTH):
        def function():
            self.begun.append(name)
            if name == "bad":
                raise ValueError("bad")
            return name, threading.current_thread() is threading.main_thread()

        self.work.run(function, lambda result: self.found.append(result), size)


async def turns(executor):
    """Let threads and the event loop do all that waits."""
    await asyncio.sleep(0)
    while executor.waiting:
        executor.run()
        await asyncio.sleep(0)


def test_results_come_in_order_one_function_at_a_time():
    async def main():
        executor = LateExecutor(3)
        lanes = [Lane(executor), Lane(executor)]
        for number in range(6):
            for lane in lanes:
                lane.run(number)
        assert len(executor.waiting) == 2  # one of each
        assert [lane.work.held for lane in lanes] == [6 * WORTH] * 2
        await turns(executor)
        assert [lane.found for lane in lanes] == [[(number, False) for number in range(6)]] * 2
        assert [lane.work.held for lane in lanes] == [0, 0]

    asyncio.run(main())


@pytest.mark.parametrize("threads", [True, False])
def test_small_function_runs_at_once_unless_others_are_ahead(threads):
    async def main():
        executor = LateExecutor() if threads else None
        lane = Lane(executor)
        lane.run("small", WORTH - 1)
        assert lane.found == [("small", True)]
        lane.run("large")
        assert lane.work.takes(1) == threads
        lane.run("next", 1)
        assert [name for name, _ in lane.found] == (["small"] if threads else ["small", "large", "next"])
        if executor is not None:
            await turns(executor)
        assert lane.found == [("small", True), ("large", not threads), ("next", not threads)]

    asyncio.run(main())


@pytest.mark.parametrize("size", [1, WORTH])
def test_error_is_reported_once_and_nothing_follows(size):
    async def main():
        executor = LateExecutor()
        lane = Lane(executor)
        lane.run("first", size)
        lane.run("bad", size)
        lane.run("after", size)
        lane.work.finish(lambda: lane.found.append("the end"))
        await turns(executor)
        assert [str(error) for error in lane.errors] == ["bad"]
        assert [name for name, _ in lane.found] == ["first"]

    asyncio.run(main())


def test_error_of_the_code_that_takes_a_result_is_reported():
    async def main():
        executor, errors = LateExecutor(), []
        work = OrderedWork(executor, errors.append)
        work.run(lambda: 1, lambda result: {}[result], WORTH)
        await turns(executor)
        assert [type(error) for error in errors] == [KeyError]

    asyncio.run(main())


def test_close_waits_for_the_function_in_a_thread_and_drops_all_results():
    async def main():
        executor = LateExecutor()
        lane, ended = Lane(executor), []
        for name in ("first", "second"):
            lane.run(name)
        lane.work.close(lambda: ended.append(True))
        assert not ended and lane.work.busy
        await turns(executor)
        assert ended == [True] and not lane.work.busy
        assert lane.begun == ["first"] and lane.found == []
        lane.run("third", 1)
        assert lane.begun == ["first"]
        idle = Lane(executor)
        idle.work.close(lambda: ended.append(True))
        assert ended == [True, True]

    asyncio.run(main())


def test_finish_comes_after_all_results():
    async def main():
        executor = LateExecutor()
        lane = Lane(executor)
        lane.run("first")
        lane.work.finish(lambda: lane.found.append("the end"))
        assert lane.found == []
        await turns(executor)
        assert lane.found == [("first", False), "the end"]
        lane.work.finish(lambda: lane.found.append("again"))
        assert lane.found[-1] == "again"

    asyncio.run(main())


def test_function_that_ends_after_the_event_loop_is_no_error():
    executor = LateExecutor()

    async def main():
        Lane(executor).run("late")

    asyncio.run(main())
    executor.run_all()


def test_functions_run_on_the_event_loop_when_threads_have_ended():
    async def main():
        workers = ThreadPoolExecutor(1)
        workers.shutdown()
        lane = Lane(workers)
        for number in range(3):
            lane.run(number)
        assert lane.begun == []
        while len(lane.found) < 3:
            await asyncio.sleep(0)
        assert lane.found == [(0, True), (1, True), (2, True)] and lane.errors == []

    asyncio.run(main())


def test_latest_work_takes_one_result_of_each_key_in_order_and_none_of_dropped_ones():
    async def main():
        steps, errors, found = LateWork(), [], []
        work = LatestWork(steps, errors.append)

        def put(key, value):
            work.run(key, lambda: value, lambda key, value: found.append((key, value)))

        put(1, "a")
        put(2, "b")
        await asyncio.sleep(0)
        assert list(work) == [1, 2] and 1 in work and 3 not in work and len(steps.waiting) == 1
        put(1, "c")  # while "a" is being computed
        await steps.go()
        assert found == []
        await steps.go()
        await steps.go()
        assert found == [(1, "c"), (2, "b")] and not list(work)
        put(3, "d")
        await asyncio.sleep(0)
        work.clear()
        await steps.go()
        assert len(found) == 2 and not steps.waiting
        put(4, "e")  # a new task begins
        await asyncio.sleep(0)
        await steps.go()
        assert found[2:] == [(4, "e")] and not errors

    asyncio.run(main())


def test_latest_work_reports_an_error_and_serves_what_comes_later():
    async def main():
        steps, errors, found = LateWork(), [], []
        work = LatestWork(steps, errors.append)
        work.run(1, lambda: 1 / 0, lambda key, value: found.append(key))
        await asyncio.sleep(0)
        await steps.go()
        assert [type(error) for error in errors] == [ZeroDivisionError] and not found
        work.clear()
        work.run(2, lambda: 2, lambda key, value: found.append(key))
        await asyncio.sleep(0)
        await steps.go()
        assert found == [2]

    asyncio.run(main())


def parts(done, name, *costs):
    """A job whose parts have these costs."""
    for cost in costs:
        yield SimpleNamespace(cost=cost)
        done.append(name)


def test_rationed_work_of_the_owner_that_has_used_least_comes_first():
    now, done = [0.0], []
    work = RationedWork(lambda: now[0])
    assert work.add(b"large", 1, 10, parts(done, "large", BURST, BURST, BURST))
    work.run()
    assert done == ["large"] and work.holds(b"large", 1)
    assert work.add(b"small", 1, 10, parts(done, "small", 1.0)) and not work.add(
        b"small", 1, 10, parts(done, "no", 1.0)
    )
    work.run()
    assert done == ["large"], "the budget is spent"
    now[0] += BURST / RATE / 2
    work.run()
    assert done == ["large", "small", "large"]
    now[0] += 100.0
    work.run()
    assert done == ["large", "small", "large", "large"] and not work.holds(b"large", 1)


def test_full_queue_of_rationed_work_gives_up_the_largest_job():
    now, done = [0.0], []
    work = RationedWork(lambda: now[0])
    assert work.add(b"a", 1, MAX_WAITING - 10, parts(done, "a", BURST))
    assert not work.add(b"b", 1, MAX_WAITING, parts(done, "b", 1.0))
    assert work.add(b"c", 1, 100, parts(done, "c", 1.0)) and not work.holds(b"a", 1)
    work.run()
    assert done == ["c"]


@pytest.mark.parametrize("parts_after", [0, 1])
def test_rationed_job_that_drops_its_owner_ends(parts_after):
    """Such as one that sends something over a link that breaks."""
    done = []

    def job():
        yield SimpleNamespace(cost=1.0)
        work.drop(b"a")
        yield from parts(done, "a", *[1.0] * parts_after)

    work = RationedWork(lambda: 0.0)
    work.add(b"a", 1, 10, job())
    work.run()
    assert not work.holds(b"a", 1) and not done
