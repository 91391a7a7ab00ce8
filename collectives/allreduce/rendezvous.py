"""Collection of an operation's callers and choice of its group, before the operation becomes a round.

Each peer sends its wish (`Call`) to all others. When all present peers have called, or `grace` is over, the first
caller by rendezvous ranking names the group (`Call.group`). A peer accepts a group that it would have named itself, or
that more than half of the others name: see `group_choice`. Peers with a different plan are left out.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Collection
from dataclasses import dataclass

from thinwire.collectives.allreduce.group_acceptance import Group, confirmed, fits, greater, orderly
from thinwire.collectives.allreduce.signature import difference
from thinwire.collectives.blocking_work import Work, at_once
from thinwire.collectives.transport.sending.send_queue import SendQueue
from thinwire.swarm.identity.identity import Identity
from thinwire.swarm.messages.registry import MAX_GROUP, Call, Digest, PeerId, Plan
from thinwire.swarm.rendezvous_hash import leader_order


@dataclass(frozen=True, slots=True)
class PeerContext:
    """Context that an operation needs from its peer.

    `live`: peers with a link. `gone`: peers whose process is known to be dead. `here`: peers in the membership's view,
    and us. `life`: a number that grows with every restart of this peer. `link`: known rates of our link from training
    rounds, bytes/s up and down (0: unknown). `aside`: computes large results.
    """

    identity: Identity
    run_id: Digest
    send_queue: SendQueue
    now: Callable[[], float]
    live: Collection[PeerId]
    gone: Collection[PeerId]
    here: Callable[[], Collection[PeerId]]
    key_of: Callable[[PeerId], bytes | None]
    life: int
    link: Callable[[], tuple[int, int]] = lambda: (0, 0)
    aside: Work = at_once

    @property
    def me(self) -> PeerId:
        """Own peer id."""
        return self.identity.peer_id


class Rendezvous:
    """The callers of one operation as one peer knows them.

    `grace`: seconds to wait for present peers that have not called. `patience`: seconds after which the next peer names
    the group if the one whose turn it is has not.
    """

    def __init__(self, place: PeerContext, plan: Plan, *, grace: float, patience: float) -> None:
        self.calls: dict[PeerId, Call] = {}
        """Last call of each other peer with the same plan."""
        self.differing: dict[PeerId, str] = {}
        """Peers with a different plan, and the difference."""
        self._place, self._plan, self._grace, self._patience = place, plan, grace, patience
        self._withdrawn: set[PeerId] = set()  # peers that called, withdrew, and have not called again
        # peers whose proposal alone was accepted: one group each, to guarantee an end
        self._heeded: set[PeerId] = set()
        self._began = place.now()
        self._complete: float | None = None

    @property
    def waited(self) -> float:
        """Seconds since our call."""
        return self._place.now() - self._began

    @property
    def all(self) -> set[PeerId]:
        """Callers that are not in a group without us, and us."""
        me = self._place.me
        return {me} | {peer for peer, call in self.calls.items() if not call.group or me in call.group}

    @property
    def outvoted(self) -> str:
        """The difference, if at least as many peers want something else as want the same; else ""."""
        many = len(self.differing) >= 1 + len(self.calls) + len(self._awaited())
        return next(iter(self.differing.values())) if many else ""

    def on_message(self, peer: PeerId, call: Call) -> bool:
        """Handle another peer's call; return whether it is well formed."""
        self._withdrawn.discard(peer)
        if call.plan != self._plan:
            self.calls.pop(peer, None)
            self.differing[peer] = difference(self._plan, call.plan, peer)
            return True
        if not orderly(call.group):
            return False
        self.differing.pop(peer, None)
        self.calls[peer] = call
        return True

    def forget(self, peer: PeerId) -> None:
        """Forget a peer that no longer calls or is unreachable."""
        self.calls.pop(peer, None)
        self.differing.pop(peer, None)

    def withdraw(self, peer: PeerId) -> None:
        """Note a withdrawal: groups with this peer were named before the withdrawal arrived."""
        if peer in self.calls:
            self._withdrawn.add(peer)
        self.forget(peer)

    def again(self) -> None:
        """Start over: no peer is in a group, as far as we know."""
        self._heeded.clear()
        self._complete = None

    def clear(self) -> None:
        """Forget all calls: they were for another number."""
        self.calls.clear()
        self.differing.clear()
        self._withdrawn.clear()

    def named(self, group: Group, *, begun: bool) -> Group | None:
        """Return the group named by others that we join, or None.

        `group`: the present group, which may stay; `begun`: whether its round has begun.
        """
        place = self._place
        here, late = set(place.here()), self._late
        others = (set(self.calls) if late and not begun else here | set(self.calls)) - set(place.gone) - {place.me}
        named = {peer: call.group for peer, call in self.calls.items() if len(call.group) >= self._plan.least}
        most = confirmed(named, others)
        if most is not None:
            return most
        counts = Counter(other for peer, other in named.items() if peer in other)
        for peer, other in named.items():
            if peer not in other or peer in self._heeded or not greater(other, group):
                continue
            if not self._withdrawn.isdisjoint(other):
                continue
            # One proposer does not end our waiting for present peers; two do.
            awaited = self.all | (self._awaited() if counts[other] < 2 else set())
            if fits(other, place.me, {place.me, *self.calls}, here, awaited):
                self._heeded.add(peer)
                return other
        return None

    def own(self, key: tuple[int, int]) -> Group | None:
        """Return the group that we name, when it is our turn; () if too few have called in time.

        `key`: round and fragment.
        """
        place, now, callers = self._place, self._place.now(), self.all
        few = len(callers) < self._plan.least
        if not self._late and (self._awaited() or few):
            self._complete = None
            return None
        if few:
            return ()
        if self._complete is None:
            self._complete = now
        turn = leader_order(place.run_id, callers, *key).index(place.me)
        return tuple(sorted(callers)[:MAX_GROUP]) if now >= self._complete + turn * self._patience else None

    def other(self, group: Group) -> Group | None:
        """Return the most frequent group other than `group` among those begun by their own members."""
        groups = Counter(call.group for peer, call in self.calls.items() if peer in call.group and call.group != group)
        return max(groups, key=lambda one: (groups[one], one)) if groups else None

    @property
    def _late(self) -> bool:
        return self._place.now() >= self._began + self._grace

    def _awaited(self) -> set[PeerId]:
        """Return present peers that have not called and that we wait for."""
        known = {self._place.me, *self.calls, *self.differing, *self._place.gone}
        return set() if self._late else set(self._place.here()) - known
