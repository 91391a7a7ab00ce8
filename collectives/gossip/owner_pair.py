"""One side of a pair in a group whose chunks have owners: contributions go to owners, means come back.

A member requests from each other member only the chunks that it owns itself, and those without an owner. As soon as the owner
has a chunk of all members, it sends the mean to each (`send_mean`). If all chunks have owners, each member sends and receives
2·(n − 1)/n payloads instead of n − 1.

Messages are those of a pair (`pair`). A mean is a Chunk with a number above those of the two vectors, and with the attempt of
the receiver's contribution. A mean needs no hash: the stream authenticates the owner, and no other member can check it.
"""

from __future__ import annotations

from collections.abc import Callable, Collection

import msgspec
from thinwire.collectives.gossip.pair import Pair, PairResult, PairTerms
from thinwire.collectives.gossip.transfer import digest_of
from thinwire.compression.core.codec import CodecError
from thinwire.compression.core.types import Buffer
from thinwire.swarm.frame import Frame, nbytes
from thinwire.swarm.messages.registry import Base, Chunk, Fetch, PeerId, Ready


class OwnerPair(Pair):
    """Pair with a member of a group whose chunks have owners.

    Numbers of chunks: `ours` and `owned` are those that we and the partner own, `shared` those without an owner. `ended`
    is called at the end, and `arrived` with the number of each chunk of the partner that has arrived. `reduced` returns True
    once we have the means of all our chunks. Until then the partner may still be refused, so each `look` calls it. The result
    contains the means that the partner has sent.
    """

    def __init__(
        self,
        partner: PeerId,
        terms: PairTerms,
        ended: Callable[[], None],
        *,
        ours: Collection[int],
        owned: Collection[int],
        shared: Collection[int] = (),
        arrived: Callable[[int], None],
        reduced: Callable[[], bool],
    ) -> None:
        super().__init__(partner, terms, ended, {*ours, *shared})
        self._owned, self._requestable = frozenset(owned), frozenset((*owned, *shared))
        self._means: dict[int, Buffer] = {}
        self._sent_means: dict[int, Frame] = {}
        self._arrived, self._reduced = arrived, reduced

    def contribution(self, number: int) -> Buffer | None:
        """Return a chunk of the partner by its number; None if it has not arrived, or the pair has failed."""
        count = len(self._grid)
        receiver = self._step if number < count else self._base
        return receiver.chunk(number % count) if receiver is not None else None

    @property
    def open(self) -> bool:
        """True while contributions of the partner may still arrive."""
        return self.result is None and not self._refused

    def send_mean(self, number: int, payload: Buffer) -> None:
        """Send the mean of a chunk, of which the partner's contribution is a part."""
        receiver = self._step if number < len(self._grid) else self._base
        if receiver is not None:
            message = Chunk(self.round, self.fragment, receiver.attempt, 2 * len(self._grid) + number)
            frame = self._sent_means[number] = Frame(message, payload)
            self._send_queue.bulk(self.partner, frame)

    def mean(self, number: int) -> Buffer | None:
        """Return the mean of a chunk that the partner owns; None if there is none."""
        return self._means.get(number)

    def fail(self, reason: str, *, notify: bool = True) -> None:
        """Continue without the partner, and without its means."""
        if self.result is None:
            self._means.clear()
            self._sent_means.clear()
        super().fail(reason, notify=notify)

    def release(self) -> None:
        """Free the partner's data after the result was used."""
        super().release()
        self._means.clear()

    def on_link_up(self) -> None:
        """Handle a new link: means may have been lost with the old one."""
        broken = not self._patience.linked
        super().on_link_up()
        for frame in self._sent_means.values() if broken else ():
            self._send_queue.bulk(self.partner, frame)

    @property
    def _extra_time(self) -> float:
        """Seconds that a ready partner gets in addition: it may wait for other members as long as we do."""
        return self._patience.deadline if self.complete else 0.0

    def _serve(self, message: Fetch) -> None:
        """Send requested chunks, but none that others own."""
        requested = tuple(one for one in message.indices if one in self._requestable)
        super()._serve(msgspec.structs.replace(message, indices=requested))

    def _take_base(self, base: Base) -> None:
        if base.plan != self._plan:
            return  # The partner has drawn another group, and may still draw ours before it is ready.
        before, count = self._base, len(self._grid)
        super()._take_base(base)
        if before is None or base.attempt <= before.attempt:
            return
        if digest_of(base.hashes, count) == before.digest:
            if self._echoed is base:  # It has drawn another group meanwhile, and dropped the means of this one.
                before.attempt = base.attempt
                for number in [number for number in self._sent_means if number >= count]:
                    self.send_mean(number, self._sent_means[number].payload)
        elif any(number >= count for number in self._sent_means):
            self.fail("announced again")

    def _take_ready(self, ready: Ready) -> None:
        before = self._step
        super()._take_ready(ready)
        if (
            before is not None
            and self._step is not before
            and any(number < len(self._grid) for number in self._sent_means)
        ):
            self.fail("announced again")  # Its former contribution is a part of means that others have.

    def _take_chunk(self, message: Chunk, frame: Frame) -> None:
        number = message.index - 2 * len(self._grid)
        if number >= 0:
            return self._take_mean(number, message, frame)
        missing = self.contribution(message.index) is None
        super()._take_chunk(message, frame)
        if missing and self.contribution(message.index) is not None:
            self._arrived(message.index)

    def _take_mean(self, number: int, message: Chunk, frame: Frame) -> None:
        count = len(self._grid)
        sender = self._announced if number < count else self._posted
        if self.result is not None or sender is None or message.attempt != sender.announced.attempt:
            return
        if number not in self._owned or number in self._means:
            return
        try:
            self._codecs.means.check(frame.payload, self._grid.size(number % count))
        except CodecError as error:
            return self.fail(error.reason)
        self._means[number] = frame.payload
        self._patience.note_data(nbytes(frame.payload))
        self._look()

    def look(self) -> None:
        """Finish if nothing is missing any more."""
        ready = self.theirs
        if self.ours is None or ready is None or not self.complete or not self._reduced():
            return
        if len(self._means) == len(self._owned):
            means = tuple(self._means[number] for number in sorted(self._means))
            self._end(PairResult(self.partner, means, ready.attempt, ready.weight))

    def _look(self) -> None:
        self.look()
