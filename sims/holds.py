"""What keeps bytes between two simulated peers from arriving: cuts and clogs, which may overlap."""

from __future__ import annotations

from typing import TYPE_CHECKING, TypeAlias

from thinwire.swarm.protocol import PeerId

if TYPE_CHECKING:
    from thinwire.sims.network import SimNet

Pair: TypeAlias = tuple[PeerId, PeerId]
"""Sender and receiver."""


class Holds:
    """How many cuts and clogs lie on each pair in `pairs`. A link that is held for `patience` seconds on end breaks."""

    def __init__(self, net: SimNet, patience: float) -> None:
        self.pairs: dict[Pair, list[int]] = {}
        """Pair -> cuts, clogs, and a number that tells one spell from the next."""
        self._net, self._patience, self._spells = net, patience, 0

    def cut(self, sender: PeerId, receiver: PeerId) -> bool:
        """Whether not even a new connection comes through."""
        return bool(self.pairs) and self.pairs.get((sender, receiver), (0,))[0] > 0

    def held(self, sender: PeerId, receiver: PeerId) -> bool:
        """Whether bytes of a connection do not come through."""
        return (sender, receiver) in self.pairs

    def add(self, pair: Pair, *, cut: bool) -> None:
        if pair not in self.pairs:
            self._spells += 1
            self.pairs[pair] = [0, 0, self._spells]
            self._net.at(self._net.loop.time() + self._patience, self._expire, pair, self._spells)
        self.pairs[pair][0 if cut else 1] += 1

    def remove(self, pair: Pair, *, cut: bool) -> None:
        """Take one cut or clog away; what was held back arrives one latency after the last. Nothing where there is none."""
        hold = self.pairs.get(pair)
        if hold is None or not hold[0 if cut else 1]:
            return
        hold[0 if cut else 1] -= 1
        if not hold[0] and not hold[1]:
            del self.pairs[pair]
            self._release(pair)

    def clear(self) -> None:
        pairs = list(self.pairs)
        self.pairs.clear()
        for pair in pairs:
            self._release(pair)

    def _release(self, pair: Pair) -> None:
        source, sink = self._net.peers.get(pair[0]), self._net.peers.get(pair[1])
        if source is None or sink is None:
            return
        # Either end may have given the link up already, and the other not know it.
        for link in {
            id(end.links[to]): end.links[to] for end, to in ((source, pair[1]), (sink, pair[0])) if to in end.links
        }.values():
            for pipe in link.pipes:
                if pipe.source is source and pipe.arrived:
                    self._net.at(self._net.loop.time() + self._net.latency(*pair), self._net.hand_over, pipe)

    def _expire(self, pair: Pair, spell: int) -> None:
        hold, peers = self.pairs.get(pair), self._net.peers
        if hold is not None and hold[2] == spell and pair[0] in peers and pair[1] in peers:
            self._net.sever(peers[pair[0]], peers[pair[1]], "timed out")
