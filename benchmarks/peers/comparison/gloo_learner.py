"""A peer of synchronous data parallelism over gloo, fp32: every step on the mean of all gradients. Options as in loss.py."""

import json
import os
import sys
import time

import torch
import torch.distributed as dist

from benchmarks.peers.shared_training import SharedTraining, interface
from benchmarks.peers.turns import listen, say, until

options = json.loads(sys.argv[1])
os.environ["GLOO_SOCKET_IFNAME"] = interface()
training, count = SharedTraining(options), options["peers"]
say(loaded=True)
listen()
store = dist.TCPStore(options["hosts"][0], options["port"], count, options["rank"] == 0)
dist.init_process_group("gloo", store=store, rank=options["rank"], world_size=count)
dist.barrier()
say(ready=True)
moment = listen()["at"]
until(moment)
training.begin()
for _ in range(options["steps"]):
    training.gradients()
    gradients = []
    for parameter in training.model.parameters():
        assert parameter.grad is not None
        gradients.append(parameter.grad)
    flat = torch.cat([gradient.flatten() for gradient in gradients])
    dist.all_reduce(flat)
    flat /= count
    for gradient, mean in zip(gradients, flat.split([g.numel() for g in gradients]), strict=True):
        gradient.copy_(mean.view_as(gradient))
    training.clip()
    training.inner.step()
    training.rest()
    training.snapshot()
say(end=time.monotonic(), steps=training.step, moments=training.save(options["snapshots"]))
listen()
