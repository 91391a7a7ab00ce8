"""Places of payloads in shared memory: without sockets, in virtual time."""

import asyncio

import pytest
from thinwire.collectives.transport.shared_memory.places import DELAY, MOST_OFFSETS, PROMPT, Places
from thinwire.collectives.transport.shared_memory.region import PAGE
from thinwire.sims.engine import virtual_loop

SIZE = 1000 * PAGE


def run(scene, size=SIZE):
    """Run a scene with places and the list of (time, offsets) of all reports; return these."""

    async def main():
        reports, loop = [], asyncio.get_running_loop()
        await scene(Places(size, lambda offsets: reports.append((loop.time(), offsets))))
        await asyncio.sleep(10 * DELAY)
        return reports

    return virtual_loop.run(main(), seed=1)


def hold(places, count, size=1):
    """Take payloads of `size` bytes at the first pages; return their offsets."""
    offsets = [PAGE * index for index in range(count)]
    for offset in offsets:
        places.take(offset, size)
    return offsets


@pytest.mark.parametrize("place", [(SIZE, 1), (SIZE - PAGE, PAGE + 1), (2**63, 1), (0, SIZE + 1)])
def test_place_that_is_not_inside_the_region_is_refused(place):
    async def scene(places):
        places.take(SIZE - PAGE, PAGE)
        with pytest.raises(ValueError, match=f"{place[1]} bytes at {place[0]} of {SIZE} bytes of shared memory"):
            places.take(*place)

    run(scene)


def test_place_is_free_for_another_payload_once_it_is_reported():
    async def scene(places):
        places.take(PAGE, 2 * PAGE)
        places.release(PAGE)
        for _ in range(2):
            with pytest.raises(ValueError, match=f"a payload at {PAGE} of the shared memory, where another one is"):
                places.take(PAGE, 1)
            await asyncio.sleep(DELAY / 2)
        await asyncio.sleep(DELAY)
        places.take(PAGE, 1)

    assert [offsets for _, offsets in run(scene)] == [[PAGE]]


def test_payloads_have_no_more_bytes_than_the_region_until_some_are_reported():
    async def scene(places):
        for _ in range(3):
            offsets = hold(places, 5, size=2 * PAGE)
            with pytest.raises(ValueError, match=f"{11 * PAGE} bytes of payloads in {10 * PAGE} bytes"):
                places.take(9 * PAGE, 1)
            for offset in (*offsets, 9 * PAGE):
                places.release(offset)
            await asyncio.sleep(2 * DELAY)

    assert len(run(scene, size=10 * PAGE)) == 3


def test_few_places_are_reported_together_after_a_delay():
    async def scene(places):
        for _ in range(2):
            for offset in hold(places, 3):
                places.release(offset)
                await asyncio.sleep(0.25 * DELAY)
            await asyncio.sleep(0.4 * DELAY)

    offsets = [0, PAGE, 2 * PAGE]
    found = run(scene)
    assert [free for _, free in found] == [offsets] * 2
    assert [time for time, _ in found] == pytest.approx([DELAY, 2.15 * DELAY])


@pytest.mark.parametrize(("count", "size"), [(1, PROMPT), (MOST_OFFSETS, 1), (2 * MOST_OFFSETS + 1, 1)])
def test_many_bytes_or_places_are_reported_at_once(count, size):
    async def scene(places):
        for offset in hold(places, count, size):
            places.release(offset)

    found = run(scene)
    assert {time for time, _ in found} == {0.0}
    assert [offset for _, offsets in found for offset in offsets] == [PAGE * index for index in range(count)]
    assert max(len(offsets) for _, offsets in found) <= MOST_OFFSETS


def test_report_at_once_includes_what_waited_and_the_delay_of_the_next_one_begins_after_it():
    async def scene(places):
        places.take(0, 1)
        places.take(PAGE, PROMPT)
        places.release(0)
        await asyncio.sleep(DELAY / 2)
        places.release(PAGE)
        await asyncio.sleep(DELAY / 4)
        places.take(0, 1)
        places.release(0)

    found = run(scene)
    assert [free for _, free in found] == [[0, PAGE], [0]]
    assert [time for time, _ in found] == pytest.approx([DELAY / 2, 1.75 * DELAY])


@pytest.mark.parametrize("wait", [0, DELAY / 2])
def test_nothing_is_reported_once_closed(wait):
    async def scene(places):
        for offset in hold(places, 2):
            places.release(offset)
            await asyncio.sleep(wait)
            places.close()

    assert run(scene) == []
