"""All-reduce operations of one peer outside training, each with a name and a number.

Peers count the operations of one name alike: the n-th call of one peer meets the n-th call of the others. Counts can
diverge: new peers have none, calls fail, and in a partition each side counts separately. So a peer whose number differs
from those of the others reports its number, learns theirs (`NextNumber`), and changes to the median number (the higher of
two). All peers with the same information choose the same number, and one liar cannot move a peer that two honest peers
inform. A silent peer counts as being at our number: for one patience all present peers, if we are new to a name or were
alone with it; else our last partners.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable, Collection
from statistics import median_high
from typing import TypeVarTuple

from thinwire.collectives.allreduce.group_round import LocalPart, key_of
from thinwire.collectives.allreduce.operation import Operation, OperationResult
from thinwire.collectives.allreduce.rendezvous import PeerContext
from thinwire.swarm.frame import Frame
from thinwire.swarm.messages.registry import OPERATIONS, AveragePlan, Call, Message, NextNumber, PeerId

Args = TypeVarTuple("Args")

AT_ONCE = 64
"""Most operations in progress."""

NAMES = 4096
"""Names whose numbers are stored; the most recently used ones."""

EARLY = 64
"""Calls per peer that are stored until we call the same."""

STORED_SECONDS, STORED, STORED_BYTES = 30.0, 64, 256 << 20
"""Maximum age, number and bytes of results that are stored for late callers."""

DOWN = 8
"""Limit on how often a call may be given a lower number; reports arrive one by one."""

MAX_NUMBER = 2**31
"""Exclusive upper bound of numbers; a peer that reaches it starts over."""


def belongs_to_operation(message: Message) -> bool:
    """Return True if a message belongs to an operation and not to the model's rounds."""
    if isinstance(message, (Call, NextNumber)):
        return True
    fragment: int = getattr(message, "fragment", 0)
    return fragment >= OPERATIONS


class AllreduceService:
    """Routes frames and events of a Presence to the operations of one peer."""

    def __init__(self, context: PeerContext, *, gone: set[PeerId], patience: float = 2.0) -> None:
        """Create the service. `gone` is the same set as in `context`; it is updated here."""
        self._context, self._gone, self._patience = context, gone, patience
        # By name: the number of our next call; and the number up to which operations had begun, with our last
        # announcement.
        self._next: OrderedDict[str, int] = OrderedDict()
        self._begun: dict[str, tuple[int, int]] = {}
        self._known: dict[tuple[str, int], Operation] = {}
        self._early: dict[PeerId, OrderedDict[tuple[str, int], tuple[Call, float]]] = {}  # with the time of arrival
        self._last_partners: dict[str, frozenset[PeerId]] = {}  # contributors of the last operation of a name
        self._reported: dict[PeerId, OrderedDict[str, int]] = {}  # next number of each name that a peer reports

    def begin(self, name: str, plan: AveragePlan, share: LocalPart, *, grace: float) -> Operation:
        """Start an operation; its result arrives in `ended`. Raises ValueError if too many are in progress."""
        if len(self.running()) >= AT_ONCE:
            raise ValueError(f"{AT_ONCE} averages are in progress: wait until some of them finish")
        self._prune()
        self._follow_others(name)  # reports from before the call are dropped
        if self._next.get(name, 0) >= MAX_NUMBER:
            del self._next[name]  # a peer must have lied about the others' number
        fresh, number = name not in self._next, self._next.get(name, 0)
        self._count(name, number + 1)
        operation = Operation(
            self._context,
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
        """Return the sizes of all stores and their limits."""
        early = max((len(calls) for calls in self._early.values()), default=0)
        return {
            "operations": (len(self._known), AT_ONCE + STORED),
            "names": (len(self._next), NAMES),
            "calls": (early, EARLY),
            "reported numbers": (max(map(len, self._reported.values()), default=0), EARLY),
        }

    # --- events of the presence

    def on_link_up(self, peer: PeerId) -> None:
        """Handle a new link to a peer."""
        self._gone.discard(peer)
        for operation in list(self._known.values()):
            _guarded(operation, operation.on_link_up, peer)

    def on_link_down(self, peer: PeerId, *, gone: bool) -> None:
        """Handle a broken link to a peer."""
        self._early.pop(peer, None)
        self._reported.pop(peer, None)
        if gone:
            self._gone.add(peer)
        for operation in list(self._known.values()):
            _guarded(operation, operation.on_link_down, peer)

    def on_frame(self, peer: PeerId, frame: Frame) -> None:
        """Route a frame to its operation."""
        message = frame.message
        if isinstance(message, Call):
            self._on_call(peer, message)
        elif isinstance(message, NextNumber):
            self._on_next_number(peer, message)
        else:
            key = getattr(message, "round", 0), getattr(message, "fragment", 0)
            for operation in reversed(self._known.values()):  # recent operations get most frames
                if operation.key == key:
                    _guarded(operation, operation.on_frame, peer, frame)
                    break

    def on_tick(self) -> None:
        """Let time pass in all operations."""
        if not self._reported and not self._known:
            return
        for name in dict.fromkeys(name for numbers in self._reported.values() for name in numbers):
            self._follow_others(name)
        for operation in list(self._known.values()):
            _guarded(operation, operation.tick)
        self._prune()

    def _prune(self) -> None:
        """Free finished operations that are too old for late callers."""
        now, stored, size = self._context.now(), 0, 0
        for key, operation in reversed(list(self._known.items())):
            if operation.ended.done():
                stored, size = stored + 1, size + operation.nbytes
                if (
                    operation.current is None
                    or now > operation.ended_at + STORED_SECONDS
                    or stored > STORED
                    or size > STORED_BYTES
                ):
                    del self._known[key]

    # --- calls

    def running(self) -> list[Operation]:
        """Return the operations that have not ended."""
        return [operation for operation in self._known.values() if not operation.ended.done()]

    def _put(self, operation: Operation) -> None:
        key = operation.name, operation.number
        self._known.pop(key, None)  # drop an old result of that number; entries are in the order of calls
        self._known[key] = operation

    def _count(self, name: str, number: int) -> None:
        self._next[name] = number
        self._next.move_to_end(name)
        if len(self._next) > NAMES:
            forgotten, _ = self._next.popitem(last=False)
            self._begun.pop(forgotten, None)
            self._last_partners.pop(forgotten, None)

    def _attempt(self, name: str, number: int) -> int:
        """Return the last announcement number of a repeated operation, or the start value of a new one."""
        begun, attempt = self._begun.get(name, (0, 0))
        return attempt if number < begun else self._context.first_attempt

    def _ended(self, operation: Operation, ended: OperationResult) -> None:
        name = operation.name
        if operation.announced and name in self._next:
            begun, attempt = self._begun.get(name, (0, 0))
            self._begun[name] = max(begun, operation.number + 1), max(attempt, operation.announced)
            for peer in operation.group:
                numbers = self._reported.get(peer, OrderedDict())
                if name in numbers and numbers[name] <= operation.number:
                    del numbers[name]  # the peer has begun a later operation since
        if not ended.failure and name in self._next:
            self._last_partners[name] = frozenset(ended.outcome.contributors)

    def _on_call(self, peer: PeerId, call: Call) -> None:
        name, number = call.name, call.number
        if number >= MAX_NUMBER:
            return
        operation, following, waiting = self._known.get((name, number)), self._next.get(name, 0), self._waiting(name)
        ended = operation is None or operation.ended.done()
        lost = call.fresh and not call.group and number < following - 1
        if operation is not None and not (ended and lost):
            _guarded(operation, operation.on_call, peer, call)
        elif number < following and not waiting:
            self._context.send_queue.control(peer, NextNumber(name, following, False))
        met = operation is not None and peer in operation.group and not lost  # its present call repeats an earlier one
        if not ended or met or not (waiting or number >= following):
            return
        early = self._early.setdefault(peer, OrderedDict())
        early[name, number] = call, self._context.now()
        if len(early) > EARLY:
            early.popitem(last=False)
        if waiting:
            waiting[0].locate(peer, number)

    def _on_next_number(self, peer: PeerId, message: NextNumber) -> None:
        """Handle `peer`'s report that all operations before a number are over, or that it withdrew from them."""
        early = self._early.get(peer, OrderedDict())
        for name, number in [key for key in early if key[0] == message.name and key[1] < message.number]:
            del early[name, number]
        for operation in self.running():
            begun = operation.current is not None
            if (
                operation.name == message.name
                and operation.number < message.number
                and (message.withdrawn or not begun)
            ):
                _guarded(operation, operation.forget, peer)
        waiting = self._waiting(message.name)
        if waiting and (others := [number for name, number in early if name == message.name]):
            waiting[0].locate(peer, others[-1])  # it has moved to another number
        if waiting and not message.withdrawn and message.number < MAX_NUMBER:
            numbers = self._reported.setdefault(peer, OrderedDict())
            numbers[message.name] = message.number
            if len(numbers) > EARLY:
                numbers.popitem(last=False)
            self._follow_others(message.name)

    def _waiting(self, name: str) -> list[Operation]:
        """Return the operations of a name that have not begun, the lowest number first."""
        found = [one for one in self.running() if one.name == name and one.current is None]
        return sorted(found, key=lambda one: one.number)

    def _follow_others(self, name: str) -> None:
        """Change to the median number of the others."""
        waiting = self._waiting(name)
        if not waiting:
            for reported in self._reported.values():
                reported.pop(name, None)
            return
        own = waiting[0].number
        numbers = {peer: reported[name] for peer, reported in self._reported.items() if name in reported}
        number = median_high(
            [own, *(numbers.get(peer, own) for peer in self._counted_peers(name, waiting[0], numbers))]
        )
        # A limit for lower numbers: otherwise a peer that reports different numbers to two peers could swap them forever.
        if number > own or (number < own and waiting[0].lowered < DOWN):
            self._shift(name, waiting, number - own)

    def _shift(self, name: str, waiting: list[Operation], by: int) -> None:
        """Renumber all operations that have not begun."""
        there = [self._known.get((name, operation.number + by)) for operation in waiting]
        if any(one is not None and one not in waiting and not one.ended.done() for one in there):
            return
        for peer in sorted(self._context.live):
            self._context.send_queue.control(peer, NextNumber(name, waiting[-1].number + 1, True))
            self._context.send_queue.control(peer, NextNumber(name, waiting[0].number + by, False))
        for operation in waiting if by < 0 else reversed(waiting):
            del self._known[name, operation.number]
            number = operation.number + by
            operation.renumber(number, self._attempt(name, number))
            self._put(operation)
            _guarded(operation, operation.call)
            self._replay(operation)
        top = 1 + max(one.number for one in {*waiting, *self.running()} if one.name == name)
        self._count(name, top if by < 0 else max(top, self._next.get(name, 0)))

    def _counted_peers(self, name: str, operation: Operation, numbers: Collection[PeerId]) -> set[PeerId]:
        """Return the peers whose numbers count, also those that have reported none."""
        others = set(self._context.here()) - self._gone - {self._context.me}
        informed = {*numbers, *operation.callers}
        if known := others & self._last_partners.get(name, frozenset()):
            return known | informed
        return informed if operation.waited > self._patience else others | informed

    def _replay(self, operation: Operation) -> None:
        for peer, early in list(self._early.items()):
            call, at = early.pop((operation.name, operation.number), (None, 0.0))
            # A call from long ago is repeated if it is still valid.
            if call is not None and self._context.now() <= at + self._patience:
                _guarded(operation, operation.on_call, peer, call)


def _guarded(operation: Operation, step: Callable[[*Args], None], *args: *Args) -> None:
    """Run a step so that an error ends this operation only, and not the peer."""
    try:
        step(*args)
    except Exception as error:
        operation.on_error(error)


__all__ = ["AllreduceService", "LocalPart", "Operation", "PeerContext", "belongs_to_operation", "key_of"]
