"""Collection of an operation's callers and choice of its group, before the operation becomes a round.

Each peer sends its wish (`Call`) to all others. When all present peers have called, or `grace` is over for two
callers, the first caller by rendezvous ranking names the group (`Call.group`). A peer accepts a group that it would
have named itself, or that more than half of the others name: see `group_acceptance`. Peers with a different plan are
left out.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Collection
from dataclasses import dataclass

from thinwire.collectives.allreduce.group_acceptance import Group, confirmed, fits, greater, orderly
from thinwire.collectives.allreduce.signature import difference
from thinwire.collectives.blocking_work import Work, at_once
from thinwire.collectives.transport.sending.send_queue import SendQueue
from thinwire.swarm.keyring import Keyring
from thinwire.swarm.messages.registry import MAX_GROUP, AveragePlan, Call, PeerId
from thinwire.swarm.rendezvous_hash import leader_order


@dataclass(frozen=True, slots=True)
class PeerContext:
    """Context that an operation needs from its peer.

    `live`: peers with a link. `gone`: peers whose process is known to be dead. `here`: peers in the membership's view,
    and us. `first_attempt`: number of the announcement before the first one of this process, above those of earlier processes.
    `link`: known rates of our link from training rounds, bytes/s up and down (0: unknown). `aside`: computes large results.
    """

    keyring: Keyring
    send_queue: SendQueue
    now: Callable[[], float]
    live: Collection[PeerId]
    gone: Collection[PeerId]
    here: Callable[[], Collection[PeerId]]
    first_attempt: int
    link: Callable[[], tuple[int, int]] = lambda: (0, 0)
    aside: Work = at_once

    @property
    def me(self) -> PeerId:
        """Own peer id."""
        return self.keyring.me


class Rendezvous:
    """The callers of one operation as one peer knows them.

    `grace`: seconds to wait for present peers that have not called. `patience`: seconds after which the next peer names
    the group if the one whose turn it is has not.
    """

    def __init__(self, context: PeerContext, plan: AveragePlan, *, grace: float, patience: float) -> None:
        self.calls: dict[PeerId, Call] = {}
        """Last call of each other peer with the same plan."""
        self._called_at: dict[PeerId, float] = {}  # when the first call of each of them arrived
        self.differing: dict[PeerId, str] = {}
        """Peers with a different plan, and the difference."""
        self._context, self._plan, self._grace, self._patience = context, plan, grace, patience
        self._withdrawn: set[PeerId] = set()  # peers that called, withdrew, and have not called again
        self._accepted_from: set[PeerId] = set()
        """Peers whose group was accepted without a majority: only one group of each, so that the choice ends."""
        self._began = context.now()
        self._complete: float | None = None

    @property
    def waited(self) -> float:
        """Seconds since our call."""
        return self._context.now() - self._began

    @property
    def all(self) -> set[PeerId]:
        """Callers that are not in a group without us, and us."""
        me = self._context.me
        return {me} | {peer for peer, call in self.calls.items() if not call.group or me in call.group}

    @property
    def outvoted(self) -> str:
        """The difference, if at least as many peers have a different plan as have the same; else ""."""
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
        self._called_at.setdefault(peer, self._context.now())
        return True

    def forget(self, peer: PeerId) -> None:
        """Forget a peer that no longer calls or is unreachable."""
        self.calls.pop(peer, None)
        self._called_at.pop(peer, None)
        self.differing.pop(peer, None)

    def withdraw(self, peer: PeerId) -> None:
        """Note a withdrawal: groups with this peer were named before the withdrawal arrived."""
        if peer in self.calls:
            self._withdrawn.add(peer)
        self.forget(peer)

    def start_over(self) -> None:
        """Choose a group again: no peer is in one, as far as we know."""
        self._accepted_from.clear()
        self._complete = None

    def clear(self) -> None:
        """Forget all calls: they were for another number."""
        self.calls.clear()
        self._called_at.clear()
        self.differing.clear()
        self._withdrawn.clear()

    def named(self, group: Group, *, begun: bool) -> Group | None:
        """Return the group named by others that we join, or None.

        `group`: the present group, which may stay; `begun`: whether its round has begun.
        """
        context = self._context
        here, late = set(context.here()), self._late
        others = (set(self.calls) if late and not begun else here | set(self.calls)) - set(context.gone) - {context.me}
        named = {peer: call.group for peer, call in self.calls.items() if len(call.group) >= self._plan.least}
        most = confirmed(named, others)
        if most is not None:
            return most
        counts = Counter(other for peer, other in named.items() if peer in other)
        for peer, other in named.items():
            if peer not in other or peer in self._accepted_from or not greater(other, group):
                continue
            if not self._withdrawn.isdisjoint(other):
                continue
            # One proposer does not end our waiting for present peers; two do.
            awaited = self.all | (self._awaited() if counts[other] < 2 else set())
            if fits(other, context.me, {context.me, *self.calls}, here, awaited):
                self._accepted_from.add(peer)
                return other
        return None

    def own(self, key: tuple[int, int]) -> Group | None:
        """Return the group that we name, when it is our turn; () if too few have called in time.

        `key`: round and fragment.
        """
        context, now, callers = self._context, self._context.now(), self.all
        few = len(callers) < self._plan.least
        if not self._late and (self._awaited() or few):
            self._complete = None
            return None
        if few:
            return ()
        if self._complete is None:
            self._complete = now
        if self._first_late(callers):
            return None
        turn = leader_order(context.keyring.run_id, callers, *key).index(context.me)
        return tuple(sorted(callers)[:MAX_GROUP]) if now >= self._complete + turn * self._patience else None

    def other(self, group: Group) -> Group | None:
        """Return the most frequent group other than `group` among those begun by their own members."""
        groups = Counter(call.group for peer, call in self.calls.items() if peer in call.group and call.group != group)
        return max(groups, key=lambda one: (groups[one], one)) if groups else None

    @property
    def _late(self) -> bool:
        return self._context.now() >= self._began + self._grace

    def _awaited(self) -> set[PeerId]:
        """Return present peers that have not called and that we wait for."""
        return set() if self._late else self._absent()

    def _absent(self) -> set[PeerId]:
        """Return present peers that have not called."""
        known = {self._context.me, *self.calls, *self.differing, *self._context.gone}
        return set(self._context.here()) - known

    def _first_late(self, callers: Collection[PeerId]) -> bool:
        """Return True if all other callers still wait for absent peers, if they have our grace.

        Our proposal alone would not end their waiting, and a group of two would begin without the other. The round waits one
        patience for its members; half of it is left for messages in transit.
        """
        called_at = [self._called_at[peer] for peer in callers if peer != self._context.me]
        if not called_at or not self._absent():
            return False
        return self._context.now() < min(called_at) + self._grace - self._patience / 2
