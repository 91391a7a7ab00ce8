"""Node of a hivemind DHT until stdin ends: dht_node.py [BOOTSTRAP]. Prints its address. Needs hivemind, not thinwire.

DHT_NODE_KEY: file with its identity, made if it does not exist; DHT_NODE_PORT: its port on the loopback interface.
"""

import asyncio
import os
import signal
import sys

from hivemind.dht.node import DHTNode


async def main():
    node = await DHTNode.create(
        initial_peers=sys.argv[1:],
        host_maddrs=[f"/ip4/127.0.0.1/tcp/{os.environ.get('DHT_NODE_PORT', '0')}"],
        identity_path=os.environ.get("DHT_NODE_KEY"),
        use_ipfs=False,
        use_relay=False,
        auto_nat=False,
        nat_port_map=False,
    )
    print((await node.get_visible_maddrs())[0], flush=True)
    await asyncio.to_thread(sys.stdin.read)
    await node.shutdown()


asyncio.run(main())
signal.raise_signal(signal.SIGKILL)  # Threads of hivemind do not end by themselves.
