"""Lineages of other peers: what they claim, what they prove, and which one prevails over ours."""

from __future__ import annotations

from collections.abc import Collection, Generator

from thinwire.collectives.blocking_work import JobPart
from thinwire.collectives.state_sync.state_offers import ReceivedChains
from thinwire.compression.core.types import Buffer
from thinwire.node.outer.quorum_wait import QuorumWait
from thinwire.node.outer.session import FragmentRounds
from thinwire.node.outer.state_transfer.state_server import StateServer
from thinwire.swarm.frame import Frame
from thinwire.swarm.lineage import (
    descends,
    later,
    lineage_of,
    new_founders,
    newest_round,
    prevails,
    shared,
)
from thinwire.swarm.messages.registry import Chain, Fork, Head, PeerId


class Lineages:
    """Lineages of other peers, compared with that of our replica.

    `quorum_wait`: wait for the quorum of the round in progress. `states.entered`: True if our state is the swarm's. `chains`:
    those that other peers have sent. `founder`: author of the manifest; a peer without a state believes only a chain that
    begins with this peer. Empty: it believes any.
    """

    def __init__(
        self,
        rounds: FragmentRounds,
        *,
        chains: ReceivedChains,
        quorum_wait: QuorumWait,
        states: StateServer,
        founder: bytes,
    ) -> None:
        presence = rounds.presence
        self._is_excluded = presence.roster.is_excluded
        self._replica, self._fragment, self._now, self._received = rounds.replica, rounds.fragment, rounds.now, chains
        self._live, self._send_queue, self._me = presence.live, presence.send_queue, presence.roster.record.peer_id
        self._current, self._quorum_wait, self._states, self._founder = rounds.current, quorum_wait, states, founder
        self._name = rounds.replica.lineage
        """Our lineage in the round in progress."""
        self._claimed_names: dict[PeerId, bytes] = {}
        """Lineages of other peers, as they claim."""
        self._chains: dict[PeerId, Chain] = {}
        """Their chains, which are valid, as far as these may be of use."""
        self._rationed, self._job = presence.rationed, ("chain", rounds.fragment)
        self._missed: set[PeerId] = set()
        """Peers to ask again for a chain that came while another was being checked, or too many waited."""

    def on_link_up(self, peer: PeerId) -> None:
        """Send the name of our lineage."""
        self.ask(peer)

    def on_link_down(self, peer: PeerId) -> None:
        self._rationed.drop(peer)
        self._missed.discard(peer)
        self.drop([peer])

    def drop(self, peers: Collection[PeerId]) -> None:
        """Forget the lineages of peers that are gone, or do not serve their state."""
        for peer in peers:
            self._claimed_names.pop(peer, None)
            self._chains.pop(peer, None)

    def on_head(self, peer: PeerId, head: Head, payload: Buffer) -> None:
        """Note the lineage of another peer; send our chain if that may prove that the peer is behind."""
        self._claimed_names[peer], nbytes = head.lineage, memoryview(payload).nbytes
        if lineage_of(self._chains.get(peer, ())) != head.lineage:
            self._chains.pop(peer, None)
        if not nbytes:
            if head.lineage != self._replica.lineage or head.round < self._replica.round:
                self._send_chain(peer)
        elif self._rationed.add(peer, self._job, nbytes, self._examine(peer, head, bytes(payload))):
            self._rationed.run()
        else:
            self._missed.add(peer)

    def _examine(self, peer: PeerId, head: Head, data: bytes) -> Generator[JobPart, None, None]:
        """Check the chain of a peer, if it would change something, in parts, see RationedWork."""
        received = self._received.find(data, self._fragment)
        chain = yield from received.decode()
        ours = self._replica.chain
        if chain is None or lineage_of(chain) != head.lineage:
            return
        if prevails(chain, ours) or later(chain, ours):
            proves = yield from received.prove(self.trusted)
            # The peer may have gone to another lineage meanwhile.
            if proves is not None and self._claimed_names.get(peer) == head.lineage:
                self._chains[peer] = chain
        elif prevails(ours, chain) or later(ours, chain):
            self._send_chain(peer)

    def trusted(self, fork: Fork) -> bool:
        """Return True if a run that begins so is ours: as we know it, or founded again by the same founder."""
        if self._replica.chain:
            return fork.members == self._replica.chain[0].fork.members
        return not self._founder or fork.members == (self._founder,)

    def advance(self) -> None:
        """Begin a round: peers of other lineages learn of it, and all learn of a new lineage."""
        ours = self._replica.chain
        self._chains = {
            one: chain for one, chain in self._chains.items() if not self._of_ours(chain) or later(chain, ours)
        }
        before, self._name = self._name, self._replica.lineage
        for peer in sorted(self._live):
            other = self._claimed_names.get(peer, self._name) != self._name
            if other or (before and before != self._name):
                self.ask(peer)

    def on_tick(self) -> None:
        """Continue checks, ask for missed chains, and bar peers of other lineages from voting."""
        agreement = self._current().agreement
        self._rationed.run()
        for peer in sorted(one for one in self._missed if not self._rationed.holds(one, self._job)):
            self._missed.discard(peer)
            self.ask(peer)
        for peer, name in self._claimed_names.items():
            if name != self._name:
                agreement.electorate.nonvoters.add(peer)

    @property
    def _head(self) -> Head:
        return Head(self._replica.round, self._fragment, self._replica.lineage)

    def _of_ours(self, chain: Chain) -> bool:
        return lineage_of(chain) == self._replica.lineage

    def ask(self, peer: PeerId) -> None:
        """Ask for the chain of a peer that is ahead of us, or in another lineage."""
        if self._replica.chain:
            self._send_queue.control(peer, self._head)

    def _send_chain(self, peer: PeerId) -> None:
        """Send our chain; a peer with a newer one, or of a lineage that prevails, answers with that."""
        proof = self._replica.proof
        if proof and not self._send_queue.requested(peer, Head, self._fragment):
            self._send_queue.bulk(peer, Frame(self._head, proof), requested=True)

    def gives_way(self, chain: Chain) -> bool:
        """Return True if our lineage gives way to that of `chain`.

        A lineage that has a quorum does not give way to one that was founded in it.
        """
        ours = self._newest
        if not ours or not prevails(chain, ours):
            return False
        if not descends(chain, self._replica.lineage):
            return True
        return self._quorum_wait.since is not None or not self._states.entered

    @property
    def _newest(self) -> Chain:
        """The chain that proves the newest round of our lineage."""
        chains = [self._replica.chain, *(self._chains[peer] for peer in self.ahead())]
        return max(chains, key=lambda chain: newest_round(chain[-1]) if chain else -1)

    def prevailing(self) -> Collection[PeerId]:
        """Return the peers of the lineage that prevails over ours; empty if there is none."""
        best: Chain = ()
        for _, chain in sorted(self._chains.items(), key=lambda item: item[0]):
            if self.gives_way(chain) and (not best or prevails(chain, best)):
                best = chain
        return [peer for peer, chain in self._chains.items() if best and lineage_of(chain) == lineage_of(best)]

    def ahead(self) -> Collection[PeerId]:
        """Return the peers that have proved a later round of our lineage."""
        ours = self._replica.chain
        return [peer for peer, chain in self._chains.items() if self._of_ours(chain) and later(chain, ours)]

    def adoptable(self) -> Fork | None:
        """Return the fork of a prevailing lineage that was founded with our state; the next tick takes it up.

        None takes up one that was founded with peers that are excluded here, and no member one with newcomers on trial.
        """
        ours = self._replica.chain
        for peer in sorted(self.prevailing()) if self._quorum_wait.since is not None else ():
            chain = self._chains[peer]
            fork = chain[-1].fork
            begins_with_ours = len(chain) == shared(chain, ours) + 1 == len(ours) + 1 and (fork.round, fork.base) == (
                self._replica.round,
                self._replica.digest,
            )
            new = new_founders(fork)
            trial = self._me in fork.before and any(map(self._current().agreement.electorate.on_trial, new))
            if begins_with_ours and not trial and not any(map(self._is_excluded, new, fork.tokens)):
                return fork
        return None
