"""The plane of dense rounds in two levels: across the wide area a group of peers that share a network sends one value a chunk.

A contribution goes to the relay of its own group, the relay sends the group's mean to the chunk's owner, the owner sends the
mean of the groups' values to the relays, and these hand it on (`routes` says who is what). With G groups of n peers the wide
area carries 1 / n of what the butterfly's does. Everything else is the butterfly's: announcements, records, votes and repair.

What differs for the values: a group's mean is encoded once more with the run's codec, so where that loses something, results
carry its error twice. A lone peer's contribution goes as it is. Results are a function of the contributions and of
which of them share a site, and both are announced; they do not depend on who relays or owns.

What differs for trust: the relay checks each contribution of its group against what was announced, and its norm against
what is usual; the owner sees the group's value only, and checks that it is one, and its norm. So a relay can lie about its
chunks of its group's part, as an owner can about the whole of its own.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping, Sequence
from statistics import median_high
from typing import ClassVar

from thinwire.collectives.aggregate import Rule
from thinwire.collectives.agreement import Agreement
from thinwire.collectives.buffers import Pool
from thinwire.collectives.complaints import SUBTOTAL, UNSUMMED
from thinwire.collectives.contributions import Contributions, Key
from thinwire.collectives.exchange import Exchange
from thinwire.collectives.outbox import Outbox
from thinwire.collectives.plane import Plane
from thinwire.collectives.routes import Cluster, Routes
from thinwire.collectives.shards import Grid
from thinwire.compression.codec import Codec
from thinwire.swarm.frame import Frame
from thinwire.swarm.protocol import Digest, Open, PeerId, Subtotal


class Hierarchy(Exchange):
    """See Exchange, and the module. `groups`: the running norm of the groups' values, by chunk; the caller keeps it."""

    # Who waits for others as we do is given the time to name them.
    bears: ClassVar[Mapping[str, int]] = {UNSUMMED: 2, "result missing": 3}

    def __init__(
        self,
        agreement: Agreement,
        *,
        codec: Codec,
        grid: Grid,
        rule: Rule,
        seed: bytes,
        outbox: Outbox,
        now: Callable[[], float],
        usual: dict[int, float],
        groups: dict[int, float],
        pool: Pool | None = None,
        phase: Callable[[int, str], None] = lambda round, name: None,
    ) -> None:
        super().__init__(
            agreement,
            codec=codec,
            grid=grid,
            rule=rule,
            seed=seed,
            outbox=outbox,
            now=now,
            usual=usual,
            pool=pool,
            phase=phase,
        )
        self._routes: Routes | None = None
        # The values of groups: by the name of what they are of, so that they outlive a ballot that others have left.
        # Of two groups that differ much neither is the odd one: the larger is what is remembered.
        self._totals = Contributions(codec, grid, groups, median_high)
        self._given: dict[tuple[Digest, int], PeerId] = {}
        self._told: set[tuple[PeerId, int, Digest]] = set()

    # --- what a ballot says

    def open(self, opened: Open) -> None:
        """See Exchange."""
        self._routes = routes = Routes(opened, len(self.grid), self._seed)
        for (name, index), relay in list(self._given.items()):
            # What a relay has said that is none any more may be why it is none.
            if name not in routes.named or routes.collector(routes.named[name], index) != relay:
                self._totals.drop((name, 0), index)
                del self._given[name, index]
        site = routes.number.get(self.me)
        # For the same reason: where we collect no more, what we have told is gone, and told again when we collect anew.
        self._told = {said for said in self._told if site is not None and routes.collector(site, said[1]) == self.me}
        super().open(opened)

    def _basis(self, opened: Open) -> object:
        """See Plane: also which contributors share a site."""
        inputs = self._routes.inputs if self._routes is not None else ()
        return [opened.contributors, [each.peer for each in inputs]]

    def _assign(self, opened: Open) -> None:
        """See Exchange; our own contribution is for whoever collects those of our site."""
        routes = self._routes
        assert routes is not None
        self.owners = routes.owners
        self._mine = [i for i, owner in enumerate(self.owners) if owner == self.me and self.me in opened.alive]
        site, chunks = routes.number.get(self.me), range(len(self.grid))
        self._takers = tuple(routes.collector(site, i) for i in chunks) if site is not None and routes.whole else ()

    def _resume(self, opened: Open) -> None:
        for index in range(len(self.grid)):
            self._send_result(opened, index, self._heirs(opened, index))
            self._reduce(index)

    def settle(self) -> None:
        """See Plane."""
        for cluster in self._routes.clusters if self._routes is not None else ():
            self._contributions.settle(cluster.name, learns=self._learns)
        self._totals.settle(self._key, learns=self._learns)
        super().settle()

    def lost(self, peer: PeerId) -> None:
        """See Plane."""
        super().lost(peer)
        self._told = {key for key in self._told if key[0] != peer}

    def reach(self, peer: PeerId) -> None:
        """See Plane."""
        opened = self.opened
        if opened is None or peer not in opened.alive or self.agreement.commit is not None:
            return
        self._scatter(opened)
        for index in range(len(self.grid)):
            if peer in self._heirs(opened, index):
                self._send_result(opened, index, (peer,))
            self._reduce(index)

    # --- on the way up

    def _awaits(self, key: Key, index: int) -> bool:
        """See Exchange."""
        routes = self._routes
        site = routes.number.get(key[0]) if routes is not None and routes.whole and self.opened is not None else None
        if routes is None or site is None or routes.collector(site, index) != self.me:
            return False
        return any((entry.peer, entry.attempt) == key for entry in routes.clusters[site].entries)

    def _reduce(self, index: int) -> None:
        """Do what can be done of a chunk: the values of groups that we collect, then the result, if we own it."""
        opened, routes = self.opened, self._routes
        if opened is None or routes is None or not routes.whole or self.agreement.commit is not None:
            return
        if self.results.chunks[index] is not None and self.owners[index] == self.me:
            return
        for cluster in routes.collected(self.me, index):
            if self._total(cluster, index) and self.owners[index] != self.me:
                self._tell(cluster, index)
        if self.owners[index] == self.me:
            self._finish(opened, routes, index)

    def _total(self, cluster: Cluster, index: int) -> bool:
        """Whether the value of a group that we collect is here, as soon as all that it is of is."""
        name = (cluster.name, 0)
        if self._totals.has(name, index):
            return True
        payloads = self._contributions.of(cluster.entries, index)
        if payloads is None:
            return False
        if cluster.sums:
            # Our own, too: were it beyond measure and the sum were judged, all of us would answer for it.
            for entry, payload in zip(cluster.entries, payloads, strict=True):
                if entry.peer == self.me:
                    self._contributions.screen((self.me, entry.attempt), index, payload)
            for peer in (far := self._contributions.beyond(cluster.entries, cluster.name, index)):
                self.agreement.accuse(peer, "norm", self._now())
            if far:
                return False
            weights = [float(entry.weight) for entry in cluster.entries]
            value = self._reducer.result(payloads, weights, self.grid.size(index))
            self._totals.screen(name, index, value)
            self._totals.own(*name, index, value)
        else:
            (entry,) = cluster.entries
            self._contributions.lend((entry.peer, entry.attempt), index, self._totals, name)
        self._progress()
        return True

    def _tell(self, cluster: Cluster, index: int) -> None:
        """Send the value of our group to the chunk's owner, once."""
        owner = self.owners[index]
        value = self._totals.of((cluster.value,), index)
        if value is not None and (owner, index, cluster.name) not in self._told:
            self._told.add((owner, index, cluster.name))
            message = Subtotal(self.round, self.fragment, cluster.name, index)
            self._outbox.bulk(owner, Frame(message, value[0]))

    def _finish(self, opened: Open, routes: Routes, index: int) -> None:
        values = self._totals.of(routes.inputs, index)
        if values is None:
            return
        far = self._totals.beyond(routes.inputs, self._key, index)
        for name in far:
            self._doubt(routes, routes.named[name], index)
        if far:
            return
        weights = [float(each.weight) for each in routes.inputs]
        single = len(values) == 1 and any(cluster.sums for cluster in routes.clusters)
        # One group alone: its value has been encoded already.
        result = values[0] if single else self._reducer.result(values, weights, self.grid.size(index))
        self.results.put(index, result)
        self._progress()
        self.check()
        self._send_result(opened, index, self._heirs(opened, index))

    def _doubt(self, routes: Routes, number: int, index: int) -> None:
        """The value of a group is beyond all measure: those whose contributions we saw answer for it, else its relay."""
        collector, cluster = routes.collector(number, index), routes.clusters[number]
        if collector == self.me:
            for entry in cluster.entries:
                self.agreement.accuse(entry.peer, "norm", self._now())
        else:
            self._totals.drop((cluster.name, 0), index)  # another relay may have a better one
            self.agreement.accuse(collector, SUBTOTAL, self._now())

    def take(self, sender: PeerId, frame: Frame) -> None:
        """See Plane; a Subtotal, too."""
        if isinstance(frame.message, Subtotal):
            self._take_subtotal(sender, frame.message, frame)
        else:
            super().take(sender, frame)

    def _take_subtotal(self, sender: PeerId, message: Subtotal, frame: Frame) -> None:
        routes, index, name = self._routes, message.index, message.name
        if self.agreement.commit is not None or not self._fits(frame):
            return
        number = routes.named.get(name) if routes is not None and self.opened is not None else None
        if (
            routes is None
            or number is None
            or self.owners[index] != self.me
            or routes.collector(number, index) != sender
        ):
            self._early.put(sender, frame)  # it may have overtaken the Open that asks for it
            return
        if self._totals.has((name, 0), index):
            return
        if self._totals.screen((name, 0), index, frame.payload):
            self.agreement.accuse(sender, SUBTOTAL, self._now())
            return
        self._totals.own(name, 0, index, frame.payload)
        self._given[name, index] = sender
        self._progress()
        self._reduce(index)
        self._record()

    # --- on the way down

    def _heirs(self, opened: Open, index: int) -> Sequence[PeerId]:
        """See Exchange: of the owner the relays and its own group, of a relay its group."""
        return self._routes.heirs(self.me, index) if self._routes is not None else ()

    def _vouches(self, sender: PeerId, index: int) -> bool:
        """See Exchange: our group's relay, too, until the owner's record says otherwise."""
        return self._routes is not None and sender in self._routes.sources(self.me, index)

    # --- who holds us up

    def owing(self, opened: Open) -> Collection[PeerId]:
        """See Plane: whose values those that we wait for are made of."""
        return Plane.owing(self, opened)

    def culprit(self, opened: Open) -> tuple[PeerId, str] | None:
        """See Plane: contributors to what we collect, then relays of what we own, then whoever owes us a result."""
        routes, results = self._routes, self.results
        if routes is None:
            return None
        duties = [(index, routes.collected(self.me, index)) for index in results.lacks()] if routes.whole else []
        for index, collected in duties:
            for cluster in collected:
                for entry in cluster.entries:
                    if not self._contributions.has((entry.peer, entry.attempt), index):
                        return entry.peer, "chunk missing" if entry.peer in self.agreement.ready else "not announced"
        for index, collected in duties:
            for name, number in routes.named.items() if self.owners[index] == self.me else ():
                if not self._totals.has((name, 0), index) and routes.clusters[number] not in collected:
                    return routes.collector(number, index), UNSUMMED
        for index in results.lacks():
            relay, owner = routes.sources(self.me, index)[0], self.owners[index]
            # A relay is to blame once the owner has signed: then it has the result, and has sent it.
            guilty = relay if results.signed(index) else owner
            if guilty != self.me:
                return guilty, "result missing"
        return None
