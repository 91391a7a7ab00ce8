"""The two-level hierarchy: sites behind gateways, faults in every phase, and wide-area bytes."""

from __future__ import annotations

import numpy as np
import pytest
from kit import scenes
from kit.scenarios import two_levels, violated
from thinwire.collectives.rounds.data_planes.contributions import Contributions
from thinwire.collectives.rounds.data_planes.hierarchy import Hierarchy
from thinwire.collectives.timing import TICK
from thinwire.sims.engine import virtual_loop
from thinwire.sims.network.link import Gateway
from thinwire.swarm.messages.registry import Chunk, Result, Subtotal

PHASES = ["announce", "open", "record", "vote", "commit"]
TWO = ("attic", "attic", "barn", "barn", "attic", "barn")
MBIT = 125_000.0


def two_sites(swarm, count=6, *, sites=TWO, **options):
    return swarm(count, **{"topology": "hierarchy", "sites": sites, "size": 40_000} | options)


def behind_gateways(s, rate):
    """A gateway for each site; the peers' own links are fast."""
    gates = {name: Gateway(s.net, rate, rate) for name in sorted(set(s.sites))}
    for node in s.nodes.values():
        node.transport.gateway = gates[s.site(node.index)]
        node.transport.uplink.rate = node.transport.downlink.rate = 1000 * MBIT
    return list(gates.values())


@pytest.mark.parametrize("codec", ["fp32", "int4(block=256,stochastic=1)"])
def test_hierarchy_replicas_stay_identical(swarm, codec):
    async def main():
        s = two_sites(swarm, codec=codec, rounds=4)
        s.start()
        await s.finish()
        s.check()
        assert all(not any(node.missing.values()) for node in s.nodes.values())
        assert all(isinstance(node.session.current.data_plane, Hierarchy) for node in s.nodes.values())

    virtual_loop.run(main(), seed=1)


@pytest.mark.parametrize(
    ("size", "count"), [(1, 6), (2, 6), (3, 6), (5, 6), (7919, 6), (203_530, 5), (100, 1), (100, 2)]
)
def test_hierarchy_works_for_any_size_and_number_of_peers(swarm, size, count):
    async def main():
        s = two_sites(swarm, count, codec="fp32", rounds=2, size=size)
        s.start()
        await s.finish()
        s.check()

    virtual_loop.run(main(), seed=2)


def test_hierarchy_averages_powersgd_factors(swarm):
    """Two rounds a step: the second one depends on what the relay of a site has encoded again."""

    async def main():
        s = two_sites(swarm, outer='method = "powersgd"', codec="powersgd(rank=4)", rounds=4, size=12_000)
        s.start()
        await s.finish()
        s.check()
        assert all(len(node.contributors[4]) == 6 and not node.missing[4] for node in s.nodes.values())

    virtual_loop.run(main(), seed=1)


def test_hierarchy_sums_have_each_contribution_once_after_a_death(swarm):
    """Each peer contributes 2 to the power of its index, one dies: sums are exact and equal, with any relays."""

    async def main():
        s = two_sites(swarm, codec="fp32", rounds=4, size=40_000, outer="lr = 1.0\nmomentum = 0.0\nnesterov = false")
        for node in s.nodes.values():
            node.theta[:] = node.replica.theta[:] = 0.0
            node.replica.seal()
            node.spoil = lambda round, delta, node=node: np.full_like(delta, 2.0**node.index)
        s.fail_at(4, 2, "open")
        s.start()
        rest = [0, 1, 2, 3, 5]
        await s.finish(rest)
        s.check(rest)
        total = np.float64(0)
        for number in range(1, 5):
            present = [node.index for node in s.nodes.values() if node.id in s.nodes[0].contributors[number]]
            assert set(present) >= set(rest)
            # Sites of different sizes: the mean of means by weight is the mean of all.
            total -= sum(2.0**index for index in present) / len(present)
        theta = s.nodes[0].replica.theta
        assert theta.min() == theta.max() == pytest.approx(total, rel=1e-6)

    virtual_loop.run(main(), seed=3)


@pytest.mark.parametrize("phase", PHASES)
@pytest.mark.parametrize("victim", [0, 4, *(pytest.param(i, marks=pytest.mark.soak) for i in (1, 2, 3, 5))])
def test_hierarchy_survives_kill_of_one_of_six(swarm, phase, victim):
    async def main():
        s = two_sites(swarm, seed=victim, rounds=4, size=30_000)
        rest = await scenes.lose(s, {victim: phase})
        assert not s.scripts
        scenes.soon(s, rest)

    virtual_loop.run(main(), seed=victim)


@pytest.mark.parametrize("seed", range(3))
def test_hierarchy_survives_death_of_a_site(swarm, seed):
    async def main():
        s = two_sites(swarm, 7, sites=("attic", "barn", "attic", "attic", "barn", "barn", "attic"), seed=seed, rounds=5)
        for victim in (1, 4, 5):
            s.fail_at(victim, 3, PHASES[(seed + victim) % 5])
        s.start()
        rest = [0, 2, 3, 6]
        await s.finish(rest)
        s.check(rest)

    virtual_loop.run(main(), seed=seed)


def test_paused_relay_is_left_out_and_catches_up(swarm):
    async def main():
        s = two_sites(swarm, rounds=10, size=20_000)

        def stop(node):
            s.net.pause(node.id)
            virtual_loop.current().call_later(12.0, s.net.resume, node.id)

        s.fail_at(4, 3, "open", stop)
        s.start()
        await s.finish(limit=600)
        s.check()
        others = s.nodes[0].committed_at
        assert others[5] - others[2] < 20

    virtual_loop.run(main(), seed=9, limit=4000)


def test_hierarchy_peer_with_nan_is_left_out(swarm):
    async def main():
        s = two_sites(swarm, codec="fp32", rounds=4)

        def poison(round, delta):
            if round == 3:
                delta[777] = float("nan")
            return delta

        s.nodes[1].spoil = poison
        s.start()
        await s.finish()
        s.check()
        assert s.nodes[0].contributors[3] == sorted(s.nodes[i].id for i in (0, 2, 3, 4, 5))

    virtual_loop.run(main(), seed=4)


def _nan(chunks):
    spoiled = np.frombuffer(chunks[2], np.float32).copy()
    spoiled[5] = np.nan
    return [*chunks[:2], spoiled.view(np.uint8).data, *chunks[3:]]


def _huge(chunks):
    return [(np.frombuffer(chunk, np.float32) * np.float32(1e8)).view(np.uint8).data for chunk in chunks]


LONE = ("attic", "barn", "barn", "barn", "barn", "barn")


@pytest.mark.parametrize(
    ("change", "reason", "liar", "sites"),
    [
        (_nan, "not finite", 0, TWO),
        (_huge, "norm", 0, TWO),
        (_huge, "norm", 1, TWO),
        (_nan, "not finite", 0, LONE),
        (_huge, "norm", 0, LONE),
    ],
)
def test_bad_hierarchy_payload_is_excluded_with_reason(swarm, change, reason, liar, sites):
    """The relay of its site finds it, or the chunk's owner for a peer without a site."""

    async def main():
        s = two_sites(swarm, codec="fp32", sites=sites, rounds=4)
        s.nodes[liar].forge(3, change)
        s.start()
        await s.finish()
        s.check()
        for node in s.nodes.values():
            assert node.missing[3] == {s.nodes[liar].id: reason}
            assert node.missing[4] == {}

    virtual_loop.run(main(), seed=4)


def _lies(node, kind, change):
    """Frames of this kind go out changed."""
    bulk = node.presence.send_queue.bulk

    def forged(to, frame, **how):
        if isinstance(frame.message, kind):
            frame = change(to, frame)
        if frame is not None:
            bulk(to, frame, **how)

    node.presence.send_queue.bulk = forged


def _spoiled(to, frame):
    payload = np.frombuffer(frame.payload, np.float32).copy()
    payload[0] = np.inf
    return replace_payload(frame, payload)


def _long(to, frame):
    return replace_payload(frame, np.frombuffer(frame.payload, np.float32) * np.float32(1e9))


def replace_payload(frame, payload):
    return type(frame)(frame.message, payload.view(np.uint8).data)


def _silent(to, frame):
    return None


@pytest.mark.parametrize(("change", "liar"), [(_spoiled, 3), (_long, 0), (_long, 3), (_silent, 0)])
def test_relay_that_lies_about_its_site_loses_its_chunks(swarm, change, liar):
    """All contributions of its site still count: another relay forwards them."""

    async def main():
        s = two_sites(swarm, codec="fp32", rounds=4)
        s.fail_at(liar, 2, "applied", lambda node: _lies(node, Subtotal, change))
        s.start()
        await s.finish()
        s.check()
        for node in s.nodes.values():
            assert len(node.contributors[3]) == 6 and node.missing[3] == {}
        assert any(s.nodes[liar].id in n.round_factory.peer_backoff.resting(5) for n in s.nodes.values())

    virtual_loop.run(main(), seed=4)


@pytest.mark.parametrize("seed", range(3))
def test_silent_peer_makes_few_relays_lose_their_chunks(swarm, monkeypatch, seed):
    """Relays that wait for it are not to blame for the wait of others."""
    idle = []
    real = Hierarchy.open

    def open(self, proposal):
        idle.append(len(proposal.idle))
        real(self, proposal)

    async def main():
        s = two_sites(swarm, seed=seed, rounds=6, size=40_000)
        s.fail_at(4, 2, "applied", lambda node: _lies(node, Chunk, _silent))
        s.start()
        await s.finish([0, 1, 2, 3, 5], limit=600)
        # Two in a ballot, one of them again with another; never most of the six.
        assert max(idle) <= 3

    monkeypatch.setattr(Hierarchy, "open", open)
    virtual_loop.run(main(), seed=seed, limit=4000)


def test_relay_that_forwards_nothing_delays_only_its_site(swarm):
    async def main():
        s = two_sites(swarm, rounds=5)
        _lies(s.nodes[0], Result, lambda to, frame: None)
        s.start()
        await s.finish()
        s.check()

    virtual_loop.run(main(), seed=4)


def test_hierarchy_ignores_late_frames_of_aborted_ballot(swarm):
    """Frames of a dead ballot's relay arrive in the middle of the next ballot, and in the next round."""

    async def main():
        s = two_sites(swarm, rounds=5)
        held = []

        def keep(to, frame):
            held.append((to, frame))
            return frame

        def die(node):
            node.kill()
            for delay in (0.05, 0.5, 2.0):
                virtual_loop.current().call_later(delay, replay)

        def replay():
            teller = s.nodes[2]
            for to, frame in list(held):
                if isinstance(frame.message, (Subtotal, Chunk)) and to != teller.id:
                    other = next(node for node in s.nodes.values() if node.id == to)
                    if other.transport.alive:
                        other.session.on_frame(s.nodes[4].id, frame)

        _lies(s.nodes[4], (Subtotal, Chunk), keep)
        s.fail_at(4, 3, "open", die)
        s.start()
        rest = [0, 1, 2, 3, 5]
        await s.finish(rest)
        s.check(rest)
        assert held

    virtual_loop.run(main(), seed=11)


def test_hierarchy_without_shared_sites_equals_butterfly(swarm):
    """If no peers share a site, the states are those of the butterfly, bit for bit."""

    def digests(topology):
        async def main():
            s = swarm(4, topology=topology, rounds=3)
            s.start()
            await s.finish()
            s.check()
            return s.nodes[0].digests

        return virtual_loop.run(main(), seed=5)

    assert digests("hierarchy") == digests("butterfly")


def crossing(swarm, topology, *, sites, count, size=196_608, rate=None, rounds=2):
    """Return bulk bytes that left each site in a round, and seconds from the last announcement to the commits."""

    async def main():
        s = swarm(
            count,
            topology=topology,
            sites=sites,
            rounds=rounds,
            size=size,
            codec="int8(block=256)",
            patience=60.0,
            straggler_timeout=120.0,
            latency=0.002,
            bandwidth=None,
        )
        gates = behind_gateways(s, rate)
        for node in s.nodes.values():
            node.pace = 1.0
        marks = []
        s.fail_at(0, 1, "applied", lambda node: virtual_loop.current().call_later(0.4, mark))

        def mark():
            marks.append([gate.bulk for gate in gates])

        s.start()
        await s.finish(limit=3000)
        s.check()
        nbytes = s.nodes[0].session.codec.nbytes(size)
        per = [(gate.bulk - before) / (rounds - 1) / nbytes for gate, before in zip(gates, marks[0], strict=True)]
        opens = [
            at for node in s.nodes.values() for at, name, f in node.log if name == "phase" and f["phase"] == "announce"
        ]
        last = max(node.committed_at[rounds] for node in s.nodes.values())
        began = max(at for at in opens if at < last - 0.05)
        return per, last - began

    return virtual_loop.run(main(), seed=8, limit=5000)


@pytest.mark.parametrize(
    ("sites", "count"), [(("a", "b"), 8), (("a", "b", "c"), 6), (("a", "a", "b"), 6)], ids=["2x4", "3x2", "4+2"]
)
def test_hierarchy_wide_area_bytes_match_formula(swarm, sites, count):
    """Of a model's bytes a site of n among N peers in G sites sends 2 (1 - 1/G), instead of 2 n (1 - n/N)."""
    flat, _ = crossing(swarm, "butterfly", sites=sites, count=count)
    tall, _ = crossing(swarm, "hierarchy", sites=sites, count=count)
    names = [sites[i % len(sites)] for i in range(count)]
    groups = sorted(set(names))
    for at, name in enumerate(groups):
        n = names.count(name)
        assert flat[at] == pytest.approx(2 * n * (1 - n / count), rel=0.02)
        assert tall[at] == pytest.approx(2 * (1 - 1 / len(groups)), rel=0.02)


def test_hierarchy_on_shared_uplink_saves_the_time_of_the_bytes_that_it_saves(swarm):
    """Two sites of 4 peers send 4 models each in a butterfly, and one in a hierarchy; see the formula above."""
    sites, rate, size = ("a", "b"), 3.0 * MBIT, 196_608
    _, flat = crossing(swarm, "butterfly", sites=sites, count=8, size=size, rate=rate)
    _, tall = crossing(swarm, "hierarchy", sites=sites, count=8, size=size, rate=rate)
    model = size * (1 + 4 / 256) / rate  # seconds; a block of 256 bytes has a scale of 4 bytes
    assert flat >= 4 * model and tall >= model
    # Peers look at the clock once in a tick, so that one of the rounds may end a tick later.
    assert flat - tall == pytest.approx(3 * model, abs=TICK)


def test_aggregate_invariant_finds_bug_in_site_mean(monkeypatch):
    """The first contribution of a site stands for all of its site."""
    of = Contributions.of

    def sloppy(self, entries, index):
        payloads = of(self, entries, index)
        of_site = payloads is not None and all(entry.attempt for entry in entries)  # sums of sites have no attempt
        return [payloads[0]] * len(payloads) if of_site else payloads

    monkeypatch.setattr(Contributions, "of", sloppy)
    assert "aggregate" in violated(two_levels(seconds=8.0))
