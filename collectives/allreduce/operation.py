"""One all-reduce operation outside training: the arrays of several peers are reduced to one.

Peers call an operation by a name and a number. The first caller has no group yet, so there are two phases. First the
callers find each other and agree on a group: see `rendezvous`. Then the operation is a round like any other with that
group as its members: see `group_round`. Later callers get the result without being members. A call fails unless more callers
have the same plan than have a different one.

Two groups can be named at once, if a leader dies at that moment, if links are missing, or if one member waits less long
than the others. A peer that has not voted changes to the larger group, or to a group that more than half of the other peers
name. A peer that has voted changes only to a group whose round more than half of the others have begun. A peer that has not
voted when its round must give up tries one other group that was begun. A result is always that of the contributors it names.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Collection
from dataclasses import dataclass, field

from thinwire.collectives.allreduce.group_round import LocalPart, group_round, key_of
from thinwire.collectives.allreduce.rendezvous import PeerContext, Rendezvous
from thinwire.collectives.consensus.members.quorum import enough
from thinwire.collectives.consensus.paxos import Agreement
from thinwire.collectives.outcome import Outcome
from thinwire.collectives.rounds.data_planes.contributions import ContributionSummary
from thinwire.collectives.rounds.round import Round
from thinwire.collectives.timing import GIVE_UP
from thinwire.collectives.transport.pending_frames import PendingFrames
from thinwire.swarm.frame import Frame
from thinwire.swarm.messages.registry import MAX_GROUP, Ask, AveragePlan, Call, NextNumber, PeerId, Ready

LOGGER = logging.getLogger(__name__)

UNABLE = 4
"""Patiences without progress after which a peer gives up a group of which no quorum is reachable."""


@dataclass(frozen=True, slots=True)
class OperationResult:
    """End of an operation: an outcome with a commit, or `failure`, the cause, with a `hint`.

    `missing`: peers that were present but are not in the result, each with a reason.
    """

    outcome: Outcome = field(default_factory=Outcome)
    missing: dict[PeerId, str] = field(default_factory=dict)
    failure: str = ""
    hint: str = ""


class Operation:
    """One peer's part in an operation.

    Pass it the events that `AllreduceService` routes; `ended` receives its result.

    - `fresh`: we are new to the name and do not know the next number.
    - `attempt`: number of our last announcement for this operation number, or a start value that is higher after each restart.
    - `grace`: seconds to wait for present peers that have not called.
    - `patience`: seconds without progress before a peer acts.
    """

    def __init__(
        self,
        context: PeerContext,
        name: str,
        number: int,
        plan: AveragePlan,
        share: LocalPart,
        *,
        fresh: bool,
        attempt: int,
        grace: float,
        patience: float,
    ) -> None:
        self.name, self.number, self.plan = name, number, plan
        self.ended: asyncio.Future[OperationResult] = asyncio.get_running_loop().create_future()
        self.ended_at, self.lowered = 0.0, 0
        """Time of the end, and number of times that the operation was given a lower number."""
        self.group: tuple[PeerId, ...] = ()
        self.current: Round | None = None
        self._context, self._share, self._fresh = context, share, fresh
        self._grace, self._patience = grace, patience
        self._callers = Rendezvous(context, plan, grace=grace, patience=patience)
        self._pending_frames = PendingFrames(4 * MAX_GROUP, 16)
        self._call_sent_at: dict[PeerId, float] = {}  # peers that received our call for this number, and when
        self._located: dict[PeerId, int] = {}  # number that each peer called when `locate` last answered it
        self._started = self._called_at = context.now()
        self._attempt, self._voter, self._voted = attempt, True, False
        self._withdrew: set[PeerId] = set()  # peers that withdrew from a group with us
        self._waiting: asyncio.Task[Outcome] | None = None

    @property
    def key(self) -> tuple[int, int]:
        """Round and fragment of its messages."""
        return key_of(self.name, self.number)

    @property
    def nbytes(self) -> int:
        """Bytes stored for the operation: our input, contributions of others, and the results."""
        own = sum(memoryview(payload).nbytes for payload in self._share.payloads)
        return own + (self.current.nbytes if self.current is not None else 0)

    @property
    def callers(self) -> Collection[PeerId]:
        """Other peers that have called."""
        return self._callers.calls.keys()

    @property
    def waited(self) -> float:
        """Seconds since the call."""
        return self._callers.waited

    def call(self) -> None:
        """Send our call to all present peers."""
        self._call_sent_at, self._located, self._called_at = {}, {}, self._context.now()
        for peer in sorted({*self._context.here(), *self._context.live} - {self._context.me}):
            self.answer(peer)

    def answer(self, peer: PeerId) -> None:
        """Send our call to one peer."""
        self._context.send_queue.control(peer, self._call())

    def locate(self, peer: PeerId, number: int) -> None:
        """Send our number and our call to a peer that calls another number, once for each of its numbers."""
        if peer not in self.callers and self._located.get(peer) != number:
            self._located[peer] = number
            self._call_sent_at[peer] = self._context.now()
            self._context.send_queue.control(peer, NextNumber(self.name, self.number, False))
            self.answer(peer)

    def renumber(self, number: int, attempt: int) -> None:
        """Change to the number of the others; only before the round has begun."""
        self.lowered += number < self.number
        self.number, self._fresh, self._attempt = number, False, attempt
        self._callers.clear()
        self._pending_frames.clear()

    async def wait(self) -> OperationResult:
        """Wait for the result. If cancelled, withdraw."""
        try:
            return await asyncio.shield(self.ended)
        except asyncio.CancelledError:
            self.withdraw()
            raise

    def withdraw(self) -> None:
        """Withdraw the call: the caller no longer waits."""
        self._give_up("the operation was cancelled")

    # --- events

    def on_call(self, peer: PeerId, call: Call) -> None:
        """Handle another peer's call of this operation."""
        begun, now = self.current is not None, self._context.now()
        if begun and not call.group:
            self.answer(peer)  # it is late
        if self.ended.done():
            return
        if not begun and now > self._call_sent_at.get(peer, self._called_at) + self._patience:
            self._call_sent_at[peer] = now
            self.answer(peer)  # the peer may have received our earlier call too soon
        if self._callers.on_message(peer, call):
            self._choose_group()

    def forget(self, peer: PeerId) -> None:
        """Handle a peer's withdrawal.

        If it is in our group but not in its round yet, it will not take part. As long as nothing was promised, we then
        look for another group, but only once for each peer: otherwise one peer could prevent every result.
        """
        current = self.current
        if current is None:
            self._callers.withdraw(peer)
        elif not (
            self.ended.done()
            or peer not in self.group
            or peer in self._withdrew
            or peer in current.agreement.ready
            or current.agreement.proposal is not None
            or current.agreement.acceptor.bound
        ):
            self._withdrew.add(peer)
            self._callers.withdraw(peer)
            self._callers.start_over()
            current.data_plane.halt()
            self._attempt, self.current, self.group = current.attempt, None, ()
            if self._waiting is not None:
                self._waiting.cancel()
            self.call()

    @property
    def announced(self) -> int:
        """Number of our last announcement; 0 if there was none."""
        if self.current is None:
            return self._attempt if self._withdrew else 0
        return self.current.attempt

    def on_frame(self, peer: PeerId, frame: Frame) -> None:
        """Handle a frame of the round."""
        if self.current is not None:
            self.current.on_frame(peer, frame)
        elif frame.signature:
            self._pending_frames.put(peer, frame)

    def on_link_up(self, peer: PeerId) -> None:
        """Handle a new link to `peer`."""
        if not self.ended.done():
            self.answer(peer)
        if self.current is not None:
            self.current.on_link_up(peer)

    def on_link_down(self, peer: PeerId) -> None:
        """Handle a broken link to `peer`."""
        self._call_sent_at.pop(peer, None)
        self._located.pop(peer, None)
        if self.current is not None:
            self._callers.calls.pop(peer, None)
            self.current.on_link_down(peer)
        else:
            self._callers.forget(peer)
            self._choose_group()

    def tick(self) -> None:
        """Let time pass."""
        now = self._context.now()
        if self.current is not None:
            self.current.tick()
            wait = GIVE_UP if self._able(self.current.agreement) else UNABLE
            if not self.ended.done() and now > max(self._started, self.current.progressed_at) + wait * self._patience:
                failure, hint = "no majority of the group is left and reachable", "call again with the present peers"
                # Each of the others may have begun another group, so that none of them is in more than half of the calls.
                if self._voter and not self._voted:
                    self._change_group(failure, hint)
                else:
                    self._fail(failure, hint)
        else:
            self._choose_group()

    def _able(self, agreement: Agreement) -> bool:
        """Return True if a quorum of the group is reachable.

        Members that have begun another group count as unreachable.
        """
        elsewhere = {
            peer for peer, call in self._callers.calls.items() if peer in call.group and call.group != self.group
        }
        here = agreement.electorate.live - agreement.electorate.nonvoters - elsewhere
        return enough(here, agreement.terms.members, fraction=agreement.terms.fraction)

    # --- choosing the group

    def _call(self) -> Call:
        return Call(self.name, self.number, self._fresh, self.plan, self.group)

    def _choose_group(self) -> None:
        """Join a group that others named, if it is acceptable, or name one."""
        if self.ended.done() or self._voted:
            return
        group = self._callers.named(self.group, begun=self.current is not None)
        if group is None:
            if self.current is None:
                self._name_group()
        elif group != self.group:
            self._join(group)

    def _name_group(self) -> None:
        if differ := self._callers.outvoted:
            self._fail(differ, "call with the same shapes, types, op and codec on all peers")
            return
        group = self._callers.own(self.key)
        if group:
            self._join(group)
        elif group is not None:
            self._give_up(
                f"{len(self._callers.all)} of at least {self.plan.least} peers have called within {self._grace:g} s",
                next(iter(self._callers.differing.values()), ""),
            )

    def _join(self, group: tuple[PeerId, ...]) -> None:
        context, (round, fragment) = self._context, self.key
        again = self.current is not None
        if self.current is not None:
            self.current.data_plane.halt()  # it must not vote any more
        self.group, self._started, self._voted = group, context.now(), False
        current = group_round(
            context,
            group,
            self.key,
            self.plan,
            self._share,
            patience=self._patience,
            voter=self._voter,
            attempt=self._attempt,
            on_phase=self._phase,
        )
        self.current = current
        self.call()
        self._wait(current)
        if again or context.me not in group or not self._voter:
            for peer in sorted(context.live):
                context.send_queue.control(peer, Ask(round, fragment, again=again))
        current.announce(
            self._share.payloads,
            weight=self._share.weight,
            loss=0.0,
            speed=0.0,
            summary=ContributionSummary(self._share.hashes),
        )
        self._attempt = current.attempt
        for peer, frame in self._pending_frames.take():
            message = frame.message
            if not (
                self._withdrew and isinstance(message, Ready) and message.base != current.agreement.terms.base
            ):  # messages of the abandoned group
                current.on_frame(peer, frame)

    def _phase(self, round: int, name: str) -> None:
        self._voted |= name == "vote"

    # --- completion

    def _wait(self, current: Round) -> None:
        if self._waiting is not None:
            self._waiting.cancel()
        self._waiting = asyncio.ensure_future(current.wait())
        self._waiting.add_done_callback(lambda task: self._on_outcome(current, task))

    def _on_outcome(self, current: Round, task: asyncio.Task[Outcome]) -> None:
        if task.cancelled() or self.current is not current or self.ended.done():
            return
        outcome = task.result()
        if outcome.commit is not None:
            self._end(OperationResult(outcome, self._absent(outcome)))
            return
        self._change_group("the other peers started the operation as another group", "call again")

    def _change_group(self, failure: str, hint: str) -> None:
        """Change to another group that was begun, without a vote, or fail if there is none."""
        other = self._callers.other(self.group)
        if other is None:
            self._fail(failure, hint)
            return
        self._voter = False  # promises made in the other group may have counted there
        self._join(other)

    def _absent(self, outcome: Outcome) -> dict[PeerId, str]:
        context, reasons = self._context, dict(outcome.missing)
        others = {*self.group, *context.here(), *reasons, *self._callers.differing}.difference(outcome.contributors)
        return {peer: self._reason(peer, reasons.get(peer, "")) for peer in sorted(others)}

    def _reason(self, peer: PeerId, reason: str) -> str:
        if peer in self._callers.differing:
            return self._callers.differing[peer]
        call = self._callers.calls.get(peer)
        if call is not None and call.group and self._context.me in set(self.group) - set(call.group):
            return "began without us"
        return reason or ("gone" if peer in self._context.gone else "late" if call is not None else "has not called")

    def _give_up(self, failure: str, hint: str = "") -> None:
        """Fail, and inform the other peers that we take no part."""
        if not self.ended.done() and self.current is None:
            for peer in sorted(self._context.live):
                self._context.send_queue.control(peer, NextNumber(self.name, self.number + 1, True))
        self._fail(failure, hint)

    def on_error(self, error: Exception) -> None:
        """Fail because of a local error, which must not end other operations or the peer."""
        LOGGER.error("average %r number %d", self.name, self.number, exc_info=error)
        self._fail(f"internal error: {type(error).__name__}: {error}", "please report this error with the log file")

    def _fail(self, failure: str, hint: str = "") -> None:
        self._end(OperationResult(failure=failure, hint=hint))
        if self.current is not None:
            self.current.data_plane.halt()
        if self._waiting is not None:
            self._waiting.cancel()

    def _end(self, ended: OperationResult) -> None:
        if not self.ended.done():
            self.ended.set_result(ended)
            self.ended_at = self._context.now()
