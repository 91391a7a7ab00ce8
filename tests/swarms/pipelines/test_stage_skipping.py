"""Planned paths on uneven links: as fast as planned, within the rules, also when peers come and go."""

from __future__ import annotations

import asyncio
from collections import Counter, defaultdict
from dataclasses import replace
from itertools import pairwise

import numpy as np
import pytest
from thinwire.node.pipeline.groups.rebalance import Rebalancer
from thinwire.node.pipeline.model.stage import Stage
from thinwire.node.pipeline.model.stage_optimizer import StageOptimizer
from thinwire.node.pipeline.planner.constraints import violations
from thinwire.node.pipeline.planner.problem import Problem
from thinwire.sims.engine import virtual_loop

from benchmarks.pipeline import skippipe
from benchmarks.pipeline.hollow_section import HollowSection

MICROS, ROOM = 12, 3


@pytest.fixture(scope="module")
def cities():
    return skippipe.cities()


def executed(replica):
    """Return the peers that each micro-batch visited, by start time, and each host's maximum load."""
    ways, held, most = defaultdict(list), defaultdict(set), Counter()
    for _, peer, name, fields in sorted(replica.events, key=lambda event: event[0]):
        micro = fields.get("micro")
        if name == "forward":
            ways[micro].append(peer)
            held[peer].add(micro)
            most[peer] = max(most[peer], len(held[peer]))
        elif name == "passed" and fields["backward"]:
            held[peer].discard(micro)
    return dict(ways), most


def check(replica, length):
    """Check that the run kept CC1 to CC3 and TC1."""
    ways, most = executed(replica)
    assert set(ways) == set(range(replica.micros))
    ruled = replace(replica.instance, length=length, per_start=replica.micros, rounds=1)
    paths = [(0, *ways[micro]) for micro in range(replica.micros)]
    of_paths = [broken for path in paths for broken in violations(ruled, [path])]
    assert not of_paths, of_paths
    assert most and max(most.values()) <= replica.room
    return paths


@pytest.mark.parametrize(("rates", "gain"), [(False, 0.40), pytest.param(True, 0.30, marks=pytest.mark.trial)])
def test_planned_step_takes_planned_time_and_less_than_full_pipeline(cities, rates, gain):
    async def full():
        replica = skippipe.Replica(cities, MICROS, ROOM, None, window=2 * ROOM, rates=rates)
        return [(await replica.step()).measured for _ in range(3)][-1]

    async def skipping():
        replica = skippipe.Replica(cities, MICROS, ROOM, {"skip": 1 / 3, "tries": 20_000}, rates=rates)
        outcomes = []
        for _ in range(8):
            outcomes.append(await replica.step())
            assert outcomes[-1].finished == set(range(MICROS)) and not outcomes[-1].lost and not outcomes[-1].skipped
            assert outcomes[-1].attempts == MICROS
            check(replica, 4)
        assert 2 <= replica.route_planner.plans <= 8
        return outcomes[-1]

    whole = virtual_loop.run(full(), seed=1, limit=1e6)
    last = virtual_loop.run(skipping(), seed=1, limit=1e6)
    assert last.measured == pytest.approx(last.planned, rel=0.1)
    assert last.measured < (1 - gain) * whole, (last.measured, whole)


def test_step_finishes_after_a_death_and_next_step_is_replanned(cities):
    async def main():
        replica = skippipe.Replica(cities, MICROS, ROOM, {"skip": 1 / 3, "tries": 5_000}, rates=False)
        for _ in range(4):
            await replica.step()
            paths = check(replica, 4)
        victim = Counter(peer for path in paths for peer in path[1:]).most_common(1)[0][0]

        def die(at, peer, name, fields):
            if peer == victim and name == "forward":
                replica.watch = None
                replica.kill(victim)

        replica.watch = die
        outcome = await replica.step()
        assert replica.watch is None and outcome.finished == set(range(MICROS)) and outcome.attempts > MICROS
        plans = replica.route_planner.plans
        after = await replica.step()
        why = [fields["why"] for _, _, name, fields in replica.events if name == "planned"]
        assert why == ["mended"] and replica.route_planner.plans == plans + 1
        assert after.finished == set(range(MICROS)) and after.attempts == MICROS and not after.lost
        assert all(victim not in path for path in check(replica, 4))
        for _ in range(5):  # until its links are known, too
            after = await replica.step()
            check(replica, 4)
        assert after.measured == pytest.approx(after.planned, rel=0.1)

    virtual_loop.run(main(), seed=1, limit=1e6)


def even(works, delay=0.05, stages=None):
    """An instance with equal links: an origin and a stage for the rest, or these stages."""
    count = len(works)
    delays = delay * (1 - np.eye(count))
    stages = stages or ((0,), tuple(range(1, count)))
    memory = np.full(count, 64)
    return Problem("", delays, stages, np.array(works, float), memory, len(stages), 1, gap=0.0)


def test_load_follows_changing_speed_without_a_plan():
    async def main():
        replica = skippipe.Replica(even([0.01, 4.0, 2.0, 1.0]), 28, 64, None, window=28)

        async def shares(count):
            taken = Counter()
            for _ in range(count):
                outcome = await replica.step()
                for peer, micros in outcome.counted[1].items():
                    taken[replica.number[peer]] += len(micros)
            return {peer: taken[peer] / taken.total() for peer in (1, 2, 3)}

        await shares(1)
        assert await shares(4) == pytest.approx({1: 1 / 7, 2: 2 / 7, 3: 4 / 7}, abs=0.011)
        replica.paces[1] = 1.0  # the slowest is as fast as the fastest now
        await shares(2)
        assert await shares(3) == pytest.approx({1: 0.4, 2: 0.2, 3: 0.4}, abs=0.02)

    virtual_loop.run(main(), seed=1, limit=1e6)


def test_hosts_move_to_slow_stage_without_emptying_another():
    """Stage 1 has one slow host, stage 2 has four: two of them move, one in each period."""

    async def main():
        instance = even([0.01, 1.0, 0.25, 0.25, 0.25, 0.25], stages=((0,), (1,), (2, 3, 4, 5)))
        replica = skippipe.Replica(instance, 24, 64, None, window=8)
        loop, stage_holders = asyncio.get_running_loop(), replica.origin.stage_holders
        balance = Rebalancer(replica.origin.measurements, loop.time, period=60.0)
        measured, moves, sizes = [], [], []

        async def move(peer, source, target):
            """Between two steps, like a host that ends its process and starts another."""
            stage_holders.holders[source].remove(peer)
            await asyncio.sleep(3.0)
            host, own = (
                next(host for host in replica.hosts if host.me == peer),
                HollowSection(skippipe.VOCABULARY, skippipe.WIDTH),
            )
            host.stage, host.layers, host.update = target, Stage(own), StageOptimizer(own, skippipe.INNER)
            stage_holders.holders[target].append(peer)

        while loop.time() < 250:
            outcome = await replica.step()
            assert outcome.finished == set(range(24)) and not outcome.lost and not outcome.skipped
            for stage, peers in outcome.counted.items():
                assert sum(map(len, peers.values())) == 24 and set(peers) <= set(stage_holders.holders[stage])
            measured.append(outcome.measured)
            found = balance.due(
                {
                    stage: [p for p in peers if p not in stage_holders.lost]
                    for stage, peers in stage_holders.holders.items()
                }
            )
            if found is not None:
                moves.append((loop.time(), found.source, found.target))
                await move(found.peer, found.source, found.target)
            sizes.append([len(stage_holders.holders[stage]) for stage in (1, 2)])
        assert [move[1:] for move in moves] == [(2, 1)] * len(moves) and 1 <= len(moves) <= 2, moves
        assert all(later[0] - earlier[0] >= 60 for earlier, later in pairwise(moves))
        assert min(map(min, sizes)) >= 1 and measured[-1] < 0.4 * measured[0]
        stages = Counter(host.stage for host in replica.hosts)
        assert stages == {stage: len(peers) for stage, peers in stage_holders.holders.items()}

    virtual_loop.run(main(), seed=1, limit=1e6)
