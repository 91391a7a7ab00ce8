"""Back-off of peers that cost a round its time: for some rounds they own no chunks, or stop no leader.

A round finds out which owners fail, moves their chunks to others and commits. Without memory, the next round would
start with the same owners and lose the same patience again. So a peer that ended a round without its chunks pauses for
2 rounds, then 4, 8 and so on; each round in which it owns chunks to the end undoes one of these steps. For an honest peer
whose link was bad, or that was accused falsely, the only cost is ownership: its contributions and votes still count.
The same applies to a peer that got many chunks because it announced a fast link, and then took much longer than it
should.

A contributor that announces and does not send its data costs a round as much. It owns nothing until it has contributed in as
many rounds as it has failed in, and after PATIENT failures it pauses as contributor, too.

A member that begins a ballot stops the one in progress. If its own ballot does not commit, it has cost the round a patience.
Then others do not follow its ballots, in pauses of the same lengths, while another leader makes progress (`Turn.too_early`).
If the leader has departed or makes no progress, they do. So a member that always begins ballots can delay few rounds, and an
honest one whose ballot competed with another one loses little.
"""

from __future__ import annotations

from collections.abc import Collection
from dataclasses import dataclass

from thinwire.swarm.messages.registry import MAX_GROUP, PeerId, Proposal

STEPS = 6
"""Binary logarithm of the longest pause, in rounds."""

PATIENT = 3
"""Rounds without a contributor's data, less the rounds with it, after which it pauses."""

FORGOTTEN = 64
"""Rounds for which a pause as leader is remembered, so that the next one is longer."""


@dataclass(slots=True)
class Backoff:
    """Pauses after failures: 2, 4, 8 and so on up to 2**`most` rounds. Each success undoes one step."""

    most: int = STEPS
    failures: int = 0
    until: int = 0
    """Last round of the pause."""

    def fail(self, round: int) -> None:
        """Begin a longer pause than the last one."""
        self.failures = min(self.most, self.failures + 1)
        self.until = round + 2**self.failures

    def succeed(self) -> None:
        """Undo one step: the next pause is as long as the last one."""
        self.failures = max(0, self.failures - 1)


class PeerBackoff:
    """One peer's memory of the failures of others.

    The memory of the leader decides; all peers have seen much the same.
    """

    def __init__(self) -> None:
        self._known: dict[PeerId, Backoff] = {}
        """Peers that have failed as owners of chunks."""
        self._withheld: dict[PeerId, Backoff] = {}
        """Contributors that have not sent their data to owners."""
        self._unserved: dict[PeerId, Backoff] = {}
        """Contributors that have not sent their data to an audit."""
        self._vain: dict[PeerId, Backoff] = {}
        """Members that have begun ballots without a commit."""

    def resting(self, round: int) -> set[PeerId]:
        """Return the peers that are to own no chunks in this round."""
        known = [*self._known.items(), *self._unserved.items()]
        return {peer for peer, one in known if round <= one.until} | self._withheld.keys()

    def barred(self, round: int) -> set[PeerId]:
        """Return the peers that are not to contribute in this round."""
        known = [*self._withheld.items(), *self._unserved.items()]
        return {peer for peer, one in known if one.failures >= PATIENT and round <= one.until}

    def hasty(self, round: int) -> set[PeerId]:
        """Return the peers whose ballots are not to stop a leader that makes progress in this round."""
        return {peer for peer, one in self._vain.items() if round <= one.until}

    @property
    def remembered(self) -> set[PeerId]:
        """Peers whose failures are not forgotten yet."""
        return self._known.keys() | self._withheld.keys() | self._unserved.keys() | self._vain.keys()

    def audited(self, peer: PeerId, round: int, *, served: bool) -> None:
        """Record whether a contributor has sent its data to an audit.

        A contributor that does not may protect a lying owner, perhaps itself. So it pauses as owner, and after PATIENT such
        audits as contributor; only audits that it serves undo that.
        """
        if not served:
            self._unserved.setdefault(peer, Backoff()).fail(round)
        elif peer in self._unserved:
            self._unserved[peer].succeed()
            if not self._unserved[peer].failures:
                del self._unserved[peer]
        for one in list(self._unserved)[:-MAX_GROUP]:
            del self._unserved[one]

    def record(
        self,
        proposal: Proposal,
        failed: Collection[PeerId],
        withheld: Collection[PeerId] = (),
        led: Collection[PeerId] = (),
    ) -> None:
        """Record that a round has committed with this ballot.

        `failed` lost their chunks or lied about them; `withheld` did not send the data that they had announced; `led` began
        ballots above the first.
        """
        leader = proposal.ballot.leader
        for peer in sorted(set(led) - {leader}):
            self._vain.setdefault(peer, Backoff()).fail(proposal.round)
        if leader in led and leader in self._vain:
            self._vain[leader].succeed()
        for peer in [one for one, pauses in self._vain.items() if proposal.round > pauses.until + FORGOTTEN]:
            del self._vain[peer]
        for peer in list(self._vain)[:-MAX_GROUP]:
            del self._vain[peer]
        contributed = {entry.peer for entry in proposal.contributors}
        for peer in withheld:
            self._withheld.setdefault(peer, Backoff()).fail(proposal.round)
        for peer in contributed & self._withheld.keys():
            self._withheld[peer].succeed()
            if not self._withheld[peer].failures:
                del self._withheld[peer]
        for peer in list(self._withheld)[:-MAX_GROUP]:  # those that have withheld first
            del self._withheld[peer]
        for peer in failed:
            self._known.setdefault(peer, Backoff()).fail(proposal.round)
        for peer in set(self._known) - set(failed) - self.resting(proposal.round):
            if peer in proposal.alive and peer not in proposal.idle:
                self._known[peer].succeed()
            if not self._known[peer].failures or peer not in proposal.alive:
                del self._known[peer]
