"""Rounds of pairs and groups (NoLoCo): local training, what partners contribute, one outer step; or a step of one's own."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import blake3
import numpy as np
from thinwire.collectives.aggregate import outliers
from thinwire.collectives.gossip import Meeting
from thinwire.collectives.outcome import Outcome
from thinwire.collectives.statesync import Fetched
from thinwire.compression.codec import Buffer
from thinwire.node.gossipsession import GossipSession
from thinwire.node.outer import Read, Write
from thinwire.node.paired import Pull
from thinwire.node.rounds import Lost, mismatch
from thinwire.node.waiting import Work, whole
from thinwire.swarm.manifest import Manifest
from thinwire.swarm.protocol import Ballot, Commit, Contribution, Exclusion, Open


class GossipRounds:
    """What `Rounds` is where all average together, with the same ways in. A round always commits: alone, if need be."""

    def __init__(self, session: GossipSession, manifest: Manifest, *, read: Read, write: Write, work: Work) -> None:
        outer = manifest.outer
        self._session, self._read, self._write, self._work = session, read, write, work
        self._pull, self._rounds = Pull(outer.momentum, outer.lr, outer.gamma), manifest.run.rounds

    @property
    def turn(self) -> int:
        """See Rounds."""
        return self._session.replica.round

    def follow(self, told: Callable[[Outcome], None]) -> None:
        """See Rounds: nobody's rounds are followed here, nor by the next two."""

    async def rest(self) -> None:
        """See Rounds."""

    def go_on(self) -> None:
        """See Rounds."""

    async def settled(self) -> None:
        """See Rounds: nothing is left to be done when `sync` has ended."""

    def thereafter(self, what: Callable[[], None]) -> None:
        """See Rounds."""
        what()

    async def enter(self, *, tries: int = 0, alone: int = 0, lost: Lost | None = None) -> bool:
        """Become part of a running swarm with the state of one of its peers, see `Rounds.enter`. Raises ManifestMismatch."""
        session, tried, lonely = self._session, 0, 0
        while not await self._catch_up():
            if session.foreign is not None:
                raise mismatch(session.replica, session.foreign)
            tried += 1
            if tries and tried >= tries:
                await self._adopt()
                return True
            lonely = lonely + 1 if session.alone else 0
            if alone and lonely >= alone:
                return False
            await session.pause()
        return True

    async def sync(self, *, weight: int, loss: float, speed: float) -> Outcome:
        """One round after the inner steps. `weight` is the tokens that went into them; `loss` and `speed` are for display.

        Commits a step with partners or a step alone, whole, and the model starts from the new slow weights. Without commit
        only when the swarm is so far ahead that the state of another was taken over.
        """
        session = self._session
        if session.behind.is_set() and await self._catch_up():
            return Outcome()
        read = self._read
        if self._travels and not session.current.posted:  # of the first round: nobody has told us that it begins
            session.post(*await self._work(self._base))
        try:
            payloads = await self._work(lambda: self._encode(read))
        except FloatingPointError as error:
            # Nothing of our own, but still one of the group: the others draw us back to where they are.
            session.report("unsent", str(error))
            read, weight = session.replica.own, 0
            payloads = await self._work(lambda: self._encode(read))
        hashes = b"".join(blake3.blake3(payload).digest() for payload in payloads)
        meetings = await session.average(payloads, hashes=hashes, weight=weight, loss=loss, speed=speed)
        mine = [*payloads, *session.current.base]
        if any(meeting.theirs for meeting in meetings):
            meetings = await self._screen(mine, meetings)
        return await whole(self._commit(read, mine, meetings, weight))

    async def _screen(self, mine: list[Buffer], meetings: Sequence[Meeting]) -> tuple[Meeting, ...]:
        """Leave out what is absurdly long, beside our own or what was usual; who has neither, beside its momentum.

        Each partner is held against ourselves alone, so that it does not matter how many of them lie.
        """
        session = self._session
        replica, grid, codec = session.replica, session.grid, session.codec
        came = [meeting for meeting in meetings if meeting.theirs]
        ours, *theirs = await self._work(
            lambda: replica.lengths([mine, *(meeting.theirs for meeting in came)], grid, codec)
        )
        if not ours and not session.usual:
            ours = await self._work(lambda: float(np.linalg.norm(replica.momentum)))
        far, usual = {meeting.partner for meeting in came}, [0.0]
        if ours > 0 or session.usual > 0:
            judged = [
                outliers({session.me: ours, meeting.partner: length}, session.usual)
                for meeting, length in zip(came, theirs, strict=True)
            ]
            far, usual = {peer for out, _ in judged for peer in out}, [after for _, after in judged]
        # No lie raises it: each is what it would be with this partner alone, and that is the lower of the two lengths.
        session.usual = max(usual)
        for meeting in came:
            if meeting.partner in far:
                session.refuse(meeting.partner, "norm")
        return tuple(
            Meeting(meeting.partner, reason="norm") if meeting.theirs and meeting.partner in far else meeting
            for meeting in meetings
        )

    async def _commit(self, read: Read, mine: list[Buffer], meetings: Sequence[Meeting], weight: int) -> Outcome:
        """Make the step, whole: whoever cancels `sync` on the way waits for it."""
        session, replica, circle = self._session, self._session.replica, self._session.current
        me, came = session.me, [meeting for meeting in meetings if meeting.theirs]
        entries = [Contribution(me, circle.attempt, weight)]
        entries += [Contribution(meeting.partner, meeting.attempt, meeting.weight) for meeting in came]
        entries.sort(key=lambda entry: entry.peer)
        members = tuple(entry.peer for entry in entries)
        await session.change(
            self._work,
            lambda: replica.step(
                read,
                mine,
                [meeting.theirs for meeting in came],
                session.grid,
                session.codec,
                members=members,
                pull=self._pull,
                place=members.index(me),
            ),
        )
        missing = {meeting.partner: meeting.reason for meeting in meetings if not meeting.theirs}
        # The record of a round that some have settled between them: it needs no votes.
        excluded = tuple(Exclusion(peer, reason) for peer, reason in missing.items())
        opened = Open(
            circle.round, 0, Ballot(0, me), members, members, tuple(entries), excluded, adopted=None, sources=()
        )
        await self._adopt()
        return Outcome(commit=Commit(opened, replica.digest, ()), missing=missing)

    async def _catch_up(self) -> bool:
        """Take over the state of a peer, if there is one for us."""
        fetched = await self._session.newer(self._work)
        if fetched is not None:
            await whole(self._take_over(fetched))
        return fetched is not None

    async def _take_over(self, fetched: Fetched) -> None:
        await self._session.install(fetched, self._work)
        await self._adopt()

    async def _adopt(self) -> None:
        session = self._session

        def begin() -> tuple[list[memoryview], bytes] | None:
            self._write(session.replica.theta)
            over = 0 < self._rounds <= session.replica.round
            return self._base() if self._travels and not over else None

        base = await self._work(begin)
        session.advance()
        if base is not None:
            session.post(*base)

    @property
    def _travels(self) -> bool:
        return self._session.codec.slow is not None

    def _base(self) -> tuple[list[memoryview], bytes]:
        """The slow weights, encoded, and the hashes of their chunks."""
        session = self._session
        payloads = list(session.replica.base(session.grid, session.codec))
        return payloads, b"".join(blake3.blake3(payload).digest() for payload in payloads)

    def _encode(self, read: Read) -> list[memoryview]:
        session = self._session
        return list(session.replica.offer(read, session.grid, session.codec))
