"""Invariants of gossip rounds, on handwritten rounds."""

import numpy as np
import pytest
from thinwire.collectives.gossip.pair_codec import payload_of
from thinwire.collectives.topology.shards import MIN_CHUNK, shares
from thinwire.compression import registry
from thinwire.sims.invariants.gossip_contributions import Offer, ReplicaState
from thinwire.sims.invariants.gossip_steps import OuterSteps
from thinwire.sims.invariants.noloco import GossipInvariants
from thinwire.sims.trials.noloco_trial import CODECS, MANIFEST
from thinwire.swarm.manifest.parser import parse
from thinwire.swarm.messages.registry import Ballot, Commit, Contribution, Exclusion, Proposal

CHUNKS, BETA, GAMMA = 4, np.float32(0.7), {1: np.float32(0.7), 2: np.float32(0.4)}
SIZE = CHUNKS * MIN_CHUNK
MEMBERS, ABSENT, ROUND = (0, 1, 2), 3, 1


def peer(index):
    return bytes([index + 1]) * 32


class Large:
    """Three members of a large group, and one that all of them have given up, in the first round.

    `vectors`: 1 with γ = β, whose only vector is θ, otherwise 2. `read`: parameters that members have read, if not θ.
    `between`: called before the members commit. `came`: whether the mean of a chunk that a member gets has the vectors of the
    absent one.
    """

    def __init__(self, vectors, honest=4):
        self.told, self.vectors, rng = [], vectors, np.random.default_rng(vectors)
        self.read, self.between = {}, lambda: None
        manifest = parse(MANIFEST.format(codec="fp32", gamma=GAMMA[vectors], group=9, parts=1))
        self.judge = GossipInvariants(
            manifest, {peer(index): index for index in range(honest)}, lambda *what: self.told.append(what[0])
        )
        self.phi = rng.standard_normal((4, SIZE)).astype(np.float32)
        self.theta = self.phi + rng.standard_normal((4, SIZE)).astype(np.float32) * np.float32(0.1)
        self.owners = dict(enumerate(shares(CHUNKS, sorted(map(peer, range(4))), fragment=ROUND)))
        for index in range(4):
            state = np.concatenate([self.phi[index], np.zeros(SIZE, np.float32)])
            self.judge.installed(index, 0, state, np.empty(0, np.float32), lost=False)

    def play(self, came, members=MEMBERS, announced=True):
        """Let all members commit; `came` is given a member and a chunk. Return what was reported."""
        for index in (*members, *((ABSENT,) if announced else ())):
            self.judge.encoded(peer(index), 1, self.read.get(index, self.theta[index]))
        self.between()
        entries = tuple(Contribution(peer(index), 1, 100) for index in members)
        ids = tuple(entry.peer for entry in entries)
        gone = tuple(Exclusion(peer(index), "gone") for index in range(4) if index not in members)
        proposal = Proposal(ROUND, 0, Ballot(1, ids[0]), ids, ids, entries, gone, adopted=None, sources=())
        for index in members:
            delta = self.delta(index, members, came)
            state = np.concatenate([self.phi[index] + delta, delta])
            self.judge.committed(index, ROUND, state, np.empty(0, np.float32), Commit(proposal, bytes(32), ()))
        return self.told

    def delta(self, index, members, came):
        alone = BETA * (self.theta[index] - self.phi[index])
        for chunk, owner in self.owners.items():
            part = slice(chunk * MIN_CHUNK, (chunk + 1) * MIN_CHUNK)
            contributors = [*members, *((ABSENT,) if came(index, chunk) else ())]
            if (owner == peer(ABSENT) and ABSENT not in members) or len(contributors) == 1:
                continue
            theta, phi = (one[contributors, part].mean(axis=0) for one in (self.theta, self.phi))
            if self.vectors == 1:
                alone[part] = BETA * (theta - self.phi[index, part])
            else:
                alone[part] = BETA * (theta - phi) + GAMMA[2] * (phi - self.phi[index, part])
        return alone


@pytest.mark.parametrize("vectors", [1, 2])
@pytest.mark.parametrize("chunks", [(), (0,), (1, 2), (0, 1, 2, 3)])
def test_mean_may_have_the_contribution_of_an_absent_member(vectors, chunks):
    """It has arrived at some owners before its sender failed, and all have given the sender up since."""
    group = Large(vectors)
    assert group.play(lambda member, chunk: chunk in chunks) == [] and group.judge.met == 3


@pytest.mark.parametrize("vectors", [1, 2])
def test_members_with_different_means_of_one_chunk_are_found(vectors):
    group = Large(vectors)
    chunk = next(chunk for chunk, owner in group.owners.items() if owner == peer(0))
    assert set(group.play(lambda member, which: (member, which) == (1, chunk))) == {"aggregate"}


@pytest.mark.parametrize("vectors", [1, 2])
def test_mean_with_a_contribution_that_was_not_announced_is_found(vectors):
    """With two vectors the slow weights may be there, but not what the inner steps produce."""
    group = Large(vectors)
    assert set(group.play(lambda member, chunk: True, announced=False)) == {"aggregate"}


@pytest.mark.parametrize("vectors", [1, 2])
def test_mean_with_a_contribution_of_an_absent_stranger_is_only_bounded(vectors):
    group = Large(vectors, honest=3)
    assert group.play(lambda member, chunk: True) == [] and group.judge.met == 0


@pytest.mark.parametrize("vectors", [1, 2])
def test_absent_member_that_has_gone_too_far_to_remember_its_contribution_is_only_bounded(vectors):
    group = Large(vectors)

    def advance():
        phi, delta, ids = group.phi[ABSENT], np.zeros(SIZE, np.float32), (peer(ABSENT),)
        for round in range(1, 8):
            if round > 1:
                group.judge.encoded(*ids, 1, phi)
            delta = np.float32(0.5) * delta + BETA * (group.theta[ABSENT] - phi if round == 1 else np.float32(0))
            phi = phi + delta
            entries = (Contribution(peer(ABSENT), 1, 100),)
            proposal = Proposal(round, 0, Ballot(1, *ids), ids, ids, entries, (), adopted=None, sources=())
            state = np.concatenate([phi, delta])
            group.judge.committed(ABSENT, round, state, np.empty(0, np.float32), Commit(proposal, bytes(32), ()))

    group.between = advance
    assert group.play(lambda member, chunk: True) == [] and group.judge.met == 0


@pytest.mark.parametrize("vectors", [1, 2])
def test_member_without_finite_parameters_contributes_its_slow_weights(vectors):
    group = Large(vectors)
    group.read[1] = np.full(SIZE, np.nan, np.float32)
    group.theta[1] = group.phi[1]
    found = group.play(lambda member, chunk: False, members=(*MEMBERS, ABSENT), announced=False)
    assert found == [] and group.judge.met == 4


@pytest.mark.parametrize("chunk", range(CHUNKS))
def test_owner_that_all_have_left_uses_only_its_own_chunks(chunk):
    group = Large(1)
    found = group.play(lambda member, which: which == chunk, members=(0,))
    assert found == ([] if group.owners[chunk] in (peer(0), peer(ABSENT)) else ["aggregate"])


CODEC = registry.dense("int8(block=64)")


@pytest.mark.parametrize("times, told", [(900, []), (1500, ["bound"])])
def test_value_that_only_a_liar_has_sent_may_count_in_full(times, told):
    """A sparse value of one member is not divided by two, so its bound is twice that of a dense one."""
    manifest, found = parse(MANIFEST.format(codec=CODECS[-1], gamma=0.4, group=2, parts=1)), []
    judge = GossipInvariants(manifest, {peer(0): 0}, lambda oracle, *what: found.append(oracle))
    rng, outer, zeros = np.random.default_rng(5), OuterSteps(manifest), np.zeros(MIN_CHUNK, np.float32)
    phi = rng.standard_normal(MIN_CHUNK).astype(np.float32)
    theta = phi + rng.standard_normal(MIN_CHUNK).astype(np.float32)
    mine = Offer(ReplicaState(0, phi, zeros, zeros), theta, outer.how, 0.95)
    lie = zeros.copy()
    lie[np.flatnonzero(~mine.marks)[0]] = times * np.hypot(*map(np.linalg.norm, (mine.sent[0], mine.sent[1] - phi)))
    delta = outer.beta * (mine.sent[0] + lie)
    judge.installed(0, 0, np.concatenate([phi, zeros]), np.empty(0, np.float32), lost=False)
    judge.encoded(peer(0), 1, theta)
    entries = tuple(Contribution(peer(index), 1, 100) for index in (0, 1))
    ids = tuple(entry.peer for entry in entries)
    proposal = Proposal(1, 0, Ballot(1, ids[0]), ids, ids, entries, (), adopted=None, sources=())
    judge.committed(0, 1, np.concatenate([phi + delta, delta]), mine.left, Commit(proposal, bytes(32), ()))
    assert found == told


class Restarted:
    """A pair of peers with a lossy codec: one of them makes two rounds, and returns to the first of them."""

    def __init__(self, carried=1.0):
        self.told, self.judge = [], None
        manifest = parse(MANIFEST.format(codec=CODEC.spec, gamma=0.7, group=2, parts=1))
        self.judge = GossipInvariants(manifest, {peer(0): 0, peer(1): 1}, lambda *what: self.told.append(what))
        rng = np.random.default_rng(3)
        phi, self.states = rng.standard_normal(MIN_CHUNK).astype(np.float32), []
        delta, left = np.zeros_like(phi), np.zeros_like(phi)
        for index in (0, 1):
            self.judge.installed(index, 0, np.concatenate([phi, delta]), np.empty(0, np.float32), lost=False)
        for round in (1, 2):
            moved = rng.standard_normal(MIN_CHUNK).astype(np.float32)
            entries = tuple(Contribution(peer(index), 1, 100) for index in (0, 1))
            ids = tuple(entry.peer for entry in entries)
            proposal = Proposal(round, 0, Ballot(1, ids[0]), ids, ids, entries, (), adopted=None, sources=())
            theta = phi + moved
            sent = np.empty_like(phi)
            CODEC.decode(payload_of(CODEC, theta - phi + left), sent)
            left = (theta - phi + left - sent) * np.float32(carried)
            delta = np.float32(0.5) * delta + np.float32(0.7) * sent
            phi = phi + delta
            self.states.append((np.concatenate([phi, delta]), left))
            for index in (0, 1):  # Both have trained alike.
                self.judge.encoded(peer(index), 1, theta)
            for index in (0, 1):
                self.judge.committed(index, round, *self.states[-1], Commit(proposal, bytes(32), ()))

    def restart(self, residual, lost=False):
        self.judge.ended(0)
        self.judge.installed(0, 1, self.states[0][0], residual, lost=lost)
        return [oracle for oracle, *_ in self.told]


def test_restart_with_the_residual_of_its_checkpoint_violates_no_invariant():
    pair = Restarted()
    assert pair.judge.met == 4 and pair.restart(pair.states[0][1]) == []


@pytest.mark.parametrize("residual", ["of another round", "none", "zero", "one value off"])
def test_restart_with_another_residual_is_found(residual):
    pair = Restarted()
    one = pair.states[0][1].copy()
    one[17] = np.nextafter(one[17], np.float32(1))
    others = {"of another round": pair.states[1][1], "none": one[:0], "zero": np.zeros_like(one), "one value off": one}
    assert pair.restart(others[residual]) == ["aggregate"]


def test_lost_residual_is_excused_but_no_wrong_one():
    pair = Restarted()
    assert pair.restart(pair.states[1][1][:0], lost=True) == []
    assert pair.restart(pair.states[1][1], lost=True) == ["aggregate"]


def test_own_state_that_another_peer_sends_back_has_no_residual():
    """It is reported again when the peer is ready."""
    pair, none = Restarted(), np.empty(0, np.float32)
    assert pair.restart(none, lost=True) == []
    pair.judge.installed(0, 1, pair.states[0][0], none, lost=False)
    assert pair.told == []


def test_state_of_a_liar_is_not_judged():
    """Its rounds are not, either, so its residual is unknown."""
    pair = Restarted()
    pair.judge.installed(2, 1, *pair.states[0], lost=False)
    assert pair.told == []


def test_residual_of_a_fetched_state_is_found():
    """A peer that takes over the state of another one drops its residual."""
    pair = Restarted()
    fetched = pair.states[1][0] + np.float32(1)
    pair.judge.installed(0, 2, fetched, pair.states[1][1][:0], lost=True)
    assert pair.told == []
    pair.judge.installed(0, 2, fetched + np.float32(1), pair.states[1][1], lost=True)
    assert [oracle for oracle, *_ in pair.told] == ["aggregate"]


def test_residual_that_is_not_carried_as_the_manifest_demands_is_found_in_its_round():
    told = [(oracle, index, detail) for oracle, index, detail in Restarted(carried=0.5).told if "round 1:" in detail]
    assert [one[:2] for one in told] == [("aggregate", 0), ("aggregate", 1)]
    assert all("residual" in detail for *_, detail in told)
