"""Mistakes of the kinds that such systems have had, put into the product from outside. Test-only: ten for test_planted.py, and
four in runs of pairs for test_gossip.py.

Each function takes a pytest MonkeyPatch and plants one mistake.
"""

from __future__ import annotations

from dataclasses import replace

import numpy as np
from thinwire.collectives.agreement import Agreement
from thinwire.collectives.contributions import Contributions
from thinwire.collectives.exchange import Exchange
from thinwire.collectives.reducer import Reducer
from thinwire.collectives.series import Series
from thinwire.node.life import Life
from thinwire.node.paired import PairedReplica
from thinwire.node.rounds import Rounds
from thinwire.node.session import Session
from thinwire.sims.machine import Clocks
from thinwire.sims.network import EPOCH
from thinwire.swarm.protocol import Commit
from thinwire.swarm.roster import Roster


def apply_before_commit(patch):
    """Who holds every result applies them, without waiting for the verdict."""
    complete = Agreement.complete

    def hasty(self, digest, now):
        complete(self, digest, now)
        if self.commit is None and self.opened is not None:
            self.commit = Commit(self.opened, digest, ())

    patch.setattr(Agreement, "complete", hasty)


def residual_not_rolled_back(patch):
    """A round that is not committed leaves its tokens spent, as if they had been sent."""
    one = Life._round

    async def round(self, learner):
        committed = await one(self, learner)
        self._tokens = 0
        return committed

    patch.setattr(Life, "_round", round)


def timers_before_draining(patch):
    """After a stall whoever was not heard of in it has failed: judged at once, with the answers unread."""
    tick = Roster.tick

    def strict(self, now):
        lag = now - self._gossip_at
        self._gossip_at = max(self._gossip_at, now - self.preset.lag_limit)
        letters = tick(self, now)
        if lag > self.preset.lag_limit:
            for peer in self._members.live():
                self._members.failed(peer, now)
            for member in self._members._suspects.values():
                member.suspicion.start -= lag
        return letters

    patch.setattr(Roster, "tick", strict)


def arrival_order(patch):
    """Contributions are added up in the order in which they came."""

    def of(self, contributors, index):
        named = {(entry.peer, entry.attempt) for entry in contributors}
        found = [chunks[index] for key, chunks in self._held.items() if key in named and index in chunks]
        return found if len(found) == len(named) else None

    patch.setattr(Contributions, "of", of)


def double_apply_after_heal(patch):
    """A round that took more than one ballot is applied by the first and by the second."""
    commit = Rounds._commit

    async def twice(self, outcome, verdict):
        replica = self._session.replica
        if verdict.opened.ballot.term > 1:
            outer = self._outer
            replica.apply(
                outcome.results,
                self._session.grid,
                self._session.codec,
                members=replica.members,
                lr=outer.lr,
                momentum=outer.momentum,
                nesterov=outer.nesterov,
            )
            replica.round -= 1
        await commit(self, outcome, verdict)

    patch.setattr(Rounds, "_commit", twice)


def stale_view(patch):
    """Quorums are counted by the roster's view of the moment, and not by the members of the last round."""
    next_round = Session._next_round

    def local(self, *rest):
        members, self.replica.members = self.replica.members, self.roster.view.peers
        try:
            return next_round(self, *rest)
        finally:
            self.replica.members = members

    patch.setattr(Session, "_next_round", local)


def lost_wake_up(patch):
    """Nobody is woken when the owner of a chunk dies: who waits for its result waits on."""
    due = Agreement._due
    patch.setattr(Agreement, "lost", lambda self, peer, now, *, gone: None)
    patch.setattr(Agreement, "_due", lambda self, now: None if self.opened is not None else due(self, now))
    patch.setattr(Exchange, "culprit", lambda self, opened: None)


def chunk_counted_twice(patch):
    """The last chunk that came is added once when it comes and once when the sum is made."""
    result = Reducer.result

    def again(self, payloads, weights, size):
        return result(self, [*payloads, payloads[-1]], [*weights, weights[-1]], size)

    patch.setattr(Reducer, "result", again)


def weight_from_the_wire(patch):
    """What a contributor says of its tokens is believed."""
    begin = Series.begin
    patch.setattr(
        Series, "begin", lambda self, terms, *a, **k: begin(self, replace(terms, max_weight=2**53 - 1), *a, **k)
    )


def clock_jump(patch):
    """Time-outs are measured with the clock on the wall."""
    now = Clocks.now
    patch.setattr(Clocks, "now", lambda self: now(self) + self.jump)
    patch.setattr(Clocks, "wall", lambda self: EPOCH + self.now())


PLANTED = [
    apply_before_commit,
    residual_not_rolled_back,
    timers_before_draining,
    arrival_order,
    double_apply_after_heal,
    stale_view,
    lost_wake_up,
    chunk_counted_twice,
    weight_from_the_wire,
    clock_jump,
]


def partner_counted_twice(patch):
    """What the partner sent is in the mean two times."""
    step = PairedReplica.step
    patch.setattr(
        PairedReplica,
        "step",
        lambda self, read, mine, others, *a, **k: step(self, read, mine, [*others, *others], *a, **k),
    )


def error_feedback_dropped(patch):
    """What the codec leaves out is forgotten."""
    step = PairedReplica.step

    def forgetful(self, *a, **k):
        step(self, *a, **k)
        self.residual = np.zeros_like(self.residual)

    patch.setattr(PairedReplica, "step", forgetful)


def pull_left_out(patch):
    """Partners average their steps, and nothing draws them together."""
    step = PairedReplica.step

    def loose(self, *a, pull, **k):
        step(self, *a, pull=replace(pull, gamma=0.0), **k)

    patch.setattr(PairedReplica, "step", loose)


def pulled_from_the_exact_place(patch):
    """Each is drawn from where it is, and not from where the other was told that it is: the pulls do not cancel."""
    step = PairedReplica.step

    def exact(self, read, mine, others, grid, halves, *, members, pull, place):
        before = self.theta.copy()
        step(self, read, mine, others, grid, halves, members=members, pull=pull, place=place)
        if others and halves.slow is not None:
            for index in range(len(grid)):
                start, stop = grid.span(index)
                told = np.empty(stop - start, np.float32)
                halves.slow.decode(mine[len(grid) + index], told)
                moved = np.float32(pull.gamma) * (told - before[start:stop]) / 2
                self.momentum[start:stop] += moved
                self.theta[start:stop] += moved
            self.seal()

    patch.setattr(PairedReplica, "step", exact)


PLANTED_IN_PAIRS = [partner_counted_twice, error_feedback_dropped, pull_left_out, pulled_from_the_exact_place]
