"""All peers of hivemind's averaging, each with its DHT: hivemind_peers.py '{"peers": 4, "mb": 40, "codec": "fp32"}'.

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
    """Start the peers, then average at each request."""
    options = json.loads(sys.argv[1])
    torch.set_num_threads(1)
    count = options["peers"]
    nodes = [DHT(host_maddrs=["/ip4/127.0.0.1/tcp/0"], start=True)]
    seeds = nodes[0].get_visible_maddrs()
    nodes += [DHT(initial_peers=seeds, host_maddrs=["/ip4/127.0.0.1/tcp/0"], start=True) for _ in range(count - 1)]
    own = [[torch.from_numpy(array) for array in arrays(options["mb"], rank)] for rank in range(count)]
    averagers = [
        DecentralizedAverager(
            [tensor.clone() for tensor in tensors],
            node,
            prefix="bench",
            start=True,
            target_group_size=count,
            min_group_size=count,
            min_matchmaking_time=5.0,
            request_timeout=3.0,
            compression=CODECS[options["codec"]](),
        )
        for tensors, node in zip(own, nodes, strict=True)
    ]
    exact = sum(tensors[0].double() for tensors in own) / count
    say(ready=True)
    try:
        while True:
            prepare = listen()
            assert prepare["prepare"]
            for averager, tensors in zip(averagers, own, strict=True):
                with averager.get_tensors() as inside:
                    for tensor, source in zip(inside, tensors, strict=True):
                        tensor.copy_(source)
            steps = [
                averager.step(wait=False, require_trigger=True, allow_retries=False, timeout=120)
                for averager in averagers
            ]
            while any(step.stage != AveragingStage.AWAITING_TRIGGER and not step.done() for step in steps):
                time.sleep(0.002)
            say(prepared=True)
            until(listen()["at"])
            for step in steps:
                step.allow_allreduce()
            try:
                for step in steps:
                    step.result(300)
            except Exception as reason:  # after any error the repetition does not count
                say(end=time.monotonic(), whole=False, reason=repr(reason))
                continue
            end = time.monotonic()
            with averagers[0].get_tensors() as inside:
                error = ((inside[0].double() - exact).norm() / exact.norm()).item()
            say(end=end, whole=True, error=error)
    finally:
        for each in [*averagers, *nodes]:
            each.shutdown()


if __name__ == "__main__":
    main()
