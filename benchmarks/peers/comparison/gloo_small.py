"""A peer that all-reduces small tensors with gloo at each request: gloo_small.py '{"rank": 0, "peers": 2, "port": 29611}'."""

import json
import sys
import time

import torch
import torch.distributed as dist

from benchmarks.peers.turns import listen, say, until

options = json.loads(sys.argv[1])
torch.set_num_threads(1)
say(loaded=True)
listen()
store = dist.TCPStore("127.0.0.1", options["port"], options["peers"], options["rank"] == 0)
dist.init_process_group("gloo", store=store, rank=options["rank"], world_size=options["peers"])
dist.barrier()
say(invite="")
while True:
    request = listen()
    until(request["at"])
    took = []
    for _ in range(request["count"]):
        values = torch.full((request["size"],), float(options["rank"]))
        began = time.perf_counter()
        dist.all_reduce(values)
        took.append(time.perf_counter() - began)
    sum_of_ranks = options["peers"] * (options["peers"] - 1) / 2
    say(took=took, right=bool((values == sum_of_ranks).all()), count=options["peers"])
