"""Peer of several processes: the first rank is connected to the swarm, and all take the same steps."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable
from dataclasses import replace
from typing import TYPE_CHECKING

import msgspec
from thinwire.node.api.background_peer import BackgroundPeer
from thinwire.node.api.exchange import RoundReport
from thinwire.node.api.ranks import GroupError, Ranks
from thinwire.node.runtime.loop_thread import SwarmError
from thinwire.swarm.manifest.manifest import Manifest
from thinwire.swarm.manifest.parser import parse

if TYPE_CHECKING:
    from thinwire.node.api.rank_parameters import GroupAccess


class _State(msgspec.Struct):
    """State of the first rank's peer at the beginning of a step, equal on all ranks until the next one."""

    round: int = 0
    done: bool = False
    gathers: bool = False
    under_way: bool = False
    overlap: int = 0
    steps: int = 0
    overtaken: bool = False
    steps_before: int = 0


class _Ended(msgspec.Struct):
    """Outcome of a call of the first rank: report, whether the model was set, and the state after it."""

    report: RoundReport | None
    written: bool
    state: _State


class GroupPeer:
    """Interface of BackgroundPeer for a training loop that runs on several ranks.

    `make` creates the peer, on the first rank only. All ranks call `open`, `take_up`, `refresh`, `exchange`, `begin`,
    `finish` and `gather` in the same order. The properties are those of the last of these calls.
    """

    manifest: Manifest

    def __init__(self, ranks: Ranks, make: Callable[[], BackgroundPeer]) -> None:
        self.ranks, self._make = ranks, make
        self._leader: BackgroundPeer | None = None
        self._access: GroupAccess | None = None
        self._state, self._sent, self._closed = _State(), (0, 0), False
        self.last: RoundReport | None = None
        self.reports: deque[RoundReport] = deque(maxlen=1024)

    @property
    def leader(self) -> BackgroundPeer:
        """The peer. Raises GroupError on other ranks than the first."""
        if self._leader is None:
            raise GroupError(
                "only the first rank of the group is connected to the swarm",
                "call this on rank 0 of the group only, and share the result with torch.distributed",
            )
        return self._leader

    @property
    def leads(self) -> bool:
        """True on the first rank, once it has a peer."""
        return self._leader is not None

    def open(self) -> None:
        """Open the transport and find the run, on the first rank.

        Raises its errors there, GroupError on the others.
        """
        toml = self.ranks.lead(self._open)
        self.manifest = parse(toml, "the swarm's manifest")

    def _open(self) -> str:
        self._leader = self._make()
        self._leader.open()
        return self._leader.peer.admission.known.signed.toml.decode()

    def take_up(self, make: Callable[[], GroupAccess]) -> None:
        """Become a member with a model, which then has the swarm's parameters on all ranks.

        Raises GroupError if the ranks have models of different layouts, or `make` raises an exception on another rank.
        """
        made: list[GroupAccess] = []

        def digest() -> bytes:
            made.append(make())
            return made[0].layout.digest

        if len(set(self.ranks.each(digest))) > 1:
            raise GroupError(
                "the ranks of the group have different models",
                "give `Swarm.wrap` a model of the same names, shapes and types on every rank",
            )
        self._access = access = made[0]
        first = access.first()

        def become() -> _State:
            self.leader.take_up(
                access.layout,
                first,
                read=access.read,
                write=access.write,
                synchronize=access.synchronize,
                private=lambda: None,
                devices=access.devices,
            )
            return self._look()

        self._state = msgspec.convert(self.ranks.lead(lambda: msgspec.to_builtins(become())), _State)
        access.spread()

    def _look(self) -> _State:
        one = self.leader
        turn = one.under_way, one.overlap, one.steps, one.overtaken
        return _State(one.round, one.done, one.gathers, *turn, one.steps_before)

    def refresh(self) -> None:
        """Take over the first rank's state, at the beginning of a step. Raises its failures, on all ranks."""
        self._check_open()

        def look() -> _State:
            self.leader.check()
            return self._look()

        self._state = msgspec.convert(self.ranks.lead(lambda: msgspec.to_builtins(look())), _State)

    def exchange(self, *, steps: int, weight: int, loss: float | None = None) -> RoundReport:
        """Run one round with the parameters of all ranks, and the sum of their weights."""
        report = self._together(
            weight, loss, lambda one, total, mean: one.exchange(steps=steps, weight=total, loss=mean)
        )
        assert report is not None
        return report

    def begin(self, *, steps: int, weight: int, loss: float | None = None) -> RoundReport | None:
        """Start an exchange, see BackgroundPeer."""
        return self._together(weight, loss, lambda one, total, mean: one.begin(steps=steps, weight=total, loss=mean))

    def finish(self) -> RoundReport:
        """Finish an exchange, see BackgroundPeer."""
        report = self._together(None, None, lambda one, total, mean: one.finish())
        assert report is not None
        return report

    def gather(self) -> RoundReport:
        """Run the round that makes the present peers members."""
        report = self._together(0, None, lambda one, total, mean: one.gather())
        assert report is not None
        return report

    def _together(
        self,
        weight: int | None,
        loss: float | None,
        run: Callable[[BackgroundPeer, int, float | None], RoundReport | None],
    ) -> RoundReport | None:
        """Call the peer on the first rank; return the report, with the weights of this rank.

        Before the call, the first rank gets the parameters of all ranks; after it, all ranks get the parameters that the
        peer has set. weight: that of this rank; None in the second half of an exchange.
        """
        access = self._access
        assert access is not None, "take_up comes first"
        mean = None
        if weight is not None:
            total, mean = self.ranks.total(weight, loss)
            self._sent = weight, total
        access.collect()

        def ended() -> _Ended:
            report = run(self.leader, self._sent[1], mean)
            return _Ended(report, access.written, self._look())

        outcome = msgspec.convert(self.ranks.lead(lambda: msgspec.to_builtins(ended())), _Ended)
        if outcome.written:
            access.spread()
        self._state, report = outcome.state, outcome.report
        if report is not None:
            own, total = self._sent
            report = replace(report, weight=own, kept=report.kept * own // total if total else 0)
            self.last = report
            self.reports.append(report)
        return report

    @property
    def round(self) -> int:
        """The last committed round."""
        return self._state.round

    @property
    def done(self) -> bool:
        """True if the run has had all its rounds, the same on all ranks.

        The next step raises background failures.
        """
        self._check_open()
        return self._state.done

    @property
    def gathers(self) -> bool:
        """True if the next round only makes the present peers members, see BackgroundPeer."""
        return self._state.gathers

    @property
    def under_way(self) -> bool:
        """True while an exchange is in progress."""
        return self._state.under_way

    @property
    def overlap(self) -> int:
        """Inner steps to make while an exchange is in progress, see BackgroundPeer."""
        return self._state.overlap

    @property
    def steps(self) -> int:
        """Inner steps of the next round, see BackgroundPeer."""
        return self._state.steps

    @property
    def overtaken(self) -> bool:
        """True if the others have committed the round in progress without us."""
        return self._state.overtaken

    @property
    def steps_before(self) -> int:
        """Inner steps of a peer in all rounds up to now, see BackgroundPeer."""
        return self._state.steps_before

    def check(self) -> None:
        """Raise a background failure, on the first rank; SwarmError on all after `close`."""
        if self._leader is not None:
            self._leader.check()
        self._check_open()

    def _check_open(self) -> None:
        if self._closed:
            raise SwarmError("this peer has left the swarm", "call thinwire.join again to continue")

    def close(self) -> None:
        """End the peer of the first rank."""
        self._closed = True
        if self._leader is not None:
            self._leader.close()
