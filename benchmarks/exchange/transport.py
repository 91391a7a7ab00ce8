"""Speed of the real transport on loopback: N processes, each sends the same number of sealed 1 MiB frames to every other.

    python -m benchmarks.exchange.transport --peers 4 --mib 50

With 4 peers and 50 MiB per pair the bytes are those of an all-reduce of 100 MB in fp32. Prints, per repetition, seconds
from the first frame sent to the last received (slowest peer), MB/s each way per peer, and CPU seconds per GB moved.
"""

from __future__ import annotations

import argparse
import asyncio
import multiprocessing as mp
import os
import statistics
import time
from typing import Any

import uvloop
from thinwire.collectives.transport.interface import Contact
from thinwire.collectives.transport.zeromq.transport import ZmqTransport
from thinwire.swarm.frame import Frame
from thinwire.swarm.identity.identity import Identity
from thinwire.swarm.identity.peer_record import PeerRecord
from thinwire.swarm.messages.registry import CHUNK_BYTES, VERSION, Chunk, Hello, Refuse, Welcome

RUN = bytes(32)


def now() -> int:
    """Unix time in seconds."""
    return int(time.time())


async def peer(me: int, options: argparse.Namespace, shared: Any) -> None:
    """One peer: link with all others, then `repeat` times send and receive everything."""
    identity = Identity.generate(bytes([me]) * 32)
    record: PeerRecord | None = None

    def admit(hello: Hello, stranger: PeerRecord, source: str) -> Welcome | Refuse:
        wire = record.wire if record else b""
        return Welcome(wire, b"", bytes(32), bytes(64), (), "", "", bytes(32))

    transport = ZmqTransport(identity, run_id=RUN, admit=admit, wall=now, streams=options.streams)
    await transport.open()
    record = PeerRecord.create(identity, run_id=RUN, addresses=transport.addresses(), sequence=1, issued=now())
    shared["ports"][me] = int(transport.addresses()[0].rpartition(":")[2])
    await wait(shared)
    others = [Identity.generate(bytes([other]) * 32) for other in range(options.peers) if other != me]
    for other in range(me):
        contact = Contact(
            f"127.0.0.1:{shared['ports'][other]}", Identity.generate(bytes([other]) * 32).transport_public
        )
        answer = await transport.meet(contact, Hello(VERSION, RUN, record.wire))
        assert isinstance(answer, Welcome), answer
    payload = os.urandom(CHUNK_BYTES)

    async def feed(to: bytes) -> None:
        for index in range(options.mib):
            assert await transport.send(to, Frame(Chunk(1, 0, 1, index), payload))

    async def drain() -> None:
        left = options.mib * len(others)
        while left:
            arrival = await transport.recv()
            assert arrival.frame is not None, arrival.reason
            left -= 1

    for _ in range(options.repeat):
        await wait(shared)
        start, cpu = time.perf_counter(), time.process_time()
        await asyncio.gather(drain(), *(feed(other.peer_id) for other in others))
        shared["seconds"][me], shared["cpu"][me] = time.perf_counter() - start, time.process_time() - cpu
        await wait(shared)
        await wait(shared)
    await transport.close()


async def wait(shared: Any) -> None:
    """Meet the other processes without stopping the event loop."""
    await asyncio.get_running_loop().run_in_executor(None, shared["barrier"].wait)


def main() -> None:
    """Parse the options, run the peers, print the table."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--peers", type=int, default=4)
    parser.add_argument("--mib", type=int, default=50, help="MiB per ordered pair and repetition")
    parser.add_argument("--streams", type=int, default=2)
    parser.add_argument("--repeat", type=int, default=5)
    options = parser.parse_args()
    fork = mp.get_context("fork")
    shared: dict[str, Any] = {
        "ports": fork.Array("i", options.peers),
        "seconds": fork.Array("d", options.peers),
        "cpu": fork.Array("d", options.peers),
        "barrier": fork.Barrier(options.peers + 1),
    }
    processes = [
        fork.Process(target=lambda me: uvloop.run(peer(me, options, shared)), args=(me,), daemon=True)
        for me in range(options.peers)
    ]
    for process in processes:
        process.start()
    barrier = shared["barrier"]
    barrier.wait()
    each = options.mib * (options.peers - 1) * CHUNK_BYTES
    slowest = []
    for _ in range(options.repeat):
        barrier.wait()
        barrier.wait()
        seconds, cpu = max(shared["seconds"][:]), sum(shared["cpu"][:])
        slowest.append(seconds)
        print(f"{seconds:.3f} s  {each / seconds / 1e6:6.0f} MB/s  {cpu / (each * options.peers / 1e9):.2f} CPU s/GB")
        barrier.wait()
    print(f"median {statistics.median(slowest):.3f} s for {each / 1e6:.0f} MB each way, {options.peers} peers")
    for process in processes:
        process.join()


if __name__ == "__main__":
    main()
