"""Fill keys of a hivemind DHT with garbage at all nodes; stdin: JSON with "keys", "values" (hexadecimal), "bootstrap".

Besides these values: random bytes, oversized ones, and values nested 200 deep in lists and in extension types. Needs
hivemind, not thinwire. "victim": address of a node that gets a nested subkey, which ends it.
"""

import asyncio
import json
import random
import signal
import sys
import time

import msgpack
from hivemind.dht.node import DHTNode
from hivemind.dht.routing import DHTID
from hivemind.p2p import PeerID
from hivemind.proto import dht_pb2


def nested_types(depth):
    value = b"\x90"
    for _ in range(depth):
        value = msgpack.packb([msgpack.ExtType(0x40, value)])
    return value


async def main():
    asked = json.load(sys.stdin)
    node = await DHTNode.create(
        initial_peers=[asked["bootstrap"]],
        client_mode=True,
        use_ipfs=False,
        use_relay=False,
        auto_nat=False,
        nat_port_map=False,
    )
    values = {name: msgpack.packb(bytes.fromhex(text)) for name, text in asked["values"].items()}
    values["random"] = random.Random(1).randbytes(600)
    values["empty"] = b""
    values["text"] = msgpack.packb("not bytes")
    values["oversized"] = msgpack.packb(bytes(100_000))
    values["nested lists"] = b"\x91" * 200 + b"\xc0"
    values["nested types"] = nested_types(200)
    for key in asked["keys"]:
        where = DHTID.generate(source=key)
        for peer in [info.peer_id for info in await node.p2p.list_peers()]:
            for name, value in values.items():
                stored = await node.protocol.call_store(peer, [where], [value], time.time() + 3600, [name])
                print(name, stored)
    if victim := asked.get("victim"):
        request = dht_pb2.StoreRequest(
            keys=[DHTID.generate(source="any").to_bytes()],
            subkeys=[nested_types(200)],
            values=[b""],
            expiration_time=[time.time() + 60],
            in_cache=[False],
        )
        stub = node.protocol.get_stub(PeerID.from_base58(victim.rsplit("/", 1)[1]))
        try:
            await asyncio.wait_for(stub.rpc_store(request), 10)
            print("the victim survives")
        except Exception as error:
            print("the victim is gone:", type(error).__name__)
    await node.shutdown()


asyncio.run(main())
print("done", flush=True)
signal.raise_signal(signal.SIGKILL)  # Threads of hivemind do not end by themselves.
