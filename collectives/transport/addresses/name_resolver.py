"""Addresses of host names, which peers may state in their records."""

from __future__ import annotations

import asyncio
import ipaddress
import socket
import threading
from collections import OrderedDict
from collections.abc import Callable, Sequence
from contextlib import suppress
from functools import partial
from typing import Any, TypeAlias, TypeVar

AT_ONCE = 2
"""Names that are looked up at the same time.

A name server that does not answer holds a thread for up to 30 s.
"""

WAITING = 32
"""Names that wait for their turn; further ones fail at once."""

STORED, SECONDS, BRIEFLY = 256, 60.0, 5.0
"""Number of stored answers, and seconds for which an answer, and a temporary failure, is valid."""

Made = TypeVar("Made", bound=asyncio.BaseProtocol)

LookUp: TypeAlias = Callable[..., Sequence[tuple[Any, Any, Any, Any, tuple[Any, ...]]]]


class NameResolver:
    """Resolver of host names, in a few threads.

    The event loop has four threads for names, and uses them for numeric addresses, too: a stranger whose record names a
    server that never answers would stop all dials and new ports. So the event loop gets numeric addresses only. A thread
    cannot be stopped; it counts until its look-up ends, also if the dial is over, and its answer is stored for the next one.
    look_up: as socket.getaddrinfo.
    """

    def __init__(self, look_up: LookUp = socket.getaddrinfo) -> None:
        self._look_up = look_up
        self._turns = asyncio.Semaphore(AT_ONCE)
        self._known: OrderedDict[str, tuple[float, tuple[str, ...] | OSError]] = (
            OrderedDict()
        )  # with the time of expiry
        self._asked: dict[str, asyncio.Task[tuple[str, ...] | OSError]] = {}

    async def numeric(self, host: str) -> tuple[str, ...]:
        """Return the numeric addresses of a host, without duplicates.

        Raises OSError if it has none, or if too many names wait.
        """
        with suppress(ValueError):
            return (str(ipaddress.ip_address(host)),)
        until, found = self._known.get(host, (0.0, ()))
        if asyncio.get_running_loop().time() >= until:
            if host not in self._asked:
                if len(self._asked) >= WAITING + AT_ONCE:
                    raise OSError(f"too many names are being looked up for {host}")
                self._asked[host] = asyncio.create_task(self._answer(host))
            found = await asyncio.shield(self._asked[host])
        if isinstance(found, OSError):
            raise OSError(*found.args)
        return found

    async def connect(self, factory: Callable[[], Made], host: str, port: int) -> tuple[asyncio.BaseTransport, Made]:
        """Return a connection to the first address of a host that accepts one, and its protocol.

        Raises OSError.
        """
        failed: OSError | None = None
        for address in await self.numeric(host):
            try:
                return await asyncio.get_running_loop().create_connection(factory, address, port)
            except OSError as error:
                failed = failed or error
        raise failed or OSError(f"{host} has no address")

    async def _answer(self, host: str) -> tuple[str, ...] | OSError:
        async with self._turns:
            loop = asyncio.get_running_loop()
            answer: asyncio.Future[tuple[str, ...] | OSError] = loop.create_future()
            try:
                threading.Thread(
                    target=self._run, args=(host, loop, answer), name="look up a name", daemon=True
                ).start()
                found = await answer
            except RuntimeError as error:  # The system has no more threads.
                found = OSError(str(error))
        del self._asked[host]
        soon = isinstance(found, OSError) and found.errno in (None, socket.EAI_AGAIN)
        self._known[host] = loop.time() + (BRIEFLY if soon else SECONDS), found
        self._known.move_to_end(host)
        while len(self._known) > STORED:
            self._known.popitem(last=False)
        return found

    def _run(self, host: str, loop: asyncio.AbstractEventLoop, answer: asyncio.Future[Any]) -> None:
        """Look a name up, in a thread."""
        found: tuple[str, ...] | OSError
        try:
            entries = self._look_up(host, None, type=socket.SOCK_STREAM)
            found = tuple(dict.fromkeys(str(entry[4][0]) for entry in entries)) or OSError(f"{host} has no address")
        except OSError as error:
            found = error
        except Exception as error:  # such as UnicodeError for a name that cannot be encoded
            found = OSError(f"not a host name: {host} ({error})")
        with suppress(RuntimeError):  # The event loop may have ended.
            loop.call_soon_threadsafe(partial(_settle, answer, found))


def _settle(answer: asyncio.Future[Any], found: object) -> None:
    if not answer.done():
        answer.set_result(found)
