"""The event loop beside a caller who has none: results, errors, interrupts, failures."""

import asyncio
import signal
import threading

import pytest
from thinwire.node.background import Background, SwarmError
from thinwire.swarm.errors import HintedError


@pytest.fixture
def background():
    one = Background("test")
    yield one
    one.stop()


def test_results_and_errors_come_to_the_caller(background):
    async def fine():
        return await background.work(lambda: threading.current_thread().name), threading.current_thread().name

    async def wrong():
        raise TimeoutError("mine")

    assert background.call(fine()) == ("test-compute_0", "test")
    with pytest.raises(TimeoutError, match="mine"):
        background.call(wrong())
    assert background.ask(lambda: 7) == 7


def test_an_interrupt_cancels_the_call_and_waits_until_nothing_computes(background):
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


def test_a_failure_reaches_who_waits_and_who_comes_later(background):
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


def test_a_failure_ends_what_was_started_too(background):
    async def awaited(result):
        await asyncio.wait([asyncio.wrap_future(result)])

    result = background.start(asyncio.sleep(3600))
    background.ask(lambda: asyncio.get_running_loop().call_soon(background.fail, OSError("broken")))
    asyncio.run(asyncio.wait_for(awaited(result), 60))
    assert result.cancelled()
    with pytest.raises(SwarmError, match="OSError: broken"):
        background.start(asyncio.sleep(0))


def test_a_failure_with_a_hint_is_raised_as_it_is(background):
    background.ask(lambda: asyncio.get_running_loop().call_soon(background.fail, HintedError("what", "do")))
    with pytest.raises(HintedError, match="what") as caught:
        background.ask(lambda: 1)
    assert caught.value.hint == "do"


def test_stop_ends_the_threads_and_what_runs(background):
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


def test_a_dead_loop_is_no_hang(background):
    async def die():
        asyncio.get_running_loop().stop()
        await asyncio.sleep(3600)

    with pytest.raises(SwarmError):
        background.call(die())
