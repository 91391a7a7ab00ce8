"""Trials of newcomers in open runs: members score the contributions of peers that are no members yet.

A newcomer on trial announces a contribution in each round. Each member asks one of the newcomers for it, the first in its
own ranking of the round, and evaluates a small step along the contribution on two batches: one that the newcomer should
have trained on, and another one. The score rises if the first loss falls more (the Gauntlet of Lidin and others,
arXiv 2505.21684). A member endorses newcomers with a good score, and peers that it has seen as members before, in its
announcements. Electorate.admits counts the endorsements.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Collection, Mapping
from dataclasses import dataclass, field

import blake3
import numpy as np
from thinwire.collectives.rounds.round import Round
from thinwire.compression.core.types import Buffer, Floats
from thinwire.node.membership.presence import Presence
from thinwire.node.runtime.event_log import Emit
from thinwire.node.state.replica import Replica
from thinwire.swarm.frame import Frame
from thinwire.swarm.identity.identity import Identity, short
from thinwire.swarm.messages.registry import MAX_ENDORSED, Chunk, Fetch, PeerId, Ready
from thinwire.swarm.rendezvous_hash import rank

Score = Callable[[Floats, Floats, PeerId, int, bytes], tuple[float, float]]
"""Loss decreases by a step from outer parameters, see Learner.score."""

DECAY = 0.95
"""Part of a score that remains after one more evaluation; the rest is its sign."""

STEP = 0.2
"""Length of the step that is evaluated, in outer learning rates along the contribution."""

PASS = 0.9
"""Part of the highest score after the required evaluations that a newcomer needs."""

FAILURES = 3
"""Consecutive contributions that do not lower the loss, after which a newcomer needs one that does."""

MOST = 4096
"""Maximum number of newcomers with a score, and of known former members."""


@dataclass(slots=True)
class Candidate:
    """Opinion about one newcomer.

    rounds: number of its scored contributions. failures: of those since the last one that lowered the loss.
    """

    score: float = 0.0
    rounds: int = 0
    failures: int = 0
    reason: str = ""
    endorsed: bool = False

    def judge(self, assigned: float, other: float, required: int) -> None:
        """Add an evaluation: the loss decreases on the assigned batch and on another one."""
        good = assigned > 0.0
        sign = (float(np.sign(assigned - other)) if good else -1.0) if np.isfinite(assigned + other) else -1.0
        self.score = DECAY * self.score + (1 - DECAY) * sign
        self.rounds, self.failures = self.rounds + 1, 0 if good else self.failures + 1
        enough = self.rounds >= required and self.score >= PASS * (1 - DECAY**required)
        self.endorsed = enough and self.failures < FAILURES
        self.reason = "" if good else "its contribution does not lower the loss"

    def told(self, required: int) -> str:
        """Return rounds, score and reason for people."""
        told = f"{self.rounds} rounds scored, at least {required} needed, score {self.score:+.2f}"
        return f"{told}, {self.reason}" if self.reason else told


@dataclass(slots=True)
class _Sample:
    """Contribution that this member scores in one round.

    base: outer parameters on which it is based. done: it is scored.
    """

    peer: PeerId
    round: int
    ready: Ready
    payloads: dict[int, Buffer] = field(default_factory=dict)
    base: Floats | None = None
    done: bool = False

    @property
    def whole(self) -> bool:
        return len(self.payloads) * 32 == len(self.ready.hashes)


class Trials:
    """Newcomers of one run, as this peer knows them.

    `required`: scored contributions of a trial; 0: no trial.
    """

    def __init__(
        self,
        identity: Identity,
        replica: Replica,
        presence: Presence,
        fragment: int,
        *,
        required: int,
        current: Callable[[], Round],
        emit: Emit,
    ) -> None:
        self._identity, self._me = identity, identity.peer_id
        self._replica, self._fragment, self._required = replica, fragment, required
        self._roster, self._send_queue, self._current, self._emit = presence.roster, presence.send_queue, current, emit
        self._former: dict[PeerId, None] = {}
        self._candidates: dict[PeerId, Candidate] = {}
        self._sample: _Sample | None = None

    def on_trial(self, peer: PeerId) -> bool:
        """Return True if a peer needs an endorsement to become a member."""
        return bool(self._required) and self._roster.on_trial(peer)

    @property
    def here(self) -> bool:
        """True if this peer itself is on trial: it has a state and is no member."""
        return self._replica.round > 0 and self._me not in self._replica.members and self.on_trial(self._me)

    def endorsed(self) -> tuple[PeerId, ...]:
        """Return the present newcomers that our announcements endorse."""
        if not self._required:
            return ()
        members = self._replica.members
        passed = (peer for peer in self._roster.others if peer not in members and self._vouches(peer))
        return tuple(sorted(passed)[:MAX_ENDORSED])

    def _vouches(self, peer: PeerId) -> bool:
        candidate = self._candidates.get(peer)
        return peer in self._former or (candidate is not None and candidate.endorsed)

    def told(self, peer: PeerId) -> str:
        """Return the state of a newcomer's trial for people; empty for other peers."""
        if peer in self._replica.members or peer in self._former or not self.on_trial(peer):
            return ""
        return self._candidates.get(peer, Candidate()).told(self._required)

    def advance(self) -> None:
        """Begin the next round: members of the last one need no trial when they come back."""
        if not self._required:
            return
        for peer in self._replica.members:
            if peer in self._candidates and peer not in self._former:
                self._emit("endorsed", {"peer": peer.hex(), "detail": self._candidates.pop(peer).told(self._required)})
            if len(self._former) < MOST:
                self._former[peer] = None
        self._roster.keep(self._former)

    # --- the contribution that this member scores

    def look(self) -> None:
        """Ask one newcomer for its contribution to the round in progress, once, when we have announced ours."""
        current = self._current()
        agreement = current.agreement
        if not self._required or self._me not in agreement.ready or agreement.commit is not None:
            return
        if self._me not in self._replica.members or (self._sample is not None and self._sample.round == current.round):
            return
        terms = agreement.terms
        waiting = {
            peer: ready
            for peer, ready in agreement.ready.items()
            if ready.weight and (ready.base, ready.plan) == (terms.base, terms.plan) and self._judges(peer)
        }
        if not waiting:
            return
        peer = rank(terms.base + self._me, "trial", waiting)[0]
        self._sample = _Sample(peer, current.round, waiting[peer])
        hashes, grid = waiting[peer].hashes, self._replica.grid
        copies = copied(peer, agreement.ready, self._replica.members)
        if copies or len(hashes) != 32 * len(grid):
            self._sample.done = True
            self._judge(
                peer, 0.0, 0.0, "it copies the contribution of another peer" if copies else "it has another size"
            )
            return
        chunks = tuple(range(len(hashes) // 32))
        self._send_queue.control(peer, Fetch(current.round, self._fragment, blake3.blake3(hashes).digest(), chunks))

    def _judges(self, peer: PeerId) -> bool:
        return peer not in self._replica.members and peer not in self._former and self.on_trial(peer)

    def takes(self, peer: PeerId, frame: Frame) -> bool:
        """Take a chunk that this member has asked for, once; return True if the frame is one.

        The round gets all others: the newcomer may be a contributor now.
        """
        message, sample = frame.message, self._sample
        if not isinstance(message, Chunk) or sample is None or sample.done:
            return False
        index, ready = message.index, sample.ready
        if (peer, message.round, message.attempt) != (sample.peer, sample.round, ready.attempt):
            return False
        size = self._replica.codec.nbytes(self._replica.grid.size(index)) if index < len(self._replica.grid) else 0
        if (
            index in sample.payloads
            or memoryview(frame.payload).nbytes > size
            or frame.hashed() != ready.hashes[32 * index : 32 * index + 32]
        ):
            return False
        sample.payloads[index] = frame.payload
        return True

    @property
    def asked(self) -> bool:
        """True if the base of a requested contribution must be stored before the round changes it."""
        sample = self._sample
        return sample is not None and not sample.done and sample.base is None

    def hold(self) -> None:
        """Store the outer parameters of the round in progress. Runs in the worker."""
        if self._sample is not None:
            self._sample.base = self._replica.theta.copy()

    @property
    def due(self) -> bool:
        """True if a contribution is here as a whole, and its base, too."""
        sample = self._sample
        return sample is not None and not sample.done and sample.base is not None and sample.whole

    def evaluate(self, score: Score) -> tuple[float, float]:
        """Return the loss decreases by the contribution that is here. Runs in the worker."""
        sample, replica = self._sample, self._replica
        assert sample is not None and sample.base is not None
        step = np.empty_like(sample.base)
        try:
            for index in range(len(replica.grid)):
                replica.codec.check(sample.payloads[index], replica.grid.size(index))
            for low, high, values in replica.coder.decoded([sample.payloads[at] for at in range(len(replica.grid))]):
                np.multiply(values, np.float32(STEP * replica.outer.sgd.lr), out=step[low:high])
        except (ValueError, KeyError):
            return 0.0, 0.0  # No honest encoder writes it.
        round = sample.round - 1
        salt = self._identity.sign("trial", sample.peer, round.to_bytes(8, "big"))  # Never sent.
        return score(sample.base, step, sample.peer, round, salt)

    def judged(self, assigned: float, other: float) -> None:
        """Record the result of `evaluate`."""
        sample = self._sample
        if sample is not None:
            sample.done, sample.base, sample.payloads = True, None, {}
            if self._judges(sample.peer):
                self._judge(sample.peer, assigned, other)

    def _judge(self, peer: PeerId, assigned: float, other: float, reason: str = "") -> None:
        if peer not in self._candidates and len(self._candidates) >= MOST:
            del self._candidates[next(iter(self._candidates))]
        candidate = self._candidates.setdefault(peer, Candidate())
        candidate.judge(assigned, other, self._required)
        candidate.reason = reason or candidate.reason
        fields = {"peer": peer.hex(), "score": candidate.score, "assigned": assigned, "other": other}
        self._emit("trial", {**fields, "detail": f"peer {short(peer)}: {candidate.told(self._required)}"})


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
