"""Node of a hivemind DHT, in a separate process.

`dht_source.py` starts it with the interpreter that has hivemind.

Requests come on stdin and answers leave on stdout: a length of 4 bytes (big-endian), then JSON. A message of a stranger
may end this process, because hivemind deserializes keys and dictionaries of its messages: nested extension types exhaust
the stack. So nothing else runs here. The file imports nothing of thinwire, which need not be installed beside hivemind.

The first request has the options, and its answer the addresses of this node; then {"id", "do", ...} with "do" one of
"reach" (the nodes of the option "again"), "store" (key, subkey, value, expires), "get" (key), "peers". The process ends
with stdin.
"""

from __future__ import annotations

import asyncio
import base64
import json
import os
import random
import re
import sys
from collections.abc import Sequence
from contextlib import suppress
from typing import Any, BinaryIO

MOST_VALUES, VALUE_BYTES = 1024, 2048
"""Most values in an answer, and most bytes of each; further values are sampled, longer ones left out."""

FRAME_BYTES, MOST_PEERS = 4 << 20, 64
"""Longest request, and most addresses of nodes in an answer."""

BUCKET, REPLICAS, WAIT_SECONDS = 20, 5, 3.0
"""Parameters of Kademlia: nodes of a bucket, nodes that store a value, seconds to wait for a node."""


class Node:
    """The DHT node and its answers to requests."""

    def __init__(self, node: Any, again: Sequence[str]) -> None:
        self._node, self._again = node, again

    @classmethod
    async def open(cls, options: dict[str, Any]) -> Node:
        """Join the DHT of the bootstrap addresses, or begin one without any."""
        from hivemind.dht.node import DHTNode
        from hivemind.dht.validation import DHTRecord, RecordValidatorBase

        class PlainValues(RecordValidatorBase):  # type: ignore[misc]  # hivemind has no types here
            """Replacement of each value that is not plain bytes by None before hivemind deserializes it.

            Without this one malformed value of a dictionary makes the whole dictionary unreadable.
            """

            def validate(self, record: DHTRecord) -> bool:
                return True  # False would discard all other values of the dictionary, too.

            def strip_value(self, record: DHTRecord) -> bytes:
                return record.value if is_plain(record.value) else b"\xc0"

        node = await DHTNode.create(
            initial_peers=options["bootstrap"],
            host_maddrs=options["listen"],
            client_mode=options["client"],
            record_validator=PlainValues(),
            bucket_size=BUCKET,
            num_replicas=REPLICAS,
            wait_timeout=WAIT_SECONDS,
            use_ipfs=False,
            use_relay=False,
            auto_nat=False,
            nat_port_map=False,
        )
        return cls(node, options["again"])

    async def answer(self, request: dict[str, Any]) -> dict[str, Any]:
        """Execute one request."""
        match request["do"]:
            case "reach":
                answered = await asyncio.gather(*(self._reach(address) for address in self._again))
                return {"reached": any(answered) or not answered}
            case "store":
                value = base64.b64decode(request["value"])
                stored = await self._node.store(
                    request["key"], value, float(request["expires"]), subkey=request["subkey"]
                )
                # A node that has begun again has two ids in our tables: asked twice, it refuses the value that it has.
                return {"stored": bool(stored) or request["subkey"] in await self._read(request["key"])}
            case "get":
                raw = [one.value for one in (await self._read(request["key"])).values()]
                good = [one for one in raw if isinstance(one, bytes) and len(one) <= VALUE_BYTES]
                chosen = random.sample(good, min(MOST_VALUES, len(good)))
                return {"values": [base64.b64encode(one).decode() for one in chosen]}
            case "peers":
                infos = await self._node.p2p.list_peers()
                texts = [f"{one}/p2p/{info.peer_id}" for info in infos for one in info.addrs]
                return {"peers": texts[:MOST_PEERS]}
        return {"error": "unknown request"}

    async def _read(self, key: str) -> dict[str, Any]:
        found = await self._node.get(key, latest=True)
        return found.value if found is not None and isinstance(found.value, dict) else {}

    async def _reach(self, address: str) -> bool:
        """Dial a node unless it is connected, and put it into our tables again; return True if it answers.

        hivemind removes a node that does not answer from its tables, and never dials the bootstrap addresses again.
        """
        from hivemind.dht.node import Multiaddr
        from hivemind.p2p import P2PDaemonError, PeerID

        full = Multiaddr(address)
        peer = PeerID.from_base58(full["p2p"])
        dial = self._node.p2p._client.connect(peer, [full.decapsulate("/p2p/" + full["p2p"])])
        try:
            await asyncio.wait_for(dial, WAIT_SECONDS)
        except (P2PDaemonError, asyncio.TimeoutError):  # noqa: UP041  # Python 3.10 has two time-outs.
            return False
        with suppress(Exception):  # The node may answer nonsense; then others still count.
            return await self._node.protocol.call_ping(peer) is not None
        return False

    async def addresses(self) -> list[str]:
        """Return the addresses at which other nodes can bootstrap from this one."""
        return [str(one) for one in await self._node.get_visible_maddrs()]


def is_plain(value: bytes) -> bool:
    """Return True if a value is the msgpack encoding of bytes, of at most VALUE_BYTES, and nothing else."""
    kind, size = value[:1], len(value)
    if kind == b"\xc4":
        return size >= 2 and size == 2 + value[1]
    return kind == b"\xc5" and 3 <= size <= 3 + VALUE_BYTES and size == 3 + int.from_bytes(value[1:3], "big")


def _text_of(error: Exception) -> str:
    """Return an error as text, without the times of libp2p's log lines: equal causes are told once."""
    return re.sub(r"\d{4}/\d\d/\d\d \d\d:\d\d:\d\d ", "", f"{type(error).__name__}: {error}")[:500]


def _read(pipe: BinaryIO) -> dict[str, Any] | None:
    head = pipe.read(4)
    if len(head) < 4:
        return None
    size = int.from_bytes(head, "big")
    data = pipe.read(size) if size <= FRAME_BYTES else b""
    return json.loads(data) if len(data) == size else None


def _write(pipe: BinaryIO, message: dict[str, Any]) -> None:
    data = json.dumps(message).encode()
    pipe.write(len(data).to_bytes(4, "big") + data)
    pipe.flush()


async def serve(requests: BinaryIO, answers: BinaryIO) -> None:
    """Answer requests at the same time, until there are no more."""
    options = await asyncio.to_thread(_read, requests)
    if options is None:
        return
    try:
        node = await Node.open(options)
        _write(answers, {"addresses": [] if options["client"] else await node.addresses()})
    except Exception as error:  # of hivemind, of any kind
        _write(answers, {"error": _text_of(error)})
        return
    tasks: set[asyncio.Task[None]] = set()

    async def one(request: dict[str, Any]) -> None:
        try:
            answer = await node.answer(request)
        except Exception as error:
            answer = {"error": _text_of(error)}
        _write(answers, {**answer, "id": request["id"]})

    while (request := await asyncio.to_thread(_read, requests)) is not None:
        task = asyncio.create_task(one(request))
        tasks.add(task)
        task.add_done_callback(tasks.discard)


def main() -> None:
    """Serve the pipes; what libraries print goes to stderr."""
    answers = os.fdopen(os.dup(1), "wb")
    os.dup2(2, 1)
    asyncio.run(serve(sys.stdin.buffer, answers))
    os._exit(0)  # Threads of hivemind do not end by themselves.


if __name__ == "__main__":
    main()
