"""Addresses of host names, which peers may state in their records."""

from __future__ import annotations

import asyncio
import ipaddress
import socket
import threading
from collections import OrderedDict
from collections.abc import Callable
from contextlib import suppress
from functools import partial
from typing import Any, TypeAlias

AT_ONCE = 2
"""Names that are looked up at the same time.

A name server that does not answer holds a thread for up to 30 s.
"""

WAITING = 32
"""Names that wait for their turn; further ones fail at once."""

KEPT, SECONDS = 256, 60.0
"""Number and time of answers that are kept, failures included."""

LookUp: TypeAlias = Callable[..., list[tuple[Any, Any, Any, Any, tuple[Any, ...]]]]


class NameResolver:
    """Resolver of host names, in a few threads.

    The event loop has four threads for names, and uses them for numeric addresses, too: a stranger whose record names a
    server that never answers would stop all dials and new ports. So the event loop gets numeric addresses only. A thread
    cannot be stopped; it counts until its look-up ends, also if the dial is over. look_up: as socket.getaddrinfo.
    """

    def __init__(self, look_up: LookUp = socket.getaddrinfo) -> None:
        self._look_up = look_up
        self._turns, self._waiting = asyncio.Semaphore(AT_ONCE), 0
        self._known: OrderedDict[str, tuple[float, str | OSError]] = OrderedDict()

    async def numeric(self, host: str) -> str:
        """Return the numeric address of a host. Raises OSError if it has none, or if too many names wait."""
        with suppress(ValueError):
            return str(ipaddress.ip_address(host))
        now = asyncio.get_running_loop().time()
        since, found = self._known.get(host, (-SECONDS, ""))
        if now >= since + SECONDS:
            found = await self._asked(host)
            self._known[host] = asyncio.get_running_loop().time(), found
            self._known.move_to_end(host)
            while len(self._known) > KEPT:
                self._known.popitem(last=False)
        if isinstance(found, OSError):
            raise OSError(*found.args)
        return found

    async def _asked(self, host: str) -> str | OSError:
        if self._waiting >= WAITING:
            raise OSError(f"too many names are being looked up for {host}")
        self._waiting += 1
        try:
            await self._turns.acquire()
        finally:
            self._waiting -= 1
        loop = asyncio.get_running_loop()
        answer: asyncio.Future[str | OSError] = loop.create_future()

        def ended(found: str | OSError) -> None:
            self._turns.release()
            if not answer.done():
                answer.set_result(found)

        def run() -> None:
            found: str | OSError
            try:
                found = str(self._look_up(host, None, type=socket.SOCK_STREAM)[0][4][0])
            except OSError as error:
                found = error
            except UnicodeError:
                found = OSError(f"not a host name: {host}")
            with suppress(RuntimeError):  # The event loop may have ended.
                loop.call_soon_threadsafe(partial(ended, found))

        threading.Thread(target=run, name=f"look up {host}", daemon=True).start()
        return await answer
