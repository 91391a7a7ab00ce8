"""How far replicas are apart after rounds of random groups, beside the theory and a mean of all.

    python -m benchmarks.swarms.mixing                          # 1,000 replicas in groups of 2, 4, 8, 16 and 64; some seconds
    python -m benchmarks.swarms.mixing --peers 10000 --groups 32 64
    python -m benchmarks.swarms.mixing --groups 16 --parts 1 4 16    # a round mixes one of n parts of the slow weights

The groups are those that the product draws (collectives/topology/matching.py). Replicas begin as independent random vectors and
take the mean of their group in each round (γ = 1, no momentum, no training). Theory: the mean square of the deviations
shrinks by (groups − 1) / (peers − 1) in each round, whatever they are (`gamma_limit` in
swarm/method_specs/noloco.py); with n parts in every n-th. The chunks of a part are those of the product
(`PairCodec.mixed`). "payloads": contributions that a peer sends in one round, for one vector.
"""

from __future__ import annotations

import argparse
import json
from itertools import product

import numpy as np
from thinwire.collectives.gossip.owner_group import MESH
from thinwire.collectives.gossip.pair_codec import parse_pair_codec
from thinwire.collectives.topology.matching import partition
from thinwire.collectives.topology.shards import Grid

from benchmarks.support import machine

VALUES = 512
"""Values of a replica; each coordinate is one trial."""

CHUNKS = 64
"""Chunks of a replica, at least as many as parts."""


def main() -> None:
    """Parse the options, play the rounds, print."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--peers", type=int, default=1000)
    parser.add_argument("--groups", type=int, nargs="+", default=[2, 4, 8, 16, 64], help="sizes of groups")
    parser.add_argument("--parts", type=int, nargs="+", default=[1], help="numbers of parts of the slow weights")
    parser.add_argument("--apart", type=float, default=1e-3, help="deviation, by the first, that counts as mixed")
    options = parser.parse_args()
    rows = []
    for size, parts in product(options.groups, options.parts):
        deviations = played(options.peers, size, options.apart, parts)
        groups = -(-options.peers // size)
        ratio = (groups - 1) / (options.peers - 1)
        turns = (len(deviations) - 1) // parts
        rows.append(
            {
                "group": size,
                "parts": parts,
                "payloads": (size - 1 if size <= MESH else 2 * (size - 1) / size) / parts,
                "rounds": len(deviations) - 1,
                "theory": until(options.apart, ratio, parts),
                "ratio": (deviations[turns * parts] / deviations[0]) ** (2 / turns) if turns else float("nan"),
                "expected": ratio,
            }
        )
    print(f"\n{machine.describe()}; {options.peers} replicas until {options.apart:g} of the first deviation\n")
    print(
        "| group | parts | payloads a round | rounds | theory | mean square after a turn of all parts | theory |\n"
        "|---|---|---|---|---|---|---|"
    )
    for row in rows:
        print(
            f"| {row['group']} | {row['parts']} | {row['payloads']:.2f} | {row['rounds']} | {row['theory']} "
            f"| {row['ratio']:.4f} | {row['expected']:.4f} |"
        )
    print("\n" + json.dumps({"machine": machine.describe(), "options": vars(options), "rows": rows}))


def until(apart: float, ratio: float, parts: int) -> int:
    """Return the rounds until the root mean square is `apart` of the first, by theory.

    After t rounds t mod n of the parts have been mixed once more than the others.
    """
    rounds = 0
    square = 1.0
    while square > apart**2:
        rounds += 1
        turns, more = divmod(rounds, parts)
        square = (more * ratio ** (turns + 1) + (parts - more) * ratio**turns) / parts
    return rounds


def played(peers: int, size: int, apart: float, parts: int = 1) -> list[float]:
    """Return the root mean square deviation from the mean of all, at first and after each round."""
    rng = np.random.default_rng(0)
    view = sorted(rng.bytes(32) for _ in range(peers))
    values = rng.standard_normal((peers, VALUES))
    values -= values.mean(axis=0)
    codec, cut = parse_pair_codec("int8(block=256)", lr=1.0, gamma=1.0, parts=parts), Grid(VALUES, VALUES // CHUNKS)
    found = [float(np.sqrt(np.mean(values**2)))]
    while found[-1] > apart * found[0]:
        drawn = np.concatenate([np.arange(*cut.span(chunk)) for chunk in codec.mixed(cut, len(found))])
        for group in partition(bytes(32), len(found), view, size):
            here = np.ix_(np.array(group), drawn)
            values[here] = values[here].mean(axis=0)
        found.append(float(np.sqrt(np.mean(values**2))))
    return found


if __name__ == "__main__":
    main()
