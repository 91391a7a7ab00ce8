"""Start of the rounds of one peer: their common settings, and the terms of the next one."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

import blake3
import msgspec
from thinwire.collectives.consensus.members.terms import RoundTerms
from thinwire.collectives.consensus.members.vote_store import VoteStore
from thinwire.collectives.health.straggler_grace import StragglerGrace
from thinwire.collectives.rounds.data_plane_factory import DataPlaneFactory, DataPlaneSpec
from thinwire.collectives.rounds.data_planes.allgather.payload_pieces import max_contributors
from thinwire.collectives.rounds.round import LinkReport, Round
from thinwire.collectives.rounds.round_factory import RoundFactory
from thinwire.collectives.topology.peer_backoff import PeerBackoff
from thinwire.collectives.transport.pending_frames import PendingFrames
from thinwire.node.outer.own_lineage import check_votes
from thinwire.node.outer.session import SessionContext
from thinwire.node.outer.verification.session_standing import SessionStanding
from thinwire.node.outer.verification.verification import Verification
from thinwire.node.state.replica import Replica
from thinwire.swarm.keyring import Keyring
from thinwire.swarm.messages.registry import MAX_GROUP, PeerId


class RoundStarter:
    """Starts the rounds of one `fragment` by the manifest, the replica and the lateness of members.

    `votes`: memory of our votes. `on_phase`, `pending_frames`: see RoundFactory. `paced`: see PeerStanding.
    """

    def __init__(
        self,
        context: SessionContext,
        replica: Replica,
        fragment: int,
        *,
        votes: VoteStore,
        on_phase: Callable[[int, str], None],
        pending_frames: PendingFrames | None,
        paced: Callable[[PeerId, int], bool],
    ) -> None:
        identity, manifest, run_id, presence = context.identity, context.manifest, context.run_id, context.presence
        exchange, cut = manifest.exchange, replica.plan_grid
        self._manifest, self.presence, self.replica, self._fragment = manifest, presence, replica, fragment
        self._me, self._votes, self._now = identity.peer_id, votes, context.now
        self._members: frozenset[PeerId] = frozenset()
        backoff = PeerBackoff()
        self.verification = Verification(
            identity,
            manifest,
            run_id,
            replica=replica,
            presence=presence,
            fragment=fragment,
            backoff=backoff,
            emit=context.emit,
        )
        by_bandwidth = exchange.chunk_assignment == "bandwidth"
        spec = DataPlaneSpec(
            codec=replica.codec,
            rule=exchange.rule,
            collective=exchange.collective,
            topology=exchange.topology,
            by_bandwidth=by_bandwidth,
            audited=manifest.audited,
        )
        planes = DataPlaneFactory(
            spec,
            run_id,
            send_queue=presence.send_queue,
            now=context.now,
            owner_residuals=replica.owner_residuals,
            aside=presence.aside,
            pool=replica.pool,
        )
        keyring = Keyring(identity, run_id, presence.roster.peers.key_of)
        slow_own, trials = exchange.slow_peers != "no-ownership", self.verification.trials
        links = LinkReport(presence.site, spans=presence.spans)
        self.factory = RoundFactory(
            keyring,
            planes,
            live=presence.live,
            patience=context.patience,
            links=replace(links, rates=presence.send_queue.bandwidth.end_round) if by_bandwidth else links,
            standing=SessionStanding(keyring, presence, trials, slow_own=slow_own, paced=paced),
            on_phase=on_phase,
            pending_frames=pending_frames,
            peer_backoff=backoff,
        )
        self.straggler_grace = StragglerGrace(
            exchange.timeout_seconds, auto=exchange.straggler_timeout == "auto", fraction=manifest.quorum
        )
        self.ahead = False
        """True if our votes show that this peer has been further than its state."""
        self._plan = blake3.blake3(
            msgspec.msgpack.encode([replica.layout, replica.codec.spec, cut.total, cut.chunk, exchange.rule])
        ).digest()

    def start(self, attempt: int, last: Round | None = None) -> Round:
        """Start the round after the state of the replica.

        `attempt`: number of our last announcement. `last`: the round before, or the same round, that ends now.
        """
        audits = self.verification.audits
        audits.lift_verdicts()
        if last is not None and last.complete and last.round == self.replica.round:
            audits.begin(last)
        replica, exchange, limit = self.replica, self._manifest.exchange, self.straggler_grace.limit
        if last is not None and self.presence.watch is not None:
            self.presence.watch.contributed(last.data_plane.ratios, last.round, fragment=self._fragment)
        terms = RoundTerms(
            replica.round + 1,
            self._fragment,
            replica.members,
            replica.digest,
            self._plan,
            fraction=self._manifest.quorum,
            min_peers=exchange.min_peers,
            max_weight=self._manifest.max_weight,
            max_contributors=max_contributors(replica.grid) if exchange.collective == "all-gather" else MAX_GROUP,
            grace=limit,
            limit=limit,
            graces=self._graces(last),
            buffered=replica.asynchronous,
            lives=replica.known_lives,
            lineage=replica.lineage,
        )
        terms = replica.terms(terms)
        further = check_votes(replica, self._votes, self._me)
        self.ahead = further or (self.ahead and not replica.round)
        return self.factory.begin(terms, replica.grid, store=self._votes, attempt=attempt, turn=replica.phase)

    def _graces(self, last: Round | None) -> dict[PeerId, float]:
        """Return the graces of members and applicants in a round that begins now, if this peer opens it.

        An applicant has announced a contribution too late for the last round: a newcomer gets the results after the members,
        so it may be too late in each round. The round waits for it as for a member, unless it is on trial. Members
        without a grace have the configured one. An asynchronous round takes the members that are ready, so the others are not
        late. It does not wait for members that were not there in the last round, and stayed members (`Electorate.retained`):
        those that are back announce themselves at once, while the others make their inner steps.
        """
        replica, live = self.replica, self.presence.live
        commit = last.agreement.commit if last is not None else None
        present = commit.proposal.alive if commit is not None else ()
        gone = set(replica.members).difference(present) if replica.asynchronous and present else ()
        absent = dict.fromkeys(gone, 0.0)
        if replica.asynchronous and self._manifest.exchange.straggler_timeout != "auto":
            return absent
        here = [peer for peer in replica.members if peer in live or peer == self._me]
        here += self._applicants(last)
        attended = self.straggler_grace.begin(replica.round + 1, here, self._now(), present=present)
        # `attended` is about the round before: a member that was late in it may be none now.
        members, self._members = self._members, frozenset(replica.members)
        others = [one for one in attended if one.peer != self._me and one.peer in members]
        if others and self.presence.watch is not None:
            self.presence.watch.attended(others, fragment=self._fragment)
        return {**self.straggler_grace.graces(), **absent}

    def _applicants(self, last: Round | None) -> list[PeerId]:
        """Return the newcomers that this round waits for."""
        if last is None or last.round != self.replica.round:
            return []
        live, members, roster = self.presence.live, self.replica.members, self.presence.roster
        ready = last.agreement.ready
        return sorted(one for one in live.intersection(ready).difference(members) if not roster.on_trial(one))
