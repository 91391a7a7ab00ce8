"""All averages of one peer that are no training rounds: several at once, each known by a name and a number.

Of one name all peers count alike: the n-th call of one meets the n-th call of the others. Counts come apart: who is new to a
name has none, calls fail, and in a partition each side counts for itself. So everybody who waits at a number that the others
are not at tells them, and hears where they are (`Over`), and goes to the number in the middle, of two the higher one, up or
down. All who hear the same go to the same, and one that lies moves nobody who hears two that
do not. Who has not spoken counts as being where we are: as long as we are new to a name, or were alone with it, everybody that
is here, for a patience, and then nobody; else those with whom we have finished the last one.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable, Collection
from functools import partial
from statistics import median_high
from typing import TypeVarTuple

from thinwire.collectives.callers import Place
from thinwire.collectives.operation import Ended, Operation, Share, key_of
from thinwire.swarm.frame import Frame
from thinwire.swarm.protocol import OPERATIONS, Call, Commit, Message, Over, PeerId, Plan

Args = TypeVarTuple("Args")

AT_ONCE = 64
"""Most averages in progress."""

NAMES = 4096
"""Names whose numbers are remembered, the last used ones."""

EARLY = 64
"""Calls of one peer that are kept for when we call the same."""

KEPT_SECONDS, KEPT, KEPT_BYTES = 30.0, 64, 256 << 20
"""How long results are kept for those who come late, and how many, and how much of them."""

DOWN = 8
"""Times that a call is given a lower number at most; news come one by one."""

LAST = 2**31
"""No number that counts is as high: who has come there begins anew."""


def is_ours(message: Message) -> bool:
    """Whether a message is about an average and not about the model's rounds."""
    if isinstance(message, (Call, Over)):
        return True
    fragment: int = message.opened.fragment if isinstance(message, Commit) else getattr(message, "fragment", 0)
    return fragment >= OPERATIONS


class Operations:
    """See the module; a handler of what a Presence tells."""

    def __init__(self, place: Place, *, gone: set[PeerId], patience: float = 2.0) -> None:
        """`gone`: the same set as in `place`; kept here."""
        self._place, self._gone, self._patience = place, gone, patience
        # Of each name: the number of our next call, and the one up to which some had begun, with our last announcement.
        self._next: OrderedDict[str, int] = OrderedDict()
        self._begun: dict[str, tuple[int, int]] = {}
        self._known: dict[tuple[str, int], Operation] = {}
        self._early: dict[PeerId, OrderedDict[tuple[str, int], tuple[Call, float]]] = {}  # and when each came
        self._with: dict[str, frozenset[PeerId]] = {}  # whom the last one of a name was finished with
        self._overs: dict[PeerId, OrderedDict[str, int]] = {}  # what each says is next

    def begin(self, name: str, plan: Plan, share: Share, *, grace: float) -> Operation:
        """Call an average; its end is in `ended`. Raises ValueError when too many are in progress."""
        if len(self._running()) >= AT_ONCE:
            raise ValueError(f"{AT_ONCE} averages are in progress: wait for some of them")
        self._prune()
        self._move(name)  # what was heard while we waited for none is forgotten
        if self._next.get(name, 0) >= LAST:
            del self._next[name]  # somebody has lied about where the others are
        fresh, number = name not in self._next, self._next.get(name, 0)
        self._count(name, number + 1)
        operation = Operation(
            self._place,
            name,
            number,
            plan,
            share,
            fresh=fresh,
            attempt=self._attempt(name, number),
            grace=grace,
            patience=self._patience,
        )
        self._put(operation)
        operation.ended.add_done_callback(lambda ended: self._ended(operation, ended.result()))
        try:
            operation.call()
            self._replay(operation)
            operation.tick()
        except Exception:
            self._known.pop((name, operation.number), None)
            self._next[name] = number
            if fresh:
                del self._next[name]
            raise
        return operation

    def sizes(self) -> dict[str, tuple[int, int]]:
        """What is held, and how much it may be."""
        early = max((len(calls) for calls in self._early.values()), default=0)
        return {
            "operations": (len(self._known), AT_ONCE + KEPT),
            "names": (len(self._next), NAMES),
            "calls": (early, EARLY),
            "overs": (max(map(len, self._overs.values()), default=0), EARLY),
        }

    # --- what presence tells

    def reached(self, peer: PeerId) -> None:
        """See Handler."""
        self._gone.discard(peer)
        for operation in list(self._known.values()):
            _alone(operation, operation.reach, peer)

    def lost(self, peer: PeerId, *, gone: bool) -> None:
        """See Handler."""
        self._early.pop(peer, None)
        self._overs.pop(peer, None)
        if gone:
            self._gone.add(peer)
        for operation in list(self._known.values()):
            _alone(operation, partial(operation.lost, gone=gone), peer)

    def routed(self, peer: PeerId, frame: Frame) -> None:
        """See Handler."""
        message = frame.message
        if isinstance(message, Call):
            self._called(peer, message)
        elif isinstance(message, Over):
            self._over(peer, message)
        else:
            opened = message.opened if isinstance(message, Commit) else message
            key = getattr(opened, "round", 0), getattr(opened, "fragment", 0)
            for operation in reversed(self._known.values()):  # the last ones are what is most often talked about
                if operation.key == key:
                    _alone(operation, operation.hear, peer, frame)
                    break

    def ticked(self) -> None:
        """See Handler."""
        for name in dict.fromkeys(name for overs in self._overs.values() for name in overs):
            self._move(name)
        for operation in list(self._known.values()):
            _alone(operation, operation.tick)
        self._prune()

    def _prune(self) -> None:
        """Forget what nobody comes late for any more."""
        now, kept, held = self._place.now(), 0, 0
        for key, operation in reversed(list(self._known.items())):
            if operation.ended.done():
                kept, held = kept + 1, held + operation.nbytes
                if operation.fly is None or now > operation.ended_at + KEPT_SECONDS or kept > KEPT or held > KEPT_BYTES:
                    del self._known[key]

    # --- calls

    def _running(self) -> list[Operation]:
        return [operation for operation in self._known.values() if not operation.ended.done()]

    def _put(self, operation: Operation) -> None:
        key = operation.name, operation.number
        self._known.pop(key, None)  # the results of one that is forgotten for it; what is kept is in the order of calls
        self._known[key] = operation

    def _count(self, name: str, number: int) -> None:
        self._next[name] = number
        self._next.move_to_end(name)
        if len(self._next) > NAMES:
            forgotten, _ = self._next.popitem(last=False)
            self._begun.pop(forgotten, None)
            self._with.pop(forgotten, None)

    def _attempt(self, name: str, number: int) -> int:
        """The number of our last announcement. One that is over here is begun anew when most of the others are behind."""
        begun, attempt = self._begun.get(name, (0, 0))
        return attempt if number < begun else self._place.life

    def _ended(self, operation: Operation, ended: Ended) -> None:
        name = operation.name
        if operation.announced and name in self._next:
            begun, attempt = self._begun.get(name, (0, 0))
            self._begun[name] = max(begun, operation.number + 1), max(attempt, operation.announced)
            for peer in operation.group:
                overs = self._overs.get(peer, OrderedDict())
                if name in overs and overs[name] <= operation.number:
                    del overs[name]  # it has been there
        if not ended.failure and name in self._next:
            self._with[name] = frozenset(ended.outcome.contributors)

    def _called(self, peer: PeerId, call: Call) -> None:
        name, number = call.name, call.number
        if number >= LAST:
            return
        operation, following, waiting = self._known.get((name, number)), self._next.get(name, 0), self._waiting(name)
        ended = operation is None or operation.ended.done()
        lost = call.fresh and not call.group and number < following - 1
        if operation is not None and not (ended and lost):
            _alone(operation, operation.hear_call, peer, call)
        elif number < following and not waiting:
            self._place.outbox.control(peer, Over(name, following, False))
        met = operation is not None and peer in operation.group and not lost  # what it says now it had said before
        if not ended or met or not (waiting or number >= following):
            return
        early = self._early.setdefault(peer, OrderedDict())
        early[name, number] = call, self._place.now()
        if len(early) > EARLY:
            early.popitem(last=False)
        if waiting:
            waiting[0].locate(peer, number)

    def _over(self, peer: PeerId, message: Over) -> None:
        """For `peer` all before a number are over, or it has withdrawn from them."""
        early = self._early.get(peer, OrderedDict())
        for name, number in [key for key in early if key[0] == message.name and key[1] < message.number]:
            del early[name, number]
        for operation in self._running():
            begun = operation.fly is not None
            if (
                operation.name == message.name
                and operation.number < message.number
                and (message.withdrawn or not begun)
            ):
                _alone(operation, operation.forget, peer)
        waiting = self._waiting(message.name)
        if waiting and (others := [number for name, number in early if name == message.name]):
            waiting[0].locate(peer, others[-1])  # it has gone on to another number
        if waiting and not message.withdrawn and message.number < LAST:
            overs = self._overs.setdefault(peer, OrderedDict())
            overs[message.name] = message.number
            if len(overs) > EARLY:
                overs.popitem(last=False)
            self._move(message.name)

    def _waiting(self, name: str) -> list[Operation]:
        """Those that have not begun, the lowest number first."""
        found = [one for one in self._running() if one.name == name and one.fly is None]
        return sorted(found, key=lambda one: one.number)

    def _move(self, name: str) -> None:
        """Go where the others are."""
        waiting = self._waiting(name)
        if not waiting:
            for overs in self._overs.values():
                overs.pop(name, None)
            return
        said, own = {peer: overs[name] for peer, overs in self._overs.items() if name in overs}, waiting[0].number
        number = median_high([own, *(said.get(peer, own) for peer in self._voices(name, waiting[0], said))])
        # Down so often only: else one that tells two peers different things could swap them for ever.
        if number > own or (number < own and waiting[0].lowered < DOWN):
            self._shift(name, waiting, number - own)

    def _shift(self, name: str, waiting: list[Operation], by: int) -> None:
        """Call all that have not begun by other numbers."""
        there = [self._known.get((name, operation.number + by)) for operation in waiting]
        if any(one is not None and one not in waiting and not one.ended.done() for one in there):
            return
        for peer in sorted(self._place.live):
            self._place.outbox.control(peer, Over(name, waiting[-1].number + 1, True))
            self._place.outbox.control(peer, Over(name, waiting[0].number + by, False))
        for operation in waiting if by < 0 else reversed(waiting):
            del self._known[name, operation.number]
            number = operation.number + by
            operation.renumber(number, self._attempt(name, number))
            self._put(operation)
            _alone(operation, operation.call)
            self._replay(operation)
        top = 1 + max(one.number for one in {*waiting, *self._running()} if one.name == name)
        self._count(name, top if by < 0 else max(top, self._next.get(name, 0)))

    def _voices(self, name: str, operation: Operation, said: Collection[PeerId]) -> set[PeerId]:
        """Those who have a say in where we go."""
        others = set(self._place.here()) - self._gone - {self._place.me}
        spoken = {*said, *operation.callers}
        if known := others & self._with.get(name, frozenset()):
            return known | spoken
        return spoken if operation.waited > self._patience else others | spoken

    def _replay(self, operation: Operation) -> None:
        for peer, early in list(self._early.items()):
            call, at = early.pop((operation.name, operation.number), (None, 0.0))
            # What was said long ago is said again by those for whom it still holds.
            if call is not None and self._place.now() <= at + self._patience:
                _alone(operation, operation.hear_call, peer, call)


def _alone(operation: Operation, step: Callable[[*Args], None], *args: *Args) -> None:
    """What goes wrong in one average ends that one, and not the peer."""
    try:
        step(*args)
    except Exception as error:
        operation.broke(error)


__all__ = ["Operations", "Operation", "Place", "Share", "is_ours", "key_of"]
