"""Who has called an average, and which group is to begin it: what an operation does before it is a round.

Everybody tells everybody what it wants to average (`Call`), and when all that are here have called, or `grace` is over, the
first of them by rendezvous ranking names those who have (`Call.group`). Everybody takes up a group that it would have named
itself, or that more than half of the others name: see `gathering`. Those who want something else are left out.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Collection
from dataclasses import dataclass

from thinwire.collectives.gathering import Group, confirmed, fits, greater, orderly
from thinwire.collectives.outbox import Outbox
from thinwire.collectives.planned import difference
from thinwire.swarm.identity import Identity
from thinwire.swarm.protocol import MAX_GROUP, Call, Digest, PeerId, Plan
from thinwire.swarm.rendezvous import leader_order


@dataclass(frozen=True, slots=True)
class Place:
    """What an average needs of the peer that it is of: who we are, whom we reach, and what time it is.

    live: peers with a link. gone: peers whose process is known to be no more. here: peers in the membership's view, and us.
    life: a number that is higher in every later life of this peer. link: what rounds of training have shown of ours, bytes/s
    up and down (0: not known).
    """

    identity: Identity
    run_id: Digest
    outbox: Outbox
    now: Callable[[], float]
    live: Collection[PeerId]
    gone: Collection[PeerId]
    here: Callable[[], Collection[PeerId]]
    key_of: Callable[[PeerId], bytes | None]
    life: int
    link: Callable[[], tuple[int, int]] = lambda: (0, 0)

    @property
    def me(self) -> PeerId:
        """Ourselves."""
        return self.identity.peer_id


class Callers:
    """Those who have called one average, as one of them knows it.

    grace: seconds that peers which are here and have not called are waited for. patience: seconds after which the next one
    names the group, when who should have has not.
    """

    def __init__(self, place: Place, plan: Plan, *, grace: float, patience: float) -> None:
        self.calls: dict[PeerId, Call] = {}
        """What the others have said last that want the same."""
        self.differing: dict[PeerId, str] = {}
        """Who wants something else, and how it differs."""
        self._place, self._plan, self._grace, self._patience = place, plan, grace, patience
        self._withdrawn: set[PeerId] = set()  # who has called, does not any more, and has not called anew
        self._heeded: set[PeerId] = set()  # whose word alone was enough: of each one group, or it could go on for ever
        self._began = place.now()
        self._complete: float | None = None

    @property
    def waited(self) -> float:
        """Seconds since we called."""
        return self._place.now() - self._began

    @property
    def all(self) -> set[PeerId]:
        """Those who have called and are not in another group already, and us."""
        me = self._place.me
        return {me} | {peer for peer, call in self.calls.items() if not call.group or me in call.group}

    @property
    def outvoted(self) -> str:
        """What is different, when those who want something else are not fewer than those who want the same."""
        many = len(self.differing) >= 1 + len(self.calls) + len(self._awaited())
        return next(iter(self.differing.values())) if many else ""

    def hear(self, peer: PeerId, call: Call) -> bool:
        """Somebody calls the same; whether it is well formed."""
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
        """Somebody does not call any more, or cannot be reached."""
        self.calls.pop(peer, None)
        self.differing.pop(peer, None)

    def withdraw(self, peer: PeerId) -> None:
        """Somebody says that it does not call any more: who names a group with it has not heard that yet."""
        if peer in self.calls:
            self._withdrawn.add(peer)
        self.forget(peer)

    def again(self) -> None:
        """Nobody is in a group yet, so far as we are concerned."""
        self._heeded.clear()
        self._complete = None

    def clear(self) -> None:
        """What was called was another one."""
        self.calls.clear()
        self.differing.clear()
        self._withdrawn.clear()

    def named(self, group: Group, *, begun: bool) -> Group | None:
        """The group of those that others name which is ours from now on. `group`: the one that has been (it may stay so), and
        `begun`: whether its round has.
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
            # One alone does not end our waiting for those who are here; two do.
            awaited = self.all | (self._awaited() if counts[other] < 2 else set())
            if fits(other, place.me, {place.me, *self.calls}, here, awaited):
                self._heeded.add(peer)
                return other
        return None

    def own(self, key: tuple[int, int]) -> Group | None:
        """The group that we name, once that is our turn: () when too few have called in time. `key`: round and fragment."""
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
        """What most of those have begun who have begun another group than this."""
        groups = Counter(call.group for peer, call in self.calls.items() if peer in call.group and call.group != group)
        return max(groups, key=lambda one: (groups[one], one)) if groups else None

    @property
    def _late(self) -> bool:
        return self._place.now() >= self._began + self._grace

    def _awaited(self) -> set[PeerId]:
        """Those who are here, have not called, and are waited for."""
        known = {self._place.me, *self.calls, *self.differing, *self._place.gone}
        return set() if self._late else set(self._place.here()) - known
