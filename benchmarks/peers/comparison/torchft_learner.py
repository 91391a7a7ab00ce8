"""A replica of torchft's DiLoCo over gloo, fp32, in torchft's own environment. Options as in loss.py."""

import json
import os
import socket
import sys
import time
from datetime import timedelta

import torch
import torch.distributed as dist
from torchft import Manager, ProcessGroupGloo
from torchft.checkpointing.http_transport import HTTPTransport
from torchft.local_sgd import DiLoCo

from benchmarks.peers.shared_training import SharedTraining, interface
from benchmarks.peers.turns import listen, say, until

TIMEOUT = timedelta(seconds=60)

options = json.loads(sys.argv[1])
os.environ["GLOO_SOCKET_IFNAME"] = interface()
host = options["hosts"][options["rank"]]
# Replicas tell each other the name of their machine, which here is the same for all.
socket.gethostname = lambda: host
training = SharedTraining(options)
model, inner = training.model, training.inner
outer = torch.optim.SGD(
    model.parameters(),
    lr=options["outer_lr"],
    momentum=options["outer_momentum"],
    nesterov=options["outer_momentum"] > 0,
)
say(loaded=True)
listen()
store = dist.TCPStore(host, 0, is_master=True, wait_for_workers=False)
manager = Manager(
    pg=ProcessGroupGloo(timeout=TIMEOUT),
    load_state_dict=lambda state: (model.load_state_dict(state["model"]), inner.load_state_dict(state["inner"])),
    state_dict=lambda: {"model": model.state_dict(), "inner": inner.state_dict()},
    min_replica_size=options["peers"],
    use_async_quorum=False,
    timeout=TIMEOUT,
    quorum_timeout=timedelta(seconds=120),
    rank=0,
    world_size=1,
    store_addr=host,
    store_port=store.port,
    replica_id=f"r{options['rank']}",
    hostname=host,
    lighthouse_addr=options["lighthouse"],
    checkpoint_transport=HTTPTransport(timeout=TIMEOUT, num_chunks=0),
    init_sync=False,
)
say(ready=True)
moment = listen()["at"]
failed = 0
with DiLoCo(
    manager,
    [model],
    inner,
    outer,
    sync_every=options["H"],
    use_bucketization=True,
    bucket_cap_mb=1024,
) as diloco:
    fragment = diloco._fragments[0]
    perform = fragment.perform_sync

    def performed() -> bool:
        global failed
        done: bool = perform()
        failed += not done
        return done

    fragment.perform_sync = performed
    until(moment)
    training.begin()
    while manager.current_step() < options["rounds"]:
        before = manager.current_step()
        training.gradients()
        training.clip()
        inner.step()
        training.rest()
        if manager.current_step() > before:
            training.snapshot()
moments = training.save(options["snapshots"])
say(end=time.monotonic(), steps=training.step, moments=moments, failed=failed, participants=manager.num_participants())
listen()
