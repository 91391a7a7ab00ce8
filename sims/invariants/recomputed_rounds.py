"""Replay of committed rounds from what their contributors announced.

An observer cannot compute a contribution that depends on a private residual, but it can see what was announced. From these
payloads it computes the results in one place, lets a replica of its own make the method's outer step from the state before,
and compares the bits of both states.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray
from thinwire.collectives.aggregation.rule_factory import dense_rule
from thinwire.collectives.outcome import Outcome
from thinwire.collectives.topology.shards import Grid
from thinwire.compression.core.types import Buffer
from thinwire.node.state.layout import Layout
from thinwire.node.state.replica import Replica
from thinwire.sims.invariants.on_commit import KEPT
from thinwire.sims.invariants.oracles import OnViolation
from thinwire.sims.invariants.reference_mean import result, round_ring, sites_of
from thinwire.swarm.manifest.manifest import Manifest
from thinwire.swarm.messages.registry import Commit, PeerId


def can_replay(manifest: Manifest) -> bool:
    """Return True if the rounds of a run can be replayed.

    Those of pairs cannot: they have no common state. Those of a sparse butterfly cannot either: its owners retain parts
    of sums.
    """
    return not manifest.outer.gossip and manifest.exchange.collective != "sparse-butterfly"


@dataclass(frozen=True, slots=True)
class _Before:
    round: int
    members: tuple[PeerId, ...]
    state: NDArray[np.float32]


class ReplayInvariant:
    """Replays the rounds of one fragment. `honest`: peer id -> index of honest peers."""

    def __init__(self, manifest: Manifest, honest: Mapping[PeerId, int], on_violation: OnViolation) -> None:
        self._manifest, self._honest, self._on_violation = manifest, honest, on_violation
        self._announced: dict[tuple[PeerId, int, int], tuple[bytes, ...]] = {}
        self._before: dict[int, _Before] = {}
        self._replica: Replica | None = None
        self._checked: set[bytes] = set()
        self.replays = 0
        """Rounds that were compared."""

    def announced(self, peer: PeerId, round: int, attempt: int, payloads: Sequence[Buffer]) -> None:
        """Record the chunks that a peer announces, in grid order."""
        if payloads and peer in self._honest:
            self._announced[peer, round, attempt] = tuple(bytes(payload) for payload in payloads)

    def installed(self, index: int, replica: Replica) -> None:
        """Record a state that a peer did not compute: its first, or a fetched one."""
        self._before[index] = _Before(replica.round, replica.members, _shared(replica).copy())

    def ended(self, index: int) -> None:
        """Record that a process ended."""
        self._before.pop(index, None)

    def committed(self, index: int, replica: Replica, layout: Layout, outcome: Outcome) -> None:
        """Compare the state that an honest peer has after a round with that of the replay."""
        before, commit = self._before.get(index), outcome.commit
        self.installed(index, replica)
        if before is None or commit is None or before.round + 1 != replica.round or replica.digest in self._checked:
            return
        self._checked.add(replica.digest)
        entries = commit.proposal.contributors
        payloads = [self._announced.get((entry.peer, replica.round, entry.attempt)) for entry in entries]
        known = [one for one in payloads if one is not None]
        elsewhere = self._manifest.exchange.topology == "ring" and commit.proposal.adopted is not None
        if len(known) == len(payloads) and not elsewhere:
            state = self._replay(before, replica, layout, commit, known)
            self.replays += 1
            if state.tobytes() != _shared(replica).tobytes():
                away = float(np.abs(state - _shared(replica)).max())
                self._on_violation(
                    "aggregate", index, f"round {replica.round}: off by up to {away:.3g} from the replay"
                )
        self._announced = {key: one for key, one in self._announced.items() if key[1] > replica.round - KEPT}

    def _replay(
        self, before: _Before, replica: Replica, layout: Layout, commit: Commit, payloads: Sequence[tuple[bytes, ...]]
    ) -> NDArray[np.float32]:
        """Return the state after the round of `commit`, computed from the announced payloads."""
        if self._replica is None:
            zeros = np.zeros(replica.size, np.float32)
            self._replica = type(replica).begin(
                self._manifest, layout, replica.codec, replica.plan_grid, zeros, before.members
            )
        mine = self._replica
        mine.state[:] = before.state
        mine.round, mine.members = before.round, before.members
        mine.reset()
        if self._manifest.exchange.collective == "all-gather":
            results: list[Buffer] = [piece for one in payloads for piece in one]
        else:
            results = self._results(commit, payloads, mine.codec, mine.grid)
        mine.commit(Outcome(tuple(results), commit), b"")
        return mine.state

    def _results(self, commit: Commit, payloads: Sequence[tuple[bytes, ...]], codec: Any, cut: Grid) -> list[Buffer]:
        """Return the encoded mean of every chunk."""
        rule, proposal, sites = dense_rule(self._manifest.exchange.rule), commit.proposal, sites_of(commit)
        weights = [float(entry.weight) for entry in proposal.contributors]
        around = round_ring(codec, proposal, len(cut)) if proposal.order else None
        made: list[Buffer] = []
        for index in range(len(cut)):
            chunks: list[Buffer] = [one[index] for one in payloads]
            if around is not None:
                made.append(around(index, chunks, cut.size(index)))
            else:
                made.append(result(codec, rule, chunks, weights, sites, cut.size(index)))
        return made


def _shared(replica: Replica) -> NDArray[np.float32]:
    """Return a replica's state without the data ledger, which has two elements a shard."""
    return replica.state if replica.ledger is None else replica.state[: -2 * replica.ledger.used.size]
