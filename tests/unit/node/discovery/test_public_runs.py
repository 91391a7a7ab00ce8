import asyncio
import random

import pytest
from kit.planted.cards import NOW, RUN, card
from thinwire.node.discovery.announcer import LOOK_SECONDS, REFRESH_SECONDS, announce
from thinwire.node.discovery.public_runs import (
    MOST_CARDS,
    MOST_PEERS,
    AmbiguousRun,
    Directory,
    DirectoryError,
    InviteNeeded,
    listing,
)
from thinwire.sims.engine import virtual_loop


class Planted:
    """Source with planted bytes."""

    name = "planted"

    def __init__(self, *wires, broken=False):
        self.wires, self.broken, self.published, self.closed = list(wires), broken, [], False

    def _answer(self):
        if self.broken:
            raise DirectoryError("it is broken", "mend it")
        return self.wires

    async def publish(self, card):
        self._answer()
        self.published.append(card)

    async def find(self, run_id):
        return self._answer()

    async def cards(self):
        return self._answer()

    async def close(self):
        self.closed = True


def directory(*sources, now=NOW, said=None):
    said = [] if said is None else said
    return Directory(sources, wall=lambda: now, rng=random.Random(1), warn=said.append)


GARBAGE = (
    b"",
    b"\x00" * 500,
    random.Random(3).randbytes(700),
    b"x" * 10_000,
    b"\x91" * 1000,
    card(1).wire[:-1] + b"\x00",
    card(2, issued=NOW - 1000).wire,  # expired
    card(3, issued=NOW + 1000).wire,
)


def test_only_valid_cards_of_the_run_are_found():
    source = Planted(*GARBAGE, card(4).wire, card(5, run=b"o" * 32).wire, card(6, addresses=()).wire)
    found = asyncio.run(directory(source).find(RUN))
    assert [one.record.peer_id for one in found] == [card(4).record.peer_id]
    assert [run.run_id for run in asyncio.run(directory(source).runs())] == [b"o" * 32, RUN]


def test_newest_card_of_a_peer_counts():
    source = Planted(
        card(1, round=3, issued=NOW - 60).wire, card(1, round=9).wire, card(1, round=2, issued=NOW - 90).wire
    )
    assert [one.description.round for one in asyncio.run(directory(source).find(RUN))] == [9]


def test_number_of_answers_is_bounded():
    source = Planted(*(card(number).wire for number in range(MOST_PEERS + 20)))
    assert len({one.record.peer_id for one in asyncio.run(directory(source).find(RUN))}) == MOST_PEERS
    crowd = Planted(*[b"noise"] * (20 * MOST_CARDS), card(1).wire)
    assert len(asyncio.run(directory(crowd).find(RUN))) <= 1


def test_failing_source_is_reported_and_left_out():
    said = []
    both = directory(Planted(broken=True), Planted(card(1).wire), said=said)
    assert len(asyncio.run(both.find(RUN))) == 1 and said == ["planted: it is broken; mend it"]
    with pytest.raises(DirectoryError, match="no directory can be read"):
        asyncio.run(directory(Planted(broken=True)).runs())
    working = Planted()
    assert asyncio.run(directory(Planted(broken=True), working).publish(card(1)))
    assert working.published == [card(1)]
    assert not asyncio.run(directory(Planted(broken=True)).publish(card(1)))


def test_own_mistake_is_no_failing_source():
    source = Planted()
    source.find = lambda run_id: _raise()
    with pytest.raises(ZeroDivisionError):
        asyncio.run(directory(source).find(RUN))


async def _raise():
    raise ZeroDivisionError


def test_listing_is_not_chosen_by_one_liar():
    honest = [card(number, round=7, peers=3, loss=2.0) for number in (1, 2)]
    liar = card(9, name="bait", round=10**15, peers=2**20, loss=-1e300)
    (run,) = listing([*honest, liar])
    said = run.description
    assert (said.name, said.round, said.peers, said.loss, run.publishers) == ("demo", 7, 3, 2.0, 3)
    (unknown,) = listing([card(1, loss=None)])
    assert unknown.description.loss is None


def test_run_is_found_by_name_and_by_the_start_of_its_id():
    source = Planted(card(1).wire, card(2).wire, card(3, run=b"o" * 32, name="other").wire)
    for target in ("demo", RUN.hex(), RUN.hex()[:8].upper()):
        invite = asyncio.run(directory(source).invite_to(target))
        assert invite.run_id == RUN
        assert {seed.address for seed in invite.seeds} == {"192.0.2.1:7001", "192.0.2.1:7002"}
        assert {seed.transport_key for seed in invite.seeds} == {card(n).record.transport_key for n in (1, 2)}


@pytest.mark.parametrize("target", ["absent", RUN.hex()[:7], b"z".hex() * 32])
def test_absent_run_is_an_error(target):
    with pytest.raises(DirectoryError):
        asyncio.run(directory(Planted(card(1).wire)).invite_to(target))


def test_name_of_several_runs_is_an_error_that_lists_them():
    source = Planted(card(1).wire, card(2, run=b"o" * 32).wire)
    with pytest.raises(AmbiguousRun) as caught:
        asyncio.run(directory(source).invite_to("demo"))
    assert all(run.hex()[:16] in str(caught.value) for run in (RUN, b"o" * 32))
    assert asyncio.run(directory(source).invite_to(RUN.hex()[:16])).run_id == RUN


def test_name_that_looks_like_an_id_leads_to_no_other_run():
    for digits in (64, 16):
        target = RUN.hex()[:digits]
        source = Planted(card(1).wire, card(2, run=b"o" * 32, name=target).wire)
        if digits == 64:
            assert asyncio.run(directory(source).invite_to(target)).run_id == RUN
        else:
            with pytest.raises(AmbiguousRun):
                asyncio.run(directory(source).invite_to(target))


def test_run_that_needs_an_invite_is_not_joined_by_name():
    for modes, needed in ((("closed", "invited"), True), (("closed", "open"), False)):
        source = Planted(*(card(number, admission=mode).wire for number, mode in enumerate(modes, 1)))
        if needed:
            with pytest.raises(InviteNeeded, match="closed"):
                asyncio.run(directory(source).invite_to("demo"))
        else:
            assert asyncio.run(directory(source).invite_to("demo")).run_id == RUN


def test_card_is_published_once_there_is_one_and_success_is_told_once():
    async def scene():
        source, told, cards = Planted(), [], iter([None, card(1)])
        shown = card(1).record.addresses

        async def published(accepted):
            told.append(accepted)

        task = asyncio.create_task(announce(directory(source), lambda: next(cards), published, lambda: shown))
        while not source.published:
            await asyncio.sleep(0.01)
        await asyncio.sleep(0)
        task.cancel()
        return source.published, told

    assert asyncio.run(scene()) == ([card(1)], [True])


def test_card_is_published_at_once_when_its_addresses_change_and_else_once_a_minute():
    async def scene():
        source, present, known = Planted(), card(1), True
        task = asyncio.create_task(
            announce(
                directory(source),
                lambda: present,
                lambda accepted: asyncio.sleep(0),
                lambda: present.record.addresses if known else (),
            )
        )
        await asyncio.sleep(REFRESH_SECONDS / 2)
        assert source.published == [card(1)]
        present = card(2)
        await asyncio.sleep(2 * LOOK_SECONDS)
        assert source.published == [card(1), card(2)]
        known = False
        await asyncio.sleep(REFRESH_SECONDS / 2)
        assert len(source.published) == 2, "unknown addresses are no other ones"
        await asyncio.sleep(REFRESH_SECONDS / 2)
        assert source.published == [card(1), card(2), card(2)]
        task.cancel()

    virtual_loop.run(scene(), seed=1)
