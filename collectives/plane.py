"""What moves the data of a round, whatever it is: `Exchange` averages chunks at their owners, `Ring` adds them up from peer to
peer, `Gather` brings every payload to everybody.

Both send only what they had announced, take only what was announced or settled, keep what comes too early, and vote when
they hold every result. What a peer does wrong ends as an accusation with a reason.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Collection, Mapping, Sequence
from typing import ClassVar

import blake3
import msgspec
from thinwire.collectives.agreement import Agreement
from thinwire.collectives.contributions import Contributions
from thinwire.collectives.outbox import Outbox
from thinwire.collectives.results import Results
from thinwire.collectives.stash import Stash
from thinwire.compression.codec import Buffer
from thinwire.swarm.frame import Frame
from thinwire.swarm.protocol import Ask, Ballot, Chunk, Digest, Open, Partial, PeerId, Record, Result

STIRRING = 30
"""Patiences for which bytes on their way count as progress while nothing of use is whole: junk may come for ever."""


class Plane(ABC):
    """One peer's part in moving the data of one round of one fragment.

    early: frames that are kept when they come before what gives them a meaning, in all and of one sender; and most bytes.
    """

    hurry: ClassVar[float] = 1.0
    """Patiences without progress after which results that are settled and missing are first asked of those who have them."""
    bears: ClassVar[Mapping[str, int]] = {}
    """Patiences without progress before a peer is accused for this reason, where that is more than one."""

    def __init__(
        self,
        agreement: Agreement,
        *,
        results: Results,
        contributions: Contributions,
        early: tuple[int, int] | tuple[int, int, int],
        outbox: Outbox,
        now: Callable[[], float],
        phase: Callable[[int, str], None],
    ) -> None:
        self.agreement, self.results = agreement, results
        self.me, self.round, self.fragment = agreement.me, agreement.terms.round, agreement.terms.fragment
        self.opened: Open | None = None
        """The ballot in progress here."""
        self.owners: tuple[PeerId, ...] = ()
        """Who is the first to have which result in it."""
        self.moved = 0.0
        """When something of use came last, or was on its way."""
        self.whole = 0.0
        """When something of use came last."""
        self._outbox, self._now, self._phase = outbox, now, phase
        self._contributions = contributions
        self._source: Sequence[Buffer] = ()
        self._attempt = 0
        self._keys: dict[Ballot, bytes] = {}
        self._key = b""
        self._sent: set[tuple[PeerId, int]] = set()
        self._early = Stash(*early)

    @property
    def failed(self) -> set[PeerId]:
        """Who shall own nothing in the next rounds."""
        return set()

    @property
    def complete(self) -> bool:
        """Whether every result that was committed is here."""
        commit = self.agreement.commit
        return commit is not None and self.results.digest == commit.digest

    @property
    def nbytes(self) -> int:
        """Bytes of contributions, our own that we need ourselves among them, and of results that are here."""
        return self._contributions.nbytes + self.results.nbytes

    @property
    def early(self) -> tuple[int, int]:
        """Frames that wait for what gives them a meaning, and how many they may be."""
        return len(self._early), self._early.total

    def contribute(self, source: Sequence[Buffer], attempt: int) -> None:
        """Our own encoded chunks, and the number of their announcement."""
        self._source, self._attempt = source, attempt
        self._sent.clear()  # nobody has any of this

    def settle(self) -> None:
        """All that was committed is here."""
        self._source = ()
        self._early.clear()
        self._contributions.settle(self._key, learns=self._learns)

    @property
    def _learns(self) -> bool:
        """Whether the round says what norm is usual: where peers contribute when they like, those often alone shall not."""
        commit, buffered = self.agreement.commit, self.agreement.terms.buffered
        return not buffered or commit is None or 2 * len(commit.opened.contributors) > len(commit.opened.alive)

    def void(self) -> None:
        """What was committed cannot be had any more."""
        self.opened, self._key, self.results.wanted = None, b"", None

    def lost(self, peer: PeerId) -> None:
        """What was sent to `peer` may not have arrived."""
        self._sent = {key for key in self._sent if key[0] != peer}

    @abstractmethod
    def reach(self, peer: PeerId) -> None:
        """A link to `peer` is up: send what it has not got."""

    @abstractmethod
    def open(self, opened: Open) -> None:
        """A ballot opens: send what is owed."""

    @abstractmethod
    def check(self) -> None:
        """Vote when every result is here, and signed for or settled."""

    @abstractmethod
    def culprit(self, opened: Open) -> tuple[PeerId, str] | None:
        """Who holds us up, and how."""

    def nudge(self) -> None:  # noqa: B027  only where a result can be had from others than who owes it
        """Time passes without progress: see whether others can help."""

    def asked(self, sender: PeerId, indices: Sequence[int]) -> None:  # noqa: B027  only a gather learns from it
        """A peer has asked us for these results."""

    def part(self, digest: Digest) -> bool:
        """Whether `digest` names the open contributors, whose results anybody may be asked for before there is a verdict."""
        return False

    def announced(self, sender: PeerId) -> None:
        """A peer has announced a contribution: free what it sent for others that count no more; take what came before."""
        named = self.opened.contributors if self.opened else ()
        attempts = {entry.attempt for entry in named if entry.peer == sender}
        self._contributions.forget(sender, {self.agreement.ready[sender].attempt, *attempts})
        self._replay()

    def take(self, sender: PeerId, frame: Frame) -> None:
        """A Chunk, a Partial, a Result or a Record; what is another plane's business is ignored."""
        message = frame.message
        if not isinstance(message, (Chunk, Partial, Result, Record)):
            return
        if isinstance(message, Chunk):
            ready = self.agreement.ready.get(sender)
            waits = ready is None or message.attempt > ready.attempt
        else:
            waits = not self._key or self._keys.get(message.ballot) != self._key
        if waits:
            if self._fits(frame) and not self.complete:
                self._early.put(sender, frame)
        elif isinstance(message, Chunk):
            self._take_chunk(sender, message, frame)
        elif isinstance(message, Record):
            self._take_record(sender, message)
        elif isinstance(message, Partial):
            self._take_partial(sender, message, frame)
        else:
            self._take_result(sender, message, frame)

    @abstractmethod
    def _fits(self, frame: Frame) -> bool:
        """Whether a frame can be of this round, as far as its lengths tell."""

    @abstractmethod
    def _take_chunk(self, sender: PeerId, message: Chunk, frame: Frame) -> None: ...

    def _take_partial(self, sender: PeerId, message: Partial, frame: Frame) -> None:  # noqa: B027  only rings have them
        pass

    @abstractmethod
    def _take_record(self, sender: PeerId, record: Record) -> None: ...

    @abstractmethod
    def _take_result(self, sender: PeerId, message: Result, frame: Frame) -> None: ...

    def _name(self, opened: Open) -> bool:
        """Note a ballot; True when its results are others than those of the ballot before."""
        self.opened, self.moved = opened, self._now()
        self.whole = self.moved
        key = blake3.blake3(msgspec.msgpack.encode(self._basis(opened))).digest()
        self._keys[opened.ballot] = key
        changed, self._key = key != self._key, key
        return changed

    def _basis(self, opened: Open) -> object:
        """What the results of a ballot follow from."""
        return opened.contributors

    def _begin(self, opened: Open) -> None:
        """What every ballot begins with: our contribution goes out, what was announced before we came is asked for."""
        self._phase(self.round, "open")
        if self.agreement.commit is None:
            if self._withdrawn(opened):
                self.agreement.accuse(self.me, "withdrawn", self._now())
            self._scatter(opened)
            self._ask_unannounced(opened)
        if opened.adopted is not None:
            self.results.settle(opened.adopted)

    @abstractmethod
    def _scatter(self, opened: Open) -> None:
        """Send our contribution where it is owed, unless it has been."""

    def _withdrawn(self, opened: Open) -> bool:
        """Whether a ballot counts on a contribution that we do not have any more."""
        named = any(entry.peer == self.me for entry in opened.contributors)
        return named and opened.adopted is None and not self._names_us(opened)

    def _names_us(self, opened: Open) -> bool:
        ours = (self.me, self._attempt)
        return bool(self._source) and any((entry.peer, entry.attempt) == ours for entry in opened.contributors)

    def _ask_unannounced(self, opened: Open) -> None:
        """Who came in the middle of the round has not heard what was announced before; without it chunks mean nothing."""
        for entry in opened.contributors:
            ready = self.agreement.ready.get(entry.peer)
            if self.me in opened.alive and (ready is None or ready.attempt < entry.attempt):
                self._outbox.control(entry.peer, Ask(self.round, self.fragment))

    def _replay(self) -> None:
        """Take again what came before the message that gives it a meaning."""
        if len(self._early):
            for sender, frame in self._early.take():
                self.take(sender, frame)

    def owing(self, opened: Open) -> Collection[PeerId]:
        """Of whom we wait for something in this ballot."""
        return [peer for peer in opened.group if peer != self.me]

    def stirs(self) -> None:
        """Something is on its way here, though it is not whole."""
        if self._now() < self.whole + STIRRING * self.agreement.terms.patience:
            self._live()

    def _progress(self) -> None:
        self.whole = self._now()
        self._live()

    def _live(self) -> None:
        self.moved = self._now()
        self.agreement.progress(self.moved)
