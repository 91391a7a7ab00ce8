"""A peer of thinwire that makes outer steps on request: thinwire_outer.py '{"rank": 0, "mb": 40, "toml": "a.toml", …}'.

`toml`: the run that it founds; "" to join with an invite. `home`: its own directory.
After the request `prepare` it moves its parameters a little. With `at` and `die` it kills itself `die` seconds after the step
began. With `alone` it steps at once, as any loop does, until its contribution is in a step of the others.
"""

import json
import sys
import threading
import time

import thinwire
import torch
from thinwire.compression.compile_kernels import warm_up

from benchmarks.peers.turns import WIDTH, blocks, die, listen, say, until


def main() -> None:
    """Join, wrap, then step by step."""
    options = json.loads(sys.argv[1])
    torch.set_num_threads(1)
    torch.manual_seed(0)
    model = torch.nn.Sequential(*(torch.nn.Linear(WIDTH, WIDTH) for _ in range(blocks(options["mb"]))))
    inner = torch.optim.SGD(model.parameters(), lr=0.0)
    noise = torch.Generator().manual_seed(options["rank"])
    drift = [torch.randn(parameter.shape, generator=noise) for parameter in model.parameters()]

    def train() -> None:
        """Move the parameters at next to no cost."""
        with torch.no_grad():
            for parameter, moves in zip(model.parameters(), drift, strict=True):
                parameter.add_(moves, alpha=1e-3)

    warm_up()
    assert callable(thinwire.join)  # The first use of the name loads its modules.
    say(loaded=True)
    request = listen()
    began = time.monotonic()
    with thinwire.join(options["toml"] or request["invite"], home=options["home"], host="127.0.0.1") as swarm:
        say(invite=swarm.invite)
        optimizer = swarm.wrap(model, inner)
        say(ready=True, round=swarm.round, began=began, seconds=time.monotonic() - began)

        def report_step() -> None:
            end, report = time.monotonic(), swarm.last
            assert report is not None  # one step has been made at least
            say(end=end, contributors=report.contributors, round=swarm.round, digest=swarm.digest)

        if request.get("alone"):
            me = swarm.status.peer
            while swarm.last is None or me not in swarm.last.members:
                train()
                optimizer.step()
            report_step()
        while True:
            request = listen()
            if "prepare" in request:
                train()
                say(invite=swarm.invite)
                continue
            until(request["at"])
            if request.get("die") is not None:
                threading.Timer(request["die"], die).start()
            while swarm.round < request["round"]:  # a newcomer also makes the step that it has missed
                optimizer.step()
            report_step()


if __name__ == "__main__":
    main()
