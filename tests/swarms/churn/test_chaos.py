"""Random faults from a seed: replicas that commit a round agree, and the swarm continues."""

from __future__ import annotations

import asyncio
import random

import pytest
from thinwire.sims.engine import virtual_loop

SEEDS = 4
SOAK = 400
"""Number of seeds with `make soak`, besides the first ones."""


def _bearable(s, up, paused, dead, victim):
    """Return True if a history can be left.

    A live peer must have the newest state, because there are no disks, and paused peers must find a peer that they
    know.
    """
    newest = max(node.replica.round for node in s.nodes.values())
    lost = {s.nodes[i].id for i in (*dead, victim)}
    known = all(set(s.nodes[i].replica.members) - lost - {s.nodes[i].id} for i in paused)
    return known and any(i != victim and s.nodes[i].replica.round == newest for i in up)


async def _chaos(make, seed):
    rng = random.Random(seed)
    s = make(rng.randint(3, 7), seed=seed, rounds=14, size=40_000, latency=rng.choice([0.005, 0.02, 0.1]))
    s.start()
    lives = dict.fromkeys(s.nodes, 0)
    paused: dict[int, float] = {}
    dead: set[int] = set()
    fresh = 20
    loop = virtual_loop.current()
    while loop.time() < 20.0:
        await asyncio.sleep(rng.expovariate(1.0))
        up = [i for i in s.nodes if i not in dead and i not in paused]
        action = rng.choice(["kill", "kill", "back", "join", "pause", "resume", "cut", "heal"])
        if action == "kill" and len(up) > 2:
            victim = rng.choice(up)
            if _bearable(s, up, [*paused], dead, victim):
                s.nodes[victim].kill()
                dead.add(victim)
        elif action == "back" and dead:
            victim = rng.choice(sorted(dead))
            dead.discard(victim)
            lives[victim] = lives.get(victim, 0) + 1
            s.join(victim, lives[victim])
        elif action == "join" and fresh < 23:
            s.join(fresh)
            fresh += 1
        elif action == "pause" and len(up) > 2 and not paused:
            victim = rng.choice(up)
            s.net.pause(s.nodes[victim].id)
            paused[victim] = loop.time()
        elif action == "resume" and paused:
            victim = paused.popitem()[0]
            s.net.resume(s.nodes[victim].id)
        elif action == "cut" and len(up) > 2:
            a, b = rng.sample(up, 2)
            s.net.cut(s.nodes[a].id, s.nodes[b].id, one_way=rng.random() < 0.3)
        elif action == "heal":
            s.net.heal()
    for victim in paused:
        s.net.resume(s.nodes[victim].id)
    s.net.heal()
    alive = [i for i in s.nodes if i not in dead]
    await s.finish(alive, limit=400)
    s.check(alive, dead_lineages=True)


@pytest.mark.trial
@pytest.mark.parametrize("seed", range(SEEDS))
def test_replicas_agree_under_random_faults(swarm, seed):
    virtual_loop.run(_chaos(swarm, seed), seed=seed, limit=2000)


@pytest.mark.soak
@pytest.mark.parametrize("seed", range(SEEDS, SOAK))
def test_replicas_agree_under_random_faults_of_many_seeds(swarm, seed):
    virtual_loop.run(_chaos(swarm, seed), seed=seed, limit=2000)
