"""How far replicas are apart after rounds of random groups, beside the theory and a mean of all.

    python -m benchmarks.swarms.mixing                          # 1,000 replicas in groups of 2, 4, 8, 16 and 64
    python -m benchmarks.swarms.mixing --peers 10000 --groups 32 64

The groups are those that the product draws (collectives/topology/matching.py). Replicas begin as independent random vectors and
take the mean of their group in each round (γ = 1, no momentum, no training). Theory: the mean square of the deviations
shrinks by (groups − 1) / (peers − 1) in each round, whatever they are (`gamma_limit` in swarm/method_specs/noloco.py).
"payloads": contributions that a peer sends in one round, for one vector.
"""

from __future__ import annotations

import argparse
import json
import math

import numpy as np
from thinwire.collectives.gossip.owner_group import MESH
from thinwire.collectives.topology.matching import partition

from benchmarks.support import machine

VALUES = 512
"""Values of a replica; each coordinate is one trial."""


def main() -> None:
    """Parse the options, play the rounds, print."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--peers", type=int, default=1000)
    parser.add_argument("--groups", type=int, nargs="+", default=[2, 4, 8, 16, 64], help="sizes of groups")
    parser.add_argument("--apart", type=float, default=1e-3, help="deviation, by the first, that counts as mixed")
    options = parser.parse_args()
    rows = []
    for size in options.groups:
        deviations = played(options.peers, size, options.apart)
        groups = -(-options.peers // size)
        ratio = (groups - 1) / (options.peers - 1)
        rows.append(
            {
                "group": size,
                "payloads": size - 1 if size <= MESH else 2 * (size - 1) / size,
                "rounds": len(deviations) - 1,
                "theory": math.ceil(2 * math.log(options.apart) / math.log(ratio)) if ratio else 1,
                "ratio": (deviations[-1] / deviations[0]) ** (2 / (len(deviations) - 1)),
                "expected": ratio,
            }
        )
    print(f"\n{machine.describe()}; {options.peers} replicas until {options.apart:g} of the first deviation\n")
    print(
        "| group | payloads a round | rounds | theory | mean square by the one before | theory |\n|---|---|---|---|---|---|"
    )
    for row in rows:
        print(
            f"| {row['group']} | {row['payloads']:.2f} | {row['rounds']} | {row['theory']} "
            f"| {row['ratio']:.4f} | {row['expected']:.4f} |"
        )
    print("\n" + json.dumps({"machine": machine.describe(), "options": vars(options), "rows": rows}))


def played(peers: int, size: int, apart: float) -> list[float]:
    """Return the root mean square deviation from the mean of all, at first and after each round."""
    rng = np.random.default_rng(0)
    view = sorted(rng.bytes(32) for _ in range(peers))
    values = rng.standard_normal((peers, VALUES))
    values -= values.mean(axis=0)
    found = [float(np.sqrt(np.mean(values**2)))]
    while found[-1] > apart * found[0]:
        for group in partition(bytes(32), len(found), view, size):
            values[group] = values[group].mean(axis=0)
        found.append(float(np.sqrt(np.mean(values**2))))
    return found


if __name__ == "__main__":
    main()
