"""Typical bugs that tests patch into the product: ten for test_planted_bugs.py, nine for test_noloco.py.

Each function takes a pytest MonkeyPatch and plants one bug.
"""

from __future__ import annotations

from dataclasses import replace

import numpy as np
from thinwire.collectives.consensus.paxos import Agreement
from thinwire.collectives.consensus.turn import Turn
from thinwire.collectives.gossip.means import MeshMeans
from thinwire.collectives.gossip.owner_pair import OwnerPair
from thinwire.collectives.gossip.pair_codec import PairCodec
from thinwire.collectives.rounds.data_planes.butterfly import Butterfly
from thinwire.collectives.rounds.data_planes.contributions import Contributions
from thinwire.collectives.rounds.data_planes.owner_results import Reducer
from thinwire.collectives.rounds.round_factory import RoundFactory
from thinwire.compression.sparse.flat import FlatSparse
from thinwire.node.methods.noloco.replica import GossipReplica
from thinwire.node.outer.round_starter import RoundStarter
from thinwire.node.peer.lifecycle import PeerLifecycle
from thinwire.node.state.replica import Replica
from thinwire.sims.network.network import EPOCH
from thinwire.sims.peers.machine import MachineClocks
from thinwire.swarm.membership.swim import Roster
from thinwire.swarm.messages.registry import Commit


def apply_before_commit(patch):
    """A peer with every result applies them without waiting for the commit."""
    complete = Agreement.complete

    def hasty(self, digest, now):
        complete(self, digest, now)
        if self.commit is None and self.proposal is not None:
            self.decision.commit = Commit(self.proposal, digest, ())

    patch.setattr(Agreement, "complete", hasty)


def residual_not_rolled_back(patch):
    """After a round without commit its tokens stay spent, as if they had been sent."""
    one = PeerLifecycle._round

    async def round(self, learner):
        committed = await one(self, learner)
        self._tokens = 0
        return committed

    patch.setattr(PeerLifecycle, "_round", round)


def timers_before_draining(patch):
    """After a stall, silent peers are judged at once, before their answers are read."""
    tick = Roster.tick

    def strict(self, now):
        lag = now - self._gossip_at
        self._gossip_at = max(self._gossip_at, now - self.preset.lag_limit)
        messages = tick(self, now)
        if lag > self.preset.lag_limit:
            for peer in self.peers.others:
                self._transitions.on_probe_failed(peer, now)
            self._transitions.shift(-lag, now)
        return messages

    patch.setattr(Roster, "tick", strict)


def arrival_order(patch):
    """Contributions are added up in the order in which they came."""

    def of(self, contributors, index):
        named = {entry.key for entry in contributors}
        found = [chunks[index] for key, chunks in self._held.items() if key in named and index in chunks]
        return found if len(found) == len(named) else None

    patch.setattr(Contributions, "of", of)


def double_apply_after_heal(patch):
    """A round with several ballots is applied by the first and by the second."""
    commit = Replica.commit

    def twice(self, outcome, me, since=None):
        if outcome.commit.proposal.ballot.term > 1:
            members = self.members
            commit(self, outcome, me, since)
            self.round, self.members = self.round - 1, members
        return commit(self, outcome, me, since)

    patch.setattr(Replica, "commit", twice)


def stale_view(patch):
    """Quorums are counted by the roster's view of the moment, and not by the members of the last round."""
    start = RoundStarter.start

    def local(self, *rest):
        members, self.replica.members = self.replica.members, self.presence.roster.peers.view.peers
        try:
            return start(self, *rest)
        finally:
            self.replica.members = members

    patch.setattr(RoundStarter, "start", local)


def lost_wake_up(patch):
    """No peer is woken when the owner of a chunk dies: those that wait for its result wait forever."""
    has_come = Turn.has_come
    patch.setattr(Agreement, "on_link_down", lambda self, peer, now: None)
    patch.setattr(Turn, "has_come", lambda self, proposal, *rest: proposal is None and has_come(self, proposal, *rest))
    patch.setattr(Butterfly, "culprit", lambda self, proposal: None)


def chunk_counted_twice(patch):
    """The last chunk is added twice: when it arrives, and when the sum is made."""
    result = Reducer.result

    def again(self, payloads, weights, size):
        return result(self, [*payloads, payloads[-1]], [*weights, weights[-1]], size)

    patch.setattr(Reducer, "result", again)


def weight_from_the_wire(patch):
    """The token count that a contributor announces is used without a check."""
    begin = RoundFactory.begin
    patch.setattr(
        RoundFactory, "begin", lambda self, terms, *a, **k: begin(self, replace(terms, max_weight=2**53 - 1), *a, **k)
    )


def clock_jump(patch):
    """Time-outs are measured with the clock on the wall."""
    now = MachineClocks.now
    patch.setattr(MachineClocks, "now", lambda self: now(self) + self.jump)
    patch.setattr(MachineClocks, "wall", lambda self: EPOCH + self.now())


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
    """The contribution of the partner is in the mean twice."""
    init = MeshMeans.__init__

    def twice(self, payloads, place, grid, codecs, round):
        others = [payload for at, payload in enumerate(payloads) if at != place]
        init(self, [*payloads, *others], place, grid, codecs, round)

    patch.setattr(MeshMeans, "__init__", twice)


def error_feedback_dropped(patch):
    """The part of a vector that the codec loses is dropped."""
    step = GossipReplica.step

    def forgetful(self, *a, **k):
        step(self, *a, **k)
        self.residual = np.zeros_like(self.residual)

    patch.setattr(GossipReplica, "step", forgetful)


def pull_left_out(patch):
    """Partners average their steps, and nothing draws them together."""
    step = GossipReplica.step

    def loose(self, *a, pull, **k):
        step(self, *a, pull=replace(pull, gamma=0.0), **k)

    patch.setattr(GossipReplica, "step", loose)


def pulled_from_the_exact_place(patch):
    """Each replica is pulled from its exact place, not from the announced one: the pulls do not cancel."""
    step = GossipReplica.step

    def exact(self, read, mine, means, grid, codecs, *, members, pull):
        before = self.theta.copy()
        step(self, read, mine, means, grid, codecs, members=members, pull=pull)
        if means is not None and codecs.slow is not None:
            for place, index in enumerate(codecs.mixed(grid, self.round)):
                start, stop = grid.span(index)
                told = np.empty(stop - start, np.float32)
                codecs.slow.decode(mine[len(grid) + place], told)
                moved = np.float32(pull.gamma) * (told - before[start:stop]) / 2
                self.momentum[start:stop] += moved
                self.theta[start:stop] += moved
            self.seal()

    patch.setattr(GossipReplica, "step", exact)


def mean_of_another_member(patch):
    """Owners send to all members what is meant for the first one."""
    send_mean, first = OwnerPair.send_mean, {}
    patch.setattr(
        OwnerPair,
        "send_mean",
        lambda self, number, payload: send_mean(self, number, first.setdefault((self.round, number), payload)),
    )


def residual_lost_at_restart(patch):
    """A restarted peer has no residual."""
    patch.setattr(GossipReplica, "load_private", lambda self, tensors, layout: "")


def residual_of_restart_not_decayed(patch):
    """A restarted peer has a residual that is too large."""
    load = GossipReplica.load_private

    def larger(self, tensors, layout):
        return load(self, {name: tensor / np.float32(0.95) for name, tensor in tensors.items()}, layout)

    patch.setattr(GossipReplica, "load_private", larger)


def residual_kept_with_another_state(patch):
    """A peer that takes over the state of another peer keeps its residual."""
    install = GossipReplica.install

    def keep(self, fetched):
        residual = self.residual
        changed = install(self, fetched)
        self.residual = residual
        return changed

    patch.setattr(GossipReplica, "install", keep)


def residual_carried_whole(patch):
    """The residual does not decay."""
    step = GossipReplica.step
    patch.setattr(
        GossipReplica, "step", lambda self, *a, pull, **k: step(self, *a, pull=replace(pull, residual_decay=1.0), **k)
    )


def first_part_in_every_round(patch):
    """All peers mix the first part of the slow weights in every round, and the others never."""
    mixed = PairCodec.mixed
    patch.setattr(PairCodec, "mixed", lambda self, grid, round: mixed(self, grid, 0))


def sparse_contribution_left_out(patch):
    """In large groups a member leaves the last sparse contribution out of its mean."""
    init = MeshMeans.__init__

    def fewer(self, payloads, *rest):
        init(self, payloads[:-1] if len(payloads) > 8 else payloads, *rest)

    patch.setattr(MeshMeans, "__init__", fewer)


def sparse_mean_over_all_members(patch):
    """A value of a sparse contribution is divided by all members, also by those that have not sent it."""

    def mean(self, payloads, out):
        one, total = np.empty_like(out), np.zeros_like(out)
        for payload in payloads:
            self.decode(payload, one)
            total += one
        out[:] = total / len(payloads)

    patch.setattr(FlatSparse, "mean", mean)


PLANTED_IN_PAIRS = [partner_counted_twice, error_feedback_dropped, pull_left_out, pulled_from_the_exact_place]
