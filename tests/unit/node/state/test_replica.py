"""The outer step: DiLoCo, exact to the bit."""

from __future__ import annotations

import copy

import blake3
import msgspec
import numpy as np
import pytest
import torch
from thinwire.collectives.aggregation.means import mean
from thinwire.collectives.outcome import Outcome
from thinwire.collectives.state_sync.state_offers import state_digest
from thinwire.collectives.state_sync.state_sync import FetchedState
from thinwire.collectives.topology.shards import grid
from thinwire.compression import registry
from thinwire.node.state.replica import Replica
from thinwire.swarm.lineage import name_of_fork
from thinwire.swarm.messages.registry import CHUNK_BYTES, LIFE, Ballot, ChainEntry, Commit, Fork, Proposal, StateOffer
from thinwire.swarm.method_specs.diloco import DiLoCo

LAYOUT = blake3.blake3(b"layout").digest()
ME = bytes(32)
SIZE = 20_011


def replica(theta):
    return Replica(LAYOUT, theta, [ME])


def commit(target, deltas, weights, spec="fp32", *, lr=0.7, momentum=0.9, nesterov=True):
    """Play one round as all peers do: encode each peer's model, average, encode, decode, step."""
    codec = target.codec = registry.parse(spec)
    cut = target.plan_grid = grid(target.theta.size, codec)
    target.outer = DiLoCo(lr=lr, momentum=momentum, nesterov=nesterov)
    encoded = []
    for delta in deltas:
        local = target.theta - delta

        def read(start, stop, out, local=local):
            out[:] = local[start:stop]

        encoded.append([bytes(chunk) for chunk in target.contribution(read, attempt=1, peers=1)])
    results = []
    for index in range(len(cut)):
        out = np.empty(cut.size(index), np.float32)
        mean(codec, [np.frombuffer(chunks[index], np.uint8) for chunks in encoded], weights, out)
        payload = np.empty(codec.nbytes(out.size), np.uint8)
        codec.encode(out, payload)
        results.append(payload.data)
    proposal = Proposal(1, 0, Ballot(1, ME), (ME,), (ME,), (), (), None, ())
    assert target.commit(Outcome(tuple(results), Commit(proposal, bytes(32), ())), ME)


@pytest.mark.parametrize("nesterov", [True, False])
def test_outer_step_is_torch_sgd_on_the_mean_pseudo_gradient(nesterov):
    rng = np.random.default_rng(1)
    theta = rng.standard_normal(SIZE).astype(np.float32)
    ours = replica(theta)
    parameter = torch.nn.Parameter(torch.from_numpy(theta.copy()))
    outer = torch.optim.SGD([parameter], lr=0.7, momentum=0.9, nesterov=nesterov)
    for _ in range(5):
        deltas = [(rng.standard_normal(SIZE) * 0.01).astype(np.float32) for _ in range(4)]
        # A peer sends the difference of its float32 parameters.
        sent = [ours.theta - (ours.theta - delta) for delta in deltas]
        parameter.grad = torch.from_numpy(np.mean(np.stack(sent).astype(np.float64), 0).astype(np.float32))
        outer.step()
        commit(ours, deltas, [1.0] * 4, nesterov=nesterov)
        np.testing.assert_allclose(ours.theta, parameter.detach().numpy(), rtol=0, atol=1e-6)
    assert ours.round == 5


def test_outer_step_weighs_contributions_one_to_three():
    theta = np.zeros(SIZE, np.float32)
    ours = replica(theta)
    one, three = np.full(SIZE, 1.0, np.float32), np.full(SIZE, 5.0, np.float32)
    commit(ours, [one, three], [100.0, 300.0], lr=1.0, momentum=0.0, nesterov=False)
    np.testing.assert_array_equal(ours.theta, -4.0)


def test_outer_step_of_one_peer_and_one_step_is_the_inner_optimizer():
    """M = 1, H = 1, outer lr 1 without momentum: DiLoCo is then the inner optimizer itself."""
    torch.manual_seed(3)
    model = torch.nn.Sequential(torch.nn.Linear(20, 30), torch.nn.Tanh(), torch.nn.Linear(30, 5))
    twin = copy.deepcopy(model)

    def flat(module):
        return torch.cat([p.detach().reshape(-1) for p in module.parameters()]).numpy().copy()

    ours = replica(flat(model))
    inner, alone = (torch.optim.AdamW(m.parameters(), lr=1e-2) for m in (model, twin))
    for step in range(10):
        batch = torch.randn(16, 20, generator=torch.Generator().manual_seed(step))
        for module, optimizer in ((model, inner), (twin, alone)):
            optimizer.zero_grad()
            module(batch).square().mean().backward()
            optimizer.step()
        commit(ours, [ours.theta - flat(model)], [1.0], lr=1.0, momentum=0.0, nesterov=False)
        at = 0
        with torch.no_grad():
            for parameter in model.parameters():
                part = ours.theta[at : at + parameter.numel()].copy()
                parameter.copy_(torch.from_numpy(part).view_as(parameter))
                at += parameter.numel()
        # θ − (θ − θ') is θ' except for the rounding of one subtraction.
        np.testing.assert_allclose(ours.theta, flat(twin), rtol=0, atol=2e-6)


@pytest.mark.parametrize("spec", ["fp32", "int8(block=256)"])
def test_replicas_stay_equal_bit_by_bit(spec):
    rng = np.random.default_rng(2)
    theta = rng.standard_normal(SIZE).astype(np.float32)
    a, b = replica(theta), replica(theta)
    for _ in range(3):
        deltas = [(rng.standard_normal(SIZE) * 0.01).astype(np.float32) for _ in range(3)]
        for one in (a, b):
            commit(one, deltas, [1.0, 2.0, 3.0], spec)
        assert a.digest == b.digest and a.state.tobytes() == b.state.tobytes()


def test_replica_never_sends_non_finite_values():
    ours = replica(np.zeros(SIZE, np.float32))
    ours.codec = registry.parse("int8(block=256)")
    ours.plan_grid = grid(SIZE, ours.codec)

    def read(start, stop, out):
        out[:] = 0
        if start <= 9_000 < stop:
            out[9_000 - start] = np.inf

    with pytest.raises(FloatingPointError, match="not finite"):
        list(ours.contribution(read, attempt=1, peers=1))


def test_digest_covers_round_members_and_every_byte():
    theta = np.random.default_rng(0).standard_normal(SIZE).astype(np.float32)
    seen = set()

    def note(one):
        one.seal()
        assert one.digest not in seen
        seen.add(one.digest)

    one = replica(theta)
    note(one)
    one.round = 1
    note(one)
    one.members = (ME, bytes([1]) * 32)
    note(one)
    one.theta[SIZE - 1] = np.nextafter(one.theta[SIZE - 1], np.float32(9))
    note(one)
    one.momentum[0] = np.float32(-0.0)
    note(one)
    note(Replica(blake3.blake3(b"other").digest(), theta, [ME]))


def test_install_replaces_only_differing_chunks():
    rng = np.random.default_rng(5)
    size = 3 * CHUNK_BYTES // 4
    theta = rng.standard_normal(size).astype(np.float32)
    source, target = replica(theta), replica(theta)
    source.theta[7] += 1.0
    source.round, source.members = 4, (ME, bytes([1]) * 32)
    source.seal()
    hashes = tuple(source.hashes)
    differ = [i for i, (a, b) in enumerate(zip(hashes, target.hashes, strict=True)) if a != b]
    assert differ == [0] and len(hashes) == 6
    offer = StateOffer(4, source.digest, LAYOUT, source.state.nbytes, source.members, lineage=source.lineage)
    fetched = FetchedState(offer, hashes, {0: bytes(source.chunk(0))}, (ME,), source.chain)
    changed = target.install(fetched)
    assert changed == CHUNK_BYTES and not fetched.chunks, "the chunks take no memory any more"
    assert target.state.tobytes() == source.state.tobytes()
    assert (target.round, target.members, target.digest) == (4, source.members, source.digest)
    assert target.digest == state_digest(4, LAYOUT, source.members, target.hashes, lineage=source.lineage)


PEERS = tuple(bytes([number]) * 32 for number in range(5))


def lives(*peers):
    return b"".join(bytes([100 + peer[0]]) * LIFE for peer in peers)


def fork_of(one, *members):
    return Fork(one.round, one.digest, one.members, members, lives(*members), (b"s" * 64,) * len(members))


def test_members_are_ordered_by_seniority_after_each_round():
    """Equal on all peers, also on those that fetched the state later: a tie goes to the most senior member."""
    ann, ben, cat, dan, eve = PEERS
    one = Replica(LAYOUT, np.zeros(10, np.float32), (cat,))
    for members, seniors in (
        ((ben, cat), (cat, ben)),
        ((ann, ben, cat, eve), (cat, ben, ann, eve)),
        ((ann, ben, dan, eve), (ben, ann, eve, dan)),
        ((ann, ben, cat, dan, eve), (ben, ann, eve, dan, cat)),
        ((cat, dan), (dan, cat)),
    ):
        one.advance(members, lives(*members))
        assert one.members == seniors and one.lives == lives(*seniors)
        assert one.known_lives == {peer: lives(peer) for peer in seniors}


def test_state_digest_depends_on_the_order_of_seniority():
    found = set()
    for start in (PEERS[0], PEERS[1]):
        one = Replica(LAYOUT, np.zeros(10, np.float32), (start,))
        one.advance(PEERS[:2], lives(*PEERS[:2]))
        found.add(one.digest)
    assert len(found) == 2


def test_founded_lineage_changes_digest_members_and_lives_but_no_values():
    one, other = (replica(np.ones(10, np.float32)) for _ in range(2))
    before, hashes, state = one.digest, list(one.hashes), one.state.copy()
    fork = fork_of(one, *PEERS[1:3])
    one.found(fork)
    assert one.chain == (*other.chain, ChainEntry(fork)) and one.lineage == name_of_fork(fork) and one.round == 0
    assert (one.members, one.lives) == (PEERS[1:3], lives(*PEERS[1:3]))
    assert one.hashes == hashes and np.array_equal(one.state, state) and one.digest != before
    other.members, other.lives = PEERS[1:3], lives(*PEERS[1:3])
    other.seal()
    assert other.digest != one.digest, "the lineage alone makes a difference"
    assert one.digest == state_digest(0, LAYOUT, one.members, hashes, one.lives, one.lineage)


def test_data_of_the_first_round_of_a_lineage_stays_with_those_that_may_have_trained_on_it():
    ann, ben, cat, dan, eve = PEERS
    one = Replica(LAYOUT, np.zeros(10, np.float32), (ann, ben))
    for founders, holders in (
        ((cat,), (cat,)),
        ((cat, dan), (cat,)),
        ((ann, dan), (ann, dan)),
        ((dan, eve), (ann, dan)),
    ):
        one.found(fork_of(one, *founders))
        assert one.leaseholders == holders
    one.advance((dan, eve), lives(dan, eve))
    assert one.leaseholders == (dan, eve)


def test_lineages_with_equal_values_never_have_equal_digests_again():
    one, other = (replica(np.ones(10, np.float32)) for _ in range(2))
    one.found(fork_of(one, *PEERS[:2]))
    other.found(fork_of(other, PEERS[0]))
    for _ in range(3):
        for each in (one, other):
            each.advance(PEERS[:3], lives(*PEERS[:3]))
        assert one.digest != other.digest
    assert set(one.members) == set(other.members)


def test_install_takes_over_the_lineage_of_the_offer():
    source, target = (replica(np.ones(10, np.float32)) for _ in range(2))
    source.found(fork_of(source, PEERS[1]))
    offer = StateOffer(0, source.digest, LAYOUT, source.state.nbytes, source.members, 0, source.lives)
    offer = msgspec.structs.replace(offer, lineage=source.lineage)
    target.install(FetchedState(offer, tuple(source.hashes), {}, (ME,), source.chain))
    assert (target.chain, target.lives, target.digest) == (source.chain, source.lives, source.digest)
    target.seal()
    assert target.digest == source.digest
