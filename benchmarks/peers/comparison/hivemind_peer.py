"""A peer of hivemind's averaging with its DHT: hivemind_peer.py '{"rank": 0, "peers": 4, "mb": 40, "codec": "fp32", …}'.

`host`: the address on which it listens.

Runs in a virtual environment of its own (numpy < 2.4). Only the all-reduce is timed: the group is found before.
"""

import json
import sys
import time

import torch
from hivemind import DHT, DecentralizedAverager
from hivemind.averaging.control import AveragingStage
from hivemind.compression import NoCompression, Uniform8BitQuantization

from benchmarks.peers.turns import arrays, listen, say, until

CODECS = {"fp32": NoCompression, "int8": Uniform8BitQuantization}


def main() -> None:
    """Find the others, then average at each request."""
    options = json.loads(sys.argv[1])
    torch.set_num_threads(1)
    rank, count, listens = options["rank"], options["peers"], [f"/ip4/{options['host']}/tcp/0"]
    first = DHT(host_maddrs=listens, start=True) if rank == 0 else None
    say(address=[str(one) for one in first.get_visible_maddrs()] if first is not None else [])
    seeds = listen()["addresses"][0]
    node = first or DHT(initial_peers=seeds, host_maddrs=listens, start=True)
    own = [torch.from_numpy(array) for array in arrays(options["mb"], rank)]
    averager = DecentralizedAverager(
        [tensor.clone() for tensor in own],
        node,
        prefix="bench",
        start=True,
        target_group_size=count,
        min_group_size=count,
        min_matchmaking_time=5.0,
        request_timeout=3.0,
        compression=CODECS[options["codec"]](),
    )
    exact = sum(torch.from_numpy(arrays(options["mb"], one)[0]).double() for one in range(count)) / count
    say(ready=True)
    try:
        while True:
            prepare = listen()
            assert prepare["prepare"]
            with averager.get_tensors() as inside:
                for tensor, source in zip(inside, own, strict=True):
                    tensor.copy_(source)
            step = averager.step(wait=False, require_trigger=True, allow_retries=False, timeout=120)
            while step.stage != AveragingStage.AWAITING_TRIGGER and not step.done():
                time.sleep(0.002)
            say(prepared=True)
            until(listen()["at"])
            step.allow_allreduce()
            try:
                step.result(300)
            except Exception as reason:  # after any error the repetition does not count
                say(end=time.monotonic(), whole=False, reason=repr(reason))
                continue
            end = time.monotonic()
            with averager.get_tensors() as inside:
                error = ((inside[0].double() - exact).norm() / exact.norm()).item()
            say(end=end, whole=True, error=error)
    finally:
        averager.shutdown()
        node.shutdown()


if __name__ == "__main__":
    main()
