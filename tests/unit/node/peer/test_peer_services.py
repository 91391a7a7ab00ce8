"""Start of training together: the contributions that the first exchange waits for, and how long it waits."""

import asyncio
from types import SimpleNamespace

import pytest
from thinwire.collectives.outcome import Outcome
from thinwire.node.peer.peer_services import GATHER_SECONDS, LOOK_SECONDS, PeerServices
from thinwire.node.peer.reports.participation import ALWAYS
from thinwire.sims.engine import virtual_loop
from thinwire.swarm.manifest.parser import parse

ME, OTHER, THIRD = (bytes([n]) * 32 for n in (1, 2, 3))
LONGEST = 7.0


class Training:
    """A peer whose others hold the state after `gather`, and contribute, leave or commit when they are told to."""

    def __init__(self, members):
        self.began, self.exchanged_at, self.told = 0.0, [], []
        roster = SimpleNamespace(on_trial=lambda peer: peer in self.on_trial)
        session = SimpleNamespace(me=ME, ready=[ME, OTHER, THIRD], live={OTHER, THIRD}, announced={}, roster=roster)
        self.on_trial = set()
        self.rounds = SimpleNamespace(overtaken=False, sync=self.sync)
        self.peer = SimpleNamespace(
            environment=SimpleNamespace(now=virtual_loop.current().time),
            manifest=parse(f"[exchange]\nstraggler_timeout = {LONGEST}"),
            replica=SimpleNamespace(members=members, round=0, contents=(0, 0)),
            session=session,
            rounds=self.rounds,
        )
        report = SimpleNamespace(
            phase="",
            speed=0.0,
            book=lambda *args, **fields: None,
            emit=lambda *event: self.told.append(event),
            end_alarm=lambda text, why: self.told.append(("over", {"detail": text})),
            uncommitted=lambda peer, **rest: None,
            group=lambda: "",
        )
        self.services = PeerServices(self.peer, report, meanwhile=None, work=None)
        self.session = session

    async def sync(self, **_):
        self.exchanged_at.append(virtual_loop.current().time() - self.began)
        return Outcome(None)

    async def gather(self, count):
        await self.services.gather(count)
        self.began = virtual_loop.current().time()

    async def exchange(self):
        await self.services.exchange(steps=1, weight=1, loss=None)


def first_exchange(happen, *, members=(ME,), wait_for=3):
    """Return the seconds from the start of training to two exchanges, and the events. `happen` changes things after 2 s."""
    found = []

    async def main():
        training = Training(members)
        await training.gather(wait_for)
        virtual_loop.current().call_later(2.0, happen, training)
        await training.exchange()
        await training.exchange()
        found.extend((training.exchanged_at, training.told))

    virtual_loop.run(main(), seed=1)
    return found


def nothing(training):
    """Let the others be silent."""


def contribute(training):
    training.session.announced |= {OTHER: "contribution", THIRD: "contribution"}


def contribute_or_leave(training):
    training.session.announced[OTHER] = "contribution"
    training.session.live.discard(THIRD)


def commit_without_us(training):
    training.rounds.overtaken = True


@pytest.mark.parametrize(
    ("happen", "seconds"),
    [(contribute, 2.0), (contribute_or_leave, 2.0), (commit_without_us, 2.0), (nothing, LONGEST)],
)
def test_member_contributes_after_the_peers_that_began_with_it_but_waits_no_longer_than_a_round(happen, seconds):
    (first, second), told = first_exchange(happen)
    assert seconds <= first <= seconds + 2 * LOOK_SECONDS and second == first, "only the first exchange waits"
    assert told == [("waiting", {"detail": "for the first contributions of 2 other peers, at most 7 s"})]


@pytest.mark.parametrize(
    "given", [{"members": (OTHER,)}, {"members": (ME, OTHER, THIRD)}, {"members": ()}, {"wait_for": 1}]
)
def test_exchange_waits_for_nobody_if_no_member_waits_for_peers_that_are_no_members(given):
    """Two peers that waited for each other would both waste the longest wait."""
    (first, second), told = first_exchange(nothing, **given)
    assert first == second == 0.0 and not told


@pytest.mark.parametrize(("on_trial", "began_late"), [(False, False), (True, False), (False, True)])
def test_peer_on_trial_or_with_rounds_of_before_its_state_is_not_warned_that_it_is_late(on_trial, began_late):
    """Rounds that the others had completed before it could begin them show nothing about its speed."""

    async def main():
        training = Training((OTHER,))
        training.on_trial = {ME} if on_trial else set()
        training.peer.identity = SimpleNamespace(peer_id=ME)
        training.peer.store_known_peers = training.rounds.call_when_settled = lambda *args: None
        commit = SimpleNamespace(proposal=SimpleNamespace(contributors=()))
        training.rounds.sync = lambda **fields: asyncio.sleep(0, Outcome(commit=commit, began_late=began_late))
        for _ in range(2 * ALWAYS):
            await training.exchange()
        alarms = [fields["detail"] for kind, fields in training.told if kind == "alarm"]
        assert [text.split(":")[0] for text in alarms] == ["contributed to 0 of 6 rounds"] * (
            not on_trial and not began_late
        )

    virtual_loop.run(main(), seed=1)


def test_alarm_of_a_late_peer_ends_when_it_has_contributed_to_half_of_its_rounds():
    async def main():
        training = Training((OTHER,))
        training.peer.identity = SimpleNamespace(peer_id=ME)
        training.peer.store_known_peers = training.rounds.call_when_settled = lambda *args: None
        told = []
        for count, contributors in ((ALWAYS, ()), (ALWAYS - 1, (ME,)), (1, (ME,)), (2, (ME,))):
            entries = tuple(SimpleNamespace(peer=peer) for peer in contributors)
            commit = SimpleNamespace(proposal=SimpleNamespace(contributors=entries))
            training.rounds.sync = lambda commit=commit, **fields: asyncio.sleep(0, Outcome(commit=commit))
            for _ in range(count):
                await training.exchange()
            told.append([kind for kind, _ in training.told])
        assert told == [["alarm"], ["alarm"], ["alarm", "over"], ["alarm", "over"]]
        (_, raised), (_, ended) = training.told
        assert raised == ended

    virtual_loop.run(main(), seed=1)


def test_joiner_counts_live_members_which_announce_nothing_before_their_first_contribution():
    """A founder that waits for a joiner would otherwise be waited for by it."""

    async def main():
        training = Training((OTHER, THIRD))
        training.session.ready, training.session.live = [], {OTHER}
        await training.gather(2)
        assert training.began == 0.0 and not training.told
        await training.gather(3)
        assert training.began >= GATHER_SECONDS, "a member that is away does not count"

    virtual_loop.run(main(), seed=1)


def test_exchange_waits_for_those_that_came_although_others_are_missing():
    (first, _), told = first_exchange(contribute, wait_for=4)
    assert 2.0 <= first <= 2.0 + 2 * LOOK_SECONDS
    assert [text["detail"].split(",")[0] for _, text in told] == [
        "for 4 peers",
        "long enough: training begins with 3 of 4 peers",
        "for the first contributions of 2 other peers",
    ]


def test_peer_that_came_after_the_start_is_not_waited_for():
    async def main():
        training = Training((ME,))
        training.session.ready = [ME, OTHER]
        await training.gather(2)
        training.session.ready.append(THIRD)
        training.session.announced[OTHER] = "contribution"
        await asyncio.wait_for(training.exchange(), 0.01)
        assert training.exchanged_at == [0.0]

    virtual_loop.run(main(), seed=1)


def test_contributions_of_peers_on_trial_are_not_waited_for():
    async def main():
        training = Training((ME,))
        training.on_trial = {OTHER, THIRD}
        await training.gather(3)
        await training.exchange()
        assert training.exchanged_at == [0.0]

    virtual_loop.run(main(), seed=1)


@pytest.mark.parametrize(
    "toml", ['[outer]\nmethod = "noloco"', '[outer]\nmethod = "buffered-async"', "[data]\nexactly_once = true"]
)
def test_first_exchange_waits_for_no_peer_where_the_others_cannot_contribute_to_it(toml):
    async def main():
        training = Training((ME,))
        training.peer.manifest = parse(toml)
        await training.gather(3)
        await training.exchange()
        assert training.exchanged_at == [0.0]

    virtual_loop.run(main(), seed=1)
