"""Who holds which stage of a replica, and which way a micro-batch can take among those that are there."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from thinwire.swarm.protocol import Hop, PeerId

from .wiring import Wiring

TRIES = 2
"""Failures of one micro-batch at one peer after which it goes there no more."""

LONGEST = 5
"""The longest rest is two to this power, in steps."""

Visits = Sequence[tuple[int, PeerId | None]]
"""Stages in the order in which a micro-batch visits them, with the peer that a plan has chosen."""


class Crew:
    """`holders`: the peers of every stage but the origin's; it may be changed between two steps, also by who joins."""

    def __init__(self, holders: Mapping[int, Sequence[PeerId]]) -> None:
        self.holders = {stage: list(peers) for stage, peers in holders.items()}
        self.lost: set[PeerId] = set()
        """Out of reach."""
        self._wirings: dict[int, Wiring[PeerId]] = {}
        self._strikes: dict[PeerId, int] = {}
        self._since: dict[PeerId, int] = {}
        self._until: dict[PeerId, int] = {}

    @property
    def peers(self) -> list[PeerId]:
        """Everybody in reach, by stage."""
        return [peer for stage in sorted(self.holders) for peer in self.holders[stage] if peer not in self.lost]

    def holds(self, peer: PeerId) -> bool:
        """Whether a peer holds a stage."""
        return any(peer in peers for peers in self.holders.values())

    def rest(self, peer: PeerId, step: int) -> None:
        """A peer has stalled: it gets nothing more in this step; for the second time in a row, in the next 2, then 4, …"""
        if self._until.get(peer, -1) < step or self._since.get(peer) != step:
            self._strikes[peer] = min(LONGEST, self._strikes.get(peer, -1) + 1)
            self._since[peer], self._until[peer] = step, step + 2 ** self._strikes[peer] - 1

    def did_well(self, peer: PeerId) -> None:
        """A peer got through a step."""
        self._strikes.pop(peer, None)

    def done(self, peer: PeerId, seconds: float, *, backward: bool) -> None:
        """A peer has passed a micro-batch on, for which it had so long."""
        for stage, peers in self.holders.items():
            if peer in peers:
                self._wired(stage).done(peer, 1.0, seconds, backward=backward)

    def _wired(self, stage: int) -> Wiring[PeerId]:
        """Whose turn it is in a stage, among those that hold it now."""
        wiring, holders = self._wirings.setdefault(stage, Wiring()), self.holders[stage]
        for peer in wiring.peers.difference(holders):
            wiring.leave(peer)
        for peer in holders:
            wiring.join(peer)
        return wiring

    def able(self, stage: int, step: int, tried: Mapping[PeerId, int]) -> list[PeerId]:
        """Who can be asked for a stage; those that rest for an earlier step's sake, where there is nobody else."""
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
        """The way of a micro-batch; stages that nobody can be asked for are left out.

        `claimed`: by stage, whose gradient may have it already, so that it counts nowhere else; `tried`: how often it failed
        where. `visits`: as planned, else all stages in order. `last`: the way of the attempt before. Who is not to blame for
        its failure is asked again; the others take turns, at their pace (see Wiring).
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
        """Whose turn it is among these."""
        wiring, here = self._wired(stage), {*self.able(stage, step, {}), *equals}
        for peer in self.holders[stage]:
            if peer in here:
                wiring.refresh(peer)
            else:
                wiring.ban(peer)
        chosen = wiring.choose(1.0, but=wiring.peers.difference(equals))
        assert chosen is not None
        return chosen
