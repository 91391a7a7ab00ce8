"""The lineage of this peer, and the founding of another one when its members have no quorum."""

from __future__ import annotations

from collections.abc import Callable

from thinwire.collectives.consensus.chain import end_of
from thinwire.collectives.consensus.members.vote_store import VoteStore
from thinwire.collectives.rounds.round import Round
from thinwire.collectives.state_sync.chunk_transfer import LATEST
from thinwire.node.outer.lineages import Lineages
from thinwire.node.outer.quorum_wait import PATIENCES, QuorumWait
from thinwire.node.outer.session import FragmentRounds
from thinwire.node.runtime.event_log import Emit
from thinwire.node.state.replica import Replica
from thinwire.swarm.identity.identity import short
from thinwire.swarm.keyring import Keyring
from thinwire.swarm.lineage import founded_by, name_of_fork
from thinwire.swarm.lineage_founding import Founding
from thinwire.swarm.messages.registry import Fork, Found, PeerId

SETTLE = 1.0
"""Patiences to wait for members that have not stated yet which founders they see."""


class OwnLineage:
    """Lineage of one peer's replica, and the founding of the next one with the reachable peers.

    `lineages`: those of other peers. `quorum_wait`: ends when a lineage is founded. token_of: returns the admission token of a
    peer. `votes`: the store of our votes. `founded`: called with the fork of a lineage that this peer and others have founded.
    """

    def __init__(
        self,
        rounds: FragmentRounds,
        lineages: Lineages,
        quorum_wait: QuorumWait,
        *,
        emit: Emit,
        keyring: Keyring,
        token_of: Callable[[PeerId], bytes],
        votes: VoteStore,
        founded: Callable[[Fork], None],
    ) -> None:
        presence = rounds.presence
        self._replica, self._fragment = rounds.replica, rounds.fragment
        self._now, self._current = rounds.now, rounds.current
        self._live, self._send_queue, self._me = presence.live, presence.send_queue, presence.roster.record.peer_id
        self._lineages, self._quorum_wait, self._emit = lineages, quorum_wait, emit
        self._keyring, self._token_of, self._votes, self._founded = keyring, token_of, votes, founded
        self._founding: Founding | None = None
        self._missing = (0, False), 0.0
        """Results that the round in progress lacks, True if it lacks claims, and the time since which it does."""

    def advance(self) -> None:
        """Begin a round: its quorum is not known to be missing."""
        founding, ours = self._founding, self._replica.chain
        self._founding, self._missing = None, ((0, False), 0.0)
        self._quorum_wait.end()
        if ours and founding is not None and founding.has_stated(ours[-1].fork):
            report(ours[-1].fork, self._emit)  # Another founder was faster, and we have fetched its state.

    def on_found(self, peer: PeerId, message: Found, signature: bytes) -> None:
        """Note the statement of a founder; it has no vote in the round in progress any more."""
        if self._me in self._replica.members and self._current().agreement.electorate.on_trial(peer):
            return  # Newcomers on trial become no members by a lineage, either.
        settled = self._replica.newest[0] == self._replica.round  # Otherwise its digest is being computed.
        if settled and self._own_founding.on_message(peer, message, signature):
            self._current().agreement.electorate.nonvoters.add(peer)

    def on_tick(self) -> None:
        """Found a lineage with the reachable peers if the round has had no quorum for long enough."""
        current, now = self._current(), self._now()
        agreement = current.agreement
        since = self._no_quorum_since(current, now)
        if since is None:
            self._quorum_wait.end()
            return
        self._quorum_wait.begin(since)
        if (fork := self._lineages.adoptable()) is not None:
            self._begin(fork)
            return
        if agreement.diverged:
            return
        called = bool(self._live.intersection(self._own_founding.stated).intersection(self._replica.members))
        until = self._quorum_wait.until
        due = until is not None and now >= until
        if not due and not called:
            return  # Links to the lost members do not break at the same time everywhere: the first peer calls the others.
        if not agreement.abstain():
            return  # The disk must remember that this peer votes no more in the parent lineage.
        self._own_founding.life = self._votes.life  # It is another one if the disk has failed meanwhile.
        found = self._own_founding.update(
            now, self._live, agreement.electorate.nonvoters, SETTLE * agreement.terms.patience
        )
        if found is not None:
            for peer in sorted(self._live):
                self._send_queue.control(peer, found)
        if (begun := self._own_founding.fork) is not None:
            self._begin(begun)

    def _no_quorum_since(self, current: Round, now: float) -> float | None:
        """Return the time since which the reachable peers cannot commit the round; None if they can.

        They cannot either if the round is bound to results that none of them has, or if no ballot can follow from their
        promises, see Agreement.blocked.
        """
        agreement = current.agreement
        lacks = current.missing_results, current.unclaimed
        if lacks != self._missing[0]:
            self._missing = lacks, now
        # Voters that have restarted are reachable, but have lost the results. A peer that follows gets them with pauses.
        longest = PATIENCES * agreement.terms.patience
        if current.follows and not current.exhausted:
            longest = max(LATEST, longest)
        lost = current.missing_results and now >= self._missing[1] + longest
        # A founder of a lineage that begins before this round has no results of it.
        gone = current.missing_results and current.unobtainable(without=self._own_founding.stated)
        able = (agreement.electorate.able or agreement.commit is not None) and not (gone or lost or agreement.blocked)
        if not self._replica.members or current.complete or able:
            return None
        return self._missing[1] if lost else now

    @property
    def _own_founding(self) -> Founding:
        replica = self._replica
        if self._founding is None or self._founding.base != replica.digest:
            place = replica.round, self._fragment, replica.digest, replica.members
            proofs = self._keyring.sign, self._keyring.key_of, self._token_of
            self._founding = Founding(self._me, *place, self._votes.life, *proofs)
        return self._founding

    def _begin(self, fork: Fork) -> None:
        self._founding = None
        self._founded(fork)
        report(fork, self._emit)


def report(fork: Fork, emit: Emit) -> None:
    """Emit the event "lineage", and its alarm: a lineage has begun."""
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
    replica: Replica, fragment: int, votes: VoteStore, keyring: Keyring, token: bytes, *, ahead: bool = False
) -> Fork | None:
    """Make this peer, whose keyring and admission token are given, the only member. Runs in `work`.

    Return the fork of the lineage if that is not the first one. No lineage is needed if the peer is the only member already,
    or in methods without agreement. A lineage is needed in any case if this peer has been further (`ahead`), because repeated
    rounds have other results. A new lineage begins with a new life, which has no vote in the parent lineage. So two copies of
    a run folder found two lineages, not one with two results.
    """
    me = keyring.me
    ahead |= check_votes(replica, votes, me)
    if not replica.alike:
        replica.members, replica.lives = (me,), votes.life
        replica.seal()
        return None
    proved = bool(replica.chain) and end_of(replica.chain).round == replica.round
    if replica.members == (me,) and replica.known_lives == {me: votes.life} and proved and not ahead:
        return None
    votes.renew()
    place = replica.round, fragment, replica.digest, replica.members
    founding = Founding(me, *place, votes.life, keyring.sign, keyring.key_of, lambda peer: token)
    founding.update(0.0, (), (), 0.0)
    fork = founding.fork
    assert fork is not None
    replica.found(fork)
    return fork if fork.before or fork.round else None
