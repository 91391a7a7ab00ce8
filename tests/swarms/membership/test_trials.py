"""Newcomers without an invite in an open run: trial, endorsement, liars and caps, in virtual time."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Mapping
from dataclasses import replace
from typing import Any, Literal

import msgspec
import pytest
from kit.outer.open_runs import invite, name_of, noise, opinions_of, replaces, told_at, update_of
from kit.outer.strangers import knocks
from kit.scenarios import SPARSE, events_of, identity_of, manifest_of, swarm_of
from thinwire.collectives.rounds.data_planes.contributions import ContributionSummary
from thinwire.sims.peers import lies
from thinwire.sims.peers.false_messages import sessions
from thinwire.sims.peers.machine import Process
from thinwire.sims.simulation.world import SimulatedRun, SimWorld, simulate
from thinwire.sims.trials.trial import PACE, STALL
from thinwire.swarm.membership import eviction
from thinwire.swarm.messages.registry import Ready

ROUNDS = 5
"""Scored contributions that a newcomer needs in these runs."""


@pytest.fixture
def played(monkeypatch: pytest.MonkeyPatch) -> Callable[..., SimulatedRun]:
    """Return a function that plays an open run; the first `old` peers have an invite of the author for their key.

    New peers tell the lie `liar`; `spoiler`: index of an old peer that tells "flip". honest_at: the last
    new peer is honest, and joins then.
    """

    def play(
        old: int,
        new: int,
        *,
        seconds: float = 50.0,
        liar: str = "",
        at: float = 6.0,
        tables: str = "",
        spoiler: int = -1,
        honest_at: float = 0.0,
        method: Mapping[str, str] = {"outer": "sync_every = 4", "codec": "fp32"},
        compute: Literal["stub", "torch"] = "stub",
    ) -> SimulatedRun:
        admission = f"[admission]\nmode = 'open'\ntrial_rounds = {ROUNDS}\n{tables or 'trial_per_network = 0'}"
        toml = manifest_of(**method, tables=admission)
        joins = {old + number: at + 0.01 * number for number in range(new)}
        joins |= {old + new - 1: honest_at} if honest_at else {}
        scenario = swarm_of(old + new, toml, seconds=seconds, parameters=2_000, joins=joins, compute=compute)
        liars = old + new - bool(honest_at)
        peers = tuple(
            replace(one, liar=liar if one.index in range(old, liars) else "flip" if one.index == spoiler else "")
            for one in scenario.peers
        )
        with monkeypatch.context() as patch:
            invite(patch, old)
            return simulate(replace(scenario, peers=peers), preset=PACE, stall=STALL)

    return play


NEWCOMER = 3
"""Index of the peer that `spoil` is about."""

REPEATED: list[int] = []
"""Rounds in which `spoil` has repeated its hashes."""


def rounds_of(run: SimulatedRun, peer: int) -> dict[int, Any]:
    return {event.fields["round"]: event.fields for event in events_of(run, "round", peer)}


def test_honest_newcomer_has_no_part_in_results_until_it_is_endorsed_and_then_counts(played, monkeypatch):
    told: list[dict[str, str]] = []
    told_at(13.0, told, monkeypatch)
    run = played(3, 1)
    assert run.violations == ()
    assert told[0][name_of(3)].startswith("on trial: score +0.1")
    assert told[0][name_of(3)].endswith("contributions, at least 5 needed")
    rounds = rounds_of(run, 0)
    first = min(number for number, fields in rounds.items() if name_of(3)[:8] in fields["members"])
    came = min(number for number, fields in rounds.items() if fields["peers"] == 4)
    assert ROUNDS <= first - came <= 3 * ROUNDS, "members are scored as well, so it takes twice as long"
    for number in range(came + 1, first):
        assert rounds[number]["contributors"] == 3 and rounds[number]["missing"][name_of(3)[:8]] == "on trial"
    assert all(rounds[number]["contributors"] == 4 for number in range(first, max(rounds)))
    scores = [fields["score"] for fields in opinions_of(run, 0, 3)][:ROUNDS]
    assert len(scores) >= ROUNDS and scores == sorted(scores) and scores[0] > 0.0
    assert {event.peer for event in events_of(run, "endorsed")} >= {0, 1, 2}
    # It applied the results of the rounds in which it had no part.
    theirs = rounds_of(run, 3)
    assert all(theirs[number]["digest"] == rounds[number]["digest"] for number in theirs)


LIES = {
    "flip": None,
    "zero": None,
    "noise": replaces(noise),
    "copy": replaces(lambda process, values: update_of(process, 1, values.size)),
}


@pytest.mark.trial
@pytest.mark.parametrize("lie", LIES)
def test_newcomer_without_training_of_its_own_is_never_endorsed(played, monkeypatch, lie):
    if LIES[lie] is not None:
        monkeypatch.setitem(lies.IMPLEMENTED, lie, LIES[lie])
    run = played(6, 1, liar=lie, seconds=60.0)
    assert not [violation for violation in run.violations if violation.peer < 6]
    rounds = rounds_of(run, 0)
    assert len(rounds) > 25 and not any(name_of(6)[:8] in fields["members"] for fields in rounds.values())
    opinions = opinions_of(run, 0, 6)
    assert len(opinions) > 10 and not events_of(run, "endorsed")
    assert all(fields["contributors"] == 6 for number, fields in rounds.items() if number > 2)
    if lie != "copy":
        assert opinions[-1]["score"] < 0.0


@pytest.mark.parametrize("exchange", ["", pytest.param("collective = 'sparse-butterfly'", marks=pytest.mark.trial)])
def test_newcomer_of_a_sparse_run_counts_once_it_is_endorsed(played, exchange):
    run = played(3, 1, method={**SPARSE, "exchange": exchange})
    assert run.violations == ()
    rounds = rounds_of(run, 0)
    first = min(number for number, fields in rounds.items() if name_of(3)[:8] in fields["members"])
    came = min(number for number, fields in rounds.items() if fields["peers"] == 4)
    assert ROUNDS <= first - came <= 3 * ROUNDS
    for number in range(came + 1, first):
        assert rounds[number]["contributors"] == 3 and rounds[number]["missing"][name_of(3)[:8]] == "on trial"


@pytest.mark.trial
@pytest.mark.parametrize("lie", ["flip", "zero"])
def test_newcomer_that_lies_is_never_endorsed_in_a_sparse_run(played, lie):
    run = played(6, 1, liar=lie, seconds=60.0, method=SPARSE)
    assert not any(name_of(6)[:8] in fields["members"] for fields in rounds_of(run, 0).values())
    assert len(opinions_of(run, 0, 6)) > 10 and not events_of(run, "endorsed")


def spoil(process: Process) -> None:
    """Announce the hashes of the newcomer as one's own, endorse none, distrust it."""
    (session,) = sessions(process)
    newcomer = identity_of(NEWCOMER).peer_id

    async def lying(source: Any, *, summary: ContributionSummary | None = None, **rest: Any) -> Any:
        for _ in range(40):
            if (theirs := session.current.agreement.ready.get(newcomer)) is not None and theirs.hashes:
                REPEATED.append(theirs.round)
                return await average(source, summary=ContributionSummary(theirs.hashes, theirs.norms), **rest)
            await asyncio.sleep(0.05)
        return await average(source, summary=summary, **rest)

    average, session.average = session.average, lying
    control = process.peer.presence.send_queue.control

    def lie(to: bytes, message: Any) -> None:
        if isinstance(message, Ready):
            message = msgspec.structs.replace(message, endorses=(), distrusts=(newcomer,))
        control(to, message)

    process.peer.presence.send_queue.control = lie


def test_one_lying_member_cannot_keep_an_honest_newcomer_out(played, monkeypatch):
    members = 4  # with fewer, all must endorse it
    monkeypatch.setitem(lies.IMPLEMENTED, "flip", spoil)
    REPEATED.clear()
    monkeypatch.setattr(f"{__name__}.NEWCOMER", members)
    run = played(members, 1, seconds=60.0, spoiler=members - 1)
    rounds = rounds_of(run, 0)
    assert len(set(REPEATED)) >= ROUNDS, "the lie was told"
    assert any(name_of(members)[:8] in fields["members"] for fields in rounds.values())
    honest = events_of(run, "trial", *range(members - 1))
    assert len(honest) > ROUNDS and not [event for event in honest if "copies" in event.fields["detail"]]


@pytest.mark.trial
@pytest.mark.parametrize(("identities", "liars"), [(500, 8), pytest.param(1000, 40, marks=pytest.mark.soak)])
def test_many_identities_and_liars_on_trial_change_no_result(played, monkeypatch, identities, liars):
    monkeypatch.setattr(SimWorld, "tasks", [], raising=False)
    clean = played(6, 0, seconds=24.0)
    original, answers = SimWorld.play, list[str]()

    async def play(self: SimWorld) -> None:
        self.net.at(9.0, knocks(identities, answers, times=1), self)
        await original(self)

    with monkeypatch.context() as patch:
        patch.setattr(SimWorld, "play", play)
        run = played(6, liars, seconds=24.0, liar="flip")
    assert answers == ["welcome"] * (6 * identities), "each takes the place of one that has not connected"
    for peer in range(6):
        expected, found = rounds_of(clean, peer), rounds_of(run, peer)
        assert abs(len(expected) - len(found)) <= 1 and len(found) > 8
        for number in expected.keys() & found.keys():
            # Digests contain the random lives of the peers.
            assert found[number]["loss"] == expected[number]["loss"], number
            assert found[number]["members"] == expected[number]["members"], number
    gone = {event.fields["peer"] for event in events_of(run, "dead", *range(6))}
    assert not gone & {name_of(peer) for peer in range(6)}


def test_honest_newcomer_gets_a_place_that_liars_hold_and_becomes_a_member(played, monkeypatch):
    """All places are taken by keys with links, whose contributions lower no loss."""
    monkeypatch.setattr(eviction, "MAX_ENDORSED", 4)
    run = played(3, 6, seconds=150.0, liar="flip", honest_at=12.0)
    assert {one.oracle for one in run.violations if one.at > 50.0} == {"roster"}, "some have no place"
    name = name_of(8)[:8]
    rounds = rounds_of(run, 0)
    assert any(name in fields["members"] for fields in rounds.values())
    assert all(name_of(liar)[:8] not in fields["members"] for fields in rounds.values() for liar in range(3, 8))


def test_newcomers_of_one_network_have_few_places(played):
    run = played(2, 8, seconds=20.0, tables="trial_per_network = 3")
    for member in (0, 1):
        assert max(fields["peers"] for fields in rounds_of(run, member).values()) == 2 + 3


@pytest.mark.trial
@pytest.mark.timeout(240)
def test_newcomer_that_trains_a_real_model_is_endorsed_and_a_liar_is_not(played):
    tables = "trial_per_network = 0\n[model]\nlayers = 1\nwidth = 32\nheads = 2\ncontext = 32\n[inner]\nbatch = 8\nwarmup = 0\n"
    method = {"outer": "sync_every = 20", "codec": "fp32"}
    run = played(3, 2, liar="flip", honest_at=7.0, seconds=300.0, tables=tables, method=method, compute="torch")
    endorsed = {event.fields["peer"] for event in events_of(run, "endorsed", 0)}
    assert endorsed == {name_of(4)} and run.violations == ()
    assert opinions_of(run, 0, 3)[-1]["score"] < 0.0
