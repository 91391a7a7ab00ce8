"""Lineages of one fragment: founding one without a quorum, and giving way to one that prevails."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Collection

from thinwire.collectives.consensus.certificates import continues
from thinwire.collectives.consensus.founding import Founding
from thinwire.collectives.consensus.vote_store import VoteStore
from thinwire.collectives.rounds.round import Round
from thinwire.collectives.state_sync import LEAP
from thinwire.node.membership.presence import Presence
from thinwire.node.runtime.event_log import Emit
from thinwire.node.state.replica import Replica
from thinwire.swarm.frame import sign_message
from thinwire.swarm.identity.identity import Identity, short
from thinwire.swarm.lineage import (
    Verify,
    descends,
    founded_by,
    lineage_of,
    name_of_fork,
    prevails,
    proved,
    shared,
)
from thinwire.swarm.messages.registry import Commit, Digest, Fork, Found, Head, Message, PeerId

PATIENCES = 3
"""Least number of patiences without a quorum before a lineage is founded."""

HEADS = 0.25
"""Patiences between two new lineages of one peer that are checked."""

STATES = 256
"""Maximum number of past states at which lineages of other peers may begin."""

SETTLE = 1.0
"""Patiences for which members are waited for that have not stated the founders they see."""


class Lineages:
    """Lineage of one peer's replica, and those of other peers.

    `orphan`: seconds without a quorum before this peer founds a lineage; 0: never. `life`: returns ours. `current`: returns
    the round in progress. `founded`: called with the fork of a lineage that this peer and others have founded. `proof`:
    returns a commit of a lineage after a round, see RoundHistory.

    A lying member can still claim a fork that this peer cannot check, see `_credible`.
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
        verify: Verify,
        life: Callable[[], bytes],
        current: Callable[[], Round],
        founded: Callable[[Fork], None],
        proof: Callable[[int, bytes], Commit | None],
    ) -> None:
        self._replica, self._fragment, self._orphan = replica, fragment, orphan
        self._live, self._send_queue, self._me = presence.live, presence.send_queue, presence.roster.record.peer_id
        self._now, self._emit, self._sign, self._verify = now, emit, sign, verify
        self._life, self._current, self._founded, self._proof = life, current, founded, proof
        self._heads: dict[PeerId, Head] = {}
        self._unproved: set[PeerId] = set()
        """Peers of `_heads` with signatures that are wrong, or of founders that we do not know."""
        self._doubted: set[PeerId] = set()
        """Peers of `_heads` of which nothing proves where their lineage begins."""
        self._met: dict[bytes, float] = {}
        """Times at which other lineages were met, by name."""
        self._name = lineage_of(replica.forks)
        self._heard: dict[PeerId, float] = {}
        self._states: dict[int, tuple[Digest, tuple[PeerId, ...]]] = {}
        """Digests and members of our last states, by round."""
        self._founding: Founding | None = None
        self.since: float | None = None
        """Time since which the round in progress has had no quorum; None if it has one."""

    @property
    def until(self) -> float | None:
        """Time at which this peer begins to found a lineage; None: not at all, as things are."""
        return None if self.since is None or not self._orphan else self.since + self._wait

    @property
    def _wait(self) -> float:
        return max(self._orphan, PATIENCES * self._current().agreement.terms.patience)

    # --- lineages of other peers

    def on_link_up(self, peer: PeerId) -> None:
        """Send our lineage, unless it is the first one: then the other peer sends its own if it has another."""
        if self._replica.forks:
            self._tell(peer)

    def on_link_down(self, peer: PeerId) -> None:
        self._heard.pop(peer, None)
        self.drop([peer])

    def drop(self, peers: Collection[PeerId]) -> None:
        """Forget the lineages of peers that are gone, or do not serve their state."""
        for peer in peers:
            self._heads.pop(peer, None)
            self._doubted.discard(peer)
            self._unproved.discard(peer)
        names = {lineage_of(head.forks) for head in self._heads.values()}
        self._met = {name: met for name, met in self._met.items() if name in names}

    def on_head(self, peer: PeerId, head: Head) -> None:
        """Note the lineage of another peer, and send ours if that prevails."""
        before, now = self._heads.get(peer), self._now()
        if before is None or before.forks != head.forks:
            # Checking signatures takes time, so a peer has a new lineage checked only now and then.
            if now < self._heard.get(peer, now):
                return
            self._heard[peer] = now + HEADS * self._current().agreement.terms.patience
            self._met.setdefault(lineage_of(head.forks), now)
            if not proved(head.forks, self._fragment, self._verify):
                self._unproved.add(peer)
            else:
                self._unproved.discard(peer)
        self._heads[peer] = head
        if peer in self._unproved or not self._credible(peer, head):
            self._doubted.add(peer)
            return
        self._doubted.discard(peer)
        if self._ours_prevails(head):
            self._tell(peer)

    def _credible(self, peer: PeerId, head: Head) -> bool:
        """Return True if the fork by which a lineage differs from ours may be what it claims to be.

        A fork at a round that we know must begin at our state of it. A lineage in which ours was founded proves that it has
        continued; a member of that time may have lost the proof with a restart. Other claims need a member whom we know.
        """
        ours, replica = self._replica.forks, self._replica
        common = shared(ours, head.forks)
        if common == len(head.forks):
            if common == len(ours) or head.round <= ours[common].round:
                return True
            own, fraction = ours[common], self._current().agreement.terms.fraction
            name = lineage_of(head.forks)
            if head.proof is None:
                return peer in own.before and head.round < own.round + LEAP
            return continues(head.proof, name, self._fragment, own.round, own.before, fraction, self._verify)
        fork = head.forks[common]
        if common < len(ours) and ours[common].base == fork.base:
            return (ours[common].round, ours[common].before) == (fork.round, fork.before)
        if replica.newest == (fork.round, fork.base):
            return replica.members == fork.before
        if fork.round in self._states:
            return self._states[fork.round] == (fork.base, fork.before)
        return not self._known.isdisjoint(fork.members) and fork.round < replica.round + LEAP

    @property
    def _known(self) -> set[PeerId]:
        """Peers that are or were members of our lineage, as far as its forks name them."""
        replica = self._replica
        return {*replica.members, *(one for fork in replica.forks for one in (*fork.before, *fork.members))}

    def _note(self) -> None:
        """Note the present state, which has its digest."""
        replica = self._replica
        if self._states.get(replica.round, (b"",))[0] != replica.digest:
            self._states[replica.round] = replica.digest, replica.members
            if len(self._states) > STATES:
                del self._states[min(self._states)]

    def advance(self) -> None:
        """Begin a round: peers of lineages over which ours prevails learn that, and all learn of a new one."""
        self._founding, self.since = None, None
        self._note()
        if self._name != lineage_of(self._replica.forks):
            self._name = lineage_of(self._replica.forks)
            for peer in sorted(self._live):
                self._tell(peer)
        for peer, head in sorted(self._heads.items(), key=lambda item: item[0]):
            if self._ours_prevails(head):
                self._tell(peer)

    def _tell(self, peer: PeerId) -> None:
        ours, proof = self._replica.forks, None
        theirs = self._heads[peer].forks if peer in self._heads else ()
        common = shared(ours, theirs)
        if common == len(ours) < len(theirs):
            proof = self._proof(theirs[common].round, lineage_of(ours))
        self._send_queue.control(peer, Head(self._replica.round, self._fragment, ours, proof))

    def _ours_prevails(self, head: Head) -> bool:
        return prevails(self._replica.forks, self._replica.round, head.forks, head.round)

    def prevailing(self) -> Collection[PeerId]:
        """Return the peers of the lineage that prevails over ours; empty if there is none.

        While this peer's lineage has a quorum it does not give way to one that was founded in it.
        """
        best: Head | None = None
        ours = lineage_of(self._replica.forks)
        able = self.since is None
        for peer, head in sorted(self._heads.items(), key=lambda item: item[0]):
            if peer in self._doubted or not prevails(head.forks, head.round, self._replica.forks, self._replica.round):
                continue
            if able and descends(head.forks, ours):
                continue
            if best is None or prevails(head.forks, head.round, best.forks, best.round):
                best = head
        name = self._larger() if best is None else lineage_of(best.forks)
        if name is None:
            return ()
        return [peer for peer, head in self._heads.items() if lineage_of(head.forks) == name]

    def _larger(self) -> bytes | None:
        """Return the name of the lineage to which ours gives way because it has more reachable peers.

        That decides if two lineages have met for a while and the forks did not decide, because a peer that restarted does
        not know the state at which another lineage began. Only members that we know count. Of equally many, the lower name.
        """
        known = self._known
        count: Counter[bytes] = Counter(lineage_of(head.forks) for peer, head in self._heads.items() if peer in known)
        if not self._name:
            # The first lineage is not announced.
            count[b""] += len(known.intersection(self._live).difference(self._heads))
        count[self._name] += 1
        best = min(count, key=lambda name: (-count[name], name))
        wait = PATIENCES * self._current().agreement.terms.patience
        return best if best != self._name and self._now() > self._met.get(best, self._now()) + wait else None

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
        self._note()
        for peer, head in self._heads.items():
            if lineage_of(head.forks) != self._name:
                agreement.bar(peer)
        able = agreement.able
        if agreement.commit is not None:  # Its results may be lost, although peers that voted for them are here again.
            able = now < fly.moved + PATIENCES * agreement.terms.patience
        able = able and not fly.unobtainable
        if not self._replica.members or fly.complete or able:
            self.since = None
            return
        if self.since is None:
            self.since = now
        base = self._replica.digest
        for peer in sorted(self.prevailing()):
            fork = self._heads[peer].forks[-1] if self._heads[peer].forks else None
            if fork is not None and fork.base == base:
                self._begin(fork)  # It was founded with the state that we have.
                return
        if agreement.diverged:
            return
        called = bool(self._live.intersection(self._begun.stated).intersection(self._replica.members))
        if not self._orphan or (now < self.since + self._wait and not called):
            return  # Links to the lost members do not break at the same time everywhere: the first peer calls the others.
        if not agreement.withdraw():
            return  # The disk must remember that this peer votes no more in the parent lineage.
        self._begun.life = self._life()  # It is another one if the disk has failed meanwhile.
        found = self._begun.state(now, self._live, agreement.silent, SETTLE * agreement.terms.patience)
        if found is not None:
            for peer in sorted(self._live):
                self._send_queue.control(peer, found)
        fork = self._begun.fork
        if fork is not None:
            self._begin(fork)

    @property
    def _begun(self) -> Founding:
        replica = self._replica
        if self._founding is None or self._founding.base != replica.digest:
            self._founding = Founding(
                self._me, replica.round, self._fragment, replica.digest, replica.members, self._life(), self._sign
            )
        return self._founding

    def _begin(self, fork: Fork) -> None:
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
    record, lineage = votes.record, lineage_of(replica.forks)
    if record is None:
        return False
    if record.lineage == lineage:
        return record.round > replica.round + 1
    if founded_by(replica.forks, record.lineage, me, votes.life):
        return False
    votes.renew()
    return True


def continue_alone(
    replica: Replica, fragment: int, votes: VoteStore, identity: Identity, run_id: bytes, *, ahead: bool = False
) -> Fork | None:
    """Make this peer the only member; return the fork if that needs a lineage. Runs in `work`.

    It needs none if the peer is the only member already, before the first round, and in methods without agreement. It
    needs one in any case if this peer has been further (`ahead`): rounds that are made again get other results.
    """
    me = identity.peer_id
    ahead |= check_votes(replica, votes, me)
    if not replica.alike or (not replica.round and not replica.forks):
        replica.hold_alone(me, votes.life)
    if not replica.alike or (replica.members == (me,) and replica.known_lives == {me: votes.life} and not ahead):
        return None
    founding = Founding(
        me,
        replica.round,
        fragment,
        replica.digest,
        replica.members,
        votes.life,
        lambda message: sign_message(message, b"", identity, run_id),
    )
    founding.state(0.0, (), (), 0.0)
    fork = founding.fork
    assert fork is not None
    replica.found(fork)
    return fork
