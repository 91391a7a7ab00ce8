"""Factory of the data planes of one fragment, with the measurements and buffers that outlive a round."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, cast

from thinwire.collectives.aggregation.means import Rule
from thinwire.collectives.aggregation.norm_bounds import norm_bound
from thinwire.collectives.aggregation.rule_factory import dense_rule
from thinwire.collectives.blocking_work import Work, at_once
from thinwire.collectives.consensus.paxos import Agreement
from thinwire.collectives.rounds.data_planes.allgather.allgather import AllGather
from thinwire.collectives.rounds.data_planes.butterfly import Butterfly
from thinwire.collectives.rounds.data_planes.contributions import OwnerChecks, Screen
from thinwire.collectives.rounds.data_planes.data_plane import DataPlane
from thinwire.collectives.rounds.data_planes.hierarchy import Hierarchy
from thinwire.collectives.rounds.data_planes.owner_results import Reducer
from thinwire.collectives.rounds.data_planes.ring import Ring
from thinwire.collectives.rounds.data_planes.sparse_butterfly import (
    OwnerResiduals,
    SparseButterfly,
    SparseButterflyCodec,
)
from thinwire.collectives.topology.shards import Grid
from thinwire.collectives.transport.buffer_pool import BufferPool
from thinwire.collectives.transport.sending.send_queue import SendQueue
from thinwire.compression.core.codec import Codec
from thinwire.swarm.aggregation_spec import AggregationSpec
from thinwire.swarm.choices import Collective, Topology
from thinwire.swarm.messages.registry import Digest


@dataclass(frozen=True, slots=True, kw_only=True)
class DataPlaneSpec:
    """Data plane of a run: what it computes, and over which peers the data travels.

    - `collective`: "all-gather": every payload goes to all peers (`codec` only validates it); "sparse-butterfly": each
      chunk has an owner that sums contributions and sends the largest values of the sum; "butterfly": chunks are
      aggregated by `rule`.
    - `topology` of a butterfly: "butterfly" (at the owners), "ring" (while they travel) or "hierarchy" (in sites first).
    - `by_bandwidth`: peers own as many chunks as their links can carry; otherwise all own equally many.
    - `audited`: see OwnerChecks; in other planes without effect.
    """

    codec: Codec | Screen
    rule: AggregationSpec
    collective: Collective = "butterfly"
    topology: Topology = "butterfly"
    by_bandwidth: bool = False
    audited: bool = False

    @property
    def sized(self) -> bool:
        """True if the leader assigns numbers of chunks to the peers, by their bandwidth."""
        return self.by_bandwidth and self.topology == self.collective == "butterfly"

    @property
    def relays(self) -> bool:
        """True if peers with weak uplinks send their payloads to a helper."""
        return self.by_bandwidth and self.collective == "all-gather"


class DataPlaneFactory:
    """Factory of data planes, which share usual norms and memory for results.

    `owner_residuals`: residuals of the chunks that we own in a sparse butterfly. `aside`: computes large results of chunks
    that we own. `pool`: memory for results.
    """

    def __init__(
        self,
        spec: DataPlaneSpec,
        run_id: Digest,
        *,
        send_queue: SendQueue,
        now: Callable[[], float],
        owner_residuals: OwnerResiduals | None = None,
        aside: Work = at_once,
        pool: BufferPool | None = None,
    ) -> None:
        self.spec = spec
        self.owner_residuals = OwnerResiduals() if owner_residuals is None else owner_residuals
        self._run_id, self._send_queue, self.now, self._aside = run_id, send_queue, now, aside
        self.rule: Rule = dense_rule(spec.rule)
        """Aggregation of dense chunks."""
        self._usual: dict[int, dict[int, float]] = {}
        self._pool = BufferPool() if pool is None else pool

    def make(self, agreement: Agreement, grid: Grid, *, seed: bytes, turn: int) -> DataPlane:
        """Create the data plane of a round.

        `seed`: draws the owners of chunks. `turn`: number of the vector, if vectors take turns: usual norms are stored per
        vector.
        """
        spec, usual = self.spec, self._usual.setdefault(turn, {})
        common: dict[str, Any] = dict(send_queue=self._send_queue, now=self.now, usual=usual)
        if spec.collective == "all-gather":
            return AllGather(agreement, screen=spec.codec, pieces=grid, **common)
        if spec.collective == "sparse-butterfly":
            common |= dict(seed=self._run_id, aside=self._aside)  # so that the owners change little from round to round
            sparse = cast(SparseButterflyCodec, spec.codec)
            return SparseButterfly(agreement, sparse, grid, owner_residuals=self.owner_residuals, **common)
        codec, common["seed"] = cast(Codec, spec.codec), seed
        reducer = Reducer(codec, self.rule, self._pool)
        if spec.topology == "hierarchy":
            return Hierarchy(agreement, reducer, grid, groups=self._usual.setdefault(-1 - turn, {}), **common)
        if spec.topology == "ring":
            return Ring(agreement, reducer, grid, guarded=spec.rule.rule == "clip", **common)
        checks = OwnerChecks(spec.audited, norm_bound(spec.rule), codec.growth)
        return Butterfly(agreement, reducer, grid, checks=checks, aside=self._aside, **common)
