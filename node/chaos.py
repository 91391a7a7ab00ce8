"""What goes wrong on purpose in a local swarm: who is killed and when, and when a newcomer arrives; all from the seed."""

from __future__ import annotations

import random
from dataclasses import dataclass

HORIZON = 30
"""Rounds within which things happen in a run without an end."""


@dataclass(frozen=True, slots=True)
class Chaos:
    """`victim` (place among the first peers, 0 is the founder) gets SIGKILL in the round after `kill_round`, the part `moment`
    of a usual round after that one was committed. The newcomer joins when `join_round` is committed.
    """

    victim: int
    kill_round: int
    moment: float
    join_round: int


def plan(seed: int, peers: int, rounds: int, *, weak: int = 0) -> Chaos:
    """Draw one; `rounds` is the length of the run (0: endless). Raises ValueError when it is too short for both.

    `weak`: peers that come after the first and hold a part of the model each: one of them is the victim.

    The kill falls between a fifth and two fifths of the run; the newcomer joins a tenth to a sixth later.
    """
    rounds = rounds or HORIZON
    if rounds < 4 or peers < 2:
        raise ValueError(f"{rounds} rounds of {peers} peers")
    draw = random.Random(seed)
    kill = draw.randint(max(1, rounds // 5), 2 * rounds // 5)
    join = kill + draw.randint(max(1, rounds // 10), max(1, rounds // 6))
    victim = peers + draw.randrange(weak) if weak else draw.randrange(peers)
    return Chaos(victim, kill, draw.random(), join)
