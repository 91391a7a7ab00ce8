"""Catch-up: finds out whether the swarm has left this peer behind, and fetches the newer state."""

from __future__ import annotations

import asyncio
from collections.abc import Generator
from functools import partial

from thinwire.collectives.blocking_work import JobPart
from thinwire.collectives.rounds.round import Round
from thinwire.collectives.rounds.round_factory import RoundFactory
from thinwire.collectives.state_sync.chunk_transfer import LATEST
from thinwire.collectives.state_sync.state_offers import Offered, Replay, matches
from thinwire.collectives.state_sync.state_sync import FetchedState, OtherModelState
from thinwire.node.outer.lineages import Lineages
from thinwire.node.outer.progress_claims import ProgressClaims
from thinwire.node.outer.session import FragmentRounds
from thinwire.node.outer.state_transfer.state_fetcher import StateFetcher
from thinwire.node.runtime.asyncio_extra import Work
from thinwire.swarm.lineage import lineage_of, prevails
from thinwire.swarm.messages.registry import Ask, PeerId

TRIES = 3
"""Failed fetches after which the peers that have proved to be ahead count as serving no state."""


class CatchUp:
    """Decision of a peer to replace its state by a fetched one.

    It follows what a chain proves: a later round of its lineage, or a lineage that prevails. The state is fetched
    only if no peer has sent the commit of our round for one patience, or if no peer has its results any more.
    `factory` makes the rounds. `turn`: held while chunks of a state are fetched; sessions of other fragments share it.
    """

    def __init__(
        self,
        rounds: FragmentRounds,
        fetcher: StateFetcher,
        *,
        factory: RoundFactory,
        lineages: Lineages,
        turn: asyncio.Semaphore | None,
    ) -> None:
        self.behind = factory.behind
        """Set when the swarm is so far ahead that the state must be fetched."""
        self.foreign: OtherModelState | None = None
        """The mismatch, if the asked peers train another model."""
        self.gone: set[PeerId] = set()
        """Peers that have left, or refuse connections; they are not waited for."""
        self.began_late = False
        """True if most of the other live members claimed to be past the round in progress when it began here."""
        presence = rounds.presence
        self._claims, self._now = ProgressClaims(rounds.now), rounds.now
        self.fetcher = fetcher
        self._replica, self._round_factory, self._current = rounds.replica, factory, rounds.current
        self._roster, self._live, self._send_queue = presence.roster, presence.live, presence.send_queue
        self._me, self._fragment = presence.roster.record.peer_id, rounds.fragment
        self._lineages, self._turn, self._failed = lineages, turn, 0
        self._proved_since: float | None = None
        """Time since which other peers have proved to be ahead of the round in progress; None if none has."""
        self._outdated = False
        """True if other peers have recovered the state while this peer was away."""
        self._prevails = False
        self.replays = False
        """True if to follow the rounds since our state takes less than to fetch the state of the swarm."""

    @property
    def alone(self) -> bool:
        """True if no peer offered a state at the last attempt: the reachable peers, if any, are no swarm."""
        return not self.fetcher.offers

    @property
    def newest(self) -> bool:
        """True if the last attempt has shown that no other peer has a newer state than ours.

        One reason is an offer of a lineage that gives way to ours: its peers wait for our state. The other is a proof by
        votes. A later round of our lineage needs the votes of a quorum of our members. We have voted in none: our votes are
        on the disk, and if that had lost them, we would be another life, without a vote. A member that offers a round up to
        ours has seen no later one; if it has voted in the next, that round is in progress, and the next ballot finds the
        vote. So if the silent members are no quorum, no peer is further. The only member needs no answer of another one. A
        joiner that a later round admitted is no exception, because that round would have needed our vote, too.
        """
        replica, agreement, offers = self._replica, self._current().agreement, self.fetcher.offers
        older = {peer for peer, one in offers.items() if one.lineage == replica.lineage and one.round <= replica.round}
        voted = self._me not in replica.members or not agreement.voter or agreement.acceptor.voted is not None
        if voted or not offers or len(older) < len(offers):
            return self._prevails
        terms, silent = agreement.terms, set(replica.members) - older - {self._me}
        return not terms.enough(silent)

    @property
    def alone_in_round(self) -> bool:
        """True if no other peer takes part in the round in progress: it needs our contribution."""
        current = self._current()
        over = current.agreement.commit is not None or self.behind.is_set()
        return not over and not self._live_members() and not (self._live & {*current.agreement.ready})

    @property
    def claimed_over(self) -> bool:
        """True if most of the other live members claim that the round in progress has committed."""
        members = self._live_members()
        return 2 * len(self._claims.past(self._current().round).intersection(members)) > len(members)

    def begin(self) -> list[PeerId]:
        """Begin a round; return the peers to ask how it ended."""
        self.behind.clear()
        self.fetcher.reset()
        self.fetcher.forget(*self.fetcher.without)
        self._outdated, self._proved_since = False, None
        further = self._claims.begin(self._current().round)
        self.began_late = self.claimed_over
        return further

    def on_link_up(self, peer: PeerId) -> None:
        self.gone.discard(peer)

    def on_link_down(self, peer: PeerId, *, gone: bool) -> None:
        self._claims.on_link_down(peer)
        if gone:
            self.gone.add(peer)

    def claimed(self, peer: PeerId, round: int) -> None:
        """Note the claim of a peer that it has committed `round`."""
        self._claims.claimed(peer, round)

    def seen(self, peer: PeerId, round: int) -> None:
        """Note a message of a later round; ask its sender how ours ended, a few times in a patience."""
        self._claims.seen(peer, round)
        current = self._current()
        if current.agreement.commit is None and self._claims.asks(peer, self._round_factory.patience):
            self._send_queue.control(peer, Ask(current.round, self._fragment))

    def look(self) -> None:
        """Give up the round and set `behind` when the swarm is so far ahead that no peer helps us to follow."""
        if self.behind.is_set():
            return
        current, lineages, patience = self._current(), self._lineages, self._round_factory.patience
        if lineages.prevailing() and lineages.adoptable() is None:
            self._give_way(current)
        proved, committed = bool(lineages.ahead()), current.agreement.commit is not None
        if not proved:
            waits = committed and not current.exhausted
            for peer in self._claims.unproved(self._replica.round, current.progressed_at, patience, waits=waits):
                self._send_queue.control(peer, Ask(current.round, self._fragment))
                lineages.ask(peer)
        if committed:
            # Only its results are missing. The wait for them is limited, and short if most sources do not have them any more,
            # or no peer that can be reached is known to have had them.
            longest = max(LATEST, 2 * patience) if current.follows else 2 * patience
            gone = current.mostly_exhausted or current.unobtainable()
            patience = self._round_factory.floor if gone else longest
        if not proved:
            self._proved_since = None
            return
        if self._proved_since is None:
            self._proved_since = self._now()
        if self._now() >= max(self._proved_since, current.progressed_at) + patience:
            self._give_way(current)

    def outdated(self) -> bool:
        """Note that other peers have recovered the state, which is to be fetched; return True.

        Return False, without effect, if members of our last round are here: these decide.
        """
        current = self._current()
        known = self._outdated and self.behind.is_set()
        if known or self._live_members() or current.agreement.commit is not None:
            return False
        self._outdated = True
        self._give_way(current)
        return True

    async def copy(self, work: Work, below: int) -> FetchedState | None:
        """Fetch the newest available copy of a state of a round before `below`."""
        patience = self._round_factory.patience
        fetched = await self.fetcher.fetch(self._live, work, patience=patience, accept=self._proves, copy_below=below)
        return fetched if isinstance(fetched, FetchedState) else None

    async def newer(self, work: Work) -> FetchedState | None:
        """Fetch the state of the last committed round; return None if no peer offers a suitable one.

        If a peer has proved that we are behind, only the state of a later round is suitable. With `replays` the caller takes
        part with its own state: the peers answer with the results of one round after the other. A peer whose state has
        diverged, or which has been proved to be behind, does not replay, because following rounds has failed there.
        """
        behind, replica, patience = self.behind.is_set(), self._replica, self._round_factory.patience
        follows = not behind and not self._current().agreement.diverged
        self.behind.clear()
        fetched = await self.fetcher.fetch(
            self._live,
            work,
            patience=patience,
            accept=partial(self._useful, behind=behind),
            turn=self._turn,
            reached=lambda offer: replica.round if follows and offer.lineage == replica.lineage != b"" else None,
        )
        self.replays = isinstance(fetched, Replay)
        if isinstance(fetched, Replay):
            for peer in fetched.sources:
                self._claims.seen(peer, fetched.round + 1)
            return None
        if isinstance(fetched, OtherModelState):
            self.foreign = fetched
            return None
        lineages = self._lineages
        leaders = self._live.intersection([*lineages.prevailing(), *lineages.ahead()])
        self._failed = self._failed + 1 if leaders and fetched is None else 0
        if self._failed >= TRIES:
            self._failed = 0
            lineages.drop(leaders)
        return fetched

    def _useful(self, offered: Offered, *, behind: bool) -> Generator[JobPart, None, bool]:
        """Check in parts whether a state should replace ours, and its chain proves it."""
        replica, chain = self._replica, offered.chain
        if not self._outdated and replica.chain:
            if lineage_of(chain) != replica.lineage:
                if prevails(replica.chain, chain):
                    self._prevails |= yield from self._proves(offered)
                if not self._lineages.gives_way(chain):
                    return False
            elif offered.offer.round < replica.round + behind:
                return False
        return (yield from self._proves(offered))

    def _proves(self, offered: Offered) -> Generator[JobPart, None, bool]:
        trusted = (lambda fork: True) if self._outdated else self._lineages.trusted
        return matches(offered.offer, (yield from offered.received.prove(trusted)))

    def _live_members(self) -> list[PeerId]:
        """Return the live other members of the last round that we know: ours, or one whose commit we have."""
        commit = self._current().agreement.commit
        members = self._replica.members if commit is None else commit.proposal.members
        return [p for p in members if p != self._me and p not in self.gone and self._roster.peers.is_live(p)]

    def _give_way(self, current: Round) -> None:
        self.behind.set()
        if current.agreement.commit is None:
            current.agreement.overtaken()
            current.pump()
