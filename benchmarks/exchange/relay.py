"""Throughput of a circuit: one peer sends sealed 1 MiB frames to another one through a relay with a limited uplink.

    python -m benchmarks.exchange.relay --up 10000000 --mib 64       # ten seconds

Everything runs on loopback, in one process. Prints the payload bytes/s that arrive, as a share of the relay's limit, and
the CPU seconds per GB of all three peers together.
"""

from __future__ import annotations

import argparse
import asyncio
import os
import time

import uvloop
from thinwire.collectives.transport.interface import Contact
from thinwire.collectives.transport.zeromq.transport import ZmqTransport
from thinwire.swarm.frame import Frame
from thinwire.swarm.identity.identity import Identity
from thinwire.swarm.identity.peer_record import PeerRecord
from thinwire.swarm.messages.registry import CHUNK_BYTES, VERSION, Chunk, Hello, Refuse, Welcome

RUN = bytes(32)


class Peer:
    """A transport on loopback, whose record has its address only if it is `reachable`."""

    def __init__(self, number: int, up: int = 0) -> None:
        self.identity = Identity.generate(bytes([number]) * 32)
        self.transport = ZmqTransport(self.identity, run_id=RUN, admit=self._admit, wall=_now, up=up)

    def _admit(self, hello: Hello, record: PeerRecord, source: str) -> Welcome | Refuse:
        return Welcome(self.record.wire, b"", bytes(32), bytes(64), (), "", "", bytes(32))

    async def open(self, *, reachable: bool) -> None:
        """Listen, and make the record."""
        await self.transport.open()
        addresses = self.transport.addresses() if reachable else ()
        self.record = PeerRecord.create(self.identity, run_id=RUN, addresses=addresses, sequence=1, issued=_now())
        self.transport.learn(self.record)

    async def meet(self, other: Peer) -> None:
        """Open a link to another peer."""
        contact = Contact(other.transport.addresses()[0], other.identity.transport_public)
        answer = await self.transport.meet(contact, Hello(VERSION, RUN, self.record.wire))
        assert isinstance(answer, Welcome), answer


def _now() -> int:
    return int(time.time())


async def measure(up: int, mib: int) -> tuple[float, float]:
    """Return payload bytes/s from the first frame to the last, and CPU seconds per GB."""
    relay, first, second = peers = (Peer(1, up), Peer(2), Peer(3))
    for peer in peers:
        await peer.open(reachable=peer is relay)
    await first.meet(relay)
    await second.meet(relay)
    await asyncio.sleep(0.1)  # the relay has both links
    first.transport.learn(second.record)
    payload = os.urandom(CHUNK_BYTES)

    async def feed() -> None:
        for index in range(mib + 1):
            assert await first.transport.send(second.identity.peer_id, Frame(Chunk(1, 0, 1, index), payload))

    feeding, seen = asyncio.create_task(feed()), 0
    begin, cpu = 0.0, 0.0
    while seen <= mib:
        arrival = await second.transport.recv()
        if arrival.frame is not None and len(arrival.frame.payload):
            seen += 1
            if seen == 1:
                begin, cpu = time.monotonic(), time.process_time()
    seconds, used = time.monotonic() - begin, time.process_time() - cpu
    await feeding
    assert second.transport.relay_of(first.identity.peer_id) == relay.identity.peer_id
    for peer in peers:
        await peer.transport.close()
    return mib * CHUNK_BYTES / seconds, used / (mib * CHUNK_BYTES) * 1e9


def main() -> None:
    """Measure and print."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--up", type=int, default=10_000_000, help="limit of the relay in bytes/s; 0: none")
    parser.add_argument("--mib", type=int, default=64, help="frames of 1 MiB")
    options = parser.parse_args()
    rate, cpu = uvloop.run(measure(options.up, options.mib))
    share = f" = {rate / options.up:.0%} of the relay's limit" if options.up else ""
    print(f"{rate / 1e6:.1f} MB/s{share}, {cpu:.1f} CPU s/GB")


if __name__ == "__main__":
    main()
