"""Whole swarms with an owner that sends all peers the same false results, with false accusers, and with honest churn."""

from __future__ import annotations

import asyncio
from dataclasses import replace
from types import SimpleNamespace

import blake3
import msgspec
import numpy as np
import pytest
from thinwire.sims.engine import virtual_loop
from thinwire.sims.peers import lies, owner_lies
from thinwire.sims.scenario.faults import OWNER_LIES
from thinwire.swarm.frame import Frame
from thinwire.swarm.messages.registry import Chunk, Commit, CompactCommit, Fetch, Ready, Verdict

PEERS, LIAR = 5, 1
AUDIT = 0.5
"""Probability of an audit; each of the four honest auditors chooses one of the chunks that it does not own."""


def _lie(node, kind):
    """Let a node lie from the next round on."""
    peer = SimpleNamespace(session=node.session, presence=node.presence)
    process = SimpleNamespace(peer=peer, others=[], alive=True, _end=lambda reason, failure: None)
    lies.make_liar(process, kind)


def _banned(node):
    return set(node.session.roster.peers.banned)


def _audited(swarm, **options):
    given = dict(rounds=40, size=60_000, codec="fp32", audit=AUDIT, aggregation="clip", chunk_assignment="equal")
    return swarm(PEERS, **(given | options))


def _told(node, name):
    return [fields for _, kind, fields in node.log if kind == name]


def _stretched(swarm, monkeypatch, scale):
    """Return the digest after a default run in which one owner multiplies its results from the third round on."""

    def stretch(rule, codec, payloads, weights, out):
        rule(codec, payloads, weights, out)
        out *= np.float32(scale)

    monkeypatch.setitem(lies.IMPLEMENTED, "stretched", owner_lies.falsify(stretch))

    async def main():
        s = swarm(PEERS, rounds=6, size=60_000, codec="int8(block=256)", aggregation="clip", chunk_assignment="equal")
        s.fail_at(LIAR, 2, "applied", lambda node: _lie(node, "stretched"))
        s.start()
        honest = [index for index in range(PEERS) if index != LIAR]
        await s.finish(honest)
        s.check(honest)
        refused = [fields["peer"] for index in honest for fields in _told(s.nodes[index], "result_refused")]
        assert set(refused) == ({s.nodes[LIAR].id.hex()} if scale != 1.0 else set())
        return s.nodes[honest[0]].replica.digest

    return virtual_loop.run(main(), seed=3)


def test_owner_with_huge_results_does_not_change_a_default_run(swarm, monkeypatch):
    """No peer votes for a result that the announced norms exclude; another owner computes it, with the same bits."""
    honest = _stretched(swarm, monkeypatch, 1.0)
    assert _stretched(swarm, monkeypatch, -10.0) == honest
    assert _stretched(swarm, monkeypatch, 1e6) == honest


def test_default_run_excludes_an_owner_whose_false_results_are_within_the_bound(swarm):
    """The run is an invited one, and names no probability of audits: each member audits a tenth of all rounds at most."""

    async def main():
        s = swarm(PEERS, rounds=60, size=60_000, codec="fp32", aggregation="clip", chunk_assignment="equal")
        assert s.manifest.admission.mode == "invited" and s.manifest.exchange.audit == "auto"
        liar = s.nodes[LIAR]
        s.fail_at(LIAR, 2, "applied", lambda node: _lie(node, "left-out"))
        s.start()
        honest = [index for index in range(PEERS) if index != LIAR]
        await s.finish(honest)
        assert all(_banned(s.nodes[index]) == {liar.id} for index in honest)

    virtual_loop.run(main(), seed=0)


@pytest.mark.parametrize("seed", [0, *(pytest.param(seed, marks=pytest.mark.soak) for seed in (1, 2))])
@pytest.mark.parametrize("kind", OWNER_LIES)
def test_owner_that_lies_to_all_is_excluded(swarm, kind, seed):
    """The liar owns a fifth of the chunks, and three honest auditors can be the ones that choose well.

    An auditor chooses a chunk of the liar with a probability of at least AUDIT / 5, so that a lie of n rounds stays
    unknown with at most (1 - AUDIT / 5) ** (4 n), which is 2 % after ten rounds.
    """

    async def main():
        s = _audited(swarm, seed=seed, rounds=16)
        liar = s.nodes[LIAR]
        s.fail_at(LIAR, 2, "applied", lambda node: _lie(node, kind))
        s.start()
        honest = [index for index in range(PEERS) if index != LIAR]
        await s.finish(honest)
        s.check(honest)
        for index in honest:
            node = s.nodes[index]
            assert _banned(node) == {liar.id}
            assert "a false result of chunk" in node.session.roster.peers.ban_reason(liar.id)
            assert liar.id not in node.replica.members
        found = min(
            fields["round"] for index in honest for fields in _told(s.nodes[index], "audited") if fields["false"]
        )
        assert 3 <= found <= 13
        assert liar.presence.banned.is_set() and "false result" in liar.presence.ban_reason

    virtual_loop.run(main(), seed=seed)


@pytest.mark.parametrize(
    "seed",
    [*range(0, 16, 3), *(pytest.param(seed, marks=pytest.mark.soak) for seed in range(50) if seed % 3 or seed > 15)],
)
def test_honest_owners_are_never_accused_when_peers_come_and_go(swarm, seed):
    """Owners die in the middle of rounds and backups compute their results; joiners and returning peers audit, too."""

    async def main():
        s = _audited(swarm, seed=seed, rounds=10, audit=1.0, size=40_000)
        phases, first, second = ("announce", "open", "record", "vote"), seed % PEERS, (seed + 2) % PEERS
        s.fail_at(first, 3, phases[seed % 4])
        s.fail_at(second, 4, phases[seed // 4 % 4])
        s.start()
        witness = s.nodes[(seed + 1) % PEERS]
        while witness.replica.round < 5:
            await asyncio.sleep(0.1)
        assert not s.nodes[first].transport.alive and not s.nodes[second].transport.alive
        s.join(7)
        s.join(first, life=1)
        alive = [index for index, node in s.nodes.items() if node.transport.alive]
        await s.finish(alive)
        s.check(alive, dead_lineages=True)
        for node in s.nodes.values():
            assert not any(fields["false"] for fields in _told(node, "audited"))
            assert not _told(node, "audit_refuted") and not _banned(node)
            assert "withheld" not in {reason for missing in node.missing.values() for reason in missing.values()}
        assert sum(len(_told(s.nodes[index], "audited")) for index in alive) > 2 * PEERS

    virtual_loop.run(main(), seed=seed)


def test_lie_in_a_round_that_a_later_ballot_adopts_can_be_found(swarm):
    """The leader dies when it has decided, so a later ballot adopts the results: their owner has signed for them."""

    async def main():
        s = _audited(swarm, rounds=14, audit=1.0)
        dead, adopted, claims = [], set(), []

        def withhold(node):
            """Let the first peer that decides round 3 die before another peer learns it."""
            control = node.presence.send_queue.control

            def send(to, message):
                agreement = node.session.current.agreement
                if isinstance(message, (Commit, CompactCommit)) and agreement.terms.round == 3:
                    if not dead:
                        dead.append(node.index)
                        node.kill()
                    if node.index in dead:
                        return
                    adopted.add(agreement.commit.proposal.adopted)
                control(to, message)

            node.presence.send_queue.control = send

        def look(node):
            claims.append(node.session.history.get(3).data_plane.audit_data.claims)

        for node in s.nodes.values():
            withhold(node)
            s.fail_at(node.index, 4, "announce", look)
        s.fail_at(LIAR, 2, "applied", lambda node: _lie(node, "shifted"))
        s.start()
        while not dead:
            await asyncio.sleep(0.1)
        honest = [index for index in range(PEERS) if index not in (LIAR, *dead)]
        await s.finish(honest)
        s.check(honest, dead_lineages=True)
        assert LIAR not in dead and adopted and None not in adopted
        assert all(s.nodes[LIAR].id in {owner for owner, _ in one.values()} for one in claims) and claims
        assert all(_banned(s.nodes[index]) == {s.nodes[LIAR].id} for index in honest)

    virtual_loop.run(main(), seed=1)


def test_contributor_that_announces_other_data_to_one_owner_is_banned(swarm):
    """Also its data differs, so that owner and announcement agree; only the decided proposal shows that it lies."""

    async def main():
        s = _audited(swarm, rounds=8, audit=1.0)
        liar, fooled = s.nodes[LIAR], s.nodes[3].id
        queue = liar.presence.send_queue
        control, bulk = queue.control, queue.bulk

        def doubled(payload):
            return (2 * np.frombuffer(payload, np.float32)).tobytes()

        def say(to, message):
            if isinstance(message, Ready) and message.round == 3 and to == fooled:
                chunks = map(doubled, liar.session.current.data_plane.source)
                hashes = b"".join(blake3.blake3(chunk).digest() for chunk in chunks)
                message = msgspec.structs.replace(message, hashes=hashes)
            control(to, message)

        def send(to, frame, **rest):
            if isinstance(frame.message, Chunk) and frame.message.round == 3 and to == fooled:
                frame = Frame(frame.message, doubled(frame.payload))
            bulk(to, frame, **rest)

        queue.control, queue.bulk = say, send
        s.start()
        honest = [index for index in range(PEERS) if index != LIAR]
        await s.finish(honest)
        s.check(honest)
        for index in honest:
            assert _banned(s.nodes[index]) == {liar.id}
            assert s.nodes[index].session.roster.peers.ban_reason(liar.id) == "two announcements in round 3"
            assert liar.id not in s.nodes[index].contributors[3]

    virtual_loop.run(main(), seed=2)


class Doubling:
    """Reducer whose results are twice as long."""

    def __init__(self, honest):
        self.honest = honest

    def check(self, payload, n):
        return self.honest.check(payload, n)

    def result(self, payloads, weights, size):
        return (2 * np.frombuffer(self.honest.result(payloads, weights, size), np.float32)).tobytes()


@pytest.mark.parametrize("serves", [True, False])
def test_false_accuser_excludes_nobody_and_is_ignored_in_the_end(swarm, serves):
    """It accuses an honest owner in each round, with the true contributions or without any."""

    async def main():
        s = _audited(swarm, rounds=16 if serves else 24, audit=1.0)
        accuser = s.nodes[LIAR]
        audits = accuser.session.starter.verification.audits
        begin, takes = audits.begin, audits.takes

        def misjudge(done):
            audit_data = done.data_plane.audit_data
            done.data_plane.audit_data = replace(audit_data, reducer=Doubling(audit_data.reducer))
            begin(done)

        audits.begin = misjudge
        if not serves:
            audits.takes = lambda peer, frame: not isinstance(frame.message, Fetch) and takes(peer, frame)
        s.start()
        await s.finish()
        s.check()
        for index in range(PEERS):
            if index != LIAR:
                refuted = _told(s.nodes[index], "audit_refuted")
                assert len(refuted) == 3 and {fields["peer"] for fields in refuted} == {accuser.id.hex()}
                assert all(("right" in fields["detail"]) is serves for fields in refuted)
        assert not any(_banned(node) for node in s.nodes.values())

    virtual_loop.run(main(), seed=1)


def _refusing(node):
    """Let a node send no chunk after its round; until then it is honest."""
    bulk = node.presence.send_queue.bulk

    def send(to, frame, **how):
        message = frame.message
        if isinstance(message, Chunk) and message.round <= node.replica.round:
            return
        bulk(to, frame, **how)

    node.presence.send_queue.bulk = send


def _forging(node):
    """Let a node send other bytes than it announced to audits."""
    bulk = node.presence.send_queue.bulk

    def send(to, frame, **how):
        message = frame.message
        if isinstance(message, Chunk) and message.round <= node.replica.round:
            frame = Frame(message, bytes(len(frame.payload)))
        bulk(to, frame, **how)

    node.presence.send_queue.bulk = send


@pytest.mark.parametrize("hinder", [_refusing, _forging])
def test_contributor_that_hinders_audits_frames_nobody_and_pauses(swarm, hinder):
    async def main():
        s = _audited(swarm, rounds=14, audit=1.0)
        hinderer = s.nodes[LIAR]
        hinder(hinderer)
        s.start()
        await s.finish()
        s.check()
        assert not any(_banned(node) for node in s.nodes.values())
        others = [s.nodes[index] for index in range(PEERS) if index != LIAR]
        accused = {fields["peer"] for node in others for fields in _told(node, "unaudited")}
        assert accused == {hinderer.id.hex()}
        paused = [number for number, missing in others[0].missing.items() if missing.get(hinderer.id) == "withheld"]
        assert len(paused) >= 5 and min(paused) >= 4

    virtual_loop.run(main(), seed=1)


@pytest.mark.parametrize("hinder", [_refusing, _forging])
def test_contributor_that_hinders_audits_does_not_protect_a_lying_owner(swarm, hinder):
    async def main():
        s = _audited(swarm, rounds=16, audit=1.0)
        hinder(s.nodes[2])
        s.fail_at(LIAR, 2, "applied", lambda node: _lie(node, "shifted"))
        s.start()
        honest = [0, 2, 3, 4]
        await s.finish(honest)
        s.check(honest)
        assert all(_banned(s.nodes[index]) == {s.nodes[LIAR].id} for index in honest)

    virtual_loop.run(main(), seed=1)


def test_newcomer_learns_of_an_excluded_owner(swarm):
    async def main():
        s = _audited(swarm, rounds=16, audit=1.0)
        s.fail_at(LIAR, 2, "applied", lambda node: _lie(node, "shifted"))
        s.start()
        await asyncio.sleep(12.0)
        liar = s.nodes[LIAR]
        assert liar.id in _banned(s.nodes[0])
        newcomer = s.join(8)
        honest = [0, 2, 3, 4, 8]
        await s.finish(honest)
        assert _banned(newcomer) == {liar.id}

    virtual_loop.run(main(), seed=1)


@pytest.mark.trial
def test_verdict_of_a_lineage_that_gives_way_ends_with_it(swarm):
    """Two liars are a quorum of a lineage of three peers, and exclude an honest peer of the other one.

    The third peer follows them, and takes the honest peer back when it is in the prevailing lineage again.
    """

    async def main():
        s = swarm(7, rounds=34, size=8_000, codec="fp32", audit=AUDIT, aggregation="clip", chunk_assignment="equal")
        honest, follower, liars = s.nodes[0], s.nodes[4], [s.nodes[5], s.nodes[6]]
        sides = [[s.nodes[index].id for index in side] for side in (range(4), range(4, 7))]
        s.fail_at(0, 4, "announce", lambda node: s.net.partition(sides))
        s.start()
        while follower.replica.lineage == honest.replica.lineage or len(follower.replica.members) < 3:
            await asyncio.sleep(0.1)
        lost = follower.replica.lineage
        for liar in liars:
            verdict = Verdict(follower.replica.round, 0, 0, honest.id, lost)
            liar.presence.send_queue.control(follower.id, verdict)
        await asyncio.sleep(2.0)
        assert _banned(follower) == {honest.id} and follower.replica.lineage == lost
        s.net.heal()
        await s.finish()
        s.check()
        assert follower.replica.lineage == honest.replica.lineage != lost
        assert _banned(follower) == set() and not honest.presence.banned.is_set()
        assert honest.id in follower.presence.live and _told(follower, "pardoned")

    virtual_loop.run(main(), seed=2)
