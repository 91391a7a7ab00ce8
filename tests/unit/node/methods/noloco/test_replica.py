"""The NoLoCo step against golden values, DiLoCo, and the theory of a quadratic."""

import numpy as np
import pytest
import torch
from thinwire.collectives.gossip.means import MeshMeans
from thinwire.collectives.gossip.pair_codec import parse_pair_codec
from thinwire.collectives.state_sync.state_sync import FetchedState
from thinwire.collectives.topology.matching import others
from thinwire.collectives.topology.shards import Grid, grid
from thinwire.compression.sparse import mean as sparsemean
from thinwire.compression.sparse.flat import PORTION
from thinwire.compression.sparse.portions import portion_chunks
from thinwire.node.methods.noloco.replica import GossipReplica, GossipStep
from thinwire.node.state.layout import Layout, Piece
from thinwire.swarm.messages.registry import StateOffer
from thinwire.swarm.method_specs.noloco import gamma_limit

ALPHA, BETA, GAMMA = 0.5, 0.7, 0.7
PULL = GossipStep(ALPHA, BETA, GAMMA)
EXACT = parse_pair_codec("fp32", lr=0.7, gamma=0.7)
TWO = parse_pair_codec("fp32", lr=0.7, gamma=0.5)
LOSSY = parse_pair_codec("int8(block=256)", lr=0.7, gamma=0.7)
TOPK = "topk(k=64,chunk=4096)|2bit|rice"
SPARSE = parse_pair_codec(TOPK, lr=0.7, gamma=0.7)
PARTS = parse_pair_codec("int8(block=256)", lr=0.7, gamma=0.7, parts=3)
SPARSE_PARTS = parse_pair_codec(TOPK, lr=0.7, gamma=0.7, parts=2)


def reader(theta):
    def read(start, stop, out):
        out[:] = theta[start:stop]

    return read


def sent(one, theta, cut, how):
    """Return both vectors that a replica sends."""
    return [*one.offer(reader(theta), cut, how), *one.base(cut, how)]


def swarm_of(n, theta):
    return [GossipReplica(bytes(32), np.asarray(theta, np.float32).reshape(-1), ()) for _ in range(n)]


def meet(replicas, thetas, group, cut, how, pull=PULL):
    """Play one round of a group: all contribute, then all step with the others' contributions."""
    payloads = {i: sent(replicas[i], thetas[i], cut, how) for i in group}
    rounds = {i: replicas[i].round + 1 for i in group}
    for i in group:
        means = (
            MeshMeans([payloads[j] for j in sorted(group)], sorted(group).index(i), cut, how, rounds[i])
            if len(group) > 1
            else None
        )
        replicas[i].step(reader(thetas[i]), payloads[i], means, cut, how, members=(), pull=pull)
        thetas[i][:] = replicas[i].theta


def matching(n, seed):
    order = np.random.default_rng(seed).permutation(n)
    return [(order[k], order[k + n // 2]) for k in range(n // 2)]


def partition(n, size, round):
    """Return the groups that the product draws in a round."""
    view = [bytes([index]) * 32 for index in range(n)]
    found = {tuple(sorted((peer, *others(bytes(32), round, view, peer, size)))) for peer in view}
    return [[peer[0] for peer in group] for group in sorted(found)]


def test_noloco_step_has_golden_values():
    first = np.random.default_rng(7).standard_normal((5, 3)).astype(np.float32)
    replicas = swarm_of(4, first)
    thetas = [replica.theta.copy() for replica in replicas]
    parameters = [torch.nn.Parameter(torch.from_numpy(theta)) for theta in thetas]  # the same memory
    inner = [torch.optim.Adam([parameter], lr=0.01) for parameter in parameters]
    cut = Grid(15, 4096)
    for s in range(1, 13):
        for r, parameter in enumerate(parameters):
            gradient = np.random.default_rng(1000 * r + s).standard_normal((5, 3)).astype(np.float32)
            parameter.grad = torch.from_numpy(gradient.reshape(-1))
            inner[r].step()
        if s % 3 == 0:
            for pair in matching(4, s + 1):
                meet(replicas, thetas, pair, cut, EXACT)
    found = [theta.reshape(5, 3)[0, 0] for theta in thetas]
    assert found == pytest.approx([-0.0229452, -0.0280766, -0.0282156, -0.0220628], abs=2e-6)
    assert thetas[0].reshape(5, 3)[4, 2] == pytest.approx(-0.0029747, abs=2e-6)


def two_vectors():
    """Encode the same numbers as the one-vector form as two exact vectors."""
    return type(EXACT)(EXACT.fast, EXACT.fast)


@pytest.mark.parametrize("size, many", [(2, 8), (3, 8), (4, 9), (8, 8)])
@pytest.mark.parametrize(
    "how, total",
    [(EXACT, 2000), (TWO, 2000), (LOSSY, 2000), (PARTS, 17_000)],
    ids=["one", "two", "lossy", "parts"],
)
def test_mean_of_noloco_replicas_follows_diloco_recurrence(how, total, size, many):
    """For any partition: mean(δ) ← α mean(δ) + β mean(Δ), where the codec's loss is added later."""
    rng = np.random.default_rng(1)
    replicas = swarm_of(many, rng.standard_normal(total))
    for replica in replicas:
        replica.theta[:] += rng.standard_normal(total) * 0.1
        replica.momentum[:] = rng.standard_normal(total) * 0.1
    thetas = [replica.theta.copy() for replica in replicas]
    cut, pull = grid(total, how), GossipStep(ALPHA, BETA, GAMMA if how is not TWO else 0.5)

    def mean(what):
        return np.mean([np.asarray(what(replica), np.float64) for replica in replicas], axis=0)

    for round in range(6):
        for theta in thetas:
            theta += rng.standard_normal(total).astype(np.float32) * 0.1
        phi, delta = mean(lambda r: r.theta), mean(lambda r: r.momentum)
        carried = mean(lambda r: r.residual if r.residual.size else np.zeros(total))
        step = np.mean(np.asarray(thetas, np.float64), axis=0) - phi
        for group in partition(many, size, round):
            meet(replicas, thetas, group, cut, how, pull)
        step += carried - mean(lambda r: r.residual if r.residual.size else np.zeros(total))
        expected = ALPHA * delta + BETA * step
        assert np.abs(mean(lambda r: r.momentum) - expected).max() < 1e-6
        assert np.abs(mean(lambda r: r.theta) - phi - expected).max() < 1e-6
    assert how.exact != bool(replicas[0].residual.size)


@pytest.mark.parametrize("how, total", [(SPARSE, 2000), (SPARSE_PARTS, 17_000)], ids=["sparse", "parts"])
@pytest.mark.parametrize("size, many", [(2, 8), (3, 8), (8, 8)])
def test_mean_of_sparse_replicas_follows_the_means_of_sparseloco_in_their_groups(how, total, size, many):
    """mean(δ) ← α mean(δ) + β (mean over the replicas of the SparseLoCo mean of their group): the pulls cancel out."""
    rng = np.random.default_rng(2)
    replicas = swarm_of(many, rng.standard_normal(total))
    thetas = [replica.theta.copy() for replica in replicas]
    cut, common = grid(total, how), rng.standard_normal(total).astype(np.float32)

    def mean(what):
        return np.mean([np.asarray(what(replica), np.float64) for replica in replicas], axis=0)

    def steps(group):
        out, codec = np.empty(total, np.float32), how.fast
        offers = [list(replicas[i].offer(reader(thetas[i]), cut, how)) for i in group]
        for index in range(len(cut)):
            start, stop = cut.span(index)
            chunks = portion_chunks(stop - start, PORTION, codec.codec.chunk)
            selected = [codec.codec.decode(offer[index], chunks) for offer in offers]
            out[start:stop] = sparsemean.mean(selected, [1.0] * len(group), chunks)
        return len(group) / many * out.astype(np.float64)

    for round in range(6):
        for theta in thetas:
            theta += (common + rng.standard_normal(total).astype(np.float32)) * np.float32(0.1)
        phi, delta, groups = mean(lambda r: r.theta), mean(lambda r: r.momentum), partition(many, size, round)
        expected = ALPHA * delta + BETA * sum(steps(group) for group in groups)
        for group in groups:
            meet(replicas, thetas, group, cut, how)
        assert np.abs(mean(lambda r: r.momentum) - expected).max() < 1e-6
        assert np.abs(mean(lambda r: r.theta) - phi - expected).max() < 1e-6
    assert replicas[0].residual.size


def test_contribution_missed_by_one_peer_moves_mean_as_documented():
    """Replicas lack each other's contributions without notice: the cost is that in docs/design/gossip.md."""
    rng, total, n = np.random.default_rng(11), 500, 4
    replicas = swarm_of(n, np.zeros(total))
    for replica in replicas:
        replica.theta[:] = rng.standard_normal(total)
    thetas = [replica.theta + rng.standard_normal(total).astype(np.float32) for replica in replicas]
    cut, phi = Grid(total, 4096), [replica.theta.astype(np.float64) for replica in replicas]
    moved = [theta - before for theta, before in zip(thetas, phi, strict=True)]
    payloads = [sent(one, t, cut, TWO) for one, t in zip(replicas, thetas, strict=True)]
    for i, replica in enumerate(replicas):
        means = MeshMeans([payloads[j] for j in range(n) if (i, j) != (0, 3)], i, cut, TWO, 1)
        pull = GossipStep(ALPHA, BETA, 0.5)
        replica.step(reader(thetas[i]), payloads[i], means, cut, TWO, members=(), pull=pull)
    found = np.sum([replica.momentum for replica in replicas], axis=0) - BETA * np.sum(moved, axis=0)
    mean, middle = np.mean(moved, axis=0), np.mean(phi, axis=0)
    np.testing.assert_allclose(found, (BETA * (mean - moved[3]) + 0.5 * (middle - phi[3])) / (n - 1), atol=1e-5)


def test_round_mixes_one_part_of_the_slow_weights_and_all_in_turn():
    rng, how = np.random.default_rng(12), parse_pair_codec("fp32", lr=0.7, gamma=0.7, parts=3)
    cut = Grid(5 * 40 - 7, 40)  # parts of 2, 2 and 1 chunks
    replicas = swarm_of(4, np.zeros(cut.total))
    for replica in replicas:
        replica.theta[:] = rng.standard_normal(cut.total)
    thetas = [replica.theta.copy() for replica in replicas]
    for round in range(1, 7):
        before = np.stack([replica.theta for replica in replicas])
        own = sent(replicas[0], thetas[0], cut, how)
        drawn = [chunk for chunk in range(5) if chunk % 3 == round % 3]
        assert len(own) == 5 + len(drawn)
        meet(replicas, thetas, range(4), cut, how, GossipStep(0.0, 0.7, 1.0))
        after = np.stack([replica.theta for replica in replicas])
        apart = [np.ptp(after[:, slice(*cut.span(chunk))], axis=0).max() for chunk in range(5)]
        assert all(apart[chunk] < 1e-6 for chunk in drawn)
        if round <= 2:
            untouched = [chunk for chunk in range(5) if chunk % 3 == 0]
            assert all(apart[chunk] > 0.1 for chunk in untouched)
            for chunk in untouched:
                np.testing.assert_array_equal(after[:, slice(*cut.span(chunk))], before[:, slice(*cut.span(chunk))])
    assert max(apart) < 1e-6


def test_parts_of_slow_weights_need_two_vectors_and_change_the_plan():
    assert parse_pair_codec("fp32", lr=0.7, gamma=0.7, parts=2).slow is not None
    specs = {parse_pair_codec("fp32", lr=0.7, gamma=0.6, parts=parts).spec for parts in (1, 2, 3)}
    assert len(specs) == 3 and TWO.spec == "fp32+fp32"


def test_residual_of_a_sparse_contribution_decays_and_follows():
    rng, total, cut = np.random.default_rng(13), 4096, Grid(4096, 4096)
    replicas = swarm_of(2, np.zeros(total))
    thetas = [rng.standard_normal(total).astype(np.float32) for _ in range(2)]
    moved = [theta.copy() for theta in thetas]
    meet(replicas, thetas, (0, 1), cut, SPARSE, GossipStep(0.0, 1.0, 1.0, residual_decay=0.5))
    for replica, whole in zip(replicas, moved, strict=True):
        largest = np.argsort(-np.abs(whole))[:64]
        rest = np.setdiff1d(np.arange(total), largest)
        np.testing.assert_allclose(replica.residual[rest], 0.5 * whole[rest], rtol=1e-6)
        assert np.abs(replica.residual[largest]).max() < 0.5 * np.abs(whole[largest]).max()
    left = replicas[0].residual.copy()
    # The largest value that was left out is the largest of the next contribution, without further training.
    out = np.empty(total, np.float32)
    SPARSE.fast.decode(sent(replicas[0], replicas[0].theta, cut, SPARSE)[0], out)
    assert out[np.argmax(np.abs(left))] != 0 and np.count_nonzero(out) == 64


@pytest.mark.parametrize("how", [SPARSE, LOSSY], ids=["sparse", "dense"])
def test_residual_in_a_checkpoint_continues_and_a_fetched_state_drops_it(how):
    rng, total = np.random.default_rng(14), 5000
    layout, cut = (
        Layout((Piece("a", (70, 70), "float32", 0, 4900), Piece("b", (100,), "float32", 4900, total)), total, b""),
        grid(total, how),
    )
    replicas, fresh = swarm_of(2, np.zeros(total)), swarm_of(1, np.zeros(total))[0]
    assert not fresh.private_state(layout) and fresh.load_private({}, layout) == ""
    thetas = [rng.standard_normal(total).astype(np.float32) for _ in range(2)]
    meet(replicas, thetas, (0, 1), cut, how)
    own = replicas[0]
    stored = {name: tensor.copy() for name, tensor in own.private_state(layout).items()}
    fresh.state[:], fresh.round = own.state, own.round
    model = reader(own.theta + np.float32(0.1))
    without = list(fresh.offer(model, cut, how))
    with pytest.raises(ValueError, match="expected 5000"):
        fresh.load_private(stored | {"residual/b": np.ones(99, np.float32)}, layout)
    assert not fresh.residual.size and fresh.load_private(stored, layout) == ""
    assert list(fresh.offer(model, cut, how)) == list(own.offer(model, cut, how)) != without
    fresh.seal()
    offer = StateOffer(fresh.round, fresh.digest, bytes(32), fresh.state.nbytes, ())
    fresh.install(FetchedState(offer, tuple(fresh.hashes), {}, ()))
    assert list(fresh.offer(model, cut, how)) == without


@pytest.mark.parametrize("released", [False, True])
def test_residual_that_a_checkpoint_reads_does_not_change_until_it_is_released(released):
    rng, total = np.random.default_rng(15), 4096
    layout, cut = Layout((Piece("a", (total,), "float32", 0, total),), total, b""), grid(total, SPARSE)
    replicas = swarm_of(2, np.zeros(total))
    thetas = [rng.standard_normal(total).astype(np.float32) for _ in range(2)]
    meet(replicas, thetas, (0, 1), cut, SPARSE)
    own = replicas[0]
    (tensor,) = own.private_state(layout).values()
    before, twin = tensor.copy(), own.twin(private=True)
    if released:
        twin.release_private()
    own.move_from_twins()
    thetas[0] += 1
    meet(replicas, thetas, (0, 1), cut, SPARSE)
    assert np.array_equal(tensor, before) != released and not twin.lost
    assert not np.array_equal(own.residual, before)


def test_one_vector_exchange_equals_two_vector_exchange():
    rng, size = np.random.default_rng(2), 999
    first = rng.standard_normal(size)
    ends = []
    for how in (EXACT, two_vectors()):
        replicas, cut = swarm_of(4, first), grid(size, how)
        thetas = [replica.theta.copy() for replica in replicas]
        steps = np.random.default_rng(3)
        for round in range(8):
            for theta in thetas:
                theta += steps.standard_normal(size).astype(np.float32) * 0.1
            for pair in matching(4, round):
                meet(replicas, thetas, pair, cut, how)
        ends.append(np.stack([replica.theta for replica in replicas]))
    assert two_vectors().nbytes(size) == 2 * EXACT.nbytes(size)
    np.testing.assert_allclose(ends[0], ends[1], atol=2e-6)
    assert np.abs(ends[0][0] - ends[0][1]).max() > 0.01  # and replicas did differ


@pytest.mark.parametrize("how", [EXACT, TWO], ids=["one", "two"])
def test_group_of_all_equals_diloco_with_heavy_ball(how):
    rng, size, cut = np.random.default_rng(4), 500, Grid(500, 4096)
    first = rng.standard_normal(size)
    replicas = swarm_of(5, first)
    thetas = [replica.theta.copy() for replica in replicas]
    phi, delta = first.astype(np.float32).astype(np.float64), np.zeros(size)
    for _ in range(10):
        for theta in thetas:
            theta += rng.standard_normal(size).astype(np.float32) * 0.1
        delta = ALPHA * delta + BETA * (np.mean(np.asarray(thetas, np.float64), axis=0) - phi)
        phi = phi + delta
        meet(replicas, thetas, range(5), cut, how)
        for replica in replicas:
            np.testing.assert_allclose(replica.theta, phi, atol=5e-6)
        assert len({replica.digest for replica in replicas}) == 1  # equal to the bit, as with DiLoCo


def test_lone_step_is_exact_and_keeps_residual():
    rng, size, cut = np.random.default_rng(5), 300, Grid(300, 4096)
    replicas = swarm_of(2, rng.standard_normal(size))
    thetas = [replica.theta + rng.standard_normal(size).astype(np.float32) for replica in replicas]
    meet(replicas, thetas, (0, 1), cut, LOSSY)
    one, theta = replicas[0], thetas[0]
    left, before, delta = one.residual.copy(), one.theta.copy(), one.momentum.copy()
    assert 0 < np.abs(left).max() < 0.05
    theta += np.float32(0.25)
    meet(replicas, thetas, (0,), cut, LOSSY)
    np.testing.assert_allclose(one.momentum, ALPHA * delta + BETA * 0.25, atol=1e-6)
    np.testing.assert_allclose(one.theta, before + one.momentum, atol=1e-6)
    np.testing.assert_array_equal(one.residual, left)
    assert one.round == 2 and one.digest != replicas[1].digest


def test_noloco_replica_does_not_send_non_finite_values():
    (one,) = swarm_of(1, np.ones(10))
    state, digest = one.state.copy(), one.digest
    theta = one.theta.copy()
    theta[3] = np.nan
    with pytest.raises(FloatingPointError, match="0 to 10"):
        list(one.offer(reader(theta), Grid(10, 4096), EXACT))
    np.testing.assert_array_equal(one.state, state)
    assert one.digest == digest and one.round == 0
    assert list(one.offer(one.own, Grid(10, 4096), EXACT))


@pytest.mark.parametrize("how", [EXACT, TWO, LOSSY], ids=["one", "two", "lossy"])
def test_contribution_length_is_its_distance(how):
    size = 5000
    mine, other = swarm_of(2, np.ones(size))
    other.theta[:] += 3.0 if how.slow else 0.0  # its slow weights are elsewhere too, where they are sent
    cut = grid(size, how)
    near, far = (sent(one, one.theta + np.float32(d), cut, how) for one, d in ((mine, 0.1), (other, 4.0)))
    lengths = mine.lengths([near, far], cut, how)
    assert lengths[0] == pytest.approx(0.1 * size**0.5, rel=0.15)
    assert lengths[1] == pytest.approx((5.0 if how.slow else 4.0) * size**0.5, rel=0.02)


# --- the exact theory, per mode: u = φ_i − mean, d = δ_i − mean; x = (E u², E ud, E d²) follows x' = A x + noise

OMEGA, STEPS = 0.02, 50
KAPPA = 1 - (1 - OMEGA) ** STEPS
NOISE = OMEGA**2 * (1 - (1 - OMEGA) ** (2 * STEPS)) / (1 - (1 - OMEGA) ** 2)


def moments(n, size, kappa, gamma, alpha=ALPHA, beta=BETA):
    """Return A and the probability that two of n are in one group of `size`.

    The second moments of the deviations follow x' = A x + noise. For a deviation u and the mean ū of its group: E ū² =
    E uū = ρ E u² with ρ = (groups − 1) / (n − 1).
    """
    rho, b = (-(-n // size) - 1) / (n - 1), gamma - beta * kappa
    w = np.array([gamma**2 - 2 * gamma * b * rho + b * b * rho, -2 * alpha * gamma + 2 * alpha * b * rho, alpha**2])
    u = np.array([-gamma + b * rho, alpha, 0.0])
    return np.stack([np.array([1.0, 0, 0]) + 2 * u + w, u + w, w])


def theory(n, size=2):
    """Stationary variance of the deviation from the mean, and of the mean itself."""
    a, groups = moments(n, size, KAPPA, GAMMA), -(-n // size)
    deviation = np.linalg.solve(np.eye(3) - a, BETA**2 * NOISE * (groups - 1) / n * np.ones(3))[0]
    # The mean: x' = x + d', d' = α d − β κ x + β ξ, with the noise of n replicas.
    step = np.array([[1 - BETA * KAPPA, ALPHA], [-BETA * KAPPA, ALPHA]])
    forcing = BETA**2 * NOISE / n * np.ones((2, 2))
    mean = np.linalg.solve(np.eye(4) - np.kron(step, step), forcing.reshape(-1))[0]
    return deviation, mean


def test_noloco_theory_gives_reference_values():
    found = {n: theory(n)[0] for n in (4, 8, 16, 64)}
    assert found == pytest.approx({4: 2.262e-3, 8: 3.511e-3, 16: 4.152e-3, 64: 4.639e-3}, rel=5e-4)
    assert theory(8)[1] == pytest.approx(1.416e-3, rel=5e-4)


def test_gamma_limit_is_where_moments_grow():
    for n, size, alpha in [(8, 2, 0.5), (9, 4, 0.5), (64, 4, 0.9), (30, 8, 0.3), (7, 3, 0.0), (8, 8, 0.5)]:
        limit = gamma_limit(alpha, n, size)

        def growth(gamma, n=n, size=size, alpha=alpha):
            return float(np.abs(np.linalg.eigvals(moments(n, size, 0.0, gamma, alpha))).max())

        assert growth(0.98 * limit) < 1 < growth(1.02 * limit)
    for n, size, alpha, parts in [(8, 2, 0.5, 2), (9, 4, 0.5, 3), (64, 4, 0.9, 4), (30, 8, 0.3, 16), (7, 3, 0.0, 5)]:
        limit = gamma_limit(alpha, n, size, parts)

        def growth_in_turns(gamma, n=n, size=size, alpha=alpha, parts=parts):
            free = np.linalg.matrix_power(moments(n, size, 0.0, 0.0, alpha), parts - 1)
            return float(np.abs(np.linalg.eigvals(free @ moments(n, size, 0.0, gamma, alpha))).max())

        assert growth_in_turns(0.98 * limit) < 1 < growth_in_turns(1.02 * limit)
    for size in range(2, 9):  # and the defaults are stable with any training
        kappas = np.linspace(0.0, 1.0, 11)
        assert all(np.abs(np.linalg.eigvals(moments(64, size, k, GAMMA))).max() < 1 for k in kappas)


@pytest.mark.parametrize("n, size", [(8, 2), (8, 4), (10, 4)])
def test_spread_on_quadratic_matches_theory(n, size):
    modes, rounds, cut = 400, 500, Grid(400, 4096)
    rng = np.random.default_rng(6)
    replicas = swarm_of(n, np.zeros(modes))
    thetas = [replica.theta.copy() for replica in replicas]
    deviation, mean = [], []
    for round in range(rounds):
        for theta in thetas:
            theta *= np.float32(1 - KAPPA)
            theta += np.sqrt(NOISE).astype(np.float32) * rng.standard_normal(modes, np.float32)
        for group in partition(n, size, round):
            meet(replicas, thetas, group, cut, EXACT)
        if round >= 50:
            phi = np.stack([replica.theta for replica in replicas])
            mean.append(np.mean(phi.mean(axis=0) ** 2))
            deviation.append(np.mean((phi - phi.mean(axis=0)) ** 2))
    wanted = theory(n, size)
    assert np.mean(deviation) == pytest.approx(wanted[0], rel=0.05)
    assert np.mean(mean) == pytest.approx(wanted[1], rel=0.08)


def largest(sign, kappa, gamma, n, rounds, how=TWO, size=2):
    """Return the largest distance from zero on a quadratic without noise; `sign`: of the pseudo-gradient."""
    rng, cut = np.random.default_rng(8), Grid(16, 4096)
    replicas = swarm_of(n, np.zeros(16))
    for replica in replicas:
        replica.theta[:] = rng.standard_normal(16)
    thetas = [replica.theta.copy() for replica in replicas]
    with np.errstate(over="ignore"):
        for round in range(rounds):
            for theta in thetas:
                theta *= np.float32(1 - kappa)
            for group in matching(n, round) if size == 2 else partition(n, size, round):
                meet(replicas, thetas, group, cut, how, GossipStep(ALPHA, sign * BETA, gamma))
            if not max(np.abs(replica.theta).max() for replica in replicas) < 1e6:
                return np.inf
    return max(np.abs(replica.theta).max() for replica in replicas)


def test_pull_with_the_sign_of_the_paper_diverges():
    assert largest(1, KAPPA, GAMMA, 4, 60) < 1
    assert largest(-1, KAPPA, GAMMA, 4, 60) == np.inf


def test_gamma_above_limit_diverges():
    assert largest(1, 0.0, 1.3, 64, 150) < 10
    assert largest(1, 0.0, 1.7, 64, 150) > 1e3


def test_gamma_above_limit_diverges_in_groups_of_four():
    assert gamma_limit(ALPHA, 16, 4) == pytest.approx(2.14, abs=0.01)
    assert largest(1, 0.0, 1.8, 16, 100, size=4) < 10
    assert largest(1, 0.0, 2.6, 16, 100, size=4) > 1e3
