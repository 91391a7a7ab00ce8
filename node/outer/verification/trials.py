"""Scores of contributions in open runs: each member scores one other peer in each round.

The scored peer is a newcomer on trial or a member. After a round each member draws one of the peers that have announced a
contribution to it, and asks for that contribution while all peers make their next inner steps: then links are free, and the
drawn peer can no longer change it. Before the inner steps of the round after that, the member evaluates a small step along the
contribution, see score_book.py. In its announcements a
member endorses newcomers with a good score and peers that it has seen as members before, and distrusts members whose
contributions do not lower the loss. Electorate.uncounted counts these opinions.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field

import numpy as np
from thinwire.collectives.consensus.proposal import DISTRUSTED
from thinwire.collectives.rounds.round import Round
from thinwire.compression.core.types import Buffer, Floats
from thinwire.node.membership.presence import Presence
from thinwire.node.outer.verification.announcement_order import AnnouncementOrder
from thinwire.node.outer.verification.own_contributions import OwnContributions, name_of
from thinwire.node.outer.verification.score_book import (
    HELPFUL,
    MOST,
    NOTHING,
    STEP,
    Falls,
    Opinion,
    ScoreBook,
    copied,
    equal_step,
)
from thinwire.node.runtime.event_log import Emit
from thinwire.node.state.replica import Replica
from thinwire.swarm.frame import Frame
from thinwire.swarm.identity.identity import Identity, short
from thinwire.swarm.messages.registry import MAX_DISTRUSTED, MAX_ENDORSED, Chunk, Fetch, PeerId, Proposal, Ready

Score = Callable[[Floats, Floats, PeerId, int, bytes], Falls]
"""Loss decreases by a step from outer parameters, see Learner.score."""


@dataclass(slots=True)
class ScoredContribution:
    """Contribution that this member scores, announced in `ready`.

    own: our contribution to the same round. base: the outer parameters on which both are based.
    """

    peer: PeerId
    newcomer: bool
    ready: Ready
    own: Sequence[Buffer]
    base: Floats
    payloads: dict[int, Buffer] = field(default_factory=dict)

    @property
    def whole(self) -> bool:
        return len(self.payloads) * 32 == len(self.ready.hashes)


class Trials:
    """Scores of the peers of one run, as this peer gives them.

    `required`: scored contributions of a newcomer's trial; 0: no peer is scored.
    """

    def __init__(
        self,
        identity: Identity,
        replica: Replica,
        presence: Presence,
        fragment: int,
        *,
        required: int,
        own_contributions: OwnContributions,
        emit: Emit,
    ) -> None:
        self._identity, self._me = identity, identity.peer_id
        self._replica, self._fragment, self._required = replica, fragment, required
        self._roster, self._send_queue, self._emit = presence.roster, presence.send_queue, emit
        self._own_contributions = own_contributions
        self._former: dict[PeerId, None] = {}
        self._book = ScoreBook(required)
        self._out: dict[PeerId, int] = {}
        """First round without the contribution of a distrusted member."""
        self._base: Floats | None = None
        self._order = AnnouncementOrder()
        self._samples: list[ScoredContribution] = []
        """Contributions that we have asked for: of the last round, and of the one before if it is here."""

    def on_trial(self, peer: PeerId) -> bool:
        """Return True if a peer needs an endorsement to become a member."""
        return bool(self._required) and self._roster.on_trial(peer)

    @property
    def here(self) -> bool:
        """True if this peer itself is on trial: it has a state and is no member."""
        return self._replica.round > 0 and self._me not in self._replica.members and self.on_trial(self._me)

    def opinions(self) -> tuple[tuple[PeerId, ...], tuple[PeerId, ...]]:
        """Return the newcomers that our announcements endorse, and the peers that they distrust."""
        if not self._required:
            return (), ()
        members, others = self._replica.members, self._roster.peers.others
        passed = [peer for peer in others if peer not in members and self._vouches(peer)]
        doubted = [peer for peer in others if self._book.distrusts(peer)]
        return tuple(sorted(passed)[:MAX_ENDORSED]), tuple(sorted(doubted)[:MAX_DISTRUSTED])

    def _vouches(self, peer: PeerId) -> bool:
        return peer in self._former or self._book.of(peer).endorsed

    def describe(self, peer: PeerId) -> str:
        """Return score, reason and since when a peer is out, for people; empty without a score."""
        opinion, newcomer = self._book.of(peer), self._is_tried_here(peer)
        if not self._required or (not newcomer and not opinion.rounds and peer not in self._out):
            return ""
        if newcomer:
            return f"on trial: {opinion.summary}, at least {self._required} needed"
        since = f"out since round {self._out[peer]} ({DISTRUSTED}): " if peer in self._out else ""
        return f"{since}{opinion.summary}"

    def advance(self, done: Round | None) -> None:
        """Begin the next round. `done`: the last one, if it was committed here.

        Members of the last one need no trial when they come back.
        """
        if not self._required:
            return
        for peer in self._replica.members:
            if self._book.of(peer).rounds and peer not in self._former:
                self._emit_about("endorsed", peer, self._book.of(peer).summary)
            if len(self._former) < MOST:
                self._former[peer] = None
        self._roster.protect(
            self._former,
            {peer for peer in self._book.opinions if self._book.failed(peer) and self._is_tried_here(peer)},
        )
        base, self._base = self._base, None
        if done is not None and (commit := done.agreement.commit) is not None:
            self._report_withdrawn(commit.proposal)
            self._draw(done, base)
        self._order.forget(self._replica.round)

    def _report_withdrawn(self, proposal: Proposal) -> None:
        """Report members whose contributions have ceased to count, or count again."""
        out = {entry.peer for entry in proposal.excluded if entry.reason == DISTRUSTED}
        for peer in sorted(out - self._out.keys()):
            self._out[peer] = proposal.round
            self._emit_about(
                "withdrawn", peer, f"{DISTRUSTED}; our {self._book.of(peer).summary}", round=proposal.round
            )
        for peer in sorted(self._out.keys() - out):
            since = self._out.pop(peer)
            if any(entry.peer == peer for entry in proposal.contributors):
                detail = f"out since round {since}, counts again; our {self._book.of(peer).summary}"
                self._emit_about("counts_again", peer, detail, round=proposal.round)

    def _emit_about(self, event: str, peer: PeerId, detail: str, **fields: object) -> None:
        self._emit(event, {"peer": peer.hex(), **fields, "detail": f"peer {short(peer)}: {detail}"})

    # --- the contributions that this member scores

    @property
    def holds(self) -> bool:
        """True if the outer parameters must be stored before the commit of a round changes them."""
        return bool(self._required and self._own_contributions.of(self._replica.round + 1))

    def hold(self) -> None:
        """Store the outer parameters of the round in progress. Runs in the worker."""
        self._base = self._replica.theta.copy()

    def _draw(self, done: Round, base: Floats | None) -> None:
        """Draw a contributor of a committed round, and ask for its contribution, if ours is in it, too."""
        agreement, members = done.agreement, self._replica.members
        for sample in self._samples:
            if not sample.whole and not sample.newcomer and self._roster.peers.is_live(sample.peer):
                self._report_score(sample.peer, self._book.unsent(sample.peer))
        self._samples = [sample for sample in self._samples if sample.whole]
        own = self._own_contributions.of(done.round)
        if base is None or not own or self._me not in members:
            return
        terms = agreement.terms
        made = [
            peer
            for peer, ready in agreement.ready.items()
            if ready.weight
            and (ready.base, ready.plan) == (terms.base, terms.plan)
            and peer in self._roster.peers.others
        ]
        newcomers = [peer for peer in made if self._is_tried_here(peer)]
        peer = self._book.choose(self._secret(b"", done.round), [one for one in made if one in members], newcomers)
        if peer is None:
            return
        sample = ScoredContribution(peer, peer in newcomers, agreement.ready[peer], own, base)
        hashes, reason = sample.ready.hashes, ""
        # Members are not compared: a liar could announce their hashes as its own, to have them excluded.
        if sample.newcomer and copied(peer, self._earlier(peer, agreement.ready), members):
            reason = "it copies the contribution of another peer"
        elif len(hashes) % 32 or not self._replica.fits(len(hashes) // 32):
            reason = "it has another size"
        if reason:
            return self.judge(sample, NOTHING, HELPFUL, reason)
        self._samples.append(sample)
        chunks = tuple(range(len(hashes) // 32))
        self._send_queue.control(peer, Fetch(done.round, self._fragment, name_of(hashes), chunks))

    def _earlier(self, peer: PeerId, ready: Mapping[PeerId, Ready]) -> dict[PeerId, Ready]:
        """Return the announcement of a peer, ours, and those that came before it.

        The hashes of a newcomer can only be repeated after it has announced them, so a liar that repeats them does not make
        it a copycat.
        """
        at = self._order.of(peer, ready[peer])
        return {
            other: one for other, one in ready.items() if other in (peer, self._me) or self._order.of(other, one) < at
        }

    def _secret(self, peer: PeerId, round: int) -> bytes:
        return self._identity.sign("trial", peer, round.to_bytes(8, "big"))  # Never sent.

    def _is_tried_here(self, peer: PeerId) -> bool:
        """Return True if a peer is a newcomer whose contributions this peer scores."""
        return peer not in self._replica.members and peer not in self._former and self.on_trial(peer)

    def takes(self, peer: PeerId, frame: Frame) -> bool:
        """Take a chunk that we have asked for, once; return True if the frame is one of these."""
        message = frame.message
        round = self._replica.round
        if isinstance(message, Ready) and self._required and round < message.round <= round + 2:
            self._order.add(peer, message)
        if not isinstance(message, Chunk):
            return False
        index, replica = message.index, self._replica
        for sample in self._samples:
            ready, known = sample.ready, sample.payloads
            if (peer, message.round, message.attempt) == (
                sample.peer,
                ready.round,
                ready.attempt,
            ) and index not in known:
                size = replica.codec.nbytes(replica.grid.size(index)) if index < len(replica.grid) else 0
                if memoryview(frame.payload).nbytes <= size and frame.hashed() == ready.hashes[32 * index :][:32]:
                    known[index] = frame.payload
                    return True
        return False

    @property
    def due(self) -> ScoredContribution | None:
        """A contribution to score that is here as a whole."""
        return next((sample for sample in self._samples if sample.whole), None)

    def evaluate(self, sample: ScoredContribution, score: Score) -> tuple[Falls, Falls]:
        """Return the loss decreases by a contribution, and by ours to that round. Runs in the worker."""
        round, salt = sample.ready.round - 1, self._secret(sample.peer, sample.ready.round - 1)
        try:
            theirs = self._step([sample.payloads[at] for at in range(len(sample.payloads))])
        except ValueError:
            return NOTHING, HELPFUL  # No honest encoder writes it.
        ours = self._step(sample.own)
        theirs = equal_step(theirs, ours)
        return (
            score(sample.base, theirs, sample.peer, round, salt),
            score(sample.base, ours, sample.peer, round, salt),
        )

    def _step(self, payloads: Sequence[Buffer]) -> Floats:
        step = self._replica.values_of(payloads)
        step *= np.float32(STEP * self._replica.outer.sgd.lr)
        return step

    def judge(self, sample: ScoredContribution, theirs: Falls, ours: Falls, reason: str = "") -> None:
        """Record the result of `evaluate`. `reason`: why it was not made."""
        self._samples = [other for other in self._samples if other is not sample]
        peer, fields = sample.peer, {"assigned": theirs[0], "other": theirs[1], "ours": sum(ours) / 2}
        if sample.newcomer:
            self._report_score(peer, self._book.judge_newcomer(peer, theirs, reason), **fields)
        elif (opinion := self._book.judge_member(peer, theirs, ours)) is not None:
            self._report_score(peer, opinion, **fields)

    def _report_score(self, peer: PeerId, opinion: Opinion, **fields: object) -> None:
        self._emit_about("trial", peer, opinion.summary, score=opinion.score, **fields)
