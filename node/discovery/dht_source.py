"""The public directory: cards in a hivemind DHT, through a child process that may end at any moment.

A card is stored under two keys, that of its run and a common one, with the hash of the card as the subkey. So a
stranger who stores something else under the subkey hides that one card only, until the next is published.
"""

from __future__ import annotations

import asyncio
import base64
import hashlib
import importlib.util
import os
import random
import signal
import sys
from collections.abc import AsyncIterator, Callable, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Annotated

import msgspec
from msgspec import Meta
from thinwire.node.discovery.public_runs import DirectoryError
from thinwire.node.membership.known_peers_file import replace_file
from thinwire.node.runtime.disk import Disk
from thinwire.swarm.identity.errors import NotInstalled
from thinwire.swarm.identity.run_card import RunCard

OPEN_SECONDS = 60.0
"""Seconds in which the child must have joined the DHT; loading hivemind takes most of them."""

ANSWER_SECONDS = 30.0
"""Seconds in which the child must answer; a child that does not is replaced."""

FIRST_WAIT, LONGEST_WAIT = 1.0, 60.0
"""Seconds before a child that has ended is replaced: doubled after each failure, with jitter of half."""

FRAME_BYTES = 4 << 20
"""Longest answer of the child."""

UNREACHABLE = "no bootstrap node answers"
CARDS_KEY = "thinwire/cards/1"
_MODULE = "thinwire.node.discovery.dht_process"
_KNOWN_BYTES = 1 << 16

_Text = Annotated[str, Meta(max_length=512)]
_Texts = Annotated[tuple[_Text, ...], Meta(max_length=64)]


class _Answer(msgspec.Struct, frozen=True):
    id: int = 0
    error: _Text = ""
    reached: bool = False
    stored: bool = False
    addresses: _Texts = ()
    values: Annotated[tuple[Annotated[str, Meta(max_length=4096)], ...], Meta(max_length=1024)] = ()
    peers: _Texts = ()


_decode = msgspec.json.Decoder(_Answer).decode


async def answers(pipe: asyncio.StreamReader) -> AsyncIterator[_Answer]:
    """Yield the answers of a child, until it ends or breaks the protocol."""
    try:
        while (size := int.from_bytes(await pipe.readexactly(4), "big")) <= FRAME_BYTES:
            yield _decode(await pipe.readexactly(size))
    except (asyncio.IncompleteReadError, OSError, msgspec.MsgspecError, UnicodeDecodeError, RecursionError):
        return


def run_key(run_id: bytes) -> str:
    """Return the key of a run's cards: a hash, which reveals no run id."""
    return "thinwire/run/1/" + hashlib.blake2b(run_id, digest_size=32).hexdigest()


def child_command(python: str) -> tuple[str, ...]:
    """Return the command of the child.

    `python`: interpreter with hivemind; empty: this one. Raises NotInstalled.
    """
    found = importlib.util.find_spec(_MODULE)
    if not python and importlib.util.find_spec("hivemind") is None:
        raise NotInstalled(
            "the public directory needs the package hivemind",
            "--lan looks on the local network; else pip install 'thinwire[hivemind]', or name an interpreter that has it "
            "with the setting directory_python",
        )
    assert found is not None and found.origin is not None
    return python or sys.executable, found.origin


class DhtSource:
    """Source of the hivemind DHT.

    command: starts the child. bootstrap: multiaddresses of DHT nodes. listen: multiaddresses to listen on; empty: the node
    only asks others. known: file of DHT nodes that an earlier child knew, also used to bootstrap. opened: called with the
    addresses of each new child, and True if it knew no node and has begun a DHT alone.
    """

    name = "DHT"

    def __init__(
        self,
        command: Sequence[str],
        *,
        bootstrap: Sequence[str],
        listen: Sequence[str],
        known: Path,
        disk: Disk,
        rng: random.Random,
        now: Callable[[], float],
        opened: Callable[[Sequence[str], bool], None] = lambda addresses, begun: None,
    ) -> None:
        self._command, self._bootstrap, self._listen = command, bootstrap, listen
        self._known, self._disk, self._rng, self._now, self._opened = known, disk, rng, now, opened
        self._child: asyncio.subprocess.Process | None = None
        self._reader: asyncio.Task[None] | None = None
        self._waiting: dict[int, asyncio.Future[_Answer]] = {}
        self._last, self._failures, self._again = 0, 0, 0.0
        self._opening = asyncio.Lock()

    async def publish(self, card: RunCard) -> None:
        """Store a card under both keys.

        Raises DirectoryError if neither is stored, or no bootstrap node answers: the card may be here or at some neighbours
        only, where other machines do not find it.
        """
        reached = await self._reach()
        value, subkey = base64.b64encode(card.wire).decode(), hashlib.blake2b(card.wire, digest_size=16).hexdigest()
        expires = card.issued + card.ttl
        stored = [
            (await self._ask({"do": "store", "key": key, "subkey": subkey, "value": value, "expires": expires})).stored
            for key in (run_key(card.run_id), CARDS_KEY)
        ]
        if not any(stored):
            raise DirectoryError("no node of the DHT stored the card", "it is published again in a minute")
        if not reached:
            raise DirectoryError(UNREACHABLE, "they are dialled again each minute; check their addresses if this lasts")
        await self._keep()

    async def find(self, run_id: bytes) -> Sequence[bytes]:
        """Return what is stored for a run."""
        return await self._get(run_key(run_id))

    async def cards(self) -> Sequence[bytes]:
        """Return what is stored for all runs."""
        return await self._get(CARDS_KEY)

    async def close(self) -> None:
        """End the child."""
        child, reader, self._child, self._reader = self._child, self._reader, None, None
        if reader is not None:
            reader.cancel()
            await asyncio.gather(reader, return_exceptions=True)
        if child is not None:
            with suppress(ProcessLookupError):
                os.killpg(child.pid, signal.SIGKILL)  # The daemon of libp2p is its child.
            await child.wait()

    @property
    def process(self) -> int | None:
        """Process number of the child, None while there is none."""
        return None if self._child is None or self._child.returncode is not None else self._child.pid

    async def _get(self, key: str) -> Sequence[bytes]:
        reached = await self._reach()
        answer = await self._ask({"do": "get", "key": key})
        if reached:
            await self._keep()
        elif not answer.values:
            raise DirectoryError(UNREACHABLE, "check the bootstrap addresses")
        try:
            return [base64.b64decode(value, validate=True) for value in answer.values]
        except ValueError:
            raise DirectoryError("the process of the DHT answers nonsense") from None

    async def _reach(self) -> bool:
        """Dial the bootstrap nodes again; return False if some are set, and none of them answers.

        Without any, those of the last start are dialled, and it is no failure if they are gone: they were neighbours.
        """
        return (await self._ask({"do": "reach"})).reached or not self._bootstrap

    async def _ask(self, request: dict[str, object]) -> _Answer:
        await self._open()
        answer = await self._exchange(request, ANSWER_SECONDS)
        if answer.error:  # Such as that of a child without its daemon of libp2p, which answers so for ever.
            await self._fail()
            raise DirectoryError(f"the process of the DHT has failed: {answer.error}", "it is started again")
        self._failures = 0
        return answer

    async def _exchange(self, request: dict[str, object], seconds: float) -> _Answer:
        """Send one request and await its answer. A child that does not answer in time is ended."""
        child = self._child
        if child is None or child.stdin is None:
            raise DirectoryError("the process of the DHT has ended", "it is started again")
        number, answer = self._last, asyncio.get_running_loop().create_future()
        self._last += 1
        self._waiting[number] = answer
        data = msgspec.json.encode({**request, "id": number})
        try:
            async with asyncio.timeout(seconds):
                child.stdin.write(len(data).to_bytes(4, "big") + data)
                await child.stdin.drain()
                received: _Answer = await answer
        except (TimeoutError, OSError):
            await self._fail()
            raise DirectoryError("the process of the DHT does not answer", "it is started again") from None
        except DirectoryError:
            await self._fail()
            raise
        finally:
            self._waiting.pop(number, None)
        return received

    async def _fail(self) -> None:
        await self.close()
        self._failures += 1
        wait = min(LONGEST_WAIT, FIRST_WAIT * 2 ** min(self._failures - 1, 10))
        self._again = self._now() + wait * (0.5 + 0.5 * self._rng.random())

    async def _open(self) -> None:
        """Start a child if none runs, after the wait that the failures so far require. Raises DirectoryError."""
        async with self._opening:
            if self._child is not None:
                if self._child.returncode is None:
                    return
                await self._fail()
            if (wait := self._again - self._now()) > 0:
                await asyncio.sleep(wait)
            try:
                self._child = await asyncio.create_subprocess_exec(
                    *self._command,
                    stdin=asyncio.subprocess.PIPE,
                    stdout=asyncio.subprocess.PIPE,
                    stderr=asyncio.subprocess.DEVNULL,
                    start_new_session=True,
                )
            except OSError as error:
                await self._fail()
                raise DirectoryError(
                    f"cannot start {self._command[0]}: {error.strerror}", "check the setting directory_python"
                ) from None
            assert self._child.stdout is not None
            self._reader = asyncio.create_task(self._read(self._child.stdout))
            self._last = 0  # The options are request 0, and their answer has no number.
            starts = self._starts()
            nodes = {"bootstrap": starts, "again": self._bootstrap or starts}
            options = {**nodes, "listen": self._listen, "client": not self._listen}
            received = await self._exchange(options, OPEN_SECONDS)
            if received.error:
                await self._fail()
                hint = "check the bootstrap addresses" if self._bootstrap else "it is started again"
                if starts and not self._bootstrap:
                    hint = f"set bootstrap, or remove {self._known} if the nodes of the last start are gone for good"
                raise DirectoryError(received.error, hint)
            self._opened(received.addresses, not starts)

    async def _read(self, pipe: asyncio.StreamReader) -> None:
        """Give each answer to the request that waits for it, until the child ends or breaks the protocol."""
        async for answer in answers(pipe):
            waiting = self._waiting.get(answer.id)
            if waiting is not None and not waiting.done():
                waiting.set_result(answer)
        for waiting in self._waiting.values():
            if not waiting.done():
                waiting.set_exception(DirectoryError("the process of the DHT has ended", "it is started again"))

    # Known nodes of the DHT

    def _starts(self) -> list[str]:
        """Return the bootstrap addresses, and a few nodes from the file of known ones."""
        try:
            known = msgspec.json.decode(self._disk.read(self._known, _KNOWN_BYTES), type=_Texts)
        except (OSError, msgspec.MsgspecError, UnicodeDecodeError, RecursionError):
            known = ()
        more = [one for one in known if one not in self._bootstrap]
        return [*self._bootstrap, *self._rng.sample(more, min(8, len(more)))]

    async def _keep(self) -> None:
        """Store the nodes that the child knows, for the next start; ignore a failing disk."""
        peers = (await self._ask({"do": "peers"})).peers
        if peers:
            with suppress(OSError):
                replace_file(self._known, self._disk, msgspec.json.encode(peers))
