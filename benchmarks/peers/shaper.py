"""Proxy for the links between peers: python shaper.py '{"peers": 4, "rate": 12.5e6, "delay": 0.04, "ports": [30000, 30010]}'.

`rate` may be a list, one for each host. Host i listens at 127.0.0.(i+1); host i dials host j at
127.1.(i+1).(j+1). Serves until its input ends.
"""

import asyncio
import json
import sys
from typing import Any

import uvloop
from thinwire.sims.processes.proxy import Proxy, ProxyAccessLink

from benchmarks.peers.turns import listen, say


async def main(options: dict[str, Any]) -> None:
    """Open all paths, then wait."""
    count = options["peers"]
    rates = options["rate"] if isinstance(options["rate"], list) else [options["rate"]] * count
    proxy = Proxy([ProxyAccessLink(rate, rate) for rate in rates], options["delay"], buffer=options.get("buffer", 0))
    ports = range(*options["ports"])
    for dialler in range(count):
        for target in range(count):
            if dialler != target:
                at = f"127.1.{dialler + 1}.{target + 1}"
                await proxy.reach(dialler, target, at, f"127.0.0.{target + 1}", ports)
    say(ready=True)
    try:
        while True:
            await asyncio.to_thread(listen)
            say(up=[host.up.carried for host in proxy.hosts], down=[host.down.carried for host in proxy.hosts])
    except SystemExit:
        await proxy.close()


if __name__ == "__main__":
    uvloop.run(main(json.loads(sys.argv[1])))
