"""Circuits of one peer: those that it asks for, those that it is asked for, and those that it relays.

One side asks a relay over their link (`CircuitAsk`). The relay answers both sides with one token (`Circuit`), each opens a
TCP connection to the relay's gate with it, and the relay splices the two. To the peers it is a TCP connection like any
other, from the asker to a port of the other side. As in TURN (RFC 8656), the right to a circuit is granted on an
authenticated channel, so a stranger at the gate can do nothing.
"""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Coroutine, Iterable, Mapping
from contextlib import suppress
from dataclasses import dataclass
from itertools import count
from typing import Any, Protocol, TypeAlias

from thinwire.collectives.transport.circuits.limits import CircuitLimits
from thinwire.collectives.transport.circuits.relay import Relay
from thinwire.collectives.transport.interface import Loan
from thinwire.collectives.transport.rate_limit import RateLimit
from thinwire.swarm.frame import Frame
from thinwire.swarm.messages.registry import Circuit, CircuitAsk, Message, PeerId, Refuse, Welcome
from thinwire.swarm.rendezvous_hash import rank

GATE = 0
"""Port that stands for the gate, whatever its number."""

TRANSIENT = ("unreachable", "refused", "busy")
"""Codes of a Refuse after which another route to the peer may lead to a link."""

Factory: TypeAlias = "Callable[[], asyncio.BaseProtocol]"

Enter: TypeAlias = "Callable[[Iterable[str], bytes, Factory], Awaitable[tuple[asyncio.BaseTransport, Any]]]"
"""Open an end of a circuit at one of a relay's gates, with a token.

Raises OSError. See `ticket.enter`."""


@dataclass(frozen=True, slots=True)
class DialRoute:
    """Route of TCP connections to a peer: `open(factory, port)` opens one, or raises OSError.

    `gate`: address of the peer's gate, "" if it is not dialled there. `relay`: the peer that splices; b"": none.
    """

    open: Callable[[Factory, int], Awaitable[tuple[asyncio.BaseTransport, Any]]]
    gate: str = ""
    relay: PeerId = b""


class Neighbour(Protocol):
    """Link to a peer that may relay for us, or that circuits lead to."""

    @property
    def dialled(self) -> bool:
        """True if we have dialled the peer."""
        ...

    @property
    def relay(self) -> PeerId:
        """The peer that splices; b"": none."""
        ...

    @property
    def gates(self) -> tuple[str, ...]:
        """Addresses of the peer's gate, those that worked before first."""
        ...

    async def send(self, frame: Frame) -> bool:
        """Send a control message."""
        ...


class Circuits:
    """Asks for circuits, follows invitations to them, and relays.

    `links`: the links that are up. `listeners`: for each of our ports (GATE: the gate) a function that makes the protocol
    of a connection that came over the given relay. `enter` makes connections to relays, `draw(count)` returns
    the random bytes of a token.
    """

    def __init__(
        self,
        own: PeerId,
        limits: CircuitLimits,
        loan: Loan,
        rate_limit: RateLimit,
        draw: Callable[[int], bytes],
        *,
        enter: Enter,
    ) -> None:
        self.links: Mapping[PeerId, Neighbour] = {}
        self.listeners: dict[int, Callable[[PeerId], asyncio.BaseProtocol]] = {}
        self.relay = Relay(limits, loan, rate_limit, self._direct, self._send_later, draw)
        self._own, self._limits, self._enter = own, limits, enter
        self._avoided: dict[tuple[PeerId, PeerId], tuple[float, float]] = {}
        """Relays that have passed on no bulk data of a peer: until when they are not asked, and for how long."""
        self._numbers = count(1)
        self._asked: dict[int, tuple[PeerId, asyncio.Future[Circuit]]] = {}
        self._answers: set[asyncio.Task[None]] = set()
        self._invited: set[asyncio.Task[None]] = set()
        self._loop = asyncio.get_running_loop()

    def _direct(self) -> set[PeerId]:
        return {peer for peer, link in self.links.items() if not link.relay}

    def relays(self, peer: PeerId) -> list[PeerId]:
        """Return the peers to ask for a circuit to `peer`.

        The order differs between pairs, and is the same on both sides, except that peers that we have dialled come
        first: their gates can be reached.
        """
        pair = b"".join(sorted((self._own, peer)))
        order = rank(pair, "circuit", self._direct() - {peer} - self._avoided_for(peer))
        return sorted(order, key=lambda one: not self.links[one].dialled)[: self._limits.relays]

    def _avoided_for(self, peer: PeerId) -> set[PeerId]:
        now = self._loop.time()
        return {relay for (relay, to), (until, _) in self._avoided.items() if to == peer and now < until}

    def avoid(self, relay: PeerId, peer: PeerId) -> None:
        """Ask a relay for no circuit to `peer` for a while, because it has passed on no bulk data.

        Each time is twice as long as the last one; after the relay has done its work for about as long, it is short again.
        """
        now, (shortest, longest) = self._loop.time(), self._limits.avoid
        self._avoided = {key: one for key, one in self._avoided.items() if now < one[0] + longest}
        until, last = self._avoided.get((relay, peer), (0.0, 0.0))
        pause = min(longest, 2 * last) if last and now < until + last + shortest else shortest
        self._avoided[relay, peer] = now + pause, pause

    async def dial(
        self,
        peer: PeerId,
        directly: Callable[[], Awaitable[Welcome | Refuse]],
        over: Callable[[str, DialRoute], Awaitable[Welcome | Refuse]],
    ) -> tuple[Welcome | Refuse, bool]:
        """Open a link to a peer: directly, or else over relays, one after the other.

        `over` gets a name of the relay for messages and the route. Return the last answer, and whether the peer's machine
        refused the direct connection.
        """
        answer: Welcome | Refuse = Refuse("unreachable", f"no direct connection within {self._limits.direct:g} s")
        with suppress(TimeoutError):
            async with asyncio.timeout(self._limits.direct if self.relays(peer) else None):
                answer = await directly()
        refused = isinstance(answer, Refuse) and answer.code == "refused"
        with suppress(TimeoutError):
            async with asyncio.timeout(self._limits.search):  # A dead peer is not reported as lost before that.
                for relay in self.relays(peer):
                    if isinstance(answer, Welcome) or answer.code not in TRANSIENT or peer in self.links:
                        break
                    answer = await over(f"relay {relay.hex()[:8]}", self.route(relay, peer))
        if isinstance(answer, Refuse) and (avoided := sorted(self._avoided_for(peer))):
            named = ", ".join(relay.hex()[:8] for relay in avoided[: self._limits.relays])
            answer = Refuse(
                answer.code, f"{answer.detail}; not asked, because no data came over it: relay {named}"[:256]
            )
        return answer, refused

    def route(self, relay: PeerId, peer: PeerId) -> DialRoute:
        """Return the route to a peer through a relay."""

        async def opened(factory: Factory, port: int) -> tuple[asyncio.BaseTransport, asyncio.BaseProtocol]:
            token, gates = await self._ask(relay, peer, port)
            return await self._enter(gates, token, factory)

        return DialRoute(opened, relay=relay)

    async def _ask(self, relay: PeerId, peer: PeerId, port: int) -> tuple[bytes, tuple[str, ...]]:
        """Return a token for a circuit, and the relay's gates. Raises ConnectionError."""
        number, answer = next(self._numbers) % 2**32, self._loop.create_future()
        self._asked[number] = relay, answer
        try:
            link = self.links.get(relay)
            if link is None or not await link.send(Frame(CircuitAsk(number, peer, port))):
                raise ConnectionError("the link to the relay is lost")
            async with asyncio.timeout(self._limits.answer):
                circuit = await answer
        except TimeoutError:
            raise ConnectionError("the relay does not answer") from None
        finally:
            del self._asked[number]
        if circuit.token is None:
            raise ConnectionError(circuit.reason)
        return circuit.token, link.gates

    def takes(self, peer: PeerId, message: Message) -> bool:
        """Handle a message about circuits from a linked peer; return False if it is another one."""
        if isinstance(message, CircuitAsk):
            if len(self._answers) < self._limits.answers:
                self.relay.answer(peer, message)
            return True
        if not isinstance(message, Circuit):
            return False
        if message.number:
            relay, answer = self._asked.get(message.number, (b"", None))
            if relay == peer and answer is not None and not answer.done():
                answer.set_result(message)
        elif message.token is not None and len(self._invited) < self._limits.invited:
            self._start(self._invited, self._follow(peer, message.port, message.token))
        return True

    async def _follow(self, relay: PeerId, port: int, token: bytes) -> None:
        """Open our end of a circuit, as if the other side had connected to one of our ports."""
        listener, link = self.listeners.get(port), self.links.get(relay)
        if listener is None or link is None:
            return
        try:
            async with asyncio.timeout(self._limits.token):
                await self._enter(link.gates, token, lambda: listener(relay))
        except OSError:
            pass  # the other side notices that the circuit does not open

    def _send_later(self, peer: PeerId, message: Message) -> None:
        if (link := self.links.get(peer)) is not None:
            self._start(self._answers, self._send(link, message))

    async def _send(self, link: Neighbour, message: Message) -> None:
        await link.send(Frame(message))

    def _start(self, tasks: set[asyncio.Task[None]], work: Coroutine[Any, Any, None]) -> None:
        task = self._loop.create_task(work)
        tasks.add(task)
        task.add_done_callback(tasks.discard)

    def abort(self) -> list[asyncio.Task[None]]:
        """Close all circuits through this peer at once; return its tasks, which are being cancelled."""
        self.relay.close()
        tasks = [*self._answers, *self._invited]
        for task in tasks:
            task.cancel()
        return tasks

    async def close(self) -> None:
        """Close all circuits through this peer and end all visits."""
        await asyncio.gather(*self.abort(), return_exceptions=True)
