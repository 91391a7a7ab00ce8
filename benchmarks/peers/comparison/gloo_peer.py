"""One peer of torch's gloo all-reduce in fp32: python gloo_peer.py '{"rank": 0, "peers": 4, "mb": 100, "port": 29611}'."""

import json
import os
import sys
import time

import torch
import torch.distributed as dist

from benchmarks.peers.shared_training import interface
from benchmarks.peers.turns import arrays, listen, say, until

options = json.loads(sys.argv[1])
torch.set_num_threads(1)
host = options.get("store", "127.0.0.1")
if host != "127.0.0.1":
    os.environ["GLOO_SOCKET_IFNAME"] = interface()
store = dist.TCPStore(host, options["port"], options["peers"], options["rank"] == 0)
dist.init_process_group("gloo", store=store, rank=options["rank"], world_size=options["peers"])
own = [torch.from_numpy(array) for array in arrays(options["mb"], options["rank"])]
work = [tensor.clone() for tensor in own]
dist.barrier()
say(ready=True)
while True:
    moment = listen()["at"]
    for tensor, source in zip(work, own, strict=True):
        tensor.copy_(source)
    until(moment)
    for tensor in work:
        dist.all_reduce(tensor)
    say(end=time.monotonic())
