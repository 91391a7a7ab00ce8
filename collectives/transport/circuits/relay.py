"""The relay's part of circuits.

It grants them between peers that have a link to this one, and splices their connections.
"""

from __future__ import annotations

import asyncio
from collections import Counter
from collections.abc import Callable, Collection
from dataclasses import replace

from thinwire.collectives.transport.circuits.limits import Allowance, CircuitLimits
from thinwire.collectives.transport.circuits.splice import Splice
from thinwire.collectives.transport.circuits.ticket import TOKEN_BYTES, name_of
from thinwire.collectives.transport.interface import Loan
from thinwire.collectives.transport.rate_limit import RateLimit
from thinwire.swarm.messages.registry import Circuit, CircuitAsk, Message, PeerId

Pair = frozenset[PeerId]


class Relay:
    """Circuits through this peer.

    `carried`: bytes passed on since the start; `refused` counts refusals by reason. `linked`: peers with a direct link,
    which alone may ask and be asked for; `send(peer, message)` sends over that link; `draw(count)` returns random bytes.
    """

    def __init__(
        self,
        limits: CircuitLimits,
        loan: Loan,
        rate_limit: RateLimit,
        linked: Callable[[], Collection[PeerId]],
        send: Callable[[PeerId, Message], None],
        draw: Callable[[int], bytes],
    ) -> None:
        self.loan = loan
        self.carried = 0
        self.refused: Counter[str] = Counter()
        self._limits, self._rate_limit, self._linked, self._send, self._draw = limits, rate_limit, linked, send, draw
        self._waiting: dict[bytes, Splice] = {}
        self._circuits: dict[Splice, None] = {}  # in order of their grants
        self._active: dict[Pair, float] = {}
        self._timer: asyncio.TimerHandle | None = None
        self._loop = asyncio.get_running_loop()
        self._allowance = Allowance(loan.daily, self._loop.time())

    def __len__(self) -> int:
        return len(self._circuits)

    def answer(self, asker: PeerId, question: CircuitAsk) -> None:
        """Grant or refuse a circuit; if granted, invite the other end, too."""
        pair = frozenset((asker, question.peer))
        if obstacle := self._obstacle(asker, pair):
            self.refused[obstacle] += 1
            self._send(asker, Circuit(question.number, question.peer, question.port, None, obstacle))
            return
        token = self._grant(asker, pair)
        self._send(question.peer, Circuit(0, asker, question.port, token, ""))
        self._send(asker, Circuit(question.number, question.peer, question.port, token, ""))

    @property
    def left(self) -> int | None:
        """Bytes that this peer may still relay; None: no limit."""
        return self._allowance.left(self._loop.time())

    def _obstacle(self, asker: PeerId, pair: Pair) -> str:
        """Return why no circuit is granted, or an empty string."""
        limits, loan = self._limits, self.loan
        if not loan.willing:
            return "it relays nothing (relay = false)"
        if len(pair) != 2 or not pair.issubset(self._linked()):
            return "it has no link to the other peer"
        if self._allowance.spent(self._loop.time()):
            return "it has relayed all bytes that it lends (relay_limit)"
        if len(self._circuits) >= loan.circuits:
            return "it has lent all its circuits (relay_circuits)"
        if sum(one.pair == pair for one in self._circuits) >= limits.pair:
            return "it has enough circuits of this pair"
        if sum(one.asker == asker for one in self._circuits) >= limits.asker:
            return "it has enough circuits of this asker"
        return ""

    def _grant(self, asker: PeerId, pair: Pair) -> bytes:
        limits = self._limits
        token, splice = self._draw(TOKEN_BYTES), Splice(asker, pair, self._rate_limit, self._relayed, self._ended)
        self._circuits[splice] = None
        self._waiting[name := name_of(token)] = splice
        self._active.setdefault(pair, self._loop.time())
        self._loop.call_later(limits.token, self._expire, name)
        self._timer = self._timer or self._loop.call_later(limits.idle / 4, self._close_idle)
        return token

    def enter(self, name: bytes) -> asyncio.BaseProtocol | None:
        """Return the protocol for a connection with a token of this name; None if the token is good for none."""
        splice = self._waiting.get(name)
        if splice is None:
            return None
        end = splice.end()
        if len(splice.ends) == 2:
            del self._waiting[name]
        return end

    def _expire(self, name: bytes) -> None:
        if (splice := self._waiting.pop(name, None)) is not None:
            splice.close()

    def _relayed(self, pair: Pair, count: int) -> None:
        self.carried += count
        if pair in self._active:
            self._active[pair] = self._loop.time()
        self._allowance.take(count, self._loop.time())
        if self._allowance.spent(self._loop.time()):
            for splice in list(self._circuits):
                splice.close()

    def _ended(self, splice: Splice) -> None:
        self._circuits.pop(splice, None)
        for name in [name for name, one in self._waiting.items() if one is splice]:
            del self._waiting[name]
        if all(one.pair != splice.pair for one in self._circuits):
            self._active.pop(splice.pair, None)

    def _close_idle(self) -> None:
        """Close the circuits of pairs that have carried nothing for too long."""
        self._timer = self._loop.call_later(self._limits.idle / 4, self._close_idle) if self._circuits else None
        oldest = self._loop.time() - self._limits.idle
        for splice in [one for one in self._circuits if self._active[one.pair] < oldest]:
            splice.close()

    def forget(self, peer: PeerId, *, waiting: bool = False) -> None:
        """Close the circuits of a peer; with `waiting`, only those that miss an end."""
        chosen = self._waiting.values() if waiting else self._circuits
        for splice in [one for one in chosen if peer in one.pair]:
            splice.close()

    def close(self) -> None:
        """Close all circuits, and grant no more."""
        self.loan = replace(self.loan, willing=False)
        if self._timer is not None:
            self._timer.cancel()
        for splice in list(self._circuits):
            splice.close()
