"""A peer of synchronous data parallelism over gloo, fp32: every step on the mean of all gradients. Options as in loss.py."""

import json
import os
import sys
import time

import torch
import torch.distributed as dist

from benchmarks.peers.lesson import Lesson, interface
from benchmarks.peers.turns import listen, say, until

options = json.loads(sys.argv[1])
os.environ["GLOO_SOCKET_IFNAME"] = interface()
lesson, count = Lesson(options), options["peers"]
say(loaded=True)
listen()
store = dist.TCPStore(options["hosts"][0], options["port"], count, options["rank"] == 0)
dist.init_process_group("gloo", store=store, rank=options["rank"], world_size=count)
dist.barrier()
say(ready=True)
moment = listen()["at"]
until(moment)
lesson.begin()
for _ in range(options["steps"]):
    lesson.gradients()
    gradients = []
    for parameter in lesson.model.parameters():
        assert parameter.grad is not None
        gradients.append(parameter.grad)
    flat = torch.cat([gradient.flatten() for gradient in gradients])
    dist.all_reduce(flat)
    flat /= count
    for gradient, mean in zip(gradients, flat.split([g.numel() for g in gradients]), strict=True):
        gradient.copy_(mean.view_as(gradient))
    lesson.clip()
    lesson.inner.step()
    lesson.rest()
    lesson.snapshot()
say(end=time.monotonic(), steps=lesson.step, moments=lesson.save(options["snapshots"]))
listen()
