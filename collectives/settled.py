"""An exchange whose results are others in another ballot, though it has the same contributors: they depend on who owns what.

So a ballot with other owners begins anew, and what was voted for in one before is only fetched by who adopts it, not computed
again: it is known by its hash, so that it does not matter in which ballot somebody had it.
"""

from __future__ import annotations

from thinwire.collectives.exchange import Exchange
from thinwire.compression.codec import Buffer
from thinwire.swarm.frame import Frame
from thinwire.swarm.protocol import Digest, Open, PeerId, Record, Result


class Settled(Exchange):
    """See the module."""

    _voted: tuple[Digest, list[Buffer]] | None = None

    def _basis(self, opened: Open) -> object:
        """See Plane."""
        return opened.adopted if opened.adopted is not None else super()._basis(opened)

    def _renew(self, opened: Open) -> None:
        """See Exchange. What was voted for last is kept: who adopts it fetches it from those who did."""
        digest = self.results.digest
        if digest is not None:
            self._voted = digest, [chunk for chunk in self.results.chunks if chunk is not None]
        if digest is not None and digest == opened.adopted:
            return
        self.results.clear()
        if self._voted is not None and self._voted[0] == opened.adopted:
            for index, chunk in enumerate(self._voted[1]):
                self.results.put(index, chunk)

    def _assign(self, opened: Open) -> None:
        """See Exchange."""
        super()._assign(opened)
        if opened.adopted is not None:
            self._takers, self._mine = (b"",) * len(self.grid), []

    def _scatter(self, opened: Open) -> None:
        """See Plane."""
        if opened.adopted is None:
            super()._scatter(opened)

    def settle(self) -> None:
        """See Plane."""
        super().settle()
        self._voted = None

    def take(self, sender: PeerId, frame: Frame) -> None:
        """See Plane."""
        if self.results.wanted is not None and isinstance(message := frame.message, (Record, Result)):
            if isinstance(message, Record):
                self._take_record(sender, message)
            else:
                self._take_result(sender, message, frame)
        else:
            super().take(sender, frame)

    def _take_record(self, sender: PeerId, record: Record) -> None:
        unsigned = [i for i in record.indices if i < len(self.grid) and not self.results.signed(i)]
        super()._take_record(sender, record)
        if not self.complete and any(map(self.results.signed, unsigned)):
            self._replay()

    def _take_result(self, sender: PeerId, message: Result, frame: Frame) -> None:
        """See Plane. What is settled has no owner: all of it is signed for at once, by whoever has it."""
        if self.results.wanted is None:
            return super()._take_result(sender, message, frame)
        if self._take_signed(sender, message, frame):
            self.check()

    def _take_signed(self, sender: PeerId, message: Result, frame: Frame) -> bool | None:
        """Take a result that is signed for, from whoever has it; None: nobody has signed yet, and it waits."""
        index = message.index
        if index >= len(self.grid) or self.results.chunks[index] is not None:
            return None
        taken = self.results.take(index, frame.payload, frame.hashed, from_owner=False)
        if taken is None:
            if self._fits(frame):
                self._early.put(sender, frame)
        elif taken:
            self._progress()
        return taken

    def culprit(self, opened: Open) -> tuple[PeerId, str] | None:
        """See Plane. Of what is settled others are asked, see Butterfly."""
        return super().culprit(opened) if opened.adopted is None else None
