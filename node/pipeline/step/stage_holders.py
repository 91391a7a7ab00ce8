"""Holders of each stage of a replica, and the paths of micro-batches among those that are present."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from thinwire.node.pipeline.step.round_robin import RoundRobin
from thinwire.swarm.messages.registry import Hop, PeerId

TRIES = 2
"""Failures of one micro-batch at one peer after which it no longer goes there."""

LONGEST = 5
"""Exponent of the longest rest: two to this power, in steps."""

Visits = Sequence[tuple[int, PeerId | None]]
"""Stages in the order in which a micro-batch visits them, each with the peer that a plan has chosen."""


class StageHolders:
    """Holders of every stage except the origin's; they may change between two steps, also by joiners."""

    def __init__(self, holders: Mapping[int, Sequence[PeerId]]) -> None:
        self.holders = {stage: list(peers) for stage, peers in holders.items()}
        self.lost: set[PeerId] = set()
        """Peers out of reach."""
        self._turns: dict[int, RoundRobin[PeerId]] = {}
        self._strikes: dict[PeerId, int] = {}
        self._since: dict[PeerId, int] = {}
        self._until: dict[PeerId, int] = {}

    @property
    def peers(self) -> list[PeerId]:
        """Return all reachable peers, by stage."""
        return [peer for stage in sorted(self.holders) for peer in self.holders[stage] if peer not in self.lost]

    def holds(self, peer: PeerId) -> bool:
        """Return True if a peer holds a stage."""
        return any(peer in peers for peers in self.holders.values())

    def rest(self, peer: PeerId, step: int) -> None:
        """Exclude a stalled peer from the rest of this step; after a second stall also from 2, 4, … steps."""
        if self._until.get(peer, -1) < step or self._since.get(peer) != step:
            self._strikes[peer] = min(LONGEST, self._strikes.get(peer, -1) + 1)
            self._since[peer], self._until[peer] = step, step + 2 ** self._strikes[peer] - 1

    def did_well(self, peer: PeerId) -> None:
        """Record that a peer completed a step."""
        self._strikes.pop(peer, None)

    def done(self, peer: PeerId, seconds: float, *, backward: bool) -> None:
        """Record that a peer has passed on a micro-batch, and the seconds it had for that."""
        for stage, peers in self.holders.items():
            if peer in peers:
                self._round_robin(stage).done(peer, 1.0, seconds, backward=backward)

    def _round_robin(self, stage: int) -> RoundRobin[PeerId]:
        """Return the round robin of a stage, over its present holders."""
        turns, holders = self._turns.setdefault(stage, RoundRobin()), self.holders[stage]
        for peer in sorted(turns.peers.difference(holders)):
            turns.leave(peer)
        for peer in holders:
            turns.join(peer)
        return turns

    def able(self, stage: int, step: int, tried: Mapping[PeerId, int]) -> list[PeerId]:
        """Return the peers that can be asked for a stage; resting ones only if there are no others."""
        here = [peer for peer in self.holders.get(stage, ()) if peer not in self.lost and tried.get(peer, 0) < TRIES]
        fresh = [peer for peer in here if self._until.get(peer, -1) < step]
        return fresh or [peer for peer in here if self._since.get(peer, -1) < step]

    def path(
        self,
        step: int,
        claimed: Mapping[int, PeerId],
        tried: Mapping[PeerId, int],
        visits: Visits | None = None,
        last: Sequence[Hop] = (),
    ) -> tuple[Hop, ...]:
        """Return the path of a micro-batch; stages without a usable peer are left out.

        `claimed`: by stage, the peer that may have its gradient already, so that no other peer counts it; `tried`:
        number of failures at each peer. `visits`: the plan, else all stages in order. `last`: the path of the attempt
        before. Peers that did not cause its failure are asked again; the others take turns, at their pace (see
        RoundRobin).
        """
        again = {hop.stage: hop.peer for hop in last}
        hops: list[Hop] = []
        for stage, wanted in visits if visits is not None else [(stage, None) for stage in sorted(self.holders)]:
            able = self.able(stage, step, tried)
            if not able:
                continue

            mine, before = claimed.get(stage), again.get(stage)

            def order(
                one: PeerId, first: tuple[PeerId | None, ...] = (mine, before, wanted)
            ) -> tuple[int, bool, bool, bool]:
                return tried.get(one, 0), one != first[0], one != first[1], one != first[2]

            best = min(map(order, able))
            peer = self._turn(stage, step, [one for one in able if order(one) == best])
            hops.append(Hop(stage, peer, mine is None or mine == peer))
        return tuple(hops)

    def _turn(self, stage: int, step: int, equals: Sequence[PeerId]) -> PeerId:
        """Return the peer whose turn it is among these."""
        turns, here = self._round_robin(stage), {*self.able(stage, step, {}), *equals}
        for peer in self.holders[stage]:
            if peer in here:
                turns.refresh(peer)
            else:
                turns.ban(peer)
        chosen = turns.choose(1.0, but=turns.peers.difference(equals))
        assert chosen is not None
        return chosen
