"""Session of one peer without a network: routes frames, ends rounds, begins the next ones."""

import asyncio
import random
from types import SimpleNamespace

import blake3
import msgspec
import numpy as np
import pytest
from kit.chains import RESULTS, certificate
from kit.round_harness import FakeSendQueue, hashes_of
from thinwire.collectives.consensus.chain import encode, founded
from thinwire.collectives.consensus.proposal import name_of
from thinwire.collectives.consensus.vote_store import MemoryVoteStore, VoteRecord
from thinwire.collectives.rounds.payload import room
from thinwire.collectives.rounds.results import digest_of
from thinwire.collectives.rounds.sparse_butterfly import OwnerResiduals
from thinwire.collectives.topology.shards import Grid
from thinwire.collectives.transport.bandwidth import Bandwidth
from thinwire.node.methods.registry import METHODS
from thinwire.node.outer.round_session import RoundSession
from thinwire.node.peer.stalls import recover, stalls
from thinwire.node.runtime.asyncio_extra import at_once
from thinwire.node.state.layout import Layout, Piece
from thinwire.swarm.frame import Frame, sign_message
from thinwire.swarm.identity.identity import Identity, short
from thinwire.swarm.lineage import lineage_of, name_of_fork
from thinwire.swarm.manifest.parser import parse
from thinwire.swarm.messages.registry import (
    MAX_GROUP,
    Ask,
    Ballot,
    Behind,
    Commit,
    Contribution,
    Decline,
    Era,
    Fork,
    Found,
    Head,
    Leave,
    Open,
    Prepare,
    Promise,
    Proof,
    Ready,
    Record,
    Result,
    Vote,
)

LAYOUT = Layout((Piece("a", (100,), "float32", 0, 100),), 100, b"l" * 32)
RUN = b"r" * 32
KEYS = {identity.peer_id: identity for identity in (Identity.generate(bytes([number]) * 32) for number in range(4))}
ME, ANN, BEN, CAT = KEYS
ALL = (ME, ANN, BEN)


class Queue(FakeSendQueue):
    """Send queue that also has the calls of sessions."""

    def __init__(self):
        super().__init__()
        self.bandwidth = Bandwidth()

    def look(self):
        pass

    def begin(self, round, fragment=0):
        pass

    def later(self, to, *kinds):
        return 0


def first_lineage(members):
    """Return the name of the lineage of peers that are given these members."""
    return name_of_fork(Fork(0, bytes(32), (), tuple(sorted(members)), b"", ()))


FIRST = first_lineage(ALL)


class Scene:
    """Session of peer ME in a run of `members`, who are all present."""

    def __init__(self, members=ALL, *, exchange="", sequence=5_000, kept=None, slow=None, **options):
        self.now, self.events, self.queue = 0.0, [], Queue()
        manifest = parse(f'[exchange]\ncodec = "fp32"\n{exchange}')
        method = METHODS["diloco"]
        codec = method.codec(manifest, LAYOUT)
        cut = method.cut(manifest, LAYOUT, codec)
        self.replica = method.replica.begin(manifest, LAYOUT, codec, cut, np.zeros(100, np.float32), members)
        if kept is not None:
            self.replica.kept = kept
        roster = SimpleNamespace(
            record=SimpleNamespace(sequence=sequence, peer_id=ME),
            record_of=lambda peer: SimpleNamespace(public_key=KEYS[peer].public_key),
            alive=lambda peer: True,
            progress=0,
        )
        presence = SimpleNamespace(
            roster=roster,
            live={ANN, BEN, CAT},
            send_queue=self.queue,
            transport=SimpleNamespace(totals=lambda: (0, 0)),
            watch=slow and SimpleNamespace(slow=slow),
            site="",
            aside=at_once,
            spans=tuple,
        )
        self.session = RoundSession(
            KEYS[ME],
            manifest,
            RUN,
            presence=presence,
            replica=self.replica,
            now=lambda: self.now,
            emit=lambda name, fields: self.events.append((name, fields)),
            **options,
        )

    def on_message(self, sender, message, payload=b""):
        """Deliver a signed frame."""
        self.session.on_frame(sender, Frame(message, payload, sign_message(message, payload, KEYS[sender], RUN)))

    def sent(self, kind, to=ANN):
        """Return the messages of one kind to a peer since the last call."""
        return [message for peer, message, _ in self.queue.of(kind) if peer == to]

    def announce(self):
        """Announce a contribution in the worker-less way of `average`; return its Ready."""
        self.session.current.announce([bytes(400)], weight=10, loss=1.0, speed=1.0)
        return self.sent(Ready)[-1]

    def deliver_round(self):
        """Deliver the round in progress: ANN leads, contributes alone and owns the chunk, and BEN votes with it."""
        session, terms, values = self.session, self.session.current.agreement.terms, np.ones(100, np.float32).tobytes()
        ballot, number = Ballot(2, ANN), session.current.round
        for peer in (ANN, BEN):
            hashes = hashes_of([values]) if peer == ANN else b""
            weight = 10 if peer == ANN else 0
            self.on_message(peer, Ready(number, 0, 1, terms.base, terms.plan, weight, hashes, True, 1.0, 1.0))
        idle = tuple(sorted((ME, BEN)))
        group = tuple(sorted(ALL))
        opened = Open(number, 0, ballot, group, group, (Contribution(ANN, 1, 10),), (), None, (), idle)
        opened = msgspec.structs.replace(opened, lineage=terms.lineage, electorate=terms.electorate)
        self.on_message(ANN, Prepare(number, 0, ballot, terms.lineage))
        self.on_message(ANN, opened)
        self.on_message(ANN, Record(number, 0, ballot, (0,), hashes_of([values])))
        self.on_message(ANN, Result(number, 0, ballot, 0), values)
        digest = digest_of([blake3.blake3(values).digest()])
        vote = Vote(number, 0, ballot, name_of(opened), digest)
        proofs = tuple(Proof(peer, sign_message(vote, b"", KEYS[peer], RUN)) for peer in sorted((ANN, BEN)))
        self.on_message(ANN, Commit(opened, digest, proofs))

    async def finish_round(self):
        """Commit the round, apply it, and begin the next one."""
        self.announce()
        self.deliver_round()
        outcome = await self.session.outcome(give_up=1.0)
        assert outcome.commit is not None
        await self.session.change(at_once, lambda: self.replica.commit(outcome, ME))
        self.session.advance()


def test_session_applies_rounds_and_remembers_them():
    async def main():
        commits: list[int] = []
        scene = Scene(on_commit=lambda: commits.append(scene.replica.round))
        assert scene.session.strays == 0
        for number in (1, 2):
            assert scene.announce().witness, "it has a vote"
            await scene.finish_round()
            assert scene.session.history.get(number) is not None and scene.replica.round == number
            assert scene.session.current.round == number + 1 and scene.session.roster.progress == number
        assert commits == [0, 1], "before the commit is applied, and for no other phase"
        phases = [fields["phase"] for name, fields in scene.events if name == "phase"]
        assert {"vote", "commit"} <= set(phases)
        assert scene.session.stats[ANN] == (1.0, 1.0, 2) and BEN not in scene.session.stats

    asyncio.run(main())


def test_restarted_peer_with_its_votes_has_a_vote_at_once_and_remembers_its_promise():
    store = MemoryVoteStore()
    before = Scene(votes=lambda fragment: store)
    before.on_message(BEN, Prepare(1, 0, Ballot(5, BEN), FIRST))
    assert len(before.sent(Promise, to=BEN)) == 1
    after = Scene(votes=lambda fragment: store)
    assert after.announce().witness
    after.on_message(ANN, Prepare(1, 0, Ballot(4, ANN), FIRST))
    assert not after.sent(Promise)
    after.on_message(ANN, Prepare(1, 0, Ballot(6, ANN), FIRST))
    assert [message.ballot for message in after.sent(Promise)] == [Ballot(6, ANN)]


def test_peer_that_returns_with_an_older_state_has_no_vote_until_a_later_round():
    async def main():
        store = MemoryVoteStore()
        store.save(VoteRecord(FIRST, 2, Ballot(2, ANN), None, None))
        scene, witness = Scene(votes=lambda fragment: store), []
        for _ in range(3):
            witness.append(scene.announce().witness)
            await scene.finish_round()
        assert witness == [False, True, True]

    asyncio.run(main())


def test_round_that_begins_again_has_its_promises_and_a_later_announcement():
    scene = Scene()
    first = scene.announce()
    scene.on_message(BEN, Prepare(1, 0, Ballot(5, BEN), FIRST))
    scene.session.advance()
    again = scene.announce()
    assert first.witness and again.witness and again.attempt > first.attempt
    assert scene.session.current.round == 1 and scene.session.history.get(1) is None
    scene.on_message(ANN, Prepare(1, 0, Ballot(4, ANN), FIRST))
    assert not scene.sent(Promise)


def test_departing_peer_says_farewell_with_its_promise():
    scene = Scene()
    scene.on_message(BEN, Prepare(1, 0, Ballot(5, BEN), FIRST))
    scene.session.leave()
    (leave,) = scene.sent(Leave)
    assert (leave.round, leave.farewell.peer, leave.farewell.promised) == (1, ME, Ballot(5, BEN))
    scene.on_message(ANN, Prepare(1, 0, Ballot(6, ANN), FIRST))
    assert not scene.sent(Promise)


def lone_fork(scene, peer, life, base=None):
    """Return a fork of the scene's state that this peer founded alone, rightly signed."""
    base = scene.replica.digest if base is None else base
    found = Found(scene.replica.round, 0, base, (peer,), life)
    signature = sign_message(found, b"", KEYS[peer], RUN)
    return Fork(scene.replica.round, base, scene.replica.members, (peer,), life, (signature,))


@pytest.mark.parametrize(("founder", "same"), [(ME, True), (ANN, False)])
def test_votes_of_another_lineage_are_forgotten_with_the_life_unless_we_founded_this_one(founder, same):
    """Otherwise the peer could come back to the other lineage, and vote there again."""
    store = MemoryVoteStore(random.Random(3))
    scene = Scene(votes=lambda fragment: store)
    scene.on_message(BEN, Prepare(1, 0, Ballot(5, BEN), FIRST))
    first = store.life
    scene.replica.found(lone_fork(scene, founder, first if founder == ME else bytes([9]) * 16))
    scene.session.advance()
    assert (store.life == first) == same
    assert scene.session.current.agreement.terms.lineage == scene.replica.lineage


def test_peer_without_a_quorum_takes_up_a_lineage_founded_with_its_state_and_fetches_nothing():
    """The other founder announces the lineage before our next tick; our training since the fork remains."""
    scene = Scene()
    for peer in (ANN, BEN, CAT):
        scene.session.live.discard(peer)
        scene.session.on_link_down(peer, gone=False)
    scene.session.on_tick()
    chain = founded(scene.replica.chain, lone_fork(scene, ANN, bytes([9]) * 16))
    scene.on_message(ANN, Head(scene.replica.round, 0, lineage_of(chain)), encode(chain))
    assert not scene.session.catch_up.behind.is_set()
    scene.session.on_tick()
    assert scene.replica.chain == chain
    assert [name for name, _ in scene.events if name in ("lineage", "alarm")] == ["lineage", "alarm"]


@pytest.mark.parametrize(("sequence", "attempt"), [(5_000, 6), (1000 * (2**30 + 7), 2**30 + 8), (1000 * 2**31, 1)])
def test_first_announcement_of_a_process_is_later_than_those_of_earlier_ones(sequence, attempt):
    assert Scene(sequence=sequence).announce().attempt == attempt


@pytest.mark.parametrize(
    ("members", "lives", "voted", "takes_part"),
    [
        (ALL, b"", 0, False),
        ((ANN, BEN), b"", 0, True),
        (ALL, b"", 5, True),  # returned with an older state
        (ALL, bytes([9]) * 48, 0, True),  # has lost its run folder
        ((ME,), b"", 0, False),
    ],
)
def test_peer_without_a_vote_of_its_round_takes_part_at_once(members, lives, voted, takes_part):
    store = MemoryVoteStore(random.Random(3))
    if voted:
        store.save(VoteRecord(FIRST, voted, Ballot(1, ANN), None, None))
    scene = Scene(members, votes=lambda fragment: store)
    scene.replica.round, scene.replica.lives = 1, lives  # as a fetched state
    scene.session.advance()
    assert [message.weight for message in scene.sent(Ready)] == [0] * takes_part


def test_digest_is_computed_after_a_change_unless_the_caller_does_it():
    scene, calls = Scene(), []
    scene.replica.compute_digest = lambda: calls.append("digest")

    async def main():
        await scene.session.change(at_once, lambda: calls.append("change"))
        await scene.session.change(at_once, lambda: calls.append("later"), settled=False)

    asyncio.run(main())
    assert calls == ["change", "digest", "later"]


def test_lost_owner_residuals_are_reported_once():
    kept = OwnerResiduals()
    kept.lost = 3, 4.0
    scene = Scene(kept=kept)
    scene.session.advance()
    scene.session.advance()
    reports = [fields["detail"] for name, fields in scene.events if name == "given up"]
    assert reports == ["residuals of 3 chunks, norm 2"] and kept.lost == (0, 0.0)


@pytest.mark.parametrize(("setting", "asked"), [("no-ownership", True), ("report", False)])
def test_slow_peers_lose_their_chunks_only_if_the_manifest_wants_it(setting, asked):
    calls = []
    Scene(exchange=f'slow_peers = "{setting}"', slow=lambda: calls.append(1) or ())
    assert bool(calls) == asked


@pytest.mark.parametrize(("setting", "measured"), [("bandwidth", True), ("equal", False)])
def test_chunks_are_assigned_by_bandwidth_only_if_configured(setting, measured):
    scene = Scene(exchange=f'chunk_assignment = "{setting}"')
    assert (scene.session.current.agreement.terms.chunks > 0) == measured


def test_butterfly_round_of_many_chunks_has_room_for_a_whole_group():
    scene = Scene()
    scene.replica.plan_grid = Grid(100_000, 100)
    assert room(scene.replica.grid) < MAX_GROUP
    scene.session.advance()
    assert scene.session.current.agreement.terms.room == MAX_GROUP


def test_grace_is_the_configured_one():
    session = Scene(exchange="straggler_timeout = 7.0").session
    assert session.grace == 7.0 and session.current.agreement.terms.graces == dict.fromkeys(ALL, 7.0)


def test_computed_grace_learns_from_announcements_only(monkeypatch):
    came = []
    monkeypatch.setattr(
        "thinwire.collectives.health.straggler_grace.StragglerGrace.came",
        lambda self, peer, round, now, contributes: came.append((peer, round)),
    )
    scene = Scene(exchange='straggler_timeout = "auto"')
    terms = scene.session.current.agreement.terms
    scene.on_message(ANN, Ready(1, 0, 1, terms.base, terms.plan, 0, b"", True, 0.0, 0.0))
    scene.on_message(BEN, Prepare(1, 0, Ballot(2, BEN), FIRST))
    scene.on_message(CAT, Ready(2, 0, 1, terms.base, terms.plan, 0, b"", True, 0.0, 0.0))
    assert came == [(ANN, 1)]


@pytest.mark.parametrize(("round", "past"), [(0, False), (1, True), (2, True)])
def test_claim_to_have_committed_this_round_or_a_later_one_counts(round, past):
    scene = Scene()
    scene.on_message(ANN, Behind(round))
    assert (ANN in scene.session.current.agreement.past) == past


def test_sender_of_a_commit_is_past_the_round_and_a_voter_is_not():
    scene = Scene()
    opened = Open(1, 0, Ballot(2, ANN), ALL, ALL, (Contribution(ANN, 1, 10),), (), None, ())
    scene.on_message(ANN, Vote(1, 0, Ballot(2, ANN), bytes(32), bytes(32)))
    scene.on_message(BEN, Commit(opened, bytes(32), ()))
    assert scene.session.current.agreement.past == {BEN}


@pytest.mark.parametrize(("members", "declines"), [((), 1), (ALL, 0)])
def test_peer_without_a_state_declines_to_promise(members, declines):
    scene = Scene(members)
    scene.on_message(ANN, Prepare(1, 0, Ballot(2, ANN), FIRST))
    assert len(scene.sent(Decline)) == declines


def test_message_of_a_forgotten_round_is_answered_with_our_progress():
    async def main():
        scene = Scene()
        await scene.finish_round()
        scene.session.history.clear()
        scene.sent(Ready)
        terms = scene.session.current.agreement.terms
        scene.on_message(ANN, Ready(1, 0, 1, terms.base, terms.plan, 0, b"", True, 0.0, 0.0))
        assert scene.sent(Behind) == [Behind(1, 0)] and scene.session.strays == 1

    asyncio.run(main())


def test_message_of_a_past_round_is_answered_with_its_commit():
    async def main():
        scene = Scene()
        await scene.finish_round()
        scene.sent(Commit)
        scene.on_message(ANN, Ask(1, 0))
        assert [message.opened.round for message in scene.sent(Commit)] == [1] and scene.session.strays == 0
        assert scene.sent(Behind) == []

    asyncio.run(main())


def test_message_of_a_dropped_round_is_answered_with_its_commit_and_our_progress():
    async def main():
        scene = Scene()
        for _ in range(2):
            await scene.finish_round()
        scene.session.on_tick()
        assert scene.session.history.get(1) is None
        scene.sent(Commit)
        scene.on_message(ANN, Vote(1, 0, Ballot(2, ANN), bytes(32), bytes(32)))
        assert scene.sent(Commit) == [] and scene.sent(Behind) == [Behind(2, 0)]
        scene.on_message(ANN, Ask(1, 0))
        assert [message.opened.round for message in scene.sent(Commit)] == [1]
        assert scene.sent(Behind) == [Behind(2, 0)] and scene.session.strays == 2

    asyncio.run(main())


@pytest.mark.parametrize(("ahead", "stored", "strays"), [(1, 1, 0), (2, 0, 1), (3, 0, 1)])
def test_message_of_the_next_round_waits_and_of_a_later_one_is_counted(ahead, stored, strays):
    scene = Scene()
    scene.on_message(ANN, Ready(1 + ahead, 0, 1, bytes(32), bytes(32), 0, b"", True, 0.0, 0.0))
    assert scene.session.sizes()["stash"][0] == stored and scene.session.strays == strays
    assert scene.session.current.agreement.past == {ANN} and scene.sent(Behind) == []


def test_message_of_the_next_round_is_delivered_when_it_begins():
    async def main():
        scene = Scene()
        scene.on_message(ANN, Prepare(2, 0, Ballot(2, ANN), FIRST))
        await scene.finish_round()
        assert [message.round for message in scene.sent(Promise)] == [1, 2]

    asyncio.run(main())


def test_refused_connection_is_no_death_for_the_quorum():
    scene = Scene()
    scene.session.stats[ANN] = (1.0, 1.0, 1)
    scene.session.on_link_down(BEN, gone=False)
    assert not scene.session.catch_up.gone
    scene.session.on_link_down(ANN, gone=True)
    assert scene.session.catch_up.gone == {ANN} and not scene.session.stats
    agreement = scene.session.current.agreement
    assert not agreement.able and not agreement.able_without((ANN, BEN)) and agreement.able_without((ANN,))
    scene.session.on_link_up(ANN)
    assert not scene.session.catch_up.gone and agreement.able


@pytest.mark.parametrize(
    ("exchange", "end"),
    [("", "a lineage continues in 8 s"), ("orphan = 0\n", "`thinwire recover` continues without them")],
)
def test_session_without_a_quorum_tells_for_whom_and_until_when_it_waits(exchange, end):
    scene = Scene(exchange=exchange)
    assert scene.session.stalled() == ""
    for peer in (ANN, BEN):
        scene.session.presence.live.discard(peer)
        scene.session.on_link_down(peer, gone=False)
    scene.session.on_tick()
    scene.now += 2.0
    first, second = (short(peer) for peer in scene.session.current.agreement.terms.members if peer in (ANN, BEN))
    assert scene.session.stalled() == f"no quorum for 2 s: waiting for {first}, {second}; {end}"
    peer = SimpleNamespace(ready=True, session=scene.session, environment=SimpleNamespace(now=lambda: scene.now))
    (stall,) = stalls(peer)
    assert set(stall.absent) == {ANN.hex(), BEN.hex()} and set(stall.absent) < set(stall.members)
    assert set(stall.founders) == set(stall.members) - set(stall.absent)
    assert (stall.seconds, stall.until, stall.obstacle) == (2.0, None if exchange else 8.0, "")
    assert recover(peer) == 1 and stalls(peer)[0].until == 0.0
    scene.session.current.agreement.overtaken()
    assert "another state" in stalls(peer)[0].obstacle


def test_session_believes_a_chain_only_with_the_votes_of_its_members():
    session = Scene().session
    root, lives = Fork(0, bytes(32), (), tuple(sorted(ALL)), b"", ()), dict.fromkeys(sorted(ALL), bytes(16))
    forged = certificate(1, name_of_fork(root), lives, ALL, lives)
    vote = Vote(1, 0, forged.commit.opened.ballot, name_of(forged.commit.opened), RESULTS)
    votes = tuple(Proof(peer, sign_message(vote, b"", KEYS[peer], RUN)) for peer in sorted(ALL))
    right = msgspec.structs.replace(forged, commit=msgspec.structs.replace(forged.commit, votes=votes))
    few = msgspec.structs.replace(forged, commit=msgspec.structs.replace(forged.commit, votes=votes[:1]))
    proved = session.prove((Era(root, (right,)),), 0, lambda fork: True)
    assert proved is not None and (proved.round, proved.members) == (1, tuple(sorted(ALL)))
    assert session.prove((Era(root, (right,)),), 0, lambda fork: False) is None
    for wrong in (forged, few):
        assert session.prove((Era(root, (wrong,)),), 0, lambda fork: True) is None
