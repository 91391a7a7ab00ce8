"""A replica of torchft's DiLoCo that makes an outer step at each request; see thinwire_outer.py for the requests.

torchft_outer.py '{"rank": 0, "mb": 40, "lighthouse": "http://127.0.0.1:29510"}', in torchft's own environment.
"""

import hashlib
import json
import os
import sys
import threading
import time
from datetime import timedelta

import torch
import torch.distributed as dist
from torchft import Manager, ProcessGroupGloo
from torchft.checkpointing.http_transport import HTTPTransport
from torchft.local_sgd import DiLoCo

from benchmarks.peers.turns import WIDTH, blocks, die, listen, say, until

TIMEOUT = timedelta(seconds=10)


def main() -> None:
    """Start a manager, then step by step."""
    options = json.loads(sys.argv[1])
    os.environ["GLOO_SOCKET_IFNAME"] = "lo"
    torch.set_num_threads(1)
    torch.manual_seed(0)
    model = torch.nn.Sequential(*(torch.nn.Linear(WIDTH, WIDTH) for _ in range(blocks(options["mb"]))))
    inner = torch.optim.SGD(model.parameters(), lr=0.0)
    outer = torch.optim.SGD(model.parameters(), lr=0.7, momentum=0.9, nesterov=True)
    noise = torch.Generator().manual_seed(options["rank"])
    say(loaded=True)
    listen()
    began = time.monotonic()
    store = dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
    manager = Manager(
        pg=ProcessGroupGloo(timeout=TIMEOUT),
        load_state_dict=lambda state: model.load_state_dict(state["model"]),
        state_dict=lambda: {"model": model.state_dict()},
        min_replica_size=1,
        use_async_quorum=False,
        timeout=TIMEOUT,
        quorum_timeout=timedelta(seconds=120),
        rank=0,
        world_size=1,
        store_addr="127.0.0.1",
        store_port=store.port,
        replica_id=f"r{options['rank']}",
        hostname="127.0.0.1",
        lighthouse_addr=options["lighthouse"],
        checkpoint_transport=HTTPTransport(timeout=TIMEOUT, num_chunks=0),
    )
    say(invite="")
    sync = 0.0
    with DiLoCo(manager, [model], inner, outer, sync_every=1) as diloco:
        fragment = diloco._fragments[0]
        prepare, perform = fragment.prepare_sync, fragment.perform_sync

        def prepared() -> None:
            nonlocal sync
            sync = time.monotonic()
            prepare()

        def performed() -> bool:
            nonlocal sync
            done: bool = perform()
            sync = time.monotonic() - sync
            return done

        fragment.prepare_sync, fragment.perform_sync = prepared, performed
        say(ready=True, round=0, began=began, seconds=time.monotonic() - began)
        while True:
            request = listen()
            if "prepare" in request:
                with torch.no_grad():
                    for parameter in model.parameters():
                        parameter.add_(torch.randn(parameter.shape, generator=noise), alpha=1e-3)
                say(invite="")
                continue
            until(request["at"])
            if request.get("die") is not None:
                threading.Timer(request["die"], die).start()
            while manager.current_step() < request["round"]:
                inner.step()
            end = time.monotonic()
            digest = hashlib.blake2b()
            for parameter in model.parameters():
                digest.update(parameter.detach().numpy().data)
            say(
                end=end,
                sync=sync,
                contributors=manager.num_participants(),
                round=manager.current_step(),
                digest=digest.hexdigest(),
            )


if __name__ == "__main__":
    main()
