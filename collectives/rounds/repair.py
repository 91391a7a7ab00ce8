"""Repair of a round: requests for results that it is bound to, and answers to other peers."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Sequence

from thinwire.collectives.consensus.members.peer_standing import PeerStanding
from thinwire.collectives.rounds.data_planes.data_plane import DataPlane
from thinwire.collectives.state_sync.chunk_transfer import IN_FLIGHT, LATEST
from thinwire.collectives.topology.chunk_requests import ChunkRequests
from thinwire.swarm.frame import Frame
from thinwire.swarm.messages.registry import Digest, Fetch, PeerId, Proposal, Result, ResultRecord

TIMES = 8
"""Number of times that a peer gets the results of a round over one link: enough after time-outs."""


class Repair:
    """Repair of one round at one peer. `data_plane` stores its results."""

    def __init__(self, data_plane: DataPlane) -> None:
        self._data_plane, self._agreement = data_plane, data_plane.agreement
        self._send_queue, self._now = data_plane.send_queue, data_plane.now
        self._requests = ChunkRequests()
        self._repeated = 0
        """Number of requests that were made because no answer came in time."""
        self._claims_at, self._claims_asked = -math.inf, 0
        self._leader_asked: tuple[Proposal, float] | None = None
        self._freed: set[PeerId] = set()

    @property
    def missing_results(self) -> int:
        """Number of results that are missing here although the round is bound to them.

        If all are here, but not what this peer needs to vote for them (see `OwnerRecords.unclaimed`), that counts as one.
        """
        results, proposal = self._data_plane.results, self._data_plane.proposal
        if proposal is None or results.wanted is None:
            return 0
        unclaimed = self._data_plane.unclaimed and not self._agreement.decision.results_confirmed(proposal)
        return results.missing or int(unclaimed)

    @property
    def follows(self) -> bool:
        """True if we fetch the results of a round in which we take no part: there may be pauses between them."""
        agreement, commit = self._agreement, self._agreement.commit
        return commit is not None and agreement.me not in {
            *agreement.terms.members,
            *commit.proposal.members,
            *commit.proposal.alive,
        }

    @property
    def mostly_exhausted(self) -> bool:
        """True if there is a commit, but most reachable sources have freed its results."""
        sources = self.sources
        return self._agreement.commit is not None and 2 * len(self._freed.intersection(sources)) > len(sources)

    @property
    def exhausted(self) -> bool:
        """True if there is a commit, and every reachable source has freed its results."""
        sources = self.sources
        return self._agreement.commit is not None and bool(sources) and self._freed.issuperset(sources)

    @property
    def sources(self) -> list[PeerId]:
        """Reachable peers that hold every result: those that voted for them.

        After the commit, if no voter is reachable: peers that claim to be past the round.
        """
        agreement = self._agreement
        return self.voters or (sorted(agreement.past & agreement.electorate.live) if agreement.commit else [])

    @property
    def voters(self) -> list[PeerId]:
        """Reachable peers that voted for the results."""
        agreement, commit, proposal = self._agreement, self._agreement.commit, self._data_plane.proposal
        voters = [proof.peer for proof in commit.votes] if commit else list(proposal.sources) if proposal else []
        return [peer for peer in voters if peer != agreement.me and peer in agreement.electorate.live]

    def settle(self, digest: Digest) -> None:
        """Settle the results as `digest`: fetch those that are missing or differ."""
        data_plane, results = self._data_plane, self._data_plane.results
        results.settle(digest)
        lost = any(
            data_plane.owners[index] not in self._agreement.electorate.live for index in results.missing_indices()
        )
        untouched = data_plane.proposal is None or self._agreement.me not in data_plane.proposal.alive
        self._requests.at = self._now()
        if results.missing and (lost or untouched or self._agreement.commit is None):
            self._fetch_all()
        data_plane.check()

    def note_freed(self, peer: PeerId) -> None:
        """Note that a peer is past this round and has freed its results: ask others for what it was asked for."""
        self._freed.add(peer)
        self._ask_others(peer)

    def note_held(self, peer: PeerId) -> None:
        """Note that a peer has the results of this round, whatever it reported about another one."""
        self._freed.discard(peer)

    def on_link_down(self, peer: PeerId) -> None:
        """Handle a broken link to `peer`."""
        if self.follows:
            self._ask_others(peer)

    def on_link_up(self, peer: PeerId) -> None:
        """Handle a new link to `peer`."""
        sources = self.sources
        if self.missing_results and peer in sources and self._freed.issuperset({*sources} - {peer}):
            self._fetch(self._data_plane.results.missing_indices(), [peer])  # All others have freed the results.

    def tick(self, now: float) -> None:
        """Let time pass: repeat requests."""
        results, patience = self._data_plane.results, self._agreement.terms.patience
        if now >= self._claims_at + self._data_plane.repair_patiences * patience:
            self._fetch_claims(now)
        if results.wanted is None or not results.missing:
            return
        # Voters continue with the next round and free the results soon after it.
        wait = 1.0 if self._requests.tries else self._data_plane.repair_patiences
        if self.follows:
            # There may be pauses: asking other sources, too, would cost the swarm the same bytes again. If no source could be
            # reached at the commit, the first one that can is asked at once.
            wait = min(LATEST / patience, 2.0 ** min(8, 1 + self._repeated)) if self._requests.tries else 0.0
        if now >= max(self._requests.at, self._data_plane.progress.progressed_at) + wait * patience and self.sources:
            self._repeated += self._requests.tries > 0
            self._fetch_all()

    def _fetch_claims(self, now: float) -> None:
        """Ask one peer after the other, the leader first, for what an audit of the results needs."""
        wanted, proposal, data_plane = self._data_plane.results.wanted, self._data_plane.proposal, self._data_plane
        if wanted is None or proposal is None or not data_plane.unclaimed or self._agreement.commit is not None:
            return
        # A voter may have restarted. Then other peers that have computed or fetched the results can show the claims.
        others = [
            peer for peer in proposal.alive if peer != self._agreement.me and peer in self._agreement.electorate.live
        ]
        sources = list(dict.fromkeys([*self.sources, *others]))
        leader, terms = proposal.ballot.leader, self._agreement.terms
        if not sources:
            return
        asked = self._leader_asked is not None and self._leader_asked[0] is proposal
        if leader in proposal.sources and leader in sources and not asked:
            peer, self._leader_asked = leader, (proposal, now)
        else:
            peer = sources[self._claims_asked % len(sources)]
            self._claims_asked += 1
        self._claims_at = now
        self._send_queue.control(peer, Fetch(terms.round, terms.fragment, wanted, ()))

    def unproved(self, now: float) -> bool:
        """Return True if the leader has shown no claims to the results of its vote within two patiences."""
        asked, data_plane = self._leader_asked, self._data_plane
        if asked is None or asked[0] is not data_plane.proposal or self._agreement.decision.results_confirmed(asked[0]):
            return False
        return data_plane.unclaimed and now >= asked[1] + 2 * self._agreement.terms.patience

    def _ask_others(self, peer: PeerId) -> None:
        missing = self._requests.owed(peer).intersection(self._data_plane.results.missing_indices())
        sources = [one for one in self.sources if one not in self._freed]
        if missing and sources:
            self._fetch(sorted(missing), sources)

    def _fetch_all(self) -> None:
        sources = self.sources
        if sources:
            self._fetch(
                self._data_plane.results.missing_indices(),
                [one for one in sources if one not in self._freed] or sources,
            )

    def _fetch(self, missing: Sequence[int], sources: Sequence[PeerId]) -> None:
        terms, wanted = self._agreement.terms, self._data_plane.results.wanted
        if wanted is not None:
            for peer, part in self._requests.plan(missing, sources, self._now()).items():
                self._send_queue.control(peer, Fetch(terms.round, terms.fragment, wanted, tuple(part)))


class ResultServer:
    """Answers to peers that lack results of a round.

    `data_plane` stores the results at this peer. `standing`: decides which peers get results with pauses, as state.
    """

    def __init__(self, data_plane: DataPlane, standing: PeerStanding) -> None:
        self._data_plane, self._agreement, self._standing = data_plane, data_plane.agreement, standing
        self._send_queue, self._now = data_plane.send_queue, data_plane.now
        self._proved: dict[PeerId, float] = {}
        """Times at which claims were shown to each peer."""
        self._served: Counter[PeerId] = Counter()
        """Number of results that were sent to each peer."""

    def on_link_down(self, peer: PeerId) -> None:
        """Note that a peer may have lost what it was sent."""
        self._proved.pop(peer, None)
        self._served.pop(peer, None)

    def serve(self, sender: PeerId, message: Fetch) -> None:
        """Send the requested results that are here, and a record of all; before the commit also claims."""
        agreement, data_plane, proposal = self._agreement, self._data_plane, self._data_plane.proposal
        round, fragment, chunks = agreement.terms.round, agreement.terms.fragment, data_plane.results.chunks
        whole = data_plane.results.digest == message.digest
        if proposal is None or not data_plane.serves(sender, message):
            return
        known = agreement.commit is None or sender in agreement.terms.members  # It was late, and may be in time again.
        paced = not known and self._standing.paced(sender, round)
        waiting = self._send_queue.requested(sender, Result) if paced else self._send_queue.requested(sender)
        if waiting > 2 * IN_FLIGHT:
            return  # the peer has not read what it asked for before
        if whole:
            everything = tuple(range(len(chunks)))
            hashes = data_plane.results.joined_hashes(everything)
            record = ResultRecord(round, fragment, proposal.ballot, everything, hashes, proposal.lineage)
            self._send_queue.control(sender, record)
            if not message.indices and agreement.commit is None:
                self._prove(sender, proposal)
        for index in dict.fromkeys(message.indices):
            if index < len(chunks) and (result := chunks[index]) is not None:
                if sender not in agreement.terms.members and self._served[sender] >= TIMES * len(chunks):
                    return  # Without a limit it could use up our uplink. After a time-out it asks other peers.
                self._served[sender] += 1
                frame = Frame(Result(round, fragment, proposal.ballot, index, proposal.lineage), result)
                self._send_queue.bulk(sender, frame, requested=True, paced=paced)

    def _prove(self, to: PeerId, proposal: Proposal) -> None:
        """Show a peer of the round what an audit of our results needs, once in a patience."""
        terms, last = self._agreement.terms, self._proved.get(to, -math.inf)
        if to in {*terms.members, *proposal.alive} and self._now() >= last + terms.patience:
            self._proved[to] = self._now()
            for proof in (*self._data_plane.claims(), *self._agreement.announcements.kept):
                self._send_queue.control(to, proof)
