"""Joining through gates that refuse a wrong clock."""

from __future__ import annotations

import asyncio
import random
from types import SimpleNamespace

import pytest
from thinwire.collectives.transport.interface import OWN_GATE, SAME_KEY, Contact
from thinwire.node.membership.join import DuplicateKey, NoPlace, NoSwarm, Refused, knock
from thinwire.sims.engine import virtual_loop
from thinwire.swarm.messages.registry import VERSION, Hello, Refuse, Welcome

HERE, DEAD = Contact("10.0.0.1:7000", bytes(32)), Contact("10.0.0.2:7000", bytes(32))
RIGHT = 12.0
"""Time at which the wrong clock is corrected."""


def _knock(contacts, ours=True, leaves=False):
    """Return the result, its time, and the contacted peers. HERE accepts signatures of a similar clock only.

    `ours`: our clock is wrong; `leaves`: HERE is gone when the clock is right.
    """
    asked = []

    async def main():
        loop = virtual_loop.current()
        environment = SimpleNamespace(now=loop.time, rng=random.Random(1))

        def hello():
            return Hello(VERSION, bytes(32), b"right" if loop.time() >= RIGHT else b"wrong")

        async def meet(contact, words):
            asked.append(contact)
            if contact is DEAD or (leaves and loop.time() >= RIGHT):
                return Refuse("unreachable", "nobody is there")
            if words.record == b"wrong" if ours else loop.time() < RIGHT:
                return Refuse("signature", "record issued 317 s in the future")
            return Welcome(b"", b"", bytes(32), bytes(64), (), "", "", bytes(32))

        refusal = await knock(
            contacts, hello, lambda welcome: None, SimpleNamespace(meet=meet), environment, seconds=60.0
        )
        return refusal, loop.time()

    return *virtual_loop.run(main(), seed=1), asked


@pytest.mark.parametrize("ours", [True, False])
def test_gate_that_refused_a_wrong_clock_is_asked_again(ours):
    """As long as another peer may admit us."""
    refusal, took, asked = _knock([HERE, DEAD], ours)
    assert refusal is None and RIGHT <= took <= RIGHT + 2.0 and DEAD in asked


def test_joiner_refused_by_all_fails_at_once():
    refusal, took, asked = _knock([HERE])
    assert isinstance(refusal, Refused) and "clocks" in refusal.hint and took < 2.0 and asked == [HERE]
    assert refusal.exit_code == 4, (
        "a service tries again: the clock may be right a minute after the machine has started"
    )


@pytest.mark.parametrize("least", [0.0, 30.0])
def test_joiner_fails_at_once_if_a_process_with_its_key_answers_and_nobody_else_may(least):
    async def main():
        loop = virtual_loop.current()
        environment = SimpleNamespace(now=loop.time, rng=random.Random(1))

        async def meet(contact, words):
            return Refuse("busy", SAME_KEY if contact is HERE else OWN_GATE)

        hello = Hello(VERSION, bytes(32), b"")
        arguments = lambda: hello, lambda welcome: None, SimpleNamespace(meet=meet), environment
        return (
            (await knock([HERE], *arguments, seconds=60.0, least=least), loop.time()),
            (await knock([HERE, DEAD], *arguments, seconds=60.0, least=least), loop.time()),
        )

    (alone, at_once), (other, later) = virtual_loop.run(main(), seed=1)
    assert isinstance(alone, DuplicateKey) and alone.exit_code == 5 and not alone.absent and at_once < 1.0
    assert isinstance(other, DuplicateKey) and later > 59.0, "another peer might have admitted it"


@pytest.mark.parametrize("seconds, times", [(2.0, 0), (10.0, 1), (40.0, 2)])
@pytest.mark.parametrize("contacts, words", [([HERE, DEAD], "317 s in the future"), ([DEAD], "nobody is there")])
def test_reason_of_a_long_search_is_reported_within_seconds(contacts, words, seconds, times):
    """The clock is wrong, and another peer of the invite does not answer: the search continues."""
    reports = []

    async def meet(contact, hello):
        return Refuse("signature", f"record issued {words}") if contact is HERE else Refuse("unreachable", words)

    async def main():
        loop, hello = virtual_loop.current(), Hello(VERSION, bytes(32), b"")
        environment, transport = SimpleNamespace(now=loop.time, rng=random.Random(1)), SimpleNamespace(meet=meet)
        await knock(
            contacts, lambda: hello, lambda welcome: None, transport, environment, seconds=seconds,
            report=lambda reason: reports.append((loop.time(), reason)),
        )  # fmt: skip

    virtual_loop.run(main(), seed=1)
    assert len(reports) == times and all(words in reason for _, reason in reports)
    assert all(("set-ntp" in reason) == (HERE in contacts) for _, reason in reports)
    assert [at for at, _ in reports] == pytest.approx([4.0, 34.5][:times], abs=1.5)


def test_withdrawn_refusal_is_not_the_reported_error():
    """The clock is corrected, but the peer that refused is gone: the error reports that."""
    refusal, _, asked = _knock([HERE, DEAD], ours=False, leaves=True)
    assert isinstance(refusal, NoSwarm) and "nobody is there" in str(refusal) and asked.count(HERE) > 2


def _refused(meet):
    """Return the error of a joiner that knocks at two contacts for 10 s. meet: returns the answer of a contact."""

    async def main():
        return await knock(
            [HERE, DEAD],
            lambda: Hello(VERSION, bytes(32), b""),
            lambda welcome: None,
            SimpleNamespace(meet=meet),
            SimpleNamespace(now=virtual_loop.current().time, rng=random.Random(1)),
            seconds=10.0,
        )

    return virtual_loop.run(main(), seed=1)


def test_joiner_without_a_free_place_is_told_to_wait_or_to_ask_the_author():
    """Also if a contact that does not answer is asked later."""

    async def meet(contact, words):
        await asyncio.sleep(5.0 if contact is DEAD else 0.1)
        return Refuse("unreachable", "") if contact is DEAD else Refuse("full", "all places are taken")

    refusal = _refused(meet)
    assert isinstance(refusal, NoPlace) and refusal.exit_code == 4 and "all places are taken" in str(refusal)
    assert not refusal.absent, "a peer that returns does not continue alone beside a full swarm"
    assert "try again" in refusal.hint and "invite --for" in refusal.hint and "runs" not in refusal.hint


@pytest.mark.parametrize(("code", "words"), [("full", "all places are taken"), ("unreachable", "no peer"), ("run", "")])
def test_address_with_another_run_is_no_refusal_while_another_peer_may_still_admit_us(code, words):
    """A service tries again after exit code 4, not after 5."""

    async def meet(contact, hello):
        await asyncio.sleep(0.1)
        return Refuse("run", "another run") if contact is DEAD else Refuse(code, "all places are taken")

    refusal = _refused(meet)
    assert refusal.exit_code == (4 if words else 5) and words in str(refusal)


def test_search_ends_when_a_peer_comes_to_our_gate():
    """No contact can be dialled, because all are behind address translators, but one of them dials us after 7 s."""

    async def main():
        loop = virtual_loop.current()

        async def meet(contact, words):
            await asyncio.sleep(5.0)
            return Refuse("unreachable", "it did not answer")

        refusal = await knock(
            [HERE, DEAD],
            lambda: Hello(VERSION, bytes(32), b""),
            lambda welcome: None,
            SimpleNamespace(meet=meet),
            SimpleNamespace(now=loop.time, rng=random.Random(1)),
            seconds=60.0,
            met=lambda: loop.time() >= 7.0,
        )
        return refusal, loop.time()

    refusal, took = virtual_loop.run(main(), seed=1)
    assert refusal is None and 7.0 <= took <= 12.0


def test_contacts_that_do_not_answer_delay_the_others_little():
    """Twenty are gone behind a firewall that drops packets; the last of 21 admits us."""
    gone = [Contact(f"10.0.1.{at}:7000", bytes([at]) * 32) for at in range(20)]
    dialled, given_up = [], []

    async def main():
        loop = virtual_loop.current()

        async def meet(contact, words):
            dialled.append(contact)
            if contact is HERE:
                return Welcome(b"", b"", bytes(32), bytes(64), (), "", "", bytes(32))
            try:
                await asyncio.sleep(8.0)
            except asyncio.CancelledError:
                given_up.append(contact)
                raise
            return Refuse("unreachable", "it did not answer")

        refusal = await knock(
            [*gone, HERE],
            lambda: Hello(VERSION, bytes(32), b""),
            lambda welcome: None,
            SimpleNamespace(meet=meet),
            SimpleNamespace(now=loop.time, rng=random.Random(1)),
            seconds=5.0,
        )
        return refusal, loop.time()

    refusal, took = virtual_loop.run(main(), seed=1)
    assert refusal is None and took <= 16.0, "eight at a time, each once, also after 5 s"
    assert len(dialled) <= 21 and len(given_up) == len(dialled) - 1 - took, "no dial is left over"
