"""A peer's gossip group of one round: a pair with each other member, drawn alike by all.

Each member sends to all others and continues once each of them has either sent everything or failed. There is no
agreement about the group: each member leaves out those it lacks, and replicas differ anyway. If all n members receive
everything, the mean of their replicas makes the steps of DiLoCo, with a sparse Δ those of SparseLoCo. If one member lacks a
contribution (Δ', φ') that the others have, the mean is off by (β (mean Δ − Δ') + γ (mean φ − φ')) / (n − 1). If a pair fails
on one side only, it is off by at least as much.
"""

from __future__ import annotations

import asyncio
from collections.abc import Container, Sequence

from thinwire.collectives.gossip.pair import Pair, PairResult, PairTerms
from thinwire.collectives.gossip.partner_patience import STALLED
from thinwire.collectives.gossip.transfer import digest_of
from thinwire.collectives.timing import GIVE_UP
from thinwire.compression.core.types import Buffer
from thinwire.swarm.frame import Frame
from thinwire.swarm.messages.registry import Base, Decline, PeerId, Ready


class GossipGroup:
    """Gossip group of one peer in one round.

    Created when the round begins; `post` sends the slow weights, `choose` names the other members, `announce` is called
    when the inner steps are done. Pass it frames of its round (`on_frame`), time (`tick`) and link changes
    (`on_link_down`, `on_link_up`). `size`: most members. `attempt`: number of the last announcement. Stores at most one
    contribution per member. `base`: our encoded slow weights, where they are exchanged.
    """

    def __init__(self, terms: PairTerms, *, size: int, attempt: int = 0) -> None:
        self.round, self.attempt = terms.round, attempt
        self.pairs: dict[PeerId, Pair] = {}
        self.ours: Ready | None = None
        self.ours_at = 0.0
        self.base: Sequence[Buffer] = ()
        self._posted: Base | None = None
        self._terms, self._others = terms, size - 1
        self._done = asyncio.Event()
        self._exchanged, self._exchanged_at = 0, 0.0  # members with a finished exchange, and when the last one finished

    # --- our side

    def choose(self, drawn: tuple[PeerId, ...], here: Container[PeerId]) -> bool:
        """Set the other members, as drawn; again when views have changed. Return False if they stay the same.

        Members that are ready and still `here` stay.
        """
        if self.ours is not None or tuple(self.pairs) == drawn:  # the usual case: called at each tick
            return False
        stay = [peer for peer, pair in self.pairs.items() if pair.theirs is not None and peer in here]
        chosen = [*stay, *(peer for peer in drawn if peer not in stay)][: self._others]
        for peer, pair in self.pairs.items():
            if peer not in chosen:
                pair.withdraw_data()
        self.pairs = {peer: self.pairs.get(peer) or self._pair(peer) for peer in sorted(chosen)}
        return True

    def _pair(self, peer: PeerId) -> Pair:
        pair = Pair(peer, self._terms, self._look)
        if self._posted is not None:
            pair.post(self._posted, self.base)
        return pair

    def post(self, base: Sequence[Buffer], hashes: bytes) -> None:
        """Announce our encoded slow weights to the members, now and as they are chosen.

        They must not change any more.
        """
        terms = self._terms
        self.base = base
        self._post(Base(terms.round, terms.fragment, self.attempt, terms.plan, hashes))

    def _post(self, posted: Base) -> None:
        self._posted = posted
        for pair in self.pairs.values():
            pair.post(posted, self.base)

    @property
    def posted(self) -> bool:
        """True after `post`; where slow weights are exchanged, it must precede `announce`."""
        return self._posted is not None

    def announce(
        self, source: Sequence[Buffer], hashes: bytes, *, weight: int, loss: float, speed: float, deadline: float
    ) -> None:
        """Announce our encoded chunks to the members. The chunks must not change any more.

        `deadline`: seconds to wait for members that are present but not ready.
        """
        terms = self._terms
        self.attempt += 1
        self.ours_at = terms.now()
        self.ours = Ready(
            self.round,
            terms.fragment,
            self.attempt,
            bytes(32) if self._posted is None else digest_of(self._posted.hashes, len(terms.grid)),
            terms.plan,
            weight,
            hashes,
            True,
            float(loss),
            float(speed),
        )
        for pair in self.pairs.values():
            pair.announce(self.ours, source, deadline=deadline)
        self._look()

    async def wait(self) -> tuple[PairResult, ...]:
        """Wait until each pair has finished or failed; return the results in peer-id order."""
        await self._done.wait()
        return tuple(pair.result for pair in self.pairs.values() if pair.result is not None)

    def drop(self, peer: PeerId, reason: str) -> None:
        """Continue without a departed peer; before we are ready the next `choose` may name another."""
        pair = self.pairs.get(peer)
        if pair is not None and self.ours is None:
            pair.withdraw_data()
            del self.pairs[peer]
        elif pair is not None:
            pair.fail(reason, notify=False)

    def release(self) -> None:
        """Free data of the members after the results were used."""
        for pair in self.pairs.values():
            pair.release()

    def close(self) -> None:
        """Drop the pairs, with our data: no member asks for it any more.

        Group and pairs hold each other until then.
        """
        self.pairs = {}

    def accepts(self, peer: PeerId, message: Base | Ready) -> bool:
        """Return True if an announcement belongs to our group, or may belong to one that we still draw."""
        return peer in self.pairs or isinstance(message, Ready)

    @property
    def outstanding(self) -> tuple[PeerId, ...]:
        """Members that the group still waits for."""
        return tuple(peer for peer, pair in self.pairs.items() if pair.result is None)

    def exchanged(self, peer: PeerId) -> bool:
        """Return True if the exchange with this peer succeeded."""
        return peer in self.pairs and self.pairs[peer].exchanged

    @property
    def halfway(self) -> float:
        """Time when half of the other members were ready; 0 before that."""
        return _middle([pair.theirs_at for pair in self.pairs.values() if pair.theirs_at], len(self.pairs)) or 0.0

    @property
    def together(self) -> float:
        """Time when we and all members with a finished exchange were ready."""
        return max(self.ours_at, *(pair.theirs_at for pair in self.pairs.values() if pair.exchanged), 0.0)

    @property
    def waited_for(self) -> float | None:
        """Time since which half of the other members wait for us, or gave up waiting; None if fewer do."""
        waiting = [pair.theirs_at for pair in self.pairs.values() if pair.theirs is not None or pair.refused]
        return _middle(waiting, len(self.pairs))

    # --- events

    def on_frame(self, sender: PeerId, frame: Frame) -> None:
        """Handle a checked frame of this round from any peer.

        Only members are answered, other partners are declined.
        """
        pair, message = self.pairs.get(sender), frame.message
        if pair is not None:
            pair.on_frame(frame)
        elif isinstance(message, Ready) and message.fragment == self._terms.fragment:
            self._terms.send_queue.control(sender, Decline(self.round, self._terms.fragment, "other partner"))

    def on_link_down(self, peer: PeerId) -> None:
        """Handle a broken link to a peer."""
        if peer in self.pairs:
            self.pairs[peer].on_link_down()

    def on_link_up(self, peer: PeerId) -> None:
        """Handle a new link to a peer."""
        if peer in self.pairs:
            self.pairs[peer].on_link_up()

    def tick(self) -> None:
        """Let time pass: give up members that are silent, stalled or late, or much slower than the others."""
        for pair in self.pairs.values():
            pair.tick()
        if self._exchanged_at and self._terms.now() > self._exchanged_at + GIVE_UP * self._terms.patience:
            for pair in self.pairs.values():
                if pair.result is None and pair.theirs is not None:
                    pair.fail(STALLED)

    def _look(self) -> None:
        exchanged = sum(pair.exchanged for pair in self.pairs.values())
        if exchanged > self._exchanged:
            self._exchanged, self._exchanged_at = exchanged, self._terms.now()
        if self.ours is not None and not self.outstanding:
            self._done.set()


def _middle(times: Sequence[float], everyone: int) -> float | None:
    """Return the time by which half of `everyone` had one, None if fewer have."""
    half = (everyone + 1) // 2
    return sorted(times)[half - 1] if half and len(times) >= half else None
