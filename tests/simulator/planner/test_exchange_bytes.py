"""Closed-form costs against known figures, the simulated network and published gossip latencies."""

import asyncio

import numpy as np
import pytest
from thinwire.collectives.costs.exchange_bytes import SPARSE_BITS, butterfly_bytes, gather_bytes
from thinwire.sims.engine import virtual_loop
from thinwire.sims.network.network import SimNet
from thinwire.swarm.frame import HEADER_BYTES, Frame
from thinwire.swarm.identity.identity import Identity
from thinwire.swarm.identity.peer_record import PeerRecord
from thinwire.swarm.messages.registry import Chunk, Welcome

RUN = bytes(32)
SCALE = 100
"""The ring below has 1 % of the bytes and of the bandwidth: the same seconds with fewer copies."""

RINGS = [(4, 60.30), (16, 76.50), (64, 85.05)]


def ring_seconds(nbytes: float, peers: int, rate: float, latency: float) -> float:
    """Return the time of a ring all-reduce of `nbytes` over links of `rate` bytes/s, `latency` s one way."""
    return 2 * (peers - 1) * (nbytes / peers / rate + latency)


def pair_bytes(parameters: float, bits: float) -> float:
    """Return the bytes of a pair that exchanges one vector.

    This is NoLoCo (arXiv:2506.10911) with γ = β and an exact codec; `gossip_time` models the actual protocol.
    """
    return parameters * bits / 8


def tree_over_pair(peers: int, spread: float, rng: np.random.Generator, samples: int = 2000) -> float:
    """Return the mean latency of a tree all-reduce, relative to that of one pair, both there and back.

    peers: a power of two. The time of a message is log-normal with `spread` = standard deviation / mean; a node of the
    tree waits for two messages.
    """
    variance = np.log1p(spread * spread)

    def draw(*shape: int) -> np.ndarray:
        return rng.lognormal(-variance / 2, np.sqrt(variance), shape)

    times = np.zeros((samples, peers))
    while times.shape[1] > 1:
        times = times + draw(*times.shape)
        times = np.maximum(times[:, ::2], times[:, 1::2])
    return float(times.mean() / draw(200_000, 2).max(1).mean())


def barrier_over_pairs(
    peers: int, steps: int, rng: np.random.Generator, rounds: int = 250, variance: float = 0.5
) -> float:
    """Return the time of rounds with a global barrier, relative to rounds in which random pairs wait.

    Only computing counts. An inner step takes exp(normal(1, `variance`)); a round has `steps` inner steps; `peers` is
    even.
    """
    barrier, clocks = 0.0, np.zeros(peers)
    for _ in range(rounds):
        took = rng.lognormal(1.0, variance**0.5, (peers, steps)).sum(1)
        barrier += float(took.max())
        clocks += took
        left, right = rng.permutation(peers).reshape(2, -1)
        clocks[left] = clocks[right] = np.maximum(clocks[left], clocks[right])
    return barrier / float(clocks.max())


@pytest.mark.parametrize(("peers", "seconds"), RINGS)
def test_ring_formulas_match_known_figures(peers, seconds):
    assert ring_seconds(500e6, peers, 12.5e6, 0.05) == pytest.approx(seconds, rel=1e-9)


@pytest.mark.parametrize(("peers", "seconds"), RINGS)
def test_ring_formula_matches_simulated_links(peers, seconds):
    async def main():
        net = SimNet(1, latency=0.05, bandwidth=12.5e6 / SCALE, encode=False)
        ring = transports(net, peers)
        for i in range(peers):  # links first: the closed form has no handshakes
            await ring[i].send(ring[(i + 1) % peers].peer_id, shard(0, 100))
            await ring[(i + 1) % peers].recv()
        began = net.loop.time()
        await asyncio.gather(*(turns(ring, i, 500_000_000 // SCALE // peers) for i in range(peers)))
        return net.loop.time() - began

    assert virtual_loop.run(main(), seed=2) == pytest.approx(seconds, rel=1e-3)


def transports(net, count):
    identities = [Identity.generate(i.to_bytes(32, "big")) for i in range(count)]
    records = [
        PeerRecord.create(identity, run_id=RUN, addresses=(f"10.0.{i}.1:1",), sequence=1, issued=net.wall())
        for i, identity in enumerate(identities)
    ]
    ring = []
    for identity, record in zip(identities, records, strict=True):
        welcome = Welcome(record.wire, b"", bytes(32), bytes(64), (), "", "", bytes(32))
        ring.append(net.transport(identity, RUN, lambda *_, welcome=welcome: welcome, record.addresses[0]))
        for known in records:
            ring[-1].learn(known)
    return ring


def shard(index, nbytes):
    """Return a frame that takes about `nbytes` on the wire."""
    return Frame(Chunk(1, 0, 0, index), bytes(nbytes - HEADER_BYTES - 5))


async def turns(ring, i, nbytes):
    """Send a shard to the right after each one from the left, 2(N-1) times, in frames of at most 1 MB."""
    parts = -(-nbytes // 1_000_000)
    for _ in range(2 * (len(ring) - 1)):
        for index in range(parts):
            assert await ring[i].send(ring[(i + 1) % len(ring)].peer_id, shard(index, nbytes // parts))
        for _ in range(parts):
            assert (await ring[i].recv()).peer == ring[i - 1].peer_id


def test_sparse_allgather_breaks_even_with_dense_butterfly_at_108_peers():
    def dearer(peers, bits):
        return gather_bytes(1e9, SPARSE_BITS[64], peers) > butterfly_bytes(1e9, bits, peers)

    assert [dearer(peers, 8.0625) for peers in (2, 107, 108, 110)] == [False, False, False, True]
    assert [dearer(peers, 4.0625) for peers in (53, 56)] == [False, True]


def test_two_peers_move_their_payload_sizes():
    assert butterfly_bytes(1000, 8, 2) == gather_bytes(1000, 8, 2) == pair_bytes(1000, 8) == 1000
    assert butterfly_bytes(1000, 8, 1) == 0


# E[tree] / E[pair] by standard deviation / mean, for n = 4, 16, 64, 256, 1024.
TREE = {
    0.0: (2.00, 4.00, 6.00, 8.00, 10.0),
    0.5: (2.10, 4.50, 7.08, 9.66, 12.3),
    1.0: (2.22, 5.18, 8.62, 12.6, 17.0),
    2.0: (2.40, 6.35, 12.2, 20.7, 30.7),
}


@pytest.mark.parametrize("spread", TREE)
def test_tree_latency_over_pair_latency_matches_published_table(spread):
    """Within 3 %, 6 % for the widest spread, whose mean depends on a few samples."""
    rng = np.random.default_rng(3)
    found = [tree_over_pair(peers, spread, rng, 800_000 // peers) for peers in (4, 16, 64, 256, 1024)]
    assert found == pytest.approx(TREE[spread], rel=0.06 if spread == 2.0 else 0.03)


@pytest.mark.parametrize(
    ("peers", "few", "many"), [(16, 1.32, 1.07), (64, 1.55, 1.12), (256, 1.77, 1.15), (1024, 2.13, 1.20)]
)
def test_barrier_idle_time_formula_matches_published_table(peers, few, many):
    """Ratio of the times to wait for all and for one, with 5 and 100 inner steps, within 4 %."""
    rng = np.random.default_rng(4)
    assert barrier_over_pairs(peers, 5, rng) == pytest.approx(few, rel=0.04)
    assert barrier_over_pairs(peers, 100, rng, 100 if peers > 100 else 250) == pytest.approx(many, rel=0.04)
