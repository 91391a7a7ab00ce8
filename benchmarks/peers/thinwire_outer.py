"""A peer of ours that makes an outer step whenever it is told: thinwire_outer.py '{"rank": 0, "mb": 40, "toml": "a.toml", …}'.

`toml`: the run that it founds; "" for one that joins with an invite. `home`: its own directory.
Told `prepare`, it moves its parameters a little. Told `at` and `die`, it kills itself so many seconds after the step began.
"""

import json
import sys
import threading
import time

import thinwire
import torch
from thinwire.compression.warmup import warm_up
from turns import WIDTH, blocks, die, listen, say, until


def main() -> None:
    """Join, wrap, then step by step."""
    options = json.loads(sys.argv[1])
    torch.set_num_threads(1)
    torch.manual_seed(0)
    model = torch.nn.Sequential(*(torch.nn.Linear(WIDTH, WIDTH) for _ in range(blocks(options["mb"]))))
    inner = torch.optim.SGD(model.parameters(), lr=0.0)
    noise = torch.Generator().manual_seed(options["rank"])
    warm_up()
    assert callable(thinwire.join)  # which loads what is behind it
    say(loaded=True)
    told = listen()
    began = time.monotonic()
    with thinwire.join(options["toml"] or told["invite"], home=options["home"], host="127.0.0.1") as swarm:
        say(invite=swarm.invite)
        optimizer = swarm.wrap(model, inner)
        say(ready=True, round=swarm.round, began=began, seconds=time.monotonic() - began)
        while True:
            told = listen()
            if "prepare" in told:
                with torch.no_grad():
                    for parameter in model.parameters():
                        parameter.add_(torch.randn(parameter.shape, generator=noise), alpha=1e-3)
                say(invite=swarm.invite)
                continue
            until(told["at"])
            if told.get("die") is not None:
                threading.Timer(told["die"], die).start()
            while swarm.round < told["round"]:  # who has just come makes the step that it has missed, too
                optimizer.step()
            end, report = time.monotonic(), swarm.last
            say(end=end, contributors=report.contributors, round=swarm.round, digest=swarm.digest)


if __name__ == "__main__":
    main()
