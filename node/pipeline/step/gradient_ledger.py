"""Ledger of the step in progress on the origin: which peer holds the gradient of each micro-batch."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass

from thinwire.swarm.messages.registry import GradientSummary, Hop, Passed, PeerId

Lost = tuple[int, frozenset[int], str]
"""Stage, micro-batches whose gradient is not in its parameters, and the reason."""


@dataclass(frozen=True, slots=True)
class StepOutcome:
    """Result of a step.

    `losses`: nats per token of each computed micro-batch; `finished`: micro-batches whose gradient came back.
    `counted`: by stage and peer, the micro-batches whose gradient is applied there; `lost`: by peer, the micro-batches
    that were given up and are in no gradient, with the reason. `skipped`: stages that a finished micro-batch skipped
    although it was to visit them. `attempts`: of all micro-batches together. `seconds`: until the step was applied.
    `computed`: computing time that each peer reports. `measured`: seconds until the last gradient was back; `planned`: the
    planned value of that, 0 without a plan.
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
    measured: float = 0.0
    planned: float = 0.0

    @property
    def loss(self) -> float:
        """Mean loss of the computed micro-batches."""
        return mean(self.losses)


def mean(losses: Mapping[int, float]) -> float:
    """Return the mean over micro-batches; NaN without any."""
    return sum(losses.values()) / len(losses) if losses else float("nan")


class GradientLedger:
    """Ledger of one step. A stage's gradient of a micro-batch is counted at one peer at most."""

    def __init__(self) -> None:
        self.losses: dict[int, float] = {}
        self.finished: set[int] = set()
        self.skipped: dict[int, tuple[int, ...]] = {}
        self._lost: dict[PeerId, tuple[int, set[int], str]] = {}
        self._gone: dict[PeerId, str] = {}
        self._settled = False
        self.tallies: dict[PeerId, GradientSummary] = {}
        self.computed: dict[PeerId, float] = {}
        self._paths: dict[tuple[int, int], tuple[Hop, ...]] = {}
        self._counted: dict[int, dict[int, PeerId]] = {}
        self._claimed: dict[int, dict[int, PeerId]] = {}

    @property
    def loss(self) -> float:
        """Mean loss of the computed micro-batches; 0 without any."""
        return mean(self.losses) if self.losses else 0.0

    @property
    def attempts(self) -> int:
        """Number of attempts of all micro-batches."""
        return len(self._paths)

    def sent(self, micro: int, attempt: int, path: tuple[Hop, ...]) -> None:
        """Record that a micro-batch has left on a path."""
        self._paths[micro, attempt] = path

    def passed(self, peer: PeerId, message: Passed) -> None:
        """Record that a peer has passed a micro-batch on; a gradient counts there, in whichever attempt."""
        if message.reason:
            return
        self.computed[peer] = self.computed.get(peer, 0.0) + max(0.0, message.seconds)
        if not message.backward:
            return
        for hop in self._paths.get((message.micro, message.attempt), ()):
            if hop.peer == peer and hop.counts:
                self._count(message.micro, hop)

    def finish(self, micro: int, attempt: int) -> None:
        """Record that a gradient is back: its whole path has passed it on, even if messages are in transit."""
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
        """Record that a micro-batch goes back: its path may count it from now on, and report that late."""
        for hop in self._paths[micro, attempt]:
            if hop.counts:
                self._claimed.setdefault(hop.stage, {})[micro] = hop.peer

    def where(self, micro: int) -> dict[int, PeerId]:
        """Return by stage the peer that may have counted a micro-batch."""
        return {stage: peers[micro] for stage, peers in self._claimed.items() if micro in peers}

    def of(self, peer: PeerId) -> tuple[int, frozenset[int]]:
        """Return a peer's stage and the micro-batches that it has counted; (0, nothing) without any."""
        for stage, peers in self._counted.items():
            mine = frozenset(micro for micro, one in peers.items() if one == peer)
            if mine:
                return stage, mine
        return 0, frozenset()

    def give_up(self, peer: PeerId, reason: str) -> None:
        """Give up what a peer has counted or will count, so that others may count it.

        No effect after the request to the peer to apply it.
        """
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
        """Fix the counted micro-batches: they are applied now."""
        self._settled = True

    def divisor(self, peer: PeerId, *, by_visits: bool) -> float:
        """Return the divisor of a peer's gradient: all micro-batches, or those of its stage; 0 if none counts.

        Peers of one stage make separate steps, each with its share of the stage's micro-batches, all of one size.
        """
        stage, mine = self.of(peer)
        if not mine:
            return 0.0
        visits = len(self._counted[stage])
        return len(mine) / visits * (visits if by_visits else len(self.losses))

    @property
    def lost(self) -> tuple[tuple[PeerId, Lost], ...]:
        """Return by peer the lost micro-batches that no other peer has counted."""
        found = []
        for peer, (stage, micros, reason) in self._lost.items():
            missing = frozenset(micros - self._counted.get(stage, {}).keys())
            if missing:
                found.append((peer, (stage, missing, reason)))
        return tuple(found)

    def counted(self) -> dict[int, dict[PeerId, frozenset[int]]]:
        """Return the counted micro-batches by stage and peer."""
        return {
            stage: {peer: self.of(peer)[1] for peer in dict.fromkeys(peers.values())}
            for stage, peers in sorted(self._counted.items())
            if peers
        }
