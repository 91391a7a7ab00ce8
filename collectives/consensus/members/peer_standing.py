"""Standing of other peers with this one, which decides how a round treats them."""

from __future__ import annotations

from collections.abc import Collection

from thinwire.swarm.evidence import Statement
from thinwire.swarm.messages.registry import PeerId


class PeerStanding:
    """Standing of peers that all trust each other and have equal rights; a subclass distinguishes."""

    def slow_peers(self) -> Collection[PeerId]:
        """Return the peers that must not own chunks in rounds that we lead."""
        return ()

    def banned(self) -> Collection[PeerId]:
        """Return the peers whose messages do not count."""
        return ()

    def on_trial(self, peer: PeerId) -> bool:
        """Return True if a peer needs endorsements to become a member."""
        return False

    def token_of(self, peer: PeerId) -> bytes:
        """Return the admission token of a peer; empty if it has none, or if none is known here."""
        return b""

    def is_admitted(self, peer: PeerId, token: bytes) -> bool:
        """Return True if the run admits a peer with this admission token.

        The answer is the same at all peers of a run: it depends on the manifest and the token only.
        """
        return True

    def is_excluded(self, peer: PeerId, token: bytes) -> bool:
        """Return True if a peer with this admission token must not become a member, as far as known here.

        It is banned, or its admission has been revoked. Other peers may know more or less.
        """
        return peer in self.banned()

    def opinions(self) -> tuple[tuple[PeerId, ...], tuple[PeerId, ...]]:
        """Return the peers that our announcement endorses, and those that it distrusts."""
        return (), ()

    def paced(self, peer: PeerId, round: int) -> bool:
        """Return True if this peer gets the results of a round with pauses, so that members get theirs first."""
        return False

    def report_equivocation(
        self, peer: PeerId, first: tuple[Statement, bytes], second: tuple[Statement, bytes]
    ) -> None:
        """Handle two statements of a peer that exclude each other, with their signatures."""
