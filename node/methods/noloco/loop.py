"""Rounds of pairs and groups (NoLoCo): local training, contributions of the partners, one outer step."""

from __future__ import annotations

from collections.abc import Sequence

import blake3
import numpy as np
from thinwire.collectives.aggregation.screening import outliers
from thinwire.collectives.gossip.means import Means, MeshMeans
from thinwire.collectives.gossip.owner_group import OwnerGroup
from thinwire.collectives.gossip.pair import PairResult
from thinwire.collectives.outcome import Outcome
from thinwire.collectives.rounds.data_planes.contributions import summarize
from thinwire.collectives.state_sync.state_sync import FetchedState
from thinwire.compression.core.types import Buffer
from thinwire.node.methods.noloco.replica import step_of
from thinwire.node.methods.noloco.session import GossipSession
from thinwire.node.outer.round_loop import Lost, Meanwhile, ReplicaLoop
from thinwire.node.runtime.asyncio_extra import Work, uninterrupted
from thinwire.node.state.replica_buffers import ParameterWrite, Read
from thinwire.swarm.manifest.manifest import Manifest
from thinwire.swarm.messages.registry import Ballot, Commit, Contribution, Exclusion, Proposal
from thinwire.swarm.method_specs.noloco import NoLoCo


class GossipLoop(ReplicaLoop):
    """Loop over rounds with drawn partners. A round always commits; without partners as a step alone."""

    _session: GossipSession

    def __init__(
        self,
        session: GossipSession,
        manifest: Manifest,
        *,
        read: Read,
        write: ParameterWrite,
        work: Work,
        beside: Work | None = None,
    ) -> None:
        outer = manifest.method(NoLoCo)
        self._session, self._read, self._write, self._work = session, read, write, work
        self._pull, self._rounds = step_of(outer), manifest.run.rounds

    async def enter(self, *, tries: int = 0, alone: int = 0, lost: Lost | None = None) -> bool:
        """Enter with the state of one peer, see `RoundLoop.enter`. A lost state is not recovered here."""
        return await super().enter(tries=tries, alone=alone)

    async def sync(self, *, weight: int, loss: float, speed: float, meanwhile: Meanwhile | None = None) -> Outcome:
        """Run one round after the inner steps. `weight`: tokens of these steps. `loss`, `speed`: for display.

        The round commits with or without partners, and the model starts from the new slow weights. The outcome has no
        commit only if most peers were so far ahead or behind that the state of one was taken over.
        """
        session = self._session
        if session.catch_up.reached is not None and await self.catch_up():
            return Outcome()
        read = self._read
        if self._sends_slow_weights and not session.current.posted:  # In the first round nothing has posted them yet.
            session.post(*await self._work(self._base))
        try:
            payloads = await self._work(lambda: self._encode(read))
        except FloatingPointError as error:
            # Contribute nothing, but stay in the group: its mean draws this replica back.
            self.report_unsent(error)
            read, weight = session.replica.own, 0
            payloads = await self._work(lambda: self._encode(read))
        else:
            self.report_sent()
        results = await session.average(payloads, summary=summarize(payloads), weight=weight, loss=loss, speed=speed)
        mine = [*payloads, *session.current.base]
        if any(not result.reason for result in results):
            results = await self._screen(mine, results)
        return await uninterrupted(self._commit(read, mine, results, weight))

    async def _screen(self, mine: list[Buffer], results: Sequence[PairResult]) -> tuple[PairResult, ...]:
        """Reject contributions that are far too long beside ours, the usual norm, or else the momentum.

        Each partner is compared with us alone, so the number of lying partners does not matter.
        """
        session = self._session
        replica = session.replica
        received = [result for result in results if not result.reason]
        ours, *theirs = await self._work(lambda: self._lengths(mine, received))
        if not ours and not session.usual:
            ours = await self._work(lambda: float(np.linalg.norm(replica.momentum)))
        far, usual = {result.partner for result in received}, [0.0]
        if ours > 0 or session.usual > 0:
            judged = [
                outliers({session.me: ours, result.partner: length}, session.usual)
                for result, length in zip(received, theirs, strict=True)
            ]
            far, usual = {peer for out, _ in judged for peer in out}, [after for _, after in judged]
        # No lie raises the usual norm: each value uses one partner alone, and the lower of the two lengths.
        session.usual = max(usual)
        for result in received:
            if result.partner in far:
                session.refuse(result.partner, "norm")
        return tuple(
            PairResult(result.partner, reason="norm") if not result.reason and result.partner in far else result
            for result in results
        )

    def _lengths(self, mine: Sequence[Buffer], received: Sequence[PairResult]) -> list[float]:
        """Return the length of our contribution, then those of the partners' contributions or means."""
        session = self._session
        replica, grid, codec, group = session.replica, session.grid, session.codec, session.current
        if not isinstance(group, OwnerGroup):
            lengths: list[float] = replica.lengths([mine, *(result.theirs for result in received)], grid, codec)
            return lengths
        means = (replica.length(group.means((result.partner,)), grid, codec) for result in received)
        return [*replica.lengths([mine], grid, codec), *means]

    def _means(self, mine: Sequence[Buffer], received: Sequence[PairResult]) -> Means | None:
        """Return the means of our group; None if this peer is alone."""
        session = self._session
        group = session.current
        if isinstance(group, OwnerGroup):
            return group.means({session.me, *(result.partner for result in received)})
        if not received:
            return None
        payloads = sorted(
            [(session.me, mine), *((result.partner, result.theirs) for result in received)], key=lambda of: of[0]
        )
        place = next(at for at, (peer, _) in enumerate(payloads) if peer == session.me)
        return MeshMeans([payload for _, payload in payloads], place, session.grid, session.codec, group.round)

    async def _commit(self, read: Read, mine: list[Buffer], results: Sequence[PairResult], weight: int) -> Outcome:
        """Make the step. It is not interrupted: a caller that cancels `sync` waits for it."""
        session, replica, group = self._session, self._session.replica, self._session.current
        me, received = session.me, [result for result in results if not result.reason]
        entries = [Contribution(me, group.attempt, weight)]
        entries += [Contribution(result.partner, result.attempt, result.weight) for result in received]
        entries.sort(key=lambda entry: entry.peer)
        members = tuple(entry.peer for entry in entries)
        await session.change(
            self._work,
            lambda: replica.step(
                read,
                mine,
                self._means(mine, received),
                session.grid,
                session.codec,
                members=members,
                pull=self._pull,
            ),
        )
        missing = {result.partner: result.reason for result in results if result.reason}
        # The record of a round between partners needs no votes.
        excluded = tuple(Exclusion(peer, reason) for peer, reason in missing.items())
        proposal = Proposal(
            group.round, 0, Ballot(0, me), members, members, tuple(entries), excluded, adopted=None, sources=()
        )
        await self.adopt()
        return Outcome(commit=Commit(proposal, replica.digest, ()), missing=missing)

    async def catch_up(self) -> bool:
        """Take over the state of a peer; return True if there was a suitable one."""
        fetched = await self._session.catch_up.newer(self._work)
        if fetched is not None:
            await uninterrupted(self._take_over(fetched))
        return fetched is not None

    async def _take_over(self, fetched: FetchedState) -> None:
        await self._session.install(fetched, self._work)
        await self.adopt()

    async def adopt(self) -> None:
        """Set the model to the slow weights, and begin the next round."""
        session = self._session

        def begin() -> tuple[list[memoryview], bytes] | None:
            self._write(session.replica.theta)
            over = 0 < self._rounds <= session.replica.round
            return self._base() if self._sends_slow_weights and not over else None

        base = await self._work(begin)
        session.advance()
        if base is not None:
            session.post(*base)

    @property
    def _sends_slow_weights(self) -> bool:
        return self._session.codec.slow is not None

    def _base(self) -> tuple[list[memoryview], bytes]:
        """Encode the slow weights; return chunks and their hashes."""
        session = self._session
        payloads = list(session.replica.base(session.grid, session.codec))
        return payloads, b"".join(blake3.blake3(payload).digest() for payload in payloads)

    def _encode(self, read: Read) -> list[memoryview]:
        session = self._session
        return list(session.replica.offer(read, session.grid, session.codec))
