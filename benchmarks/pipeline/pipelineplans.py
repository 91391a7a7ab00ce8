"""Plans of pipelines beside the best published ones, and their quality after the death of a peer.

    python -m benchmarks.pipeline.pipelineplans                       # 2 million tries each: a minute or two
    python -m benchmarks.pipeline.pipelineplans --tries 500000 --seeds 5

Seconds of a step by the event simulation, for instances of SkipPipe (arXiv 2502.19913) in examples/pipelines. "published" is
the best plan of the public implementation for the same peers in the same stages; where the planner puts peers into stages there
is no such figure, and where a full pipeline crosses the mistyped link (NL to London) it is no baseline. "one dead": seconds for
as many micro-batches when the peer dies whose loss costs most, origins aside.
"""

from __future__ import annotations

import argparse
import time
from pathlib import Path

from thinwire.node.pipeline.planner.constraints import violations
from thinwire.node.pipeline.planner.initial_plan import build
from thinwire.node.pipeline.planner.makespan import full, makespan
from thinwire.node.pipeline.planner.path_search import TRIES, mend, plan
from thinwire.node.pipeline.planner.problem import Problem, load

from benchmarks.support import machine

FOLDER = Path(__file__).parents[2] / "examples" / "pipelines"
PUBLISHED = {
    "shipped20": (33.25, 33.6),
    "gcp8_25m2": (40.83, 36.5),
    "5c20_33": (34.91, 35.3),
    "gcp12_33m2": (None, 56.2),
    "gcp20_25": (None, 52.4),
}
"""Best plan of the public implementation, and what we aim at; seconds."""


def show(name: str, options: argparse.Namespace) -> None:
    """One line of the table."""
    asked = load((FOLDER / f"{name}.json").read_bytes())
    published, aim = PUBLISHED[name]
    results = []
    for seed in range(options.seeds):
        began = time.perf_counter()
        instance, found = plan(asked, seed=seed, tries=options.tries)
        results.append((found.makespan, time.perf_counter() - began, instance, found))
        assert not violations(instance, found.paths)
    spans = sorted(result[0] for result in results)
    _, took, instance, found = min(results, key=lambda result: result[0])
    first = build(instance)
    assert first is not None
    whole = makespan(instance, full(instance))
    mended, longest = 0.0, 0.0
    for dead in [peer for stage in instance.stages[1:] for peer in stage]:
        began = time.perf_counter()
        left, after = mend(instance, found.paths, (dead,))
        longest = max(longest, time.perf_counter() - began)
        assert not violations(left, after.paths)
        mended = max(mended, after.makespan / len(after.paths) * len(found.paths))
    ours = f"{spans[0]:.2f}" if len(spans) == 1 else f"{spans[0]:.2f} to {spans[-1]:.2f}"
    known = f"{published:.2f}" if published else "-"
    kind = "" if isinstance(asked, Problem) else " (own stages)"
    print(
        f"| {name}{kind} | {whole:.2f} | {makespan(instance, first):.2f} | {known} | {aim:.1f} | {ours} "
        f"| {100 * (1 - spans[0] / whole):.0f} % | {took:.0f} | {mended:.2f} | {longest:.1f} |",
        flush=True,
    )


def main() -> None:
    """The table, one line as soon as it is there."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--tries", type=int, default=TRIES)
    parser.add_argument("--seeds", type=int, default=1)
    parser.add_argument("names", nargs="*", default=list(PUBLISHED), help="instances [all]")
    options = parser.parse_args()
    print(machine.describe())
    print("| instance | full | built | published | aim | ours | less than full | search s | one dead | mending s |")
    print("|---|---|---|---|---|---|---|---|---|---|")
    for name in options.names:
        show(name, options)


if __name__ == "__main__":
    main()
