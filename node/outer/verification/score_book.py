"""Scores of other peers in an open run: opinions of one member about their contributions.

They follow the Gauntlet of Lidin and others (arXiv 2505.21684). An evaluation is how much the loss falls by a small step
along a contribution, on two batches: one assigned to the peer and another one. Newcomers on trial train on the assigned
batches, so the first loss falls more. Members train on their shares of the data. A member that repeated a few batches would
waste most of its work, so its score uses only whether the loss falls on batches that it has not trained on.

Losses are noisy, and at the end of a training they do not fall any more. So each evaluation of a member has a control: a step
of the same length along our own contribution, on the same batches, in the same round. It is the only one that we know to be
honest. One of the two loses if the other one lowers the loss and it does not, or by less than a part of that. An evaluation
in which neither lowers it is ignored. Of two honest peers each loses equally often, so our own losses tell how often an
honest peer loses by chance: seldom at first, nearly every second time in the end. A member is distrusted once it has lost so
often in a row that chance hardly explains it, at least three times, and until it does not lose.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Collection, Mapping
from dataclasses import dataclass, field

import blake3
import numpy as np
from thinwire.compression.core.types import Floats
from thinwire.swarm.messages.registry import PeerId, Ready
from thinwire.swarm.rendezvous_hash import rank

STEP = 0.2
"""Length of the step that is evaluated, in outer learning rates along our own contribution."""

DECAY = 0.95
"""Part of a score that remains after one more evaluation; the rest is its sign."""

PASS = 0.9
"""Part of the highest score after the required evaluations that a newcomer needs."""

FAILURES = 3
"""Consecutive contributions that do not lower the loss, after which a peer needs one that does."""

FAILED = -0.1
"""Score below which a newcomer has failed: that of three bad evaluations at the start, not of two."""

LEAST = 0.1
"""Part of the decrease of the loss by another contribution that one must reach, not to lose."""

CHANCE = 2e-5
"""A member is distrusted if an honest one would lose so often in a row with at most this probability."""

RARELY = 0.15
"""Members that have lost are drawn first while an honest peer loses with at most this probability."""

MOST = 4096
"""Maximum number of peers with a score."""

COUNTED = "it does not lower the loss"
UNSENT = "it was not sent to us"

Falls = tuple[float, float]
"""Loss decreases on the batch that is assigned to a peer, and on another one."""

NOTHING, HELPFUL = (0.0, 0.0), (1.0, 1.0)
"""Decreases by a contribution that cannot be evaluated, and by one that lowers both losses."""


@dataclass(slots=True)
class Opinion:
    """Opinion about one peer.

    rounds: number of its scored contributions. failures: of those since the last good one. reason: why the last one was
    not good. distrusted: its contributions should not count until a good one. drawn: number of the last draw of the peer.
    """

    score: float = 0.0
    rounds: int = 0
    failures: int = 0
    reason: str = ""
    endorsed: bool = False
    distrusted: bool = False
    drawn: int = 0

    def add(self, sign: float, reason: str) -> None:
        """Add an evaluation; with a `reason` it is a failure."""
        self.score = DECAY * self.score + (1 - DECAY) * sign
        self.rounds, self.failures, self.reason = self.rounds + 1, self.failures + 1 if reason else 0, reason

    @property
    def summary(self) -> str:
        """Score, number of evaluations and reason for people."""
        summary = f"score {self.score:+.2f} after {self.rounds} contributions"
        return f"{summary}, {self.failures} failed in a row: {self.reason}" if self.reason else summary


@dataclass(slots=True)
class ScoreBook:
    """Opinions of one member. `required`: scored contributions of a trial. `control`: about our own ones."""

    required: int
    opinions: dict[PeerId, Opinion] = field(default_factory=dict)
    control: Opinion = field(default_factory=Opinion)
    draws: int = 0

    def of(self, peer: PeerId) -> Opinion:
        """Return the opinion about a peer; an empty one about a peer that was never scored."""
        return self.opinions.get(peer, Opinion())

    def judge_newcomer(self, peer: PeerId, theirs: Falls, reason: str = "") -> Opinion:
        """Add the evaluation of a newcomer's contribution; with a `reason` it lowers no loss."""
        assigned, other = theirs if np.isfinite(theirs).all() and not reason else (0.0, 0.0)
        opinion, good = self._stored(peer), assigned > 0.0
        opinion.add(float(np.sign(assigned - other)) if good else -1.0, "" if good else reason or COUNTED)
        enough = opinion.rounds >= self.required and opinion.score >= PASS * (1 - DECAY**self.required)
        opinion.endorsed = enough and opinion.failures < FAILURES
        return opinion

    def judge_member(self, peer: PeerId, theirs: Falls, ours: Falls) -> Opinion | None:
        """Add the evaluation of a member's contribution, and of ours; return None if it is ignored."""
        fall, control = (float(np.mean(one)) if np.isfinite(one).all() else 0.0 for one in (theirs, ours))
        if max(fall, control) <= 0.0:
            return None
        lost = control > 0.0 and fall < LEAST * control
        if not lost:  # Those that always lose would hide how often an honest peer does.
            self._add(self.control, COUNTED if control < LEAST * fall else "")
        return self._add(self._stored(peer), COUNTED if lost else "")

    def unsent(self, peer: PeerId) -> Opinion:
        """Add a contribution that a member has announced and not sent."""
        return self._add(self._stored(peer), UNSENT)

    def _add(self, opinion: Opinion, reason: str) -> Opinion:
        opinion.add(-1.0 if reason else 1.0, reason)
        improbable = opinion.failures >= FAILURES and self.chance**opinion.failures <= CHANCE
        opinion.distrusted = bool(reason) and (opinion.distrusted or improbable)
        return opinion

    @property
    def chance(self) -> float:
        """Probability with which an honest peer loses.

        It follows from our share of losses in the evaluations that the other peer did not lose: the estimator of Jeffreys,
        for about the last twenty of them; a third if there was none.
        """
        weight = (1 - DECAY**self.control.rounds) / (1 - DECAY)
        losses = (weight - self.control.score / (1 - DECAY)) / 2
        share = (losses + 0.5) / (weight + 1)
        return share / (1 + share)

    def distrusts(self, peer: PeerId) -> bool:
        """Return True if the contributions of a member should not count until it has a good one."""
        return self.of(peer).distrusted

    def choose(self, secret: bytes, members: Collection[PeerId], newcomers: Collection[PeerId]) -> PeerId | None:
        """Return the peer to score in a round; None if there is none.

        Members and newcomers have equal chances as groups, so that neither can keep the others from being scored by their
        number. Of the members, one that lost last time comes first, until it is distrusted or does not lose, if honest peers
        lose rarely. Otherwise it is one of the half that was drawn longest ago. Newcomers: see `_next_newcomers`. `secret`:
        differs by round and is known to this peer only, so that no peer can be honest just when it is scored.
        """
        lost = [peer for peer in members if self.of(peer).reason == COUNTED and not self.distrusts(peer)]
        suspects = lost if self.chance <= RARELY else []
        oldest = sorted(members, key=lambda peer: (self.of(peer).drawn, peer))[: (len(members) + 1) // 2]
        first, second = blake3.blake3(secret).digest()[:2]
        next_newcomers = self._next_newcomers(newcomers, best=second % 2 == 0)
        groups = [group for group in (suspects or oldest, next_newcomers) if group]
        if not groups:
            return None
        peer = rank(secret, "score", groups[first % len(groups)])[0]
        self.draws += 1
        self._stored(peer).drawn = self.draws
        return peer

    def _next_newcomers(self, newcomers: Collection[PeerId], *, best: bool) -> Collection[PeerId]:
        """Return the newcomers of which one is drawn.

        Keys are free, so liars may be many. If all were drawn equally often, no honest newcomer would pass among them. Half
        of the draws (`best`) are for the highest score of those that have not passed here. The others are for those with a
        bad score and fewer than FAILURES evaluations, else for those drawn longest ago.
        """
        score = {peer: self.of(peer).score for peer in newcomers}
        if best and (tried := [peer for peer in newcomers if not self.of(peer).endorsed]):
            highest = max(score[peer] for peer in tried)
            return [peer for peer in tried if score[peer] == highest]
        unclear = [peer for peer in newcomers if score[peer] < 0.0 and self.of(peer).rounds < FAILURES]
        longest = min((self.of(peer).drawn for peer in newcomers), default=0)
        return unclear or [peer for peer in newcomers if self.of(peer).drawn == longest]

    def failed(self, newcomer: PeerId) -> bool:
        """Return True if a newcomer is much worse than an unknown one, so that others may take its place."""
        return self.of(newcomer).score < FAILED

    def _stored(self, peer: PeerId) -> Opinion:
        if peer not in self.opinions and len(self.opinions) >= MOST:
            # Newcomers cost nothing; those that are endorsed have worked for it, and so have members.
            least = min(self.opinions, key=lambda one: (self.opinions[one].endorsed, self.opinions[one].rounds))
            del self.opinions[least]
        return self.opinions.setdefault(peer, Opinion())


def equal_step(theirs: Floats, ours: Floats) -> Floats:
    """Return a step of our length in the direction of theirs; zeros if that is not finite, or has none.

    The lengths of honest contributions differ with the numbers of inner steps. A member with few of them must not fail.
    """
    length = float(np.linalg.norm(theirs.astype(np.float64)))
    if not 0.0 < length < np.inf:
        return np.zeros_like(theirs)
    return theirs * np.float32(float(np.linalg.norm(ours.astype(np.float64))) / length)


def copied(peer: PeerId, ready: Mapping[PeerId, Ready], members: Collection[PeerId]) -> bool:
    """Return True if another peer has announced a chunk with the same hash.

    Chunks that several members have do not count: a part of the model without updates is the same for all.
    """

    def chunks(one: PeerId) -> set[bytes]:
        hashes = ready[one].hashes
        return {hashes[at : at + 32] for at in range(0, len(hashes), 32)}

    count = Counter(chunk for one in members if one in ready for chunk in chunks(one))
    ours = {chunk for chunk in chunks(peer) if count[chunk] < 2}
    return any(other != peer and not ours.isdisjoint(chunks(other)) for other in ready)
