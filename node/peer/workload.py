"""Inner steps and data of one peer for its next round."""

from __future__ import annotations

from thinwire.node.outer.round_loop import RoundLoop
from thinwire.node.outer.session import Session
from thinwire.node.state.data_ledger import DataLease
from thinwire.node.state.replica import Replica
from thinwire.node.training.learner import WorkShare
from thinwire.node.training.step_balancing import FRESH, steps_by_power
from thinwire.swarm.manifest.manifest import Manifest
from thinwire.swarm.messages.registry import PeerId


class Workload:
    """Work of the peer `me` before its next round: how many inner steps, and on which data.

    Follows from the manifest, the state of the replica, and the peers that the session knows.
    """

    def __init__(
        self, manifest: Manifest, me: PeerId, *, replica: Replica, session: Session, rounds: RoundLoop
    ) -> None:
        self._manifest, self._me = manifest, me
        self._replica, self._session, self._rounds = replica, session, rounds

    def steps(self, speed: float) -> int:
        """Return the inner steps of the next round at a speed in tokens/s; 0 if that is unknown."""
        outer = self._manifest.outer
        if self.gathers:
            return 0
        if outer.step_ratio == 1.0:
            pace = self._manifest.pace - self._rounds.next_cut
            # Members do not wait for peers on trial, so these announce early; their training does not count.
            return (pace + 1) // 2 if self._rounds.on_trial else pace
        oldest = self._replica.round - FRESH
        others = [one.speed for one in list(self._session.announced.values()) if one.round > oldest]
        return steps_by_power(speed, others, outer.sync_every, outer.step_ratio)

    @property
    def overlap(self) -> int:
        """Inner steps to make while an exchange is in progress."""
        return min(self._manifest.overlap, self._manifest.pace - self._rounds.next_cut)

    @property
    def gathers(self) -> bool:
        """True if the next round only makes the present peers members, so that the merge waits for them."""
        return self._manifest.outer.gathers_first and not self._replica.round

    @property
    def idle_weight(self) -> int:
        """Weight of a contribution without training: one token if the round would otherwise have no tokens.

        That is the round that only gathers peers, and, if only some peers may train, the round of others after these
        are gone.
        """
        if self.gathers or self._replica.ledger is None:
            return int(self.gathers)
        peers = self._session.roster.peers
        return int(not any(peer == self._me or peers.is_live(peer) for peer in self._replica.leaseholders))

    def over(self, rounds: int) -> bool:
        """Return True if this number of rounds is complete.

        A peer with some fragments also makes the steps of the other fragments' last rounds.
        """
        return self._replica.round >= rounds and (self._replica.complete or self._rounds.turn >= rounds)

    def share(self, made: int) -> WorkShare:
        """Return this peer's share of the next round, of which it has already made this number of inner steps."""
        step = self._manifest.steps_after(self._rounds.turn) + made
        return WorkShare(self._group(), self._me, self._replica.round, self._lease(), step, self._rounds.on_trial)

    def _group(self) -> tuple[PeerId, ...]:
        """Return the peers that share the data: the members; before this peer is one, all present peers.

        Before the first round the founder is the only member, but it must not take all shards. Peers on trial have other data,
        and their keys are free: they would leave no shards to others.
        """
        replica = self._replica
        # Peers that hold a later stage of the model do not need data: the first stage has all others.
        members = replica.members_of(0) if self._manifest.pipeline.stages else replica.members
        # In gossip runs the members are those of a pair.
        settled = replica.alike and replica.round > 0 and self._me in members
        if settled:
            return members
        roster = self._session.roster
        present, sharing = roster.peers.view.peers, {self._me, *members}
        if not self._manifest.admission.trial:
            return present
        return tuple(peer for peer in present if peer in sharing or not roster.on_trial(peer))

    def _lease(self) -> DataLease | None:
        """Return our data for the next round; None without a data ledger."""
        replica, inner = self._replica, self._manifest.inner
        if replica.ledger is None:
            return None
        samples, members = inner.batch * inner.accumulate, replica.leaseholders
        if inner.global_batch and self._me in members:
            share, larger = divmod(inner.global_batch, len(members))
            samples = share + (members.index(self._me) < larger)
        return replica.ledger.lease(members, self._me, replica.round, samples)
