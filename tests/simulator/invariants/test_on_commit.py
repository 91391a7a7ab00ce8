"""Invariants that are checked at every commit, on handwritten rounds."""

import numpy as np
import pytest
from thinwire.collectives.outcome import Outcome
from thinwire.sims.invariants.on_commit import CommitInvariants
from thinwire.swarm.manifest.parser import parse
from thinwire.swarm.messages.registry import Ballot, Commit, Contribution, Proof, Proposal

SIZE = 1000


def peer(index):
    return bytes([index]) * 32


PLAIN = '[exchange]\ncodec = "fp32"\nmax_weight = 1000\naggregation = "mean"\n'


def oracles(honest, toml=PLAIN):
    told = []
    return CommitInvariants(parse(toml), {peer(i): i for i in range(honest)}, lambda *what: told.append(what[0])), told


def test_agreement_invariant_covers_peers_far_behind():
    """A separate history, reported when the others are far ahead."""
    judge, told = oracles(3)
    state = np.zeros(4, np.float32)
    for index in range(3):
        judge.installed(index, 0, bytes(32), state)
    for round in range(1, 20):
        for index in (0, 1):
            judge.committed(index, round, bytes([round]) * 32, state + round, Outcome())
    assert not told
    for round in range(1, 12):
        judge.committed(2, round, bytes([100 + round]) * 32, state - round, Outcome())
    assert told == ["agreement"] * 11


def test_agreement_invariant_compares_peers_of_one_lineage_only():
    judge, told = oracles(3)
    state = np.zeros(4, np.float32)
    for index in range(3):
        judge.installed(index, 0, bytes(32), state)
    judge.committed(0, 1, b"a" * 32, state + 1, Outcome())
    judge.committed(1, 1, b"b" * 32, state + 2, Outcome(), "3f9a")
    assert not told
    judge.committed(2, 1, b"c" * 32, state + 3, Outcome(), "3f9a")
    assert told == ["agreement"]


def test_agreement_invariant_compares_rounds_of_one_lineage():
    judge, told = oracles(3)
    state = np.zeros(4, np.float32)
    for index in range(3):
        judge.installed(index, 0, bytes(32), state)
    judge.committed(0, 1, b"a" * 32, state + 1, Outcome())
    judge.committed(1, 1, b"b" * 32, state + 2, Outcome(), "3f9a")
    judge.installed(2, 1, b"b" * 32, state + 2, "3f9a")
    assert not told
    judge.installed(2, 1, b"b" * 32, state + 2)
    assert told == ["agreement"]


@pytest.mark.parametrize("forgetful", [None, 0, 2])
def test_agreement_invariant_excuses_a_second_value_if_a_voter_has_forgotten_the_first(forgetful):
    """Peers 0 and 1 have voted for the first value, 1 and 2 for the second."""
    told = []
    ids = {peer(i): i for i in range(3)}
    judge = CommitInvariants(parse(PLAIN), ids, lambda *what: told.append(what[0]), lambda one: ids[one] == forgetful)
    state = np.zeros(4, np.float32)
    for index in range(3):
        judge.installed(index, 0, bytes(32), state)
    for index, voters in ((0, (0, 1)), (1, (1, 2))):
        votes = tuple(Proof(peer(one), bytes(64)) for one in voters)
        proposal = Proposal(1, 0, Ballot(1, peer(0)), tuple(ids), tuple(ids), (), (), None, ())
        commit = Commit(proposal, bytes([index]) * 32, votes)
        judge.committed(index, 1, bytes([index]) * 32, state + 1, Outcome(commit=commit))
    assert told.count("agreement") == (forgetful != 0)


def test_agreement_invariant_does_not_excuse_two_states_of_one_commit():
    told, ids = [], {peer(i): i for i in range(2)}
    judge = CommitInvariants(parse(PLAIN), ids, lambda *what: told.append(what[0]), lambda one: True)
    proposal = Proposal(1, 0, Ballot(1, peer(0)), tuple(ids), tuple(ids), (), (), None, ())
    commit = Commit(proposal, bytes(32), tuple(Proof(one, bytes(64)) for one in ids))
    for index in range(2):
        judge.installed(index, 0, bytes(32), np.zeros(4, np.float32))
        judge.committed(index, 1, bytes([index]) * 32, np.full(4, index, np.float32), Outcome(commit=commit))
    assert "agreement" in told


@pytest.mark.parametrize("all_gone", [False, True])
def test_agreement_invariant_remembers_dead_peers(all_gone):
    """Rounds after the last checkpoint are made again in another lineage, also if all processes have ended."""
    judge, told = oracles(2)
    state = np.zeros(4, np.float32)
    for index in range(2):
        judge.installed(index, 0, bytes(32), state)
    judge.committed(0, 1, b"a" * 32, state + 1, Outcome())
    judge.ended(0)
    if all_gone:
        judge.ended(1)
        judge.installed(1, 0, bytes(32), state)
    judge.committed(1, 1, b"b" * 32, state + 2, Outcome())
    assert told == ["agreement"]


@pytest.mark.parametrize(("times", "found"), [(900.0, []), (5_000.0, ["bound"]), (1e5, ["bound"])])
@pytest.mark.parametrize("honest", [2, 11, 49])
def test_mean_invariant_bounds_a_liar_by_the_norm_screening(honest, times, found):
    judge, told = oracles(honest)
    rng = np.random.default_rng(honest)
    theta = rng.standard_normal(SIZE).astype(np.float32)
    moves = [rng.standard_normal(SIZE).astype(np.float32) * np.float32(0.01) for _ in range(honest)]
    lie = moves[0] * np.float32(times)
    judge.installed(0, 0, bytes(32), np.concatenate([theta, np.zeros_like(theta)]))
    for index, move in enumerate(moves):
        judge.encoded(peer(index), 1, 1, theta - move, 100)
    mean = np.mean([*moves, lie], axis=0, dtype=np.float64).astype(np.float32)
    entries = tuple(Contribution(peer(index), 1, 100) for index in range(honest + 1))
    ids = tuple(entry.peer for entry in entries)
    proposal = Proposal(1, 0, Ballot(1, ids[0]), ids, ids, entries, (), adopted=None, sources=())
    after = np.concatenate([theta - np.float32(0.7) * mean, mean])
    judge.committed(0, 1, b"1" * 32, after, Outcome(commit=Commit(proposal, b"1" * 32, ()), missing={}))
    assert told == found


@pytest.mark.parametrize("times", [10.0, 900.0])
def test_clipped_mean_is_bounded_by_the_longest_honest_contribution(times):
    """An owner that takes the plain mean in place of the clipped one is found."""
    for rule, found in (("mean", []), ("clip", ["bound"])):
        judge, told = oracles(3, PLAIN.replace("mean", rule))
        rng = np.random.default_rng(1)
        theta = rng.standard_normal(SIZE).astype(np.float32)
        moves = [rng.standard_normal(SIZE).astype(np.float32) * np.float32(0.01) for _ in range(3)]
        judge.installed(0, 0, bytes(32), np.concatenate([theta, np.zeros_like(theta)]))
        for index, move in enumerate(moves):
            judge.encoded(peer(index), 1, 1, theta - move, 100)
        mean = np.mean([*moves, moves[0] * np.float32(times)], axis=0, dtype=np.float64).astype(np.float32)
        entries = tuple(Contribution(peer(index), 1, 100) for index in range(4))
        ids = tuple(entry.peer for entry in entries)
        proposal = Proposal(1, 0, Ballot(1, ids[0]), ids, ids, entries, (), adopted=None, sources=())
        after = np.concatenate([theta - np.float32(0.7) * mean, mean])
        judge.committed(0, 1, b"1" * 32, after, Outcome(commit=Commit(proposal, b"1" * 32, ()), missing={}))
        assert told == found


def test_lineage_of_a_peer_that_has_not_reported_its_round_is_no_second_round():
    """Rounds that overlap with training are reported late."""
    judge, told = oracles(1)
    state = np.zeros(4, np.float32)
    judge.installed(0, 0, bytes(32), state)
    judge.founded(0, 1, b"b" * 32, state + 1, "3f9a")
    judge.committed(0, 1, b"b" * 32, state + 1, Outcome(), "3f9a")
    assert not told
    judge.founded(0, 1, b"c" * 32, state + 1, "77aa")
    judge.committed(0, 2, b"d" * 32, state + 2, Outcome(), "77aa")
    assert not told


@pytest.mark.parametrize(
    ("weight", "split", "found"),
    [(40, "merge", False), (140, "merge", False), (141, "merge", True), (140, "discard", True)],
)
def test_weight_invariant_counts_rounds_before_a_split_again_only_if_they_are_merged(weight, split, found):
    def outcome(round, index, weight):
        ids = (peer(index),)
        entries = (Contribution(peer(index), 1, weight),)
        proposal = Proposal(round, 0, Ballot(1, ids[0]), ids, ids, entries, (), adopted=None, sources=())
        return Outcome(commit=Commit(proposal, b"1" * 32, ()), missing={})

    judge, told = oracles(2, f'[exchange]\ncodec = "fp32"\nmax_weight = 1000\non_split = "{split}"\n')
    state = np.zeros(2 * SIZE, np.float32)
    for index in range(2):
        judge.installed(index, 0, bytes(32), state)
    judge.committed(0, 1, b"a" * 32, state, outcome(1, 0, 100))
    judge.committed(1, 1, b"b" * 32, state, outcome(1, 1, 10), "3f9a")
    judge.installed(0, 1, b"b" * 32, state, "3f9a")
    judge.encoded(peer(0), 2, 1, state[:SIZE], 40)
    judge.committed(1, 2, b"c" * 32, state, outcome(2, 0, weight), "3f9a")
    assert told == ["weight"] * found
