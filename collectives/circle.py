"""A peer's group of one round: a pair with each of the others, drawn alike by all.

Everybody tells everybody what it sends, and goes on once each of the others has either sent all of its own or failed to. So
there is no word on who is in the group: each leaves out whom it lacks, and replicas differ anyway. When all of n have what all
sent, the mean of their replicas moves as DiLoCo's would. Somebody that one of them lacks and others have moves it by
(β (mean Δ − Δ') + γ (mean φ − φ')) / (n − 1) of that one, which is what a pair that fails on one side moves it by, and less.
"""

from __future__ import annotations

import asyncio
from collections.abc import Container, Sequence

from thinwire.collectives.gossip import Meeting, Pair, Terms
from thinwire.collectives.parcels import digest_of
from thinwire.collectives.series import GIVE_UP
from thinwire.compression.codec import Buffer
from thinwire.swarm.frame import Frame
from thinwire.swarm.protocol import Base, Decline, PeerId, Ready


class Circle:
    """See the module. Made when a round begins; `post` is for the slow weights, `choose` names the others, `announce` is for
    when the inner steps are done.

    Feed it frames of its round with `hear`, time with `tick`, link changes with `lost` and `reach`. `size`: most peers of a
    group. `attempt`: what the last announcement had. Holds at most one contribution of each of the others. `base`: our encoded
    slow weights, where they travel.
    """

    def __init__(self, terms: Terms, *, size: int, attempt: int = 0) -> None:
        self.round, self.attempt = terms.round, attempt
        self.pairs: dict[PeerId, Pair] = {}
        self.ours: Ready | None = None
        self.ours_at = 0.0
        self.base: Sequence[Buffer] = ()
        self._posted: Base | None = None
        self._terms, self._others = terms, size - 1
        self._done = asyncio.Event()
        self._met, self._met_at = 0, 0.0  # how many of the others we have met, and when the last of them

    # --- our side

    def choose(self, drawn: Sequence[PeerId], here: Container[PeerId]) -> None:
        """Settle the others, as drawn; again when views have changed. Who is ready and still `here` stays."""
        if self.ours is not None:
            return
        stay = [peer for peer, pair in self.pairs.items() if pair.theirs is not None and peer in here]
        chosen = [*stay, *(peer for peer in drawn if peer not in stay)][: self._others]
        for peer, pair in self.pairs.items():
            if peer not in chosen:
                pair.part()
        self.pairs = {peer: self.pairs.get(peer) or self._pair(peer) for peer in sorted(chosen)}

    def _pair(self, peer: PeerId) -> Pair:
        pair = Pair(peer, self._terms, self._look)
        if self._posted is not None:
            pair.post(self._posted, self.base)
        return pair

    def post(self, base: Sequence[Buffer], hashes: bytes) -> None:
        """Tell the others, now and as they are chosen, what our slow weights are, encoded (not to be changed any more)."""
        terms = self._terms
        self.base, self._posted = base, Base(terms.round, terms.fragment, self.attempt, terms.plan, hashes)
        for pair in self.pairs.values():
            pair.post(self._posted, base)

    @property
    def posted(self) -> bool:
        """Whether `post` was called, which has to be before `announce` where slow weights travel."""
        return self._posted is not None

    def announce(
        self, source: Sequence[Buffer], hashes: bytes, *, weight: int, loss: float, speed: float, deadline: float
    ) -> None:
        """Tell the others that we are ready with these encoded chunks (not to be changed any more).

        `deadline`: seconds to wait for who is there and not ready.
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

    async def wait(self) -> tuple[Meeting, ...]:
        """Until each of the others has come together with us or cannot any more; in peer-id order."""
        await self._done.wait()
        return tuple(pair.meeting for pair in self.pairs.values() if pair.meeting is not None)

    def drop(self, peer: PeerId, reason: str) -> None:
        """A peer is gone: go on without it; before we are ready the next `choose` may name another."""
        pair = self.pairs.get(peer)
        if pair is not None and self.ours is None:
            pair.part()
            del self.pairs[peer]
        elif pair is not None:
            pair.fail(reason, tell=False)

    def release(self) -> None:
        """The meetings have been made use of: what it held of the others is not needed any more."""
        for pair in self.pairs.values():
            pair.release()

    @property
    def lacking(self) -> tuple[PeerId, ...]:
        """Whom it waits for."""
        return tuple(peer for peer, pair in self.pairs.items() if pair.meeting is None)

    def met(self, peer: PeerId) -> bool:
        """Whether it has come together with this one."""
        return peer in self.pairs and self.pairs[peer].met

    @property
    def halfway(self) -> float:
        """When half of the others were ready; 0 while they are not."""
        return _middle([pair.theirs_at for pair in self.pairs.values() if pair.theirs_at], len(self.pairs)) or 0.0

    @property
    def together(self) -> float:
        """When we and all that we have met were ready."""
        return max(self.ours_at, *(pair.theirs_at for pair in self.pairs.values() if pair.met), 0.0)

    @property
    def waited_for(self) -> float | None:
        """Since when half of the others wait for us, or have waited in vain; None while they do not."""
        waiting = [pair.theirs_at for pair in self.pairs.values() if pair.theirs is not None or pair.refused]
        return _middle(waiting, len(self.pairs))

    # --- events

    def hear(self, sender: PeerId, frame: Frame) -> None:
        """A checked frame of this round, from anybody; only those of the group are answered."""
        pair, message = self.pairs.get(sender), frame.message
        if pair is not None:
            pair.hear(frame)
        elif isinstance(message, Ready) and message.fragment == self._terms.fragment:
            self._terms.outbox.control(sender, Decline(self.round, self._terms.fragment, "other partner"))

    def lost(self, peer: PeerId) -> None:
        """The link to a peer broke."""
        if peer in self.pairs:
            self.pairs[peer].lost()

    def reach(self, peer: PeerId) -> None:
        """A link to a peer is up."""
        if peer in self.pairs:
            self.pairs[peer].reach()

    def tick(self) -> None:
        """Let time pass: who says nothing, sends nothing or is too late is given up, and who takes much longer than others."""
        for pair in self.pairs.values():
            pair.tick()
        if self._met_at and self._terms.now() > self._met_at + GIVE_UP * self._terms.patience:
            for pair in self.pairs.values():
                if pair.meeting is None and pair.theirs is not None:
                    pair.fail("stalled")

    def _look(self) -> None:
        met = sum(pair.met for pair in self.pairs.values())
        if met > self._met:
            self._met, self._met_at = met, self._terms.now()
        if self.ours is not None and not self.lacking:
            self._done.set()


def _middle(times: Sequence[float], everyone: int) -> float | None:
    """The time by which half of `everyone` had one."""
    half = (everyone + 1) // 2
    return sorted(times)[half - 1] if half and len(times) >= half else None
