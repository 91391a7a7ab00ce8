"""One peer of our all-reduce: python thinwire_peer.py '{"rank": 0, "peers": 4, "mb": 100, "codec": "fp32"}'."""

import asyncio
import json
import sys
import time
from typing import Any

import blake3
import numpy as np
import uvloop
from numpy.typing import NDArray
from thinwire.collectives.transport.interface import Contact
from thinwire.collectives.transport.shared_memory.local_sockets import usual_folder
from thinwire.collectives.transport.zeromq.transport import ListenAddress, ZmqTransport
from thinwire.compression.compile_kernels import warm_up
from thinwire.compression.registry import dense
from thinwire.swarm.identity.identity import Identity
from thinwire.swarm.identity.peer_record import PeerRecord
from thinwire.swarm.messages.registry import VERSION, Hello, Refuse, Welcome

from benchmarks.peers.fixed_group import Averager
from benchmarks.peers.turns import arrays, listen, say

RUN = bytes(32)


def now() -> int:
    """Unix time in seconds."""
    return int(time.time())


def listen_address(options: dict[str, Any]) -> ListenAddress:
    """Return the addresses of this peer; by default any free ports on loopback."""
    host, port = options.get("host", "127.0.0.1"), options.get("port", 0)
    ports = range(*options["ports"]) if "ports" in options else None
    return ListenAddress(host, port, ports, tuple(options.get("advertise", ())))


async def main(options: dict[str, Any]) -> None:
    """Link with all others, then average at each request."""
    rank, count = options["rank"], options["peers"]
    everyone = [Identity.generate(bytes([number]) * 32) for number in range(count)]
    identity = everyone[rank]
    record: PeerRecord | None = None
    # All slow work comes before the sockets: others give up a peer that does not answer.
    warm_up()
    source = arrays(options["mb"], rank)
    exact = mean_of_first(options) if rank == 0 else None
    result = [np.ones_like(array) for array in source]

    def admit(hello: Hello, stranger: PeerRecord, source: str) -> Welcome | Refuse:
        assert record is not None  # the address is not sent before the record exists
        return Welcome(record.wire, b"", bytes(32), bytes(64), (), "", "", bytes(32))

    transport = ZmqTransport(
        identity,
        run_id=RUN,
        admit=admit,
        wall=now,
        listen=listen_address(options),
        streams=options.get("streams", 2),
        shared=usual_folder() if options.get("shared") else None,
    )
    await transport.open()
    record = PeerRecord.create(identity, run_id=RUN, addresses=transport.addresses(), sequence=1, issued=now())
    transport.learn(record)
    say(address=transport.addresses()[0])
    addresses = (await asyncio.to_thread(listen))["addresses"]
    for other in range(rank):
        contact = Contact(through(options, other, addresses[other]), everyone[other].transport_public)
        answer = await transport.meet(contact, Hello(VERSION, RUN, record.wire))
        assert isinstance(answer, Welcome), answer
    averager = Averager(
        identity,
        RUN,
        transport,
        keys={peer.peer_id: peer.public_key for peer in everyone},
        codec=dense(options["codec"]),
        now=asyncio.get_running_loop().time,
        topology=options.get("topology", "butterfly"),
        bandwidth=options.get("bandwidth", False),
    )
    running = asyncio.create_task(averager.run())
    while len(transport.stats()) < count - 1:
        await asyncio.sleep(0.01)
    async with asyncio.timeout(10):  # an error, if this system does not share memory
        while options.get("shared") and not all(one.shared for one in transport.stats().values()):
            await asyncio.sleep(0.01)
    say(ready=True)
    while True:
        try:
            moment = (await asyncio.to_thread(listen))["at"]
        except SystemExit:
            break
        await asyncio.sleep(max(0.0, moment - time.monotonic()))
        spent = time.thread_time()
        outcome = await averager.average(source, result)
        say(end=time.monotonic(), loop=time.thread_time() - spent)
        await asyncio.to_thread(listen)
        whole = outcome.commit is not None and len(outcome.contributors) == count
        digest = blake3.blake3()
        for array in result:
            digest.update(array.view(np.uint8).data)
        say(whole=whole, digest=digest.hexdigest(), error=error(result[0], exact), link=averager.link)
    running.cancel()
    await asyncio.gather(running, return_exceptions=True)
    await averager.close()
    await transport.close()


def through(options: dict[str, Any], other: int, address: str) -> str:
    """Where to dial `other`: `via` names hosts that stand for the peers."""
    return f"{options['via'][other]}:{address.rpartition(':')[2]}" if "via" in options else address


def mean_of_first(options: dict[str, Any]) -> NDArray[np.float64]:
    """The exact mean of the first array."""
    firsts = [arrays(min(options["mb"], 4), rank)[0].astype(np.float64) for rank in range(options["peers"])]
    return sum(firsts, np.zeros_like(firsts[0])) / len(firsts)


def error(result: NDArray[np.float32], exact: NDArray[np.float64] | None) -> float:
    """Relative L2 error; 0 where the exact mean is not kept."""
    return 0.0 if exact is None else float(np.linalg.norm(result - exact) / np.linalg.norm(exact))


if __name__ == "__main__":
    uvloop.run(main(json.loads(sys.argv[1])))
