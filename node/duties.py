"""What a peer does beside training, whoever trains: exchange and book it, keep checkpoints, see that all is well, leave."""

from __future__ import annotations

import asyncio
import math
from collections.abc import Awaitable, Callable
from contextlib import suppress
from typing import ClassVar

from thinwire.collectives.outcome import Outcome
from thinwire.swarm.errors import HintedError
from thinwire.swarm.identity import Identity, short

from .chains import ChainedReplica
from .checkpoint import SaveFailed, SaveOutcome
from .peer import Peer
from .report import Reporter
from .snapshot import PrivateState

SAVE_SECONDS = 120.0
"""Time between checkpoints; the last round is always saved."""

LINGER_SECONDS = 10.0
"""How long the others are given to fetch the last round from us before we leave."""

LEAVE_SECONDS = 10.0
"""How long saying goodbye may take."""


class DuplicateKey(HintedError):
    """Another process is the same peer, and it came later."""

    exit_code: ClassVar[int] = 3


class Duties:
    """One peer's. Everything but `save` belongs to the loop's thread."""

    def __init__(self, peer: Peer, report: Reporter) -> None:
        self._peer, self._report, self._now = peer, report, peer.doors.now
        self._saved_at = self._now()
        self._apart = 0.0

    def train_on(self, meanwhile: Callable[[], Awaitable[None]]) -> None:
        """Let `meanwhile` train while an exchange is under way, once the peer is ready; the time it takes is not waited."""
        report = self._report

        async def apart() -> None:
            began = self._now()
            if report.phase == "exchanging":
                report.phase = "training"
            try:
                await meanwhile()
            finally:
                self._apart += self._now() - began
                if report.phase == "training":
                    report.phase = "exchanging"

        self._peer.rounds.meanwhile = apart

    def follow(self) -> None:
        """Follow the rounds of others while training, where the method does, and book them."""
        peer, report = self._peer, self._report

        def told(outcome: Outcome) -> None:
            report.round(peer, outcome, loss=report.loss, seconds=0.0, steps=0, weight=0)
            peer.drop_anchor()

        peer.rounds.follow(told)

    async def exchange(self, *, steps: int, weight: int, loss: float | None) -> tuple[Outcome, float]:
        """One round after `steps` inner steps on `weight` tokens or samples, see `Rounds.sync`; and the seconds of waiting."""
        peer, report, began, self._apart = self._peer, self._report, self._now(), 0.0
        before, report.phase = report.phase, "exchanging"
        try:
            capped = min(weight, peer.manifest.max_weight)
            told = loss if loss is not None and math.isfinite(loss) else 0.0  # a host may not have heard of any
            outcome = await peer.rounds.sync(weight=capped, loss=told, speed=report.speed)
        finally:
            if report.phase == "exchanging":  # and not "leaving" meanwhile
                report.phase = before
        seconds = self._now() - began - self._apart
        if outcome.commit is not None:
            report.book(peer, outcome, loss=loss, seconds=seconds, steps=steps)
            kept = weight - outcome.kept
            # What is told of a round has the digest of the state that it has left.
            peer.rounds.thereafter(
                lambda: report.round(peer, outcome, loss=loss, seconds=seconds, steps=steps, weight=kept)
            )
            peer.drop_anchor()
        elif not outcome.taken:
            report.uncommitted(peer)
        return outcome, seconds

    # --- checkpoints

    @property
    def save_due(self) -> bool:
        """Whether it is time for a checkpoint."""
        return self._now() > self._saved_at + SAVE_SECONDS

    def save(self, private: Callable[[], PrivateState | None]) -> SaveOutcome | None:
        """Write a checkpoint unless there is one of this state. Blocks for the disk: call it where computing is allowed, once
        rounds are settled.
        """
        peer = self._peer
        return peer.save(private()) if peer.ready and peer.replica.digest != peer.keep.digest else None

    def saved(self, outcome: SaveOutcome | None) -> None:
        """Book what `save` gave."""
        self._saved_at = self._now()
        if isinstance(outcome, SaveFailed):
            self._report.emit("alarm", {"detail": f"no checkpoint: {outcome.reason}"})
        elif outcome is not None:
            self._report.checkpoint = str(outcome.path)

    # --- the end

    async def trouble(self) -> BaseException:
        """Waits until this peer cannot go on, and gives the reason: its receiving failed, or its key is in use elsewhere."""
        running, presence = self._peer.running, self._peer.presence
        duplicate = asyncio.create_task(presence.duplicate.wait())
        try:
            await asyncio.wait((running, duplicate), return_when=asyncio.FIRST_COMPLETED)
        finally:
            duplicate.cancel()
        if not running.done():
            return duplicate_key(self._peer.identity)
        failure = None if running.cancelled() else running.exception()
        return failure or RuntimeError("the peer's presence has ended")

    async def linger(self) -> None:
        """Let the others get what they need from us."""
        if self._peer.ready:
            await self._peer.linger(LINGER_SECONDS)

    async def leave(self) -> None:
        """Say goodbye, close everything, and book it."""
        peer = self._peer
        with suppress(TimeoutError):
            async with asyncio.timeout(LEAVE_SECONDS):
                try:
                    if peer.ready:
                        await peer.rounds.settled()
                finally:
                    await peer.leave()
        if peer.ready:
            round, digest = peer.replica.newest
            fields: dict[str, object] = {"round": round, "digest": digest.hex()}
            if isinstance(peer.replica, ChainedReplica):
                fields["state"] = peer.replica.digest.hex()
                fields["fragments"] = {str(n): one.replica.digest.hex() for n, one in peer.replica.chains.items()}
            self._report.emit("left", fields)
        self._report.phase = "done"


def duplicate_key(identity: Identity) -> DuplicateKey:
    """The error for a peer whose key is in use elsewhere."""
    return DuplicateKey(
        f"another process uses the key of peer {short(identity.peer_id)}, and it came later",
        "give each daemon a key of its own, with --home DIR",
    )
