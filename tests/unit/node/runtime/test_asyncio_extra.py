"""Work in an executor that is awaited to its end, and errors that reach no caller."""

import asyncio
import logging

import pytest
from thinwire.node.runtime.asyncio_extra import at_intervals, cancelled, stray_errors, uninterrupted
from thinwire.sims.engine import virtual_loop


def test_function_is_called_at_intervals_until_cancelled():
    async def main():
        loop, calls = asyncio.get_running_loop(), []
        task = asyncio.create_task(at_intervals(0.5, lambda: calls.append(loop.time())))
        await asyncio.sleep(2.25)
        await cancelled(task)
        await asyncio.sleep(2.0)
        return calls

    assert virtual_loop.run(main(), seed=0) == [0.5, 1.0, 1.5, 2.0]


def test_function_called_at_intervals_raises_its_error_and_is_not_called_again():
    calls = []

    def fail():
        calls.append(1)
        raise ValueError("mine")

    async def main():
        with pytest.raises(ValueError, match="mine"):
            await at_intervals(0.5, fail)
        await asyncio.sleep(2.0)

    virtual_loop.run(main(), seed=0)
    assert calls == [1]


def test_function_called_at_intervals_may_cancel_them():
    async def main():
        calls = []
        task = asyncio.create_task(at_intervals(0.5, lambda: (calls.append(1), task.cancel())))
        await asyncio.wait([task])
        await asyncio.sleep(2.0)
        return calls

    assert virtual_loop.run(main(), seed=0) == [1]


def test_cancelled_work_is_awaited_to_its_end():
    seen = []

    async def main():
        may_end = asyncio.Event()

        async def work():
            await may_end.wait()
            seen.append("worked")
            return 5

        task = asyncio.create_task(uninterrupted(work()))
        await asyncio.sleep(0)
        await asyncio.sleep(0)
        task.cancel()
        await asyncio.sleep(0)
        assert not task.done()
        may_end.set()
        with pytest.raises(asyncio.CancelledError):
            await task
        assert await uninterrupted(work()) == 5

    asyncio.run(main())
    assert seen == ["worked", "worked"]


def test_work_errors_are_raised():
    async def wrong():
        raise ValueError("mine")

    async def main():
        with pytest.raises(ValueError, match="mine"):
            await uninterrupted(wrong())
        task = asyncio.create_task(wrong())
        await cancelled(task)
        assert task.done()

    asyncio.run(main())


@pytest.mark.parametrize("ending", [KeyboardInterrupt, SystemExit])
def test_system_exit_passes_through_work(ending):
    async def leaves():
        try:
            await asyncio.sleep(60)
        finally:
            raise ending

    async def main():
        task = asyncio.create_task(leaves())
        await asyncio.sleep(0)
        # The loop stops with it at once; a waiting caller learns it when the loop continues.
        with pytest.raises(ending):
            await cancelled(task)
        return "seen"

    loop = asyncio.new_event_loop()
    try:
        waiting = loop.create_task(main())
        with pytest.raises(ending):
            loop.run_until_complete(waiting)
        assert loop.run_until_complete(waiting) == "seen"
    finally:
        loop.close()


def test_waiter_can_be_cancelled():
    async def main():
        may_end = asyncio.Event()

        async def stubborn():
            while not may_end.is_set():
                try:
                    await may_end.wait()
                except asyncio.CancelledError:
                    pass

        task = asyncio.create_task(stubborn())
        waiting = asyncio.create_task(cancelled(task))
        for _ in range(3):
            await asyncio.sleep(0)
        waiting.cancel()
        with pytest.raises(asyncio.CancelledError):
            await waiting
        may_end.set()
        await task

    asyncio.run(main())


def test_error_of_a_callback_is_logged_once_and_an_alarm_unless_it_is_one_of_the_system(caplog):
    alarms = []

    def fail(error):
        raise error

    async def main():
        loop = asyncio.get_running_loop()
        loop.set_exception_handler(stray_errors(logging.getLogger("test"), alarms.append))
        for error in (ValueError("mine"), ConnectionResetError("theirs"), ValueError("mine")):
            loop.call_soon(fail, error)
        await asyncio.sleep(0)

    asyncio.run(main())
    assert [type(record.exc_info[1]) for record in caplog.records] == [ValueError, ConnectionResetError]
    assert len(alarms) == 1 and "internal error: ValueError: mine" in alarms[0]
