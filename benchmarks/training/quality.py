"""Loss that a codec or an outer method costs: a byte language model of about 100,000 parameters.

    python -m benchmarks.training.quality [--seeds 2] [--rounds 100] [--replicas 4] [--lr 4e-3] [--schedule cosine]
                                 [--only NAME ...] [--json FILE]

Four replicas (or --replicas) train in one process, each on separate shards of the standard library's source. Codecs, rules,
inner and outer optimizers are those of the product; there is no network. The figure is the held-out loss (nats per byte) of the
outer parameters at the end, or the mean over the replicas if these differ. Everything follows from the seed.
"""

from __future__ import annotations

import argparse
import json
import math
import sys
import tempfile
import time
from collections.abc import Callable, Sequence
from pathlib import Path

import numpy as np
import torch
from thinwire.node.training.inner_optimizer import InnerConfig

from benchmarks.training.outermeans import demo_run, dense, low_rank, sparse, sparse_butterfly
from benchmarks.training.toy import PEERS, Make, Toy, apart, synchronous, text, train
from benchmarks.training.unlike import ByAll, asynchronous, overlapped, paired


def rounds_of(make: Make) -> Callable[[Toy], float]:
    """Return a training in which only the outer step is not the usual one."""
    return lambda toy: train(toy, make)


STREAMING = 'method = "streaming"\nfragments = 2\noverlap = {}\nlocal_mix = {}'
TOPK = "topk(k={},chunk=4096)|2bit|rice"
RUNS: dict[str, Callable[[Toy], float]] = {
    "synchronous": synchronous,
    "apart": apart,
    "diloco": rounds_of(dense("fp32")),
    "diloco .4/.8": rounds_of(dense("fp32", 0.4, 0.8)),
    "diloco .7/.9": rounds_of(dense("fp32", 0.7, 0.9)),
    "int8": rounds_of(dense("int8(block=256)")),
    "int4": rounds_of(dense("int4(block=256)")),
    "e3m0": rounds_of(dense("e3m0(block=256)")),
    "sparseloco k=64": rounds_of(sparse(TOPK.format(64))),
    "sparseloco k=128": rounds_of(sparse(TOPK.format(128))),
    "sparseloco 1bit": rounds_of(sparse("topk(k=64,chunk=4096)|1bit|rice")),
    "no feedback": rounds_of(sparse(beta=0.0)),
    "beta 1": rounds_of(sparse(beta=1.0)),
    "denominator mean": rounds_of(sparse(denominator="mean")),
    "contributor mean": rounds_of(sparse(denominator="contributor_mean")),
    "30% excluded": rounds_of(sparse(excluded=0.3)),
    "sparse butterfly": rounds_of(sparse_butterfly()),
    "sparse butterfly, keep .95": rounds_of(sparse_butterfly(keep=0.95)),
    "sparse butterfly, as many": rounds_of(sparse_butterfly(wide=1)),
    "30% restored": rounds_of(sparse(excluded=0.3, on_exclusion="restore")),
    "demo k=32": demo_run("demo(k=32)"),
    "powersgd rank 8": rounds_of(low_rank(8)),
    "diloco .7/.5": rounds_of(dense("fp32", 0.7, 0.5)),
    "noloco": paired(0.7),
    "noloco int8": paired(0.7, codec="int8(block=256)"),
    "noloco int4": paired(0.7, codec="int4(block=256)"),
    "noloco gamma 0": paired(0.0),
    "noloco parts 4": paired(0.7, codec="int4(block=256)", parts=4),
    "noloco parts 16": paired(0.7, codec="int4(block=256)", parts=16),
    "noloco sparse": paired(1.0, 1.0, 0.0, codec=TOPK.format(64), decay=0.95),
    "noloco sparse /4": paired(1.0, 1.0, 0.0, codec=TOPK.format(64), decay=0.95, parts=4),
    "noloco sparse /16": paired(1.0, 1.0, 0.0, codec=TOPK.format(64), decay=0.95, parts=16),
    "noloco sparse, by all": paired(1.0, 1.0, 0.0, codec=TOPK.format(64), decay=0.95, means=ByAll),
    "noloco sparse /16, by all": paired(1.0, 1.0, 0.0, codec=TOPK.format(64), decay=0.95, parts=16, means=ByAll),
    "noloco sparse, 8s, by all": paired(1.0, 1.0, 0.0, 8, TOPK.format(64), decay=0.95, means=ByAll),
    "noloco sparse lr1.5": paired(1.0, 1.5, 0.0, codec=TOPK.format(64), decay=0.95),
    "noloco sparse, 8s": paired(1.0, 1.0, 0.0, 8, TOPK.format(64), decay=0.95),
    "noloco sparse, 8s /16": paired(1.0, 1.0, 0.0, 8, TOPK.format(64), decay=0.95, parts=16),
    "noloco sparse, 16s /16": paired(1.0, 1.0, 0.0, 16, TOPK.format(64), decay=0.95, parts=16),
    "noloco int4 m0, 16s": paired(1.0, 1.0, 0.0, 16, "int4(block=256)"),
    "noloco int4 m0": paired(1.0, 1.0, 0.0, codec="int4(block=256)"),
    "noloco, fours": paired(0.7, group=4),
    "diloco .4/.9": rounds_of(dense("fp32", 0.4, 0.9)),
    "e3m0 .4/.9": rounds_of(dense("e3m0(block=256)", 0.4, 0.9)),
    "streaming t0": overlapped(STREAMING.format(0, 0.0)),
    "streaming t1 a0": overlapped(STREAMING.format(1, 0.0)),
    "streaming t1 a.5": overlapped(STREAMING.format(1, 0.5)),
    "streaming t5 a.5": overlapped(STREAMING.format(5, 0.5)),
    "streaming e3m0": overlapped(STREAMING.format(5, 0.5), codec="e3m0(block=256)"),
    "naive overlap .4": overlapped('method = "eager"\nlr = 0.4', naive=True),
    "eager .4": overlapped('method = "eager"\nlr = 0.4'),
    "eager .2": overlapped('method = "eager"'),
    "co2": overlapped('method = "co2"'),
    "async naive": asynchronous('method = "buffered-async"\nlr = 0.7\nmomentum = 0.9\nnesterov = true'),
    "async buffered": asynchronous('method = "buffered-async"'),
    "delayed nesterov": asynchronous('method = "delayed-nesterov"'),
    "delayed, by power": asynchronous('method = "delayed-nesterov"\nstep_balancing = "by-speed"'),
    "co2 .4/.8": overlapped('method = "co2"\nlr = 0.4\nmomentum = 0.8'),
    "co2, no penalty": overlapped('method = "co2"\nlr = 0.4\nmomentum = 0.8', naive=True),
}
"""Name -> a run's loss."""


def table(losses: dict[str, list[float]]) -> str:
    """Return one line for each training: mean loss, distance to dense DiLoCo, ratio of perplexities, each seed."""
    lines = [f"{'':<26} {'loss':>7} {'to diloco':>10} {'perplexity':>11}   seeds"]
    usual = float(np.mean(losses["diloco"])) if "diloco" in losses else math.nan
    for name, found in losses.items():
        mean = float(np.mean(found))
        losses_text = " ".join(f"{loss:.3f}" for loss in found)
        lines.append(f"{name:<26} {mean:>7.3f} {mean - usual:>+10.3f} {math.exp(mean - usual):>10.3f}×   {losses_text}")
    return "\n".join(lines)


def main(arguments: Sequence[str]) -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--seeds", type=int, default=2)
    parser.add_argument("--rounds", type=int, default=100)
    parser.add_argument("--only", nargs="*", default=list(RUNS), choices=list(RUNS))
    parser.add_argument("--replicas", type=int, default=len(PEERS))
    parser.add_argument("--lr", type=float, default=4e-3, help="peak learning rate of the inner optimizer")
    parser.add_argument("--schedule", default="cosine", choices=["cosine", "constant"])
    parser.add_argument("--json", type=Path)
    options = parser.parse_args(arguments)
    torch.set_num_threads(1)
    inner = InnerConfig(lr=options.lr, warmup=options.rounds // 2, schedule=options.schedule)
    peers = [bytes([index]) * 32 for index in range(options.replicas)]
    losses: dict[str, list[float]] = {}
    with tempfile.TemporaryDirectory() as cache:
        for seed in range(options.seeds):
            for name in options.only:
                began = time.monotonic()
                loss = RUNS[name](Toy(text(Path(cache), seed), seed, options.rounds, inner=inner, peers=peers))
                losses.setdefault(name, []).append(loss)
                print(
                    f"{name}, seed {seed}: {loss:.3f} in {time.monotonic() - began:.0f} s", file=sys.stderr, flush=True
                )
                if options.json:
                    options.json.write_text(json.dumps(losses, indent=1) + "\n")
    print(table(losses))
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
