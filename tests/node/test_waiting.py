"""Work that is awaited whole."""

import asyncio

import pytest
from thinwire.node.waiting import cancelled, whole


def test_cancelled_work_ends_first():
    seen = []

    async def main():
        may_end = asyncio.Event()

        async def work():
            await may_end.wait()
            seen.append("worked")
            return 5

        task = asyncio.create_task(whole(work()))
        await asyncio.sleep(0)
        await asyncio.sleep(0)
        task.cancel()
        await asyncio.sleep(0)
        assert not task.done()
        may_end.set()
        with pytest.raises(asyncio.CancelledError):
            await task
        assert await whole(work()) == 5

    asyncio.run(main())
    assert seen == ["worked", "worked"]


def test_errors_pass():
    async def wrong():
        raise ValueError("mine")

    async def main():
        with pytest.raises(ValueError, match="mine"):
            await whole(wrong())
        task = asyncio.create_task(wrong())
        await cancelled(task)
        assert task.done()

    asyncio.run(main())
