"""Founding of a lineage: unanimous agreement of peers that continue without a quorum."""

from __future__ import annotations

from collections.abc import Callable, Collection, Sequence

import msgspec
from thinwire.swarm.lineage import new_founders
from thinwire.swarm.messages.registry import LIFE, Digest, Fork, Found, Message, PeerId

DISAGREE = 3
"""Settle times after which a peer is left out if it still names peers that have stated nothing."""


class Founding:
    """Unanimous agreement of peers to continue as a lineage after `round`.

    Every peer states the founders that it sees. Before `until` these are all members that it can reach and all peers that
    have stated the same state. After `until` they are only peers that have stated it and have named all others. The lineage
    begins when all founders have stated the same; if none of them is a member, not before `until`, because these peers learn of
    each other only by their statements. base: digest of the state after `round`. before: members of the parent lineage.
    key_of, token_of: return the public key of a peer, and its admission token.
    """

    def __init__(
        self,
        me: PeerId,
        round: int,
        fragment: int,
        base: Digest,
        before: Sequence[PeerId],
        life: bytes,
        sign: Callable[[Message], bytes],
        key_of: Callable[[PeerId], bytes | None],
        token_of: Callable[[PeerId], bytes],
    ) -> None:
        self.me, self.round, self.fragment, self.base, self.before = me, round, fragment, base, tuple(before)
        self.life, self._sign, self._key_of, self._token_of = life, sign, key_of, token_of
        self.stated: dict[PeerId, tuple[Found, bytes]] = {}
        """Statements of peers about the same state, and their signatures."""
        self._excluded: set[PeerId] = set()
        self.until: float | None = None
        """Time until which members without a statement are waited for; None before our first one."""
        self._settled = False

    def on_message(self, sender: PeerId, message: Found, signature: bytes) -> bool:
        """Note the statement of another peer; return True if it is about the same state."""
        same = (message.round, message.fragment, message.base) == (self.round, self.fragment, self.base)
        if same and sender in message.members and len(message.life) == LIFE:
            self.stated[sender] = message, signature
            return True
        return False

    def update(self, now: float, live: Collection[PeerId], silent: Collection[PeerId], settle: float) -> Found | None:
        """Return our statement about the present founders, or None if it has not changed.

        live: reachable peers. silent: members that are not waited for. settle: seconds for which the others are.
        """
        if self.until is None:
            self.until = now + settle
        if self.me in self.stated and now >= self.until + DISAGREE * settle:
            # Peers that still name others without a statement would prevent a lineage for ever.
            seen = {self.me, *(peer for peer in self.stated if peer in live)}
            self._excluded |= {peer for peer, (one, _) in self.stated.items() if not seen.issuperset(one.members)}
            self.until = now
        stated = {peer for peer in self.stated if peer in live and peer not in self._excluded}
        if now < self.until:
            founders = {self.me, *stated, *(peer for peer in self.before if peer in live and peer not in silent)}
        else:
            founders = {self.me}
            for peer in sorted(stated - {self.me}):
                named = set(self.stated[peer][0].members)
                if founders <= named and all(one == self.me or self._names(one, peer) for one in founders):
                    founders.add(peer)
        self._settled = now >= self.until or not founders.isdisjoint(self.before)
        members = tuple(sorted(founders))
        own = self.stated.get(self.me)
        if own is not None and own[0].members == members:
            return None
        message = Found(self.round, self.fragment, self.base, members, self.life)
        self.stated[self.me] = message, self._sign(message)
        return message

    def _names(self, one: PeerId, peer: PeerId) -> bool:
        return peer in self.stated[one][0].members

    def has_stated(self, fork: Fork) -> bool:
        """Return True if our last statement names the base and the founders of this fork."""
        own = self.stated.get(self.me)
        return own is not None and (fork.base, fork.members) == (self.base, own[0].members)

    @property
    def fork(self) -> Fork | None:
        """The fork, when all founders have stated the same."""
        if self.me not in self.stated or not self._settled:
            return None
        members = self.stated[self.me][0].members
        if any(peer not in self.stated or self.stated[peer][0].members != members for peer in members):
            return None
        lives = b"".join(self.stated[peer][0].life for peer in members)
        signatures = tuple(self.stated[peer][1] for peer in members)
        keys = tuple(key for peer in members if (key := self._key_of(peer)) is not None)
        fork = Fork(self.round, self.base, self.before, members, lives, signatures, keys)
        return msgspec.structs.replace(fork, tokens=tuple(map(self._token_of, new_founders(fork))))
