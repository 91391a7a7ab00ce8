"""A peer that averages small tensors through the Python interface at each request: average_peer.py '{"rank": 0, "toml": …}'."""

import json
import sys
import time

import thinwire
import torch

from benchmarks.peers.turns import listen, say, until


def main() -> None:
    """Join; at a request with `at`, `count` and `size`, make this number of averages one after the other."""
    options = json.loads(sys.argv[1])
    torch.set_num_threads(1)
    say(loaded=True)
    request = listen()
    with thinwire.join(options["toml"] or request["invite"], home=options["home"], host="127.0.0.1") as swarm:
        say(invite=swarm.invite)
        while True:
            request = listen()
            until(request["at"])
            values = torch.full((request["size"],), float(options["rank"]))
            took = []
            for _ in range(request["count"]):
                began = time.perf_counter()
                result = swarm.average(values, least=options["peers"], grace=30.0)
                took.append(time.perf_counter() - began)
            mean = (options["peers"] - 1) / 2
            say(took=took, right=bool((result.value == mean).all()), count=len(result.contributors))


if __name__ == "__main__":
    main()
