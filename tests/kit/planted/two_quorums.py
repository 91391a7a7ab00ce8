"""Two quorums of one round that have a single peer in common: its memory decides whether the round has two results."""

from __future__ import annotations

from typing import Any, Literal

import pytest
from thinwire.sims.simulation.world import SimWorld

ROUND = 5
"""The round that both quorums try to decide."""

BACK, APART = 0.8, 16.0
"""Seconds after the first decision at which `away` comes back, and the peer that was cut off then."""

EXCUSED = APART + 6.0
"""Seconds from round ROUND - 1 on in which peers may be out of reach."""

Then = Literal["stays", "restarts", "loses its folder", "leaves"]
"""Fate of the common peer when the first quorum has decided."""


class TwoQuorums:
    """Faults in a swarm of three peers, each at the moment at which it matters.

    One peer, `away`, is cut off before the round. The others decide it. The first that learns of this is cut off at
    once, and the other, which has voted, meets `away`, which knows nothing of the round.
    """

    def __init__(self, away: int, then: Then) -> None:
        self._away, self._then = away, then
        self._applied: set[int] = set()
        self._decided = False

    def event(self, world: Any, index: int, kind: str, fields: Any) -> None:
        """Observe an event of the peer `index`."""
        if kind == "round" and fields["round"] == ROUND - 1 and len(self._applied) < 3:
            self._applied.add(index)
            if len(self._applied) == 3:
                self._part(world, self._away)
                world.invariants.fault(range(3), world.loop.time() + EXCUSED, private=False)
        if kind == "phase" and fields == {"round": ROUND, "phase": "commit"} and not self._decided:
            self._decided = True
            (voter,) = {0, 1, 2} - {index, self._away}
            self._part(world, index)
            now = world.loop.time()
            world.net.at(now + 0.001, lambda: self._disturb(world, voter))
            world.net.at(now + BACK, lambda: self._part(world, self._away, end=True))
            world.net.at(now + APART, lambda: self._part(world, index, end=True))

    def _part(self, world: Any, index: int, *, end: bool = False) -> None:
        ids = [machine.identity.peer_id for machine in world.machines]
        world.net.partition([[ids.pop(index)], ids], end=end)

    def _disturb(self, world: Any, index: int) -> None:
        machine = world.machines[index]
        if self._then == "leaves":
            machine.gone = True
            self._leave(world, index)
        elif self._then != "stays":
            machine.kill()
            if self._then == "loses its folder":
                machine.lose_disk()
            world.net.at(world.loop.time() + 0.3, machine.boot)

    def _leave(self, world: Any, index: int) -> None:
        """Say farewell as soon as `away` can be reached; the process ends without waiting for its round."""
        process, now = world.machines[index].process, world.loop.time()
        if world.machines[self._away].identity.peer_id in process.peer.session.live:
            process.peer.session.leave()
            world.net.at(now + 0.1, lambda: world.machines[index].kill("left", crash=False))
        else:
            world.net.at(now + 0.01, lambda: self._leave(world, index))


def arrange(patch: pytest.MonkeyPatch, plot: TwoQuorums) -> None:
    """Let the next simulations play these faults."""
    event = SimWorld.event

    def observe(self, machine, kind, fields):
        event(self, machine, kind, fields)
        plot.event(self, machine.index, kind, fields)

    patch.setattr(SimWorld, "event", observe)
