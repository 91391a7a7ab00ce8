"""Detection of the peer that stops a round."""

from __future__ import annotations

from thinwire.collectives.rounds.data_planes.data_plane import DataPlane
from thinwire.swarm.messages.registry import Ballot, PeerId, Proposal

TRICKLE = 2048
"""Bytes/s that count as progress; slower streams are closed (see Limits)."""


class StallDetector:
    """Detector of stalls in one round at one peer.

    If no data makes progress, it complains about the peer that the round waits for, at most once in a ballot.
    """

    def __init__(self, data_plane: DataPlane) -> None:
        self._data_plane, self._agreement = data_plane, data_plane.agreement
        self._send_queue, self._now = data_plane.send_queue, data_plane.now
        self._complained_in: Ballot | None = None
        self._counted_at = self._now()
        self._received: dict[PeerId, int] = {}
        """Bytes received from each peer that owes us data, at the last count."""
        self._received_before: dict[PeerId, int | None] = {}
        """Bulk bytes that came over relays before the ballot in progress opened here, by peer; None: no relay."""

    def open(self, proposal: Proposal) -> None:
        """Begin a ballot."""
        self._received_before = {peer: self._send_queue.received_over_relay(peer) for peer in proposal.group}

    def count_partial_frames(self) -> None:
        """Count bytes of incomplete frames as progress, so that slow links are not taken for stuck peers.

        On an uplink that all receivers share, the first chunk is complete only when nearly all data has been sent.
        """
        data_plane, now, then = self._data_plane, self._now(), self._counted_at
        proposal = data_plane.proposal
        if proposal is None or not data_plane.results.missing or now < then + self._agreement.terms.patience / 8:
            return
        before = self._received
        self._received = {peer: self._send_queue.received(peer) for peer in data_plane.awaited_peers(proposal)}
        self._counted_at = now
        grown = sum(count - before[peer] for peer, count in self._received.items() if peer in before)
        if grown >= TRICKLE * (now - then):
            data_plane.progress.note_partial_arrival()

    def accuse_culprit(self) -> None:
        """Complain about the peer that the ballot in progress waits for, if no data makes progress."""
        data_plane, patience, now = self._data_plane, self._agreement.terms.patience, self._now()
        proposal, since = data_plane.proposal, data_plane.progress.progressed_at
        if proposal is None or self._agreement.commit is not None or not data_plane.waits:
            return
        if now < since + patience or self._agreement.me not in proposal.alive or self._complained_in == proposal.ballot:
            return
        found = data_plane.culprit(proposal)
        if found is None:
            self._complained_in = proposal.ballot
            return
        culprit, reason = found
        if now < since + data_plane.complaint_patiences.get(reason, 1) * patience:
            return
        self._complained_in = proposal.ballot
        self._agreement.accuse(culprit, reason, now)
        for peer in data_plane.debtors(proposal):
            self._send_queue.note_debtor(peer, self._received_before.get(peer))
