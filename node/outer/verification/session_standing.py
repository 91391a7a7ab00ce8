"""Standing of peers in the rounds of a session: by bans, trials, scores, speeds and missed rounds."""

from __future__ import annotations

from collections.abc import Callable, Collection

from thinwire.collectives.consensus.members.peer_standing import PeerStanding
from thinwire.node.membership.presence import Presence
from thinwire.node.outer.verification.trials import Trials
from thinwire.swarm.evidence import Statement
from thinwire.swarm.keyring import Keyring
from thinwire.swarm.messages.registry import Evidence, PeerId


class SessionStanding(PeerStanding):
    """Standing of peers by the findings of presence and trials.

    - `slow_own`: slow peers own chunks like others (`exchange.slow_peers`).
    - `paced`: see PeerStanding.
    """

    def __init__(
        self,
        keyring: Keyring,
        presence: Presence,
        trials: Trials,
        *,
        slow_own: bool,
        paced: Callable[[PeerId, int], bool],
    ) -> None:
        self._keyring, self._presence, self._trials = keyring, presence, trials
        self._slow_own, self._paced = slow_own, paced

    def slow_peers(self) -> Collection[PeerId]:
        """Return the peers that must not own chunks in rounds that we lead."""
        watch = self._presence.watch
        return () if self._slow_own or watch is None else watch.slow()

    def banned(self) -> Collection[PeerId]:
        """Return the peers with evidence against them, or that the author has revoked."""
        return self._presence.roster.peers.banned

    def on_trial(self, peer: PeerId) -> bool:
        """Return True if a peer needs endorsements to become a member."""
        return self._trials.on_trial(peer)

    def token_of(self, peer: PeerId) -> bytes:
        """Return the admission token in the record of a peer; empty without a record."""
        return self._presence.roster.token_of(peer)

    def is_admitted(self, peer: PeerId, token: bytes) -> bool:
        """Return True if the manifest's rule of admission admits a peer with this token."""
        return self._presence.roster.is_admitted(peer, token)

    def is_excluded(self, peer: PeerId, token: bytes) -> bool:
        """Return True if a peer is banned, or a revocation that is known here excludes it."""
        return self._presence.roster.is_excluded(peer, token)

    def opinions(self) -> tuple[tuple[PeerId, ...], tuple[PeerId, ...]]:
        """Return the peers that our announcement endorses, and those that it distrusts."""
        return self._trials.opinions()

    def paced(self, peer: PeerId, round: int) -> bool:
        """Return True if this peer gets the results of a round with pauses."""
        return self._paced(peer, round)

    def report_equivocation(
        self, peer: PeerId, first: tuple[Statement, bytes], second: tuple[Statement, bytes]
    ) -> None:
        """Ban a peer by two statements that exclude each other."""
        if (key := self._keyring.key_of(peer)) is not None:
            self._presence.convict(Evidence(key, first[0], second[0], (first[1], second[1])))
