"""All averages of one peer that are no training rounds: several at once, each known by a name and a number.

Of one name all peers count alike: the n-th call of one meets the n-th call of the others. Who is new to a name learns from
the others which number is next (`Over`): at once when more than half of those here say so, after a patience when more than
half of those do who have said anything about it. Who has finished one believes only more than half of those it was with.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable, Collection, Mapping
from functools import partial
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

LAST = 2**31
"""No number is as high."""


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
        # Of each name: the number of our next call, and the one up to which results are known to be out.
        self._next: OrderedDict[str, int] = OrderedDict()
        self._past: dict[str, int] = {}
        self._known: dict[tuple[str, int], Operation] = {}
        self._early: dict[PeerId, OrderedDict[tuple[str, int], Call]] = {}
        self._with: dict[str, frozenset[PeerId]] = {}  # whom the last one of a name was finished with
        self._overs: dict[PeerId, OrderedDict[str, int]] = {}  # what each says is next

    def begin(self, name: str, plan: Plan, share: Share, *, grace: float) -> Operation:
        """Call an average; its end is in `ended`. Raises ValueError when too many are in progress."""
        if len(self._running()) >= AT_ONCE:
            raise ValueError(f"{AT_ONCE} averages are in progress: wait for some of them")
        fresh, number = name not in self._next, self._next.get(name, 0)
        self._count(name, number + 1)
        operation = Operation(self._place, name, number, plan, share, fresh=fresh, grace=grace, patience=self._patience)
        self._known[name, number] = operation
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
            for operation in self._known.values():
                if operation.key == key:
                    _alone(operation, operation.hear, peer, frame)
                    break

    def ticked(self) -> None:
        """See Handler."""
        for name in dict.fromkeys(name for overs in self._overs.values() for name in overs):
            self._move(name)
        for operation in list(self._known.values()):
            _alone(operation, operation.tick)
        now, kept, held = self._place.now(), 0, 0
        for key, operation in reversed(list(self._known.items())):
            if operation.ended.done():
                kept, held = kept + 1, held + operation.nbytes
                if operation.fly is None or now > operation.ended_at + KEPT_SECONDS or kept > KEPT or held > KEPT_BYTES:
                    del self._known[key]

    # --- calls

    def _running(self) -> list[Operation]:
        return [operation for operation in self._known.values() if not operation.ended.done()]

    def _count(self, name: str, number: int) -> None:
        self._next[name] = number
        self._next.move_to_end(name)
        if len(self._next) > NAMES:
            forgotten, _ = self._next.popitem(last=False)
            self._past.pop(forgotten, None)
            self._with.pop(forgotten, None)

    def _ended(self, operation: Operation, ended: Ended) -> None:
        if not ended.failure and operation.name in self._next:
            self._past[operation.name] = max(self._past.get(operation.name, 0), operation.number + 1)
            self._with[operation.name] = frozenset(ended.outcome.contributors)

    def _called(self, peer: PeerId, call: Call) -> None:
        operation, following = self._known.get((call.name, call.number)), self._next.get(call.name, 0)
        lost = call.fresh and not call.group and call.number < following - 1
        if operation is not None and not (operation.ended.done() and lost):
            _alone(operation, operation.hear_call, peer, call)
        elif call.number < self._past.get(call.name, 0):
            waiting = [o.number for o in self._running() if o.name == call.name and o.fly is None]
            number = min((n for n in waiting if n > call.number), default=following)
            self._place.outbox.control(peer, Over(call.name, number, False))
        elif call.number < following:
            pass  # we had called it and have given up: what becomes of it is theirs
        else:
            early = self._early.setdefault(peer, OrderedDict())
            early[call.name, call.number] = call
            if len(early) > EARLY:
                early.popitem(last=False)

    def _over(self, peer: PeerId, message: Over) -> None:
        """For `peer` all before a number are over, or it has withdrawn from them."""
        early = self._early.get(peer, OrderedDict())
        for name, number in [key for key in early if key[0] == message.name and key[1] < message.number]:
            del early[name, number]
        if message.withdrawn:
            for operation in self._running():
                if operation.name == message.name and operation.number < message.number:
                    operation.forget(peer)
            return
        if message.number < LAST and self._waiting(message.name, message.number):
            overs = self._overs.setdefault(peer, OrderedDict())
            overs[message.name] = message.number
            if len(overs) > EARLY:
                overs.popitem(last=False)
            self._move(message.name)

    def _waiting(self, name: str, below: int) -> list[Operation]:
        found = [o for o in self._running() if o.name == name and o.fly is None and o.number < below]
        return sorted(found, key=lambda operation: operation.number)

    def _move(self, name: str) -> None:
        """What we have called and is over for most of the others is what comes next there."""
        said = {peer: overs[name] for peer, overs in self._overs.items() if name in overs}
        waiting = self._waiting(name, max(said.values(), default=0))
        if not waiting:
            for overs in self._overs.values():
                overs.pop(name, None)
            return
        number = most(said, self._voices(name, waiting[0], said))
        if number is None or number <= waiting[0].number:
            return
        ahead = number - waiting[0].number
        for operation in reversed([one for one in waiting if one.number < number]):
            moved = (name, operation.number + ahead)
            if moved not in self._known:
                self._known[moved] = self._known.pop((name, operation.number))
                _alone(operation, operation.renumber, moved[1])
                self._replay(operation)
                self._count(name, max(self._next.get(name, 0), moved[1] + 1))

    def _voices(self, name: str, operation: Operation, said: Collection[PeerId]) -> set[PeerId]:
        """Those of whom more than half have to say the same."""
        others = set(self._place.here()) - self._gone - {self._place.me}
        known = others & self._with.get(name, frozenset())
        if name in self._with:
            return known or others
        return {*said, *operation.callers} if operation.waited > self._patience else others | set(said)

    def _replay(self, operation: Operation) -> None:
        for peer, early in list(self._early.items()):
            call = early.pop((operation.name, operation.number), None)
            if call is not None:
                _alone(operation, operation.hear_call, peer, call)


def _alone(operation: Operation, step: Callable[[*Args], None], *args: *Args) -> None:
    """What goes wrong in one average ends that one, and not the peer."""
    try:
        step(*args)
    except Exception as error:
        operation.broke(error)


def most(said: Mapping[PeerId, int], voices: Collection[PeerId]) -> int | None:
    """The highest number that more than half of `voices` say at least; None if so many have not spoken."""
    numbers = sorted((number for peer, number in said.items() if peer in voices), reverse=True)
    half = len(voices) // 2
    return numbers[half] if len(numbers) > half else None


__all__ = ["Operations", "Operation", "Place", "Share", "is_ours", "key_of"]
