"""Cuts, clogs and refusals, which may overlap, between simulated peers."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping
from typing import Protocol, TypeAlias

from thinwire.sims.network.circuits import CircuitFabric
from thinwire.sims.network.link import Endpoint
from thinwire.swarm.messages.registry import PeerId

Pair: TypeAlias = tuple[PeerId, PeerId]
"""Sender and receiver."""


class Severable(CircuitFabric, Protocol):
    """A network whose links can be held up and broken."""

    @property
    def peers(self) -> Mapping[PeerId, Endpoint]:
        """The newest transport of each peer."""
        ...

    def sever(self, a: Endpoint, b: Endpoint, reason: str) -> None:
        """Break the link between two peers, for both ends."""
        ...


class Partitions:
    """Number of cuts and clogs on each pair in `pairs`.

    A link breaks if it is held for `patience` seconds without interruption.
    """

    def __init__(self, net: Severable, patience: float) -> None:
        self.pairs: dict[Pair, list[int]] = {}
        """Maps a pair to its cuts, its clogs, and a number that identifies the period."""
        self._refusals: Counter[Pair] = Counter()
        self._net, self._patience, self._spells = net, patience, 0

    def cut(self, sender: PeerId, receiver: PeerId) -> bool:
        """Return True if not even new connections get through."""
        return bool(self.pairs) and self.pairs.get((sender, receiver), (0,))[0] > 0

    def held(self, sender: PeerId, receiver: PeerId) -> bool:
        """Return True if bytes of existing connections do not get through."""
        return (sender, receiver) in self.pairs

    def refused(self, sender: PeerId, receiver: PeerId) -> bool:
        """Return True if a connection attempt of the sender is refused at once."""
        return bool(self._refusals) and self._refusals[sender, receiver] > 0

    def refuse(self, pair: Pair) -> None:
        """Refuse connection attempts until an equal number of `admit`s."""
        self._refusals[pair] += 1

    def admit(self, pair: Pair) -> None:
        """Remove one refusal; no effect if there is none."""
        self._refusals -= Counter([pair])

    def add(self, pair: Pair, *, cut: bool) -> None:
        if pair not in self.pairs:
            self._spells += 1
            self.pairs[pair] = [0, 0, self._spells]
            self._net.at(self._net.loop.time() + self._patience, self._expire, pair, self._spells)
        self.pairs[pair][0 if cut else 1] += 1

    def remove(self, pair: Pair, *, cut: bool) -> None:
        """Remove one cut or clog; no effect if there is none.

        Frames that were held back arrive one latency after the last one is removed.
        """
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
        self._refusals.clear()
        for pair in pairs:
            self._release(pair)

    def _release(self, pair: Pair) -> None:
        source, sink = self._net.peers.get(pair[0]), self._net.peers.get(pair[1])
        if source is None or sink is None:
            return
        # Either end may have given up the link already, without the knowledge of the other.
        found = [end.links[to] for end, to in ((source, pair[1]), (sink, pair[0])) if to in end.links]
        found += [connection.link for connection in self._net.connections if connection.link is not None]
        for link in {id(link): link for link in found}.values():
            for pipe in link.pipes:
                if pipe.source is source and pipe.pair == pair and pipe.arrived:
                    self._net.at(self._net.loop.time() + self._net.latency(*pair), self._net.hand_over, pipe)

    def _expire(self, pair: Pair, spell: int) -> None:
        hold, peers = self.pairs.get(pair), self._net.peers
        if hold is not None and hold[2] == spell and pair[0] in peers and pair[1] in peers:
            self._net.sever(peers[pair[0]], peers[pair[1]], "timed out")
