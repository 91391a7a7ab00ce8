"""Lineages of one fragment: founding one without a quorum, and giving way to one that prevails."""

from __future__ import annotations

from collections.abc import Callable, Collection

from thinwire.collectives.consensus.chain import Prove, decode, end_of
from thinwire.collectives.consensus.founding import Founding
from thinwire.collectives.consensus.vote_store import VoteStore
from thinwire.collectives.rounds.round import Round
from thinwire.compression.core.types import Buffer
from thinwire.node.membership.presence import Presence
from thinwire.node.runtime.event_log import Emit
from thinwire.node.state.replica import Replica
from thinwire.swarm.frame import Frame, sign_message
from thinwire.swarm.identity.identity import Identity, short
from thinwire.swarm.lineage import (
    by_strangers,
    descends,
    founded_by,
    later,
    lineage_of,
    name_of_fork,
    newest_round,
    prevails,
    shared,
)
from thinwire.swarm.messages.registry import Chain, Fork, Found, Head, Message, PeerId

PATIENCES = 3
"""Least number of patiences without a quorum before a lineage is founded."""

CHECKED = 100_000
"""Bytes of chains that are checked for one peer in a patience: checking signatures takes time."""

SETTLE = 1.0
"""Patiences for which members are waited for that have not stated the founders they see."""


class Lineages:
    """Lineage of one peer's replica, and those of other peers.

    `orphan`: seconds without a quorum before this peer founds a lineage; 0: never. `life`: returns ours. `current`: returns
    the round in progress; `entered`: returns True if our state is the swarm's. `founded`: called with the fork of a lineage
    that this peer and others have founded. `prove` checks chains. `founder`: the peer that has founded the run, as the
    author of its manifest; a peer without a state believes no other beginning. Empty: any.
    """

    def __init__(
        self,
        replica: Replica,
        presence: Presence,
        fragment: int,
        *,
        orphan: float,
        now: Callable[[], float],
        emit: Emit,
        sign: Callable[[Message], bytes],
        key_of: Callable[[PeerId], bytes | None],
        prove: Prove,
        life: Callable[[], bytes],
        current: Callable[[], Round],
        entered: Callable[[], bool],
        founded: Callable[[Fork], None],
        founder: bytes = b"",
    ) -> None:
        self._replica, self._fragment, self._orphan = replica, fragment, orphan
        self._live, self._send_queue, self._me = presence.live, presence.send_queue, presence.roster.record.peer_id
        self._now, self._emit, self._sign, self._key_of, self._prove = now, emit, sign, key_of, prove
        self._life, self._current, self._entered = life, current, entered
        self._founded, self._founder = founded, founder
        self._names: dict[PeerId, bytes] = {}
        """Lineages of other peers, as they say."""
        self._chains: dict[PeerId, Chain] = {}
        """Their chains, which are valid, as far as these may be of use."""
        self._name = replica.lineage
        self._checks: dict[PeerId, float] = {}
        """Times from which on another chain of a peer is checked."""
        self._missed: set[PeerId] = set()
        """Peers of which a chain came before that time."""
        self._founding: Founding | None = None
        self._lacking = 0, 0.0
        """Results that the round in progress lacks, and the time since which there are so many."""
        self.since: float | None = None
        """Time since which the round in progress has had no quorum; None if it has one."""
        self._asked: float | None = None
        """Time at which a person asked for a lineage, see `recover`."""

    @property
    def until(self) -> float | None:
        """Time at which this peer begins to found a lineage; None: not at all, as things are."""
        if self.since is not None and self._asked is None:
            return self.since + self._wait if self._orphan else None
        return self._asked

    def recover(self) -> None:
        """Wait no longer for a quorum, unless one is here."""
        if self.since is not None and self._asked is None:
            self._asked = self._now()

    @property
    def _wait(self) -> float:
        return max(self._orphan, PATIENCES * self._current().agreement.terms.patience)

    # --- lineages of other peers

    def on_link_up(self, peer: PeerId) -> None:
        """Send the name of our lineage."""
        self.ask(peer)

    def on_link_down(self, peer: PeerId) -> None:
        self._checks.pop(peer, None)
        self._missed.discard(peer)
        self.drop([peer])

    def drop(self, peers: Collection[PeerId]) -> None:
        """Forget the lineages of peers that are gone, or do not serve their state."""
        for peer in peers:
            self._names.pop(peer, None)
            self._chains.pop(peer, None)

    def on_head(self, peer: PeerId, head: Head, payload: Buffer) -> None:
        """Note the lineage of another peer; send our chain if that may prove that the peer is behind."""
        self._names[peer], nbytes, ours = head.lineage, memoryview(payload).nbytes, self._replica.chain
        if lineage_of(self._chains.get(peer, ())) != head.lineage:
            self._chains.pop(peer, None)
        if not nbytes:
            if head.lineage != self._replica.lineage or head.round < self._replica.round:
                self.tell(peer)
            return
        now = self._now()
        if now < self._checks.get(peer, now):
            self._missed.add(peer)
            return
        self._missed.discard(peer)
        self._checks[peer] = now + nbytes / CHECKED * self._current().agreement.terms.patience
        try:
            chain = decode(payload)
        except ValueError:
            return
        if lineage_of(chain) != head.lineage:
            return
        if not prevails(chain, ours) and not later(chain, ours):
            if prevails(ours, chain) or later(ours, chain):
                self.tell(peer)
        elif self._prove(chain, self._fragment, self.trusted) is not None:
            self._chains[peer] = chain

    def trusted(self, fork: Fork) -> bool:
        """Return True if a run that begins so is ours: as we know it, or founded again by the same founder."""
        if not self._replica.chain:
            return not self._founder or (fork.members == (self._founder,) and bool(fork.lives))
        root = self._replica.chain[0].fork
        return name_of_fork(fork) == name_of_fork(root) or (fork.members == root.members and bool(fork.lives))

    def advance(self) -> None:
        """Begin a round: peers of other lineages learn of it, and all learn of a new lineage."""
        founding, ours = self._founding, self._replica.chain
        self._founding, self.since, self._asked, self._lacking = None, None, None, (0, 0.0)
        self._chains = {
            one: chain for one, chain in self._chains.items() if not self._of_ours(chain) or later(chain, ours)
        }
        before, self._name = self._name, self._replica.lineage
        if before != self._name and ours and founding is not None and founding.began(ours[-1].fork):
            report(ours[-1].fork, self._emit)  # Another founder was faster, and we have fetched its state.
        for peer in sorted(self._live):
            other = self._names.get(peer, self._name) != self._name
            if other or (before and before != self._name):
                self.ask(peer)

    @property
    def _head(self) -> Head:
        return Head(self._replica.round, self._fragment, self._replica.lineage)

    def _of_ours(self, chain: Chain) -> bool:
        return lineage_of(chain) == self._replica.lineage

    def ask(self, peer: PeerId) -> None:
        """Ask for the chain of a peer that is ahead of us, or in another lineage."""
        if self._replica.chain:
            self._send_queue.control(peer, self._head)

    def tell(self, peer: PeerId) -> None:
        """Send our chain; a peer with a newer one, or of a lineage that prevails, answers with that."""
        proof = self._replica.proof
        if proof and not self._send_queue.later(peer, Head, self._fragment):
            self._send_queue.bulk(peer, Frame(self._head, proof), later=True)

    def gives_way(self, chain: Chain) -> bool:
        """Return True if our lineage gives way to that of `chain`.

        While it has a quorum it does not give way to one that was founded in it. Its members never give way to one that
        strangers alone have founded in it: they found one that prevails over that.
        """
        ours = self._newest
        if not ours or not prevails(chain, ours):
            return False
        if not descends(chain, self._replica.lineage):
            return True
        if by_strangers(*chain[len(ours) - 1 : len(ours) + 1]) and self._me in self._replica.members:
            return False
        return self.since is not None or not self._entered()

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
        """Return the fork of a prevailing lineage that was founded with our state; the next tick takes it up."""
        ours = self._replica.chain
        for peer in sorted(self.prevailing()) if self.since is not None else ():
            chain = self._chains[peer]
            fork = chain[-1].fork
            if len(chain) == shared(chain, ours) + 1 == len(ours) + 1 and fork.base == self._replica.digest:
                return fork
        return None

    # --- our own

    def on_found(self, peer: PeerId, message: Found, signature: bytes) -> None:
        """Note the statement of a founder; it has no vote in the round in progress any more."""
        settled = self._replica.newest[0] == self._replica.round  # Otherwise its digest is being computed.
        if settled and self._begun.on_message(peer, message, signature):
            self._current().agreement.bar(peer)

    def on_tick(self) -> None:
        """Found a lineage with the reachable peers if the round has had no quorum for long enough."""
        fly, now = self._current(), self._now()
        agreement = fly.agreement
        for peer in [one for one in self._missed if now >= self._checks.get(one, now)]:
            self._missed.discard(peer)
            self.ask(peer)
        for peer, name in self._names.items():
            if name != self._name:
                agreement.bar(peer)
        if fly.lacking != self._lacking[0]:
            self._lacking = fly.lacking, now
        # Voters that have restarted are reachable, but have lost the results.
        lost = fly.lacking and now >= self._lacking[1] + PATIENCES * agreement.terms.patience
        able = (agreement.able or agreement.commit is not None) and not (fly.unobtainable or lost)
        if not self._replica.members or fly.complete or able:
            self.since, self._asked = None, None
            return
        if self.since is None:
            self.since = self._lacking[1] if lost else now
        if (fork := self.adoptable()) is not None:
            self._begin(fork)
            return
        if agreement.diverged:
            return
        called = bool(self._live.intersection(self._begun.stated).intersection(self._replica.members))
        due = self.until is not None and now >= self.until
        if not due and not called:
            return  # Links to the lost members do not break at the same time everywhere: the first peer calls the others.
        if not agreement.withdraw():
            return  # The disk must remember that this peer votes no more in the parent lineage.
        self._begun.life = self._life()  # It is another one if the disk has failed meanwhile.
        found = self._begun.state(now, self._live, agreement.silent, SETTLE * agreement.terms.patience)
        if found is not None:
            for peer in sorted(self._live):
                self._send_queue.control(peer, found)
        if (begun := self._begun.fork) is not None:
            self._begin(begun)

    @property
    def _begun(self) -> Founding:
        replica = self._replica
        if self._founding is None or self._founding.base != replica.digest:
            place = replica.round, self._fragment, replica.digest, replica.members
            self._founding = Founding(self._me, *place, self._life(), self._sign, self._key_of)
        return self._founding

    def _begin(self, fork: Fork) -> None:
        self._founding = None
        self._founded(fork)
        report(fork, self._emit)


def report(fork: Fork, emit: Emit) -> None:
    """Emit the beginning of a lineage."""
    members, name = len(set(fork.members) & set(fork.before)), name_of_fork(fork)
    others = len(fork.members) - members
    detail = f"{members} of {len(fork.before)} members"
    detail += f" and {others} other peer{'s'[: others != 1]}" if others else ""
    detail += f" continue as lineage {short(name)} since round {fork.round}"
    emit("lineage", {"lineage": name.hex(), "members": len(fork.members), "round": fork.round, "detail": detail})
    emit("alarm", {"detail": detail})


def check_votes(replica: Replica, votes: VoteStore, me: PeerId) -> bool:
    """Begin a new life if our votes belong to another lineage that we did not leave by founding this one.

    Return True if the votes show that this peer has been further than its replica is.
    """
    record = votes.record
    if record is None:
        return False
    if record.lineage == replica.lineage:
        return record.round > replica.round + 1
    if founded_by(replica.chain, record.lineage, me, votes.life):
        return False
    votes.renew()
    return True


def continue_alone(
    replica: Replica, fragment: int, votes: VoteStore, identity: Identity, run_id: bytes, *, ahead: bool = False
) -> Fork | None:
    """Make this peer the only member. Runs in `work`.

    Return the fork of the lineage if that is not the first one. No lineage is needed if the peer is the only member already,
    or in methods without agreement. One is needed in any case if this peer has been further (`ahead`): rounds that are made
    again get other results.
    """
    me = identity.peer_id
    ahead |= check_votes(replica, votes, me)
    if not replica.alike:
        replica.members, replica.lives = (me,), votes.life
        replica.seal()
        return None
    proved = bool(replica.chain) and end_of(replica.chain).round == replica.round
    if replica.members == (me,) and replica.known_lives == {me: votes.life} and proved and not ahead:
        return None
    founding = Founding(
        me,
        replica.round,
        fragment,
        replica.digest,
        replica.members,
        votes.life,
        lambda message: sign_message(message, b"", identity, run_id),
        lambda peer: identity.public_key,
    )
    founding.state(0.0, (), (), 0.0)
    fork = founding.fork
    assert fork is not None
    replica.found(fork)
    return fork if fork.before or fork.round else None
