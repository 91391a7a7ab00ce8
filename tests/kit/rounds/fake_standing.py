"""Standing of peers in tests of agreements."""

from __future__ import annotations

from collections.abc import Callable, Collection

from thinwire.collectives.consensus.members.peer_standing import PeerStanding
from thinwire.swarm.messages.registry import PeerId


class FakeStanding(PeerStanding):
    """Standing by the given bans and trials. `report_equivocation`: see PeerStanding.

    tokens: known admission tokens; None: the run admits all peers. A token admits the peer whose id it is.
    """

    def __init__(
        self,
        *,
        banned: Collection[PeerId] = (),
        trial: Callable[[PeerId], bool] = lambda peer: False,
        tokens: dict[PeerId, bytes] | None = None,
        report_equivocation: Callable[..., None] = lambda peer, first, second: None,
    ) -> None:
        self._banned, self.on_trial, self._tokens = banned, trial, tokens
        self.report_equivocation = report_equivocation

    def banned(self) -> Collection[PeerId]:
        return self._banned

    def token_of(self, peer: PeerId) -> bytes:
        return (self._tokens or {}).get(peer, b"")

    def is_admitted(self, peer: PeerId, token: bytes) -> bool:
        return self._tokens is None or token == peer
