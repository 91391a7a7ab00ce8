"""What the origin knows of the step in progress: above all, where each micro-batch's gradient is."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass

from thinwire.swarm.protocol import Hop, Passed, PeerId, Tally

Lost = tuple[int, frozenset[int], str]
"""A stage, the micro-batches whose gradient is not in its parameters, and why."""


@dataclass(frozen=True, slots=True)
class Outcome:
    """What a step came to.

    `losses` by micro-batch (nats per token), of those that were computed; `finished`: those whose gradient came back.
    `counted`: by stage and peer the micro-batches whose gradient is applied there; `lost`: by peer what was given up, with the
    reason, and is in nobody's gradient. `skipped`: the stages that a finished micro-batch went past, though they were to be
    visited. `attempts`: of all micro-batches together. `seconds`: until it was applied. `computed`: what each peer says that
    its computing took. `flown`: seconds until the last gradient was back; `planned`: what the plan said of that, 0
    without one.
    """

    step: int
    losses: Mapping[int, float]
    finished: frozenset[int]
    counted: Mapping[int, Mapping[PeerId, frozenset[int]]]
    lost: Sequence[tuple[PeerId, Lost]]
    skipped: Mapping[int, tuple[int, ...]]
    attempts: int
    seconds: float
    computed: Mapping[PeerId, float]
    flown: float = 0.0
    planned: float = 0.0

    @property
    def loss(self) -> float:
        """Mean loss of the micro-batches that were computed."""
        return mean(self.losses)


def mean(losses: Mapping[int, float]) -> float:
    """Of micro-batches; NaN of none."""
    return sum(losses.values()) / len(losses) if losses else float("nan")


class Account:
    """One step's. A stage's gradient of a micro-batch is looked for at one peer at most."""

    def __init__(self) -> None:
        self.losses: dict[int, float] = {}
        self.finished: set[int] = set()
        self.skipped: dict[int, tuple[int, ...]] = {}
        self._lost: dict[PeerId, tuple[int, set[int], str]] = {}
        self._gone: dict[PeerId, str] = {}
        self._settled = False
        self.tallies: dict[PeerId, Tally] = {}
        self.computed: dict[PeerId, float] = {}
        self._paths: dict[tuple[int, int], tuple[Hop, ...]] = {}
        self._counted: dict[int, dict[int, PeerId]] = {}
        self._claimed: dict[int, dict[int, PeerId]] = {}

    @property
    def loss(self) -> float:
        """Mean of the micro-batches that were computed; 0 where there are none."""
        return mean(self.losses) if self.losses else 0.0

    @property
    def attempts(self) -> int:
        """How often a micro-batch was sent on its way."""
        return len(self._paths)

    def sent(self, micro: int, attempt: int, path: tuple[Hop, ...]) -> None:
        """A micro-batch is on its way."""
        self._paths[micro, attempt] = path

    def passed(self, peer: PeerId, message: Passed) -> None:
        """Who has passed a gradient on has counted it, if it was to: in whichever attempt."""
        if message.reason:
            return
        self.computed[peer] = self.computed.get(peer, 0.0) + max(0.0, message.seconds)
        if not message.backward:
            return
        for hop in self._paths.get((message.micro, message.attempt), ()):
            if hop.peer == peer and hop.counts:
                self._count(message.micro, hop)

    def finish(self, micro: int, attempt: int) -> None:
        """A micro-batch's gradient is back: all that it went through have passed it on, whether or not their word is here."""
        self.finished.add(micro)
        for hop in self._paths[micro, attempt]:
            if hop.counts:
                self._count(micro, hop)

    def _count(self, micro: int, hop: Hop) -> None:
        if hop.peer in self._gone:
            self._lose(hop.peer, hop.stage, {micro})
        else:
            self._counted.setdefault(hop.stage, {}).setdefault(micro, hop.peer)

    def _lose(self, peer: PeerId, stage: int, micros: Iterable[int]) -> None:
        self._lost.setdefault(peer, (stage, set(), self._gone[peer]))[1].update(micros)

    def turned(self, micro: int, attempt: int) -> None:
        """A micro-batch goes back: from now on those on its way may count it, and their word of that may come late."""
        for hop in self._paths[micro, attempt]:
            if hop.counts:
                self._claimed.setdefault(hop.stage, {})[micro] = hop.peer

    def where(self, micro: int) -> dict[int, PeerId]:
        """By stage, who may have counted a micro-batch."""
        return {stage: peers[micro] for stage, peers in self._claimed.items() if micro in peers}

    def of(self, peer: PeerId) -> tuple[int, frozenset[int]]:
        """A peer's stage, and what it has counted; (0, nothing) when it has counted nothing."""
        for stage, peers in self._counted.items():
            mine = frozenset(micro for micro, one in peers.items() if one == peer)
            if mine:
                return stage, mine
        return 0, frozenset()

    def give_up(self, peer: PeerId, reason: str) -> None:
        """What a peer has counted, or will have, is lost, and others may count it; unless it was told to apply it."""
        if self._settled:
            return
        self._gone.setdefault(peer, reason)
        stage, mine = self.of(peer)
        if mine:
            self._lose(peer, stage, mine)
            for micro in mine:
                del self._counted[stage][micro]
        for claims in self._claimed.values():
            for micro in [micro for micro, one in claims.items() if one == peer]:
                del claims[micro]

    def settle(self) -> None:
        """What is counted now is applied."""
        self._settled = True

    def divisor(self, peer: PeerId, *, by_visits: bool) -> float:
        """What a peer's gradient is divided by: the micro-batches of all, or of its stage; 0 where it has none that counts.

        Peers of one stage make steps of their own, each with its share of the stage's micro-batches, all of one size.
        """
        stage, mine = self.of(peer)
        if not mine:
            return 0.0
        visits = len(self._counted[stage])
        return len(mine) / visits * (visits if by_visits else len(self.losses))

    @property
    def lost(self) -> tuple[tuple[PeerId, Lost], ...]:
        """By peer, what nobody else has counted either."""
        found = []
        for peer, (stage, micros, reason) in self._lost.items():
            missing = frozenset(micros - self._counted.get(stage, {}).keys())
            if missing:
                found.append((peer, (stage, missing, reason)))
        return tuple(found)

    def counted(self) -> dict[int, dict[PeerId, frozenset[int]]]:
        """By stage and peer."""
        return {
            stage: {peer: self.of(peer)[1] for peer in dict.fromkeys(peers.values())}
            for stage, peers in sorted(self._counted.items())
            if peers
        }
