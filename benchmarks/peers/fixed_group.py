"""Fault-tolerant all-reduce of float32 arrays in a fixed group, without a training loop.

    averager = Averager(identity, run_id, transport, keys=public_keys, codec=codec, now=loop.time)
    task = asyncio.create_task(averager.run())
    outcome = await averager.average(arrays)      # all peers call it, each time with arrays of the same sizes

Agreement, screening, hashes and votes are those of a training round (see collectives/consensus and collectives/rounds).
"""

from __future__ import annotations

import asyncio
from bisect import bisect_right
from collections.abc import Callable, Mapping, Sequence
from itertools import accumulate

import blake3
import msgspec
import numpy as np
from numpy.typing import NDArray
from thinwire.collectives.blocking_work import Work
from thinwire.collectives.consensus.members.terms import RoundTerms
from thinwire.collectives.consensus.members.vote_store import MemoryVoteStore
from thinwire.collectives.deterministic_rounding import encode
from thinwire.collectives.outcome import Outcome
from thinwire.collectives.rounds.data_plane_factory import DataPlaneFactory, DataPlaneSpec
from thinwire.collectives.rounds.data_planes.contributions import ContributionSummary, summarize
from thinwire.collectives.rounds.round import LinkReport, Round
from thinwire.collectives.rounds.round_factory import RoundFactory, round_of
from thinwire.collectives.timing import GIVE_UP, TICK
from thinwire.collectives.topology.shards import Grid, grid
from thinwire.collectives.transport.buffer_pool import BufferPool
from thinwire.collectives.transport.interface import Arrival, Transport
from thinwire.collectives.transport.sending.send_queue import SendQueue
from thinwire.compression.core.codec import Codec
from thinwire.compression.core.types import Buffer, Floats
from thinwire.swarm.aggregation_spec import AggregationSpec
from thinwire.swarm.choices import Aggregation, Topology
from thinwire.swarm.frame import Frame
from thinwire.swarm.identity.identity import Identity
from thinwire.swarm.keyring import Keyring
from thinwire.swarm.messages.registry import Ask, Behind, Commit, Digest, PeerId


class Averager:
    """One peer of the group. `keys` has the Ed25519 public key of every peer of the group, ours included.

    The first call is agreed among the whole group, each later one among the members of the call before: a dead peer is
    left out, and a peer that falls behind by more than a call stays out. The transport must know all peers (`learn`).
    `now`: monotonic seconds; `grace`: seconds to wait for stragglers; `patience`: seconds without progress before a
    peer acts; `work` runs long computations. `bandwidth`: peers with faster links own more chunks; `topology`:
    "butterfly" or "ring". All peers must use the same values of these two.
    """

    def __init__(
        self,
        identity: Identity,
        run_id: Digest,
        transport: Transport,
        *,
        keys: Mapping[PeerId, bytes],
        codec: Codec,
        now: Callable[[], float],
        rule: Aggregation = "mean",
        grace: float = 10.0,
        patience: float = 2.0,
        work: Work = asyncio.to_thread,
        bandwidth: bool = False,
        topology: Topology = "butterfly",
    ) -> None:
        if topology not in ("butterfly", "ring") or (topology == "ring" and rule != "mean"):
            raise ValueError(f"the rule {rule!r} is not supported with the topology {topology!r}")
        self._transport, self._keys, self.me = transport, dict(keys), identity.peer_id
        self._codec, self._rule, self._now, self._grace, self._work = codec, rule, now, grace, work
        self._send_queue = SendQueue(transport, lambda peer: self._lost(peer))
        self._live = set(self._keys)
        self._votes = MemoryVoteStore()
        self._members, self._base = tuple(sorted(self._keys)), bytes(32)
        spec = DataPlaneSpec(codec=codec, rule=AggregationSpec(rule), topology=topology, by_bandwidth=bandwidth)
        self._round_factory = RoundFactory(
            Keyring(identity, run_id, self._keys.get),
            DataPlaneFactory(spec, run_id, send_queue=self._send_queue, now=now, aside=work),
            live=self._live,
            patience=patience,
            links=LinkReport(rates=self._send_queue.bandwidth.end_round) if bandwidth else LinkReport(),
        )
        self._topology = topology
        self._number = 1
        self._calling = False
        self.current: Round | None = None
        self.past: Round | None = None
        self._pool = BufferPool()

    async def run(self) -> None:
        """Receive frames and call ticks until cancelled."""
        async with asyncio.TaskGroup() as tasks:
            tasks.create_task(self._receive())
            tasks.create_task(self._keep_time())
            tasks.create_task(self._fail())

    async def _fail(self) -> None:
        await self._send_queue.failure

    @property
    def link(self) -> tuple[int, int]:
        """Known rates of our link: bytes/s up and down; 0 means unknown."""
        return self._send_queue.bandwidth.up, self._send_queue.bandwidth.down

    async def close(self) -> None:
        """Stop sending; the transport stays open."""
        await self._send_queue.close()

    async def average(
        self,
        arrays: Sequence[NDArray[np.float32]],
        out: Sequence[NDArray[np.float32]] | None = None,
        *,
        weight: int = 1,
    ) -> Outcome:
        """Average over the group, weighted by `weight`.

        Writes the mean to `out` (default: `arrays`), or nothing.

        If the outcome has no commit, nothing was written. `arrays` must not change meanwhile. Raises ValueError for
        arrays that cannot be averaged, and CodecError if the codec cannot represent a value (NaN).
        """
        source, target = Flat(arrays), Flat(arrays if out is None else out)
        if source.total != target.total:
            raise ValueError(f"the input has {source.total} elements, the output {target.total}")
        if self._calling:
            raise ValueError("the previous call is still in progress")
        self._calling, cut = True, grid(source.total, self._codec)
        try:
            payloads, summary = await self._work(lambda: self._encode(source, cut))
            current = self._begin(cut)
            current.announce(payloads, weight=weight, loss=0.0, speed=0.0, summary=summary)
            for peer, frame in self._round_factory.pending_frames.take():
                self._routed(peer, frame)
            outcome = await self._round_factory.outcome(
                current, give_up=self._grace + GIVE_UP * self._round_factory.patience
            )
            if outcome.commit is not None:
                await self._work(lambda: self._decode(outcome.results, cut, target))
                self._committed(current, outcome.commit)
        finally:
            self._calling = False
        return outcome

    # --- one call

    def _begin(self, cut: Grid) -> Round:
        """Return the round of this call.

        An undecided round of the last call continues, because its promises still hold.
        """
        old = self.current
        if old is not None and old.complete and old.agreement.commit is not None:
            self._committed(old, old.agreement.commit)  # the others decided it after that call had given up
            old = None
        what = [self._codec.spec, cut.total, cut.chunk, self._rule, self._topology]
        plan = blake3.blake3(msgspec.msgpack.encode(what)).digest()
        if old is not None and old.agreement.terms.plan == plan:
            old.resume()
            return old
        terms = RoundTerms(self._number, 0, self._members, self._base, plan, grace=self._grace)
        # With arrays of other sizes our votes on the results of that round still hold.
        attempt = old.attempt if old is not None else 0
        self.current = self._round_factory.begin(terms, cut, store=self._votes, attempt=attempt)
        return self.current

    def _committed(self, current: Round, commit: Commit) -> None:
        self._members = commit.proposal.members
        self._base = blake3.blake3(b"".join((self._base, commit.digest, *self._members))).digest()
        self.past, self.current, self._number = current, None, self._number + 1
        self._send_queue.begin(self._number)

    def _encode(self, source: Flat, cut: Grid) -> tuple[list[Buffer], ContributionSummary]:
        payloads: list[Buffer] = []
        scratch = np.empty(cut.chunk, np.float32)
        for index in range(len(cut)):
            start, stop = cut.span(index)
            values = source.view(start, stop)
            if self._codec.plain and values is not None:
                payload: Buffer = values.view(np.uint8).data
            else:
                payload = self._pool.lend(self._codec.nbytes(stop - start))
                if values is None:
                    values = np.frombuffer(payload, np.float32) if self._codec.plain else scratch[: stop - start]
                    source.read(start, stop, values)
                if not self._codec.plain:
                    encode(self._codec, values, np.frombuffer(payload, np.uint8))
            payloads.append(payload)
        return payloads, summarize(payloads, self._codec, cut)

    def _decode(self, results: Sequence[Buffer], cut: Grid, target: Flat) -> None:
        scratch = np.empty(cut.chunk, np.float32)
        for index, payload in enumerate(results):
            start, stop = cut.span(index)
            place = target.view(start, stop)
            values = scratch[: stop - start] if place is None else place
            self._codec.decode(payload, values)
            if place is None:
                target.write(start, values)

    # --- events of the transport

    async def _receive(self) -> None:
        while True:
            arrival = await self._transport.recv()
            if arrival.peer in self._keys:
                self._arrived(arrival)

    def _arrived(self, arrival: Arrival) -> None:
        peer, frame = arrival.peer, arrival.frame
        if frame is None:
            self._lost(peer)
            if not arrival.gone:
                # A new dial tells a dead process, whose machine refuses it, from a broken connection.
                self._send_queue.control(peer, Ask(self._number, 0))
            return
        if peer not in self._live:
            self._live.add(peer)
            if self.current is not None:
                self.current.on_link_up(peer)
        self._routed(peer, frame)

    def _routed(self, peer: PeerId, frame: Frame) -> None:
        message, number = frame.message, round_of(frame.message)
        self._send_queue.sample_bandwidth()
        if isinstance(message, Behind):
            if number > self._number:
                self._round_factory.behind.set()
        elif number == self._number and self.current is not None:
            self.current.on_frame(peer, frame)
        elif number == self._number - 1 and self.past is not None:
            self.past.on_frame(peer, frame)
        elif 0 < number < self._number and frame.signature:
            self._send_queue.control(peer, Behind(self._number - 1))
        elif number in (self._number, self._number + 1) and frame.signature:
            self._round_factory.pending_frames.put(peer, frame)
            if number > self._number:
                self._send_queue.control(peer, Ask(self._number, 0))

    def _lost(self, peer: PeerId) -> None:
        self._live.discard(peer)
        self._send_queue.drop(peer)
        for butterfly in (self.current, self.past):
            if butterfly is not None:
                butterfly.on_link_down(peer)

    async def _keep_time(self) -> None:
        while True:
            await asyncio.sleep(TICK)
            self._send_queue.sample_bandwidth()
            for butterfly in (self.current, self.past):
                if butterfly is not None:
                    butterfly.tick()


class Flat:
    """C-contiguous float32 arrays of any shape, in order, as one vector of `total` elements.

    Raises ValueError for other arrays.
    """

    def __init__(self, arrays: Sequence[NDArray[np.float32]]) -> None:
        for array in arrays:
            if array.dtype != np.float32 or not array.flags.c_contiguous:
                raise ValueError(f"arrays must be C-contiguous float32, not {array.dtype} {array.shape}")
        self._parts = [array.reshape(-1) for array in arrays if array.size]
        self._starts = [0, *accumulate(part.size for part in self._parts)]

    @property
    def total(self) -> int:
        """Elements of all arrays."""
        return self._starts[-1]

    def view(self, start: int, stop: int) -> Floats | None:
        """Return a view of elements [start, stop); None if they span several arrays."""
        at = bisect_right(self._starts, start) - 1
        first = self._starts[at]
        if start >= stop or stop > self._starts[at + 1]:
            return None
        return self._parts[at][start - first : stop - first]

    def read(self, start: int, stop: int, out: Floats) -> None:
        """Copy elements [start, stop) into `out`."""
        for inside, outside in self._pieces(start, stop):
            out[outside] = inside

    def write(self, start: int, values: Floats) -> None:
        """Copy `values` to the elements from `start` on."""
        for inside, outside in self._pieces(start, start + values.size):
            inside[:] = values[outside]

    def _pieces(self, start: int, stop: int) -> list[tuple[Floats, slice]]:
        pieces, at = [], bisect_right(self._starts, start) - 1
        here = start
        while here < stop:
            first, end = self._starts[at], min(stop, self._starts[at + 1])
            pieces.append((self._parts[at][here - first : end - first], slice(here - start, end - start)))
            here, at = end, at + 1
        return pieces
