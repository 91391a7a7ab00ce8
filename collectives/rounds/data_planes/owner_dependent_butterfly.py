"""Butterfly whose results depend on the owners.

A ballot with other owners computes all results again. In a ballot that adopts earlier results, peers only fetch them.
Results are identified by hash, so the ballot in which a peer obtained them does not matter.
"""

from __future__ import annotations

from thinwire.collectives.rounds.data_planes.butterfly import Butterfly
from thinwire.compression.core.types import Buffer
from thinwire.swarm.frame import Frame
from thinwire.swarm.messages.registry import Digest, PeerId, Proposal, Result, ResultRecord


class OwnerDependentButterfly(Butterfly):
    """Base of data planes whose results depend on the ballot's owners."""

    _voted: tuple[Digest, list[Buffer]] | None = None

    def _basis(self, proposal: Proposal) -> object:
        """Return the inputs that determine a ballot's results: the adopted digest, if any."""
        return proposal.adopted if proposal.adopted is not None else super()._basis(proposal)

    def _drop_results(self, proposal: Proposal) -> None:
        """Clear results of other ballots, but store the last voted ones for peers that adopt them."""
        self._owned.clear()
        digest = self.results.digest
        if digest is not None:
            self._voted = digest, [chunk for chunk in self.results.chunks if chunk is not None]
        if digest is not None and digest == proposal.adopted:
            return
        self.results.clear()
        if self._voted is not None and self._voted[0] == proposal.adopted:
            for index, chunk in enumerate(self._voted[1]):
                self.results.put(index, chunk)

    def _assign(self, proposal: Proposal) -> None:
        """Assign owners; a ballot that adopts results has none."""
        super()._assign(proposal)
        if proposal.adopted is not None:
            self._collectors, self._owned.indices = (b"",) * len(self.grid), ()

    def _scatter(self, proposal: Proposal) -> None:
        """Send our contribution, unless the ballot adopts results."""
        if proposal.adopted is None:
            super()._scatter(proposal)

    def finish(self) -> None:
        """Free the round's data."""
        super().finish()
        self._voted = None

    def take(self, sender: PeerId, frame: Frame) -> None:
        """Take a frame; once results are settled, any peer's ResultRecords and Results count."""
        if self.results.wanted is not None and isinstance(message := frame.message, (ResultRecord, Result)):
            if isinstance(message, ResultRecord):
                self._take_record(sender, message, frame.signature)
            else:
                self._take_result(sender, message, frame)
        else:
            super().take(sender, frame)

    def _take_record(self, sender: PeerId, record: ResultRecord, signature: bytes) -> None:
        unsigned = [i for i in record.indices if i < len(self.grid) and not self.results.signed(i)]
        super()._take_record(sender, record, signature)
        if not self.complete and any(map(self.results.signed, unsigned)):
            self._replay()

    def _take_result(self, sender: PeerId, message: Result, frame: Frame) -> None:
        """Take a result. Settled results have no owner: any peer that has them may sign for all and send them."""
        if self.results.wanted is None:
            return super()._take_result(sender, message, frame)
        if self._take_signed(sender, message, frame):
            self.check()

    def _take_signed(self, sender: PeerId, message: Result, frame: Frame) -> bool | None:
        """Take a signed result from any peer; None if it has no signature yet and is stored for later."""
        index = message.index
        if index >= len(self.grid) or self.results.chunks[index] is not None:
            return None
        taken = self.results.take(index, frame.payload, frame.hashed, check=self._check_result, from_owner=False)
        if taken is None:
            if self._fits(frame):
                self._early.put(sender, frame)
        elif taken:
            self.progress.note_arrival()
        return taken

    def culprit(self, proposal: Proposal) -> tuple[PeerId, str] | None:
        """Return the peer to blame. None for adopted results: other peers are asked, see Round."""
        return super().culprit(proposal) if proposal.adopted is None else None
