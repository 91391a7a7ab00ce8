"""Planned faults of a local swarm, drawn from the seed.

The plan has the peers to kill with their times, and the time of a joiner.
"""

from __future__ import annotations

import random
from dataclasses import dataclass

HORIZON = 30
"""Rounds within which the faults happen in an endless run."""


@dataclass(frozen=True, slots=True)
class Chaos:
    """Plan of one kill and one late joiner.

    `victim` (index among the first peers, 0 is the founder) gets SIGKILL in the round after `kill_round`, the fraction
    `moment` of a usual round after the commit of `kill_round`. The joiner starts when `join_round` is committed.
    """

    victim: int
    kill_round: int
    moment: float
    join_round: int


def plan(seed: int, peers: int, rounds: int, *, weak: int = 0) -> Chaos:
    """Draw a plan; `rounds` is the length of the run (0: endless).

    The kill is between a fifth and two fifths of the run; the joiner starts a tenth to a sixth later. `weak`: number of
    peers, after the first `peers`, that each hold a part of the model; one of them is then the victim.

    Raises ValueError if the run is too short for both faults.
    """
    rounds = rounds or HORIZON
    if rounds < 4 or peers < 2:
        raise ValueError(f"{rounds} rounds of {peers} peers")
    draw = random.Random(seed)
    kill = draw.randint(max(1, rounds // 5), 2 * rounds // 5)
    join = kill + draw.randint(max(1, rounds // 10), max(1, rounds // 6))
    victim = peers + draw.randrange(weak) if weak else draw.randrange(peers)
    return Chaos(victim, kill, draw.random(), join)
