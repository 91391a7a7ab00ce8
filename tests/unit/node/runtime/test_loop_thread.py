"""The event loop in a background thread: results, errors, interrupts, failures."""

import asyncio
import signal
import threading

import pytest
from thinwire.node.runtime.loop_thread import LoopThread, SwarmError
from thinwire.swarm.identity.errors import HintedError


@pytest.fixture
def background():
    one = LoopThread("test")
    yield one
    one.stop()


def test_loop_thread_returns_results_and_errors(background):
    async def fine():
        return await background.work(lambda: threading.current_thread().name), threading.current_thread().name

    async def wrong():
        raise TimeoutError("mine")

    assert background.call(fine()) == ("test-compute_0", "test")
    with pytest.raises(TimeoutError, match="mine"):
        background.call(wrong())
    assert background.ask(lambda: 7) == 7


def test_loop_thread_works_for_a_caller_with_a_running_loop():
    """A notebook's cells run inside an event loop."""
    ended = []

    async def endless():
        try:
            await asyncio.sleep(1000)
        finally:
            ended.append(threading.current_thread().name)

    async def cell():
        background = LoopThread("test")
        background.start(endless())
        assert background.ask(lambda: 7) == 7
        background.stop()
        background.stop()

    asyncio.run(cell())
    assert ended == ["test"]


def test_interrupt_cancels_call_and_waits_for_workers(background):
    started, release, seen = threading.Event(), threading.Event(), []

    def compute():
        started.set()
        release.wait(60)
        seen.append("computed")

    async def release_when_cancelled(task):
        while not task.cancelling():
            await asyncio.sleep(0.01)
        release.set()

    async def work():
        watch = asyncio.ensure_future(release_when_cancelled(asyncio.current_task()))
        try:
            await background.work(compute)
        except asyncio.CancelledError:
            seen.append("cancelled")
            raise
        finally:
            watch.cancel()
        seen.append("never")

    def interrupt():
        started.wait(60)
        signal.pthread_kill(threading.main_thread().ident, signal.SIGINT)

    threading.Thread(target=interrupt).start()
    with pytest.raises(KeyboardInterrupt):
        background.call(work())
    assert seen == ["computed", "cancelled"]
    assert background.ask(lambda: 1) == 1, "an interrupt is not the end"


def test_loop_failure_reaches_current_and_later_callers(background):
    async def wait():
        await asyncio.sleep(3600)

    async def fail_soon():
        asyncio.get_running_loop().call_later(0.05, background.fail, OSError("broken"))

    background.call(fail_soon())
    with pytest.raises(SwarmError, match="OSError: broken") as caught:
        background.call(wait())
    assert isinstance(caught.value.__cause__, OSError)
    with pytest.raises(SwarmError, match="OSError: broken"):
        background.check()
    assert background.last_call(asyncio.sleep(0, "goodbye")) == "goodbye"


def test_loop_failure_ends_started_tasks(background):
    async def awaited(result):
        await asyncio.wait([asyncio.wrap_future(result)])

    result = background.start(asyncio.sleep(3600))
    background.ask(lambda: asyncio.get_running_loop().call_soon(background.fail, OSError("broken")))
    asyncio.run(asyncio.wait_for(awaited(result), 60))
    assert result.cancelled()
    with pytest.raises(SwarmError, match="OSError: broken"):
        background.start(asyncio.sleep(0))


def test_hinted_failure_is_raised_unchanged(background):
    background.ask(lambda: asyncio.get_running_loop().call_soon(background.fail, HintedError("what", "do")))
    with pytest.raises(HintedError, match="what") as caught:
        background.ask(lambda: 1)
    assert caught.value.hint == "do"


def test_stop_ends_threads_and_tasks(background):
    ended = []

    async def leave_something():
        async def endless():
            try:
                await asyncio.sleep(3600)
            finally:
                ended.append("cancelled")

        task = asyncio.create_task(endless())
        await asyncio.sleep(0)
        return task

    background.call(leave_something())
    background.stop()
    assert ended == ["cancelled"]
    assert not any(thread.name.startswith("test") for thread in threading.enumerate())
    with pytest.raises(SwarmError, match="left"):
        background.ask(lambda: 1)
    assert background.last_call(asyncio.sleep(0)) is None
    background.stop()


def test_call_to_dead_loop_does_not_hang(background):
    async def die():
        asyncio.get_running_loop().stop()
        await asyncio.sleep(3600)

    with pytest.raises(SwarmError):
        background.call(die())
