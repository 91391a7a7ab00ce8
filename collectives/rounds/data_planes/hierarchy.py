"""Dense rounds in two levels: a cluster of peers sends one subtotal per chunk over the wide area.

A contribution goes to the relay of its own cluster. The relay sends the subtotal, the mean of the cluster's contributions, to
the owner of the chunk. The owner sends the mean of the subtotals to the relays, and they forward it (`hierarchy_routes`
assigns the roles). With G clusters of n peers the wide area carries 1 / n of a butterfly's bytes. Everything else works as in
the butterfly: announcements, records, votes, repair.

Values: a subtotal is encoded once more with the run's codec, so with a lossy codec results carry its error twice. The
contribution of a cluster of one peer is passed on unchanged. Results are a function of the contributions and of the clusters
of their peers, both of which the proposal names; they do not depend on relays or owners.

Trust: the relay checks each contribution of its cluster against the announcement, and its norm against the usual one; the
owner gets only the subtotal, and checks that it is valid, and its norm. So a relay can falsify the subtotals of its chunks,
as an owner can falsify the results of its own chunks.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from statistics import median_high
from typing import Any, ClassVar

from thinwire.collectives.consensus.blame import SUBTOTAL, UNSUMMED
from thinwire.collectives.consensus.paxos import Agreement
from thinwire.collectives.rounds.data_planes.butterfly import RESULT_MISSING, Butterfly
from thinwire.collectives.rounds.data_planes.contributions import Contributions
from thinwire.collectives.rounds.data_planes.data_plane import DataPlane
from thinwire.collectives.rounds.data_planes.owner_results import ChunkReducer
from thinwire.collectives.topology.hierarchy_routes import Cluster, Routes
from thinwire.collectives.topology.shards import Grid
from thinwire.swarm.frame import Frame
from thinwire.swarm.messages.registry import ContributionKey, Digest, PeerId, Proposal, Subtotal


class Hierarchy(Butterfly):
    """Data plane of a hierarchy.

    `groups`: running norm of the subtotals by chunk, stored by the caller. The other arguments are those of Butterfly.
    """

    # A relay gets contributions from its own cluster only, an owner one subtotal of each cluster, other peers only results.
    compares_peers: ClassVar[bool] = False
    # A peer that itself waits for others gets the time to name them.
    complaint_patiences: ClassVar[Mapping[str, float]] = {UNSUMMED: 2, RESULT_MISSING: 3}

    def __init__(
        self, agreement: Agreement, reducer: ChunkReducer, grid: Grid, *, groups: dict[int, float], **butterfly: Any
    ) -> None:
        super().__init__(agreement, reducer, grid, **butterfly)
        self._routes: Routes | None = None
        # Stored by the name of their contributions, so that they count in a ballot from which other contributors are missing.
        # If two clusters differ much, neither is the outlier: the larger norm is remembered.
        self._subtotals = Contributions(self._reducer, self.grid, groups, median_high)
        self._given: dict[tuple[Digest, int], PeerId] = {}
        """Relay that sent us the subtotal of a cluster, by name and chunk."""
        self._sent_subtotals: set[tuple[PeerId, int, Digest]] = set()

    # --- roles in a ballot

    def open(self, proposal: Proposal) -> None:
        """Handle a new ballot: compute the routes and drop subtotals of former relays."""
        self._routes = routes = Routes(proposal, len(self.grid), self._seed)
        for (name, index), relay in list(self._given.items()):
            # The subtotal of a former relay may be the reason why it lost that role.
            if name not in routes.named or routes.collector(routes.named[name], index) != relay:
                self._subtotals.drop((name, 0), index)
                del self._given[name, index]
        number = routes.number.get(self.me)
        # For the same reason, forget what we sent for chunks that we no longer collect; it is sent again if we collect
        # them again.
        self._sent_subtotals = {
            key for key in self._sent_subtotals if number is not None and routes.collector(number, key[1]) == self.me
        }
        super().open(proposal)

    def _basis(self, proposal: Proposal) -> object:
        """Return the inputs that determine the results: the contributors and their clusters."""
        inputs = self._routes.inputs if self._routes is not None else ()
        return [proposal.contributors, [each.peer for each in inputs]]

    def _assign(self, proposal: Proposal) -> None:
        """Assign owners; our own contribution goes to the relay of our cluster."""
        routes = self._routes
        assert routes is not None
        self._set_owners(proposal, routes.owners)
        own, chunks = routes.number.get(self.me), range(len(self.grid))
        self._collectors = tuple(routes.collector(own, i) for i in chunks) if own is not None and routes.whole else ()

    def _resume(self, proposal: Proposal) -> None:
        for index in range(len(self.grid)):
            self._send_result(proposal, index, self._result_receivers(proposal, index))
            self._reduce(index)

    def finish(self) -> None:
        """Free the round's data and update the usual norms of contributions and subtotals."""
        for cluster in self._routes.clusters if self._routes is not None else ():
            self._contributions.finish(cluster.name, learns=self._learns)
        self._subtotals.finish(self._key, learns=self._learns)
        super().finish()

    def on_link_down(self, peer: PeerId) -> None:
        """Mark data sent to `peer` as possibly lost."""
        super().on_link_down(peer)
        self._sent_subtotals = {key for key in self._sent_subtotals if key[0] != peer}

    def on_link_up(self, peer: PeerId) -> None:
        """Send a newly connected peer what it lacks."""
        proposal = self.proposal
        if proposal is None or peer not in proposal.alive or self.agreement.commit is not None:
            return
        self._scatter(proposal)
        for index in range(len(self.grid)):
            if peer in self._result_receivers(proposal, index):
                self._send_result(proposal, index, (peer,))
            self._reduce(index)

    # --- towards the owners

    def _awaits(self, key: ContributionKey, index: int) -> bool:
        """Return True if we collect this chunk of this contributor."""
        routes = self._routes
        if routes is None or not routes.whole or self.proposal is None:
            return False
        number = routes.number.get(key[0])
        if number is None or routes.collector(number, index) != self.me:
            return False
        return self._names(key, routes.clusters[number].entries)

    def _reduce(self, index: int) -> None:
        """Compute the subtotals of the clusters that we collect, then the result if we own the chunk."""
        proposal, routes = self.proposal, self._routes
        if proposal is None or routes is None or not routes.whole or self.agreement.commit is not None:
            return
        if self.results.chunks[index] is not None and self.owners[index] == self.me:
            return
        for cluster in routes.collected(self.me, index):
            if self._compute_subtotal(cluster, index) and self.owners[index] != self.me:
                self._send_subtotal(cluster, index)
        if self.owners[index] == self.me:
            self._reduce_subtotals(proposal, routes, index)

    def _compute_subtotal(self, cluster: Cluster, index: int) -> bool:
        """Compute the subtotal of a cluster that we collect once its inputs are here.

        Return True if the subtotal is there.
        """
        name = (cluster.name, 0)
        if self._subtotals.has(name, index):
            return True
        payloads = self._contributions.of(cluster.entries, index)
        if payloads is None:
            return False
        if cluster.sums:
            # Screen ours, too: if it were an outlier and only the subtotal were judged, the whole cluster would be blamed.
            for entry, payload in zip(cluster.entries, payloads, strict=True):
                if entry.peer == self.me:
                    self._contributions.screen((self.me, entry.attempt), index, payload)
            for peer in (outliers := self._contributions.outliers(cluster.entries, cluster.name, index)):
                self.agreement.accuse(peer, "norm", self.now())
            if outliers:
                return False
            weights = [float(entry.weight) for entry in cluster.entries]
            subtotal = self._reducer.result(payloads, weights, self.grid.size(index))
            self._subtotals.screen(name, index, subtotal)
            self._subtotals.store(*name, index, subtotal)
        else:
            (entry,) = cluster.entries
            self._contributions.lend(entry.key, index, self._subtotals, name)
        self.progress.note_arrival()
        return True

    def _send_subtotal(self, cluster: Cluster, index: int) -> None:
        """Send the subtotal of a cluster to the chunk's owner, once."""
        owner = self.owners[index]
        found = self._subtotals.of((cluster.subtotal,), index)
        if found is not None and (owner, index, cluster.name) not in self._sent_subtotals:
            self._sent_subtotals.add((owner, index, cluster.name))
            message = Subtotal(self.round, self.fragment, cluster.name, index)
            self.send_queue.bulk(owner, Frame(message, found[0]))

    def _reduce_subtotals(self, proposal: Proposal, routes: Routes, index: int) -> None:
        """Compute the result of a chunk that we own once all subtotals are here."""
        subtotals = self._subtotals.of(routes.inputs, index)
        if subtotals is None:
            return
        outliers = self._subtotals.outliers(routes.inputs, self._key, index)
        for name in outliers:
            self._accuse_sources(routes, routes.named[name], index)
        if outliers:
            return
        weights = [float(each.weight) for each in routes.inputs]
        single = len(subtotals) == 1 and any(cluster.sums for cluster in routes.clusters)
        # A single subtotal is encoded already.
        result = subtotals[0] if single else self._reducer.result(subtotals, weights, self.grid.size(index))
        self.results.put(index, result)
        self.progress.note_arrival()
        self.check()
        self._send_result(proposal, index, self._result_receivers(proposal, index))

    def _accuse_sources(self, routes: Routes, number: int, index: int) -> None:
        """Accuse the cause of too long a subtotal: the contributors if we collected them, else the relay."""
        collector, cluster = routes.collector(number, index), routes.clusters[number]
        if collector == self.me:
            for entry in cluster.entries:
                self.agreement.accuse(entry.peer, "norm", self.now())
        else:
            self._subtotals.drop((cluster.name, 0), index)  # another relay may have a better one
            self.agreement.accuse(collector, SUBTOTAL, self.now())

    def take(self, sender: PeerId, frame: Frame) -> None:
        """Take a frame, including a Subtotal."""
        if isinstance(frame.message, Subtotal):
            self._take_subtotal(sender, frame.message, frame)
        else:
            super().take(sender, frame)

    def _take_subtotal(self, sender: PeerId, message: Subtotal, frame: Frame) -> None:
        routes, index, name = self._routes, message.index, message.name
        if self.agreement.commit is not None or not self._fits(frame):
            return
        number = routes.named.get(name) if routes is not None and self.proposal is not None else None
        if (
            routes is None
            or number is None
            or self.owners[index] != self.me
            or routes.collector(number, index) != sender
        ):
            self._early.put(sender, frame)  # it may have overtaken the proposal that asks for it
            return
        if self._subtotals.has((name, 0), index):
            return
        if self._subtotals.screen((name, 0), index, frame.payload):
            self.agreement.accuse(sender, SUBTOTAL, self.now())
            return
        self._subtotals.store(name, 0, index, frame.payload)
        self._given[name, index] = sender
        self.progress.note_arrival()
        self._reduce(index)
        self._send_record()

    # --- towards the peers

    def _result_receivers(self, proposal: Proposal, index: int) -> Sequence[PeerId]:
        """Return the receivers of a result: relays and the own cluster for an owner, its cluster for a relay."""
        return self._routes.receivers(self.me, index) if self._routes is not None else ()

    def _is_result_source(self, sender: PeerId, index: int) -> bool:
        """Return True for a result from its owner, or from our relay until a record contradicts it."""
        return self._routes is not None and sender in self._routes.sources(self.me, index)

    # --- blame

    def awaited_peers(self, proposal: Proposal) -> Collection[PeerId]:
        """Return all peers of the group but ourselves, as subtotals may be made of any peer's data."""
        return DataPlane.awaited_peers(self, proposal)

    def culprit(self, proposal: Proposal) -> tuple[PeerId, str] | None:
        """Return the peer to blame: a contributor, a relay, or the source of a result."""
        routes, results = self._routes, self.results
        if routes is None:
            return None
        services = (
            [(index, routes.collected(self.me, index)) for index in results.missing_indices()] if routes.whole else []
        )
        for index, collected in services:
            for cluster in collected:
                for entry in cluster.entries:
                    if not self._contributions.has(entry.key, index):
                        return self._missing_data_of(entry.peer)
        for index, collected in services:
            for name, number in routes.named.items() if self.owners[index] == self.me else ():
                if not self._subtotals.has((name, 0), index) and routes.clusters[number] not in collected:
                    return routes.collector(number, index), UNSUMMED
        for index in results.missing_indices():
            relay, owner = routes.sources(self.me, index)[0], self.owners[index]
            # After the owner has signed, the relay is to blame: it has received the result.
            guilty = relay if results.signed(index) else owner
            if guilty != self.me:
                return guilty, RESULT_MISSING
        return None

    def debtors(self, proposal: Proposal) -> Collection[PeerId]:
        """Return the culprit, unless a result is missing, which may come over peers of our cluster."""
        found = self.culprit(proposal)
        return () if found is None or found[1] == RESULT_MISSING else (found[0],)
