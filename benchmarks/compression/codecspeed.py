"""Speed of the codecs in GB/s of fp32 read, beside a copy of the same array and the same codec in plain torch.

    python -m benchmarks.compression.codecspeed                  64 MiB of Gaussian values, every codec
    python -m benchmarks.compression.codecspeed --only int4      rows with this text in their names
    python -m benchmarks.compression.codecspeed --json           the figures as JSON

The rows of a table take turns, so that a busy moment affects all of them; a figure is the median. Dense codecs work chunk by
chunk as in a round (2 MiB), with two threads on two chunks at a time. "Average" decodes and adds up the payloads of four
peers, which counts as four arrays read; "accumulate" one. A GPU is measured if there is one.
"""

from __future__ import annotations

import argparse
import json
import statistics
import sys
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from functools import partial

import numpy as np
import torch
from numpy.typing import NDArray
from thinwire.compression import registry
from thinwire.compression.core.types import Buffer, Floats
from thinwire.compression.dense.blockint import Integers

from benchmarks.compression import sparserows
from benchmarks.compression.plaintorch import average_integers, encode_integers
from benchmarks.support import machine

CHUNK = 1 << 19
"""Elements of a chunk, as the grid of a large model has them."""

PEERS = 4

Act = Callable[[], object]


@dataclass(slots=True)
class Row:
    """One line of the table. ours: how many threads -> what to time; plain: the same in torch; reads: bytes of fp32 a call."""

    name: str
    ours: Callable[[int], Act]
    plain: Act | None = None
    reads: int = 0


class Shared:
    """Work in pieces that threads take in turn; the kernels release the GIL."""

    def __init__(self) -> None:
        self._pools = {2: ThreadPoolExecutor(2)}
        self._local = threading.local()

    def room(self, size: int) -> Floats:
        """Memory of this thread, the same at every call: a round reduces all its chunks in one place."""
        if getattr(self._local, "room", np.empty(0)).size < size:
            self._local.room = np.zeros(size, np.float32)
        room: Floats = self._local.room[:size]
        return room

    def __call__(self, threads: int, pieces: Sequence[Act]) -> Act:
        """A call of all pieces, by so many threads."""
        if threads == 1:
            return lambda: [piece() for piece in pieces]
        shares = [pieces[start::threads] for start in range(threads)]
        pool = self._pools[threads]
        return lambda: list(pool.map(lambda share: [piece() for piece in share], shares))


def encode_row(spec: str, x: Floats, shared: Shared) -> Row:
    """Encoding with a dense codec."""
    codec = registry.dense(spec)
    parts = [x[start : start + CHUNK] for start in range(0, x.size, CHUNK)]
    room = [np.zeros(codec.nbytes(part.size), np.uint8) for part in parts]
    pieces = [partial(codec.encode, part, out) for part, out in zip(parts, room, strict=True)]
    tensors = [torch.from_numpy(part) for part in parts]
    return Row(
        f"{codec.spec} encode",
        lambda threads: shared(threads, pieces),
        (lambda: [encode_integers(codec, part) for part in tensors]) if isinstance(codec, Integers) else None,
        x.nbytes,
    )


def average_row(spec: str, x: Floats, shared: Shared) -> Row:
    """Decoding and adding up the payloads of some peers."""
    codec = registry.dense(spec)

    def mean(sources: Sequence[Buffer], size: int) -> None:
        codec.mean(sources, [1.0] * PEERS, shared.room(size))

    pieces: list[Act] = []
    payloads: list[list[NDArray[np.uint8]]] = []
    for start in range(0, x.size, CHUNK):
        part = x[start : start + CHUNK]
        encoded = []
        for peer in range(PEERS):
            encoded.append(np.zeros(codec.nbytes(part.size), np.uint8))
            codec.encode(np.roll(part, peer), encoded[-1])
        payloads.append(encoded)
        pieces.append(partial(mean, [payload.data for payload in encoded], part.size))
    tensors = [[torch.from_numpy(payload) for payload in group] for group in payloads]
    return Row(
        f"{codec.spec} average",
        lambda threads: shared(threads, pieces),
        (lambda: [average_integers(codec, group, CHUNK) for group in tensors]) if isinstance(codec, Integers) else None,
        PEERS * x.nbytes,
    )


def rows(x: Floats) -> Iterator[Row]:
    """The table, from top to bottom."""
    shared = Shared()
    for spec in (
        "fp16",
        "bf16",
        "int8",
        "int8(block=4096)",
        "int4",
        "int4(asymmetric=1)",
        "int4(stochastic=1)",
        "int3",
        "e3m0",
    ):
        yield encode_row(spec, x, shared)
    for spec in ("fp32", "fp16", "bf16", "int8", "int8(block=4096)", "int4", "int4(asymmetric=1)", "int3", "e3m0"):
        yield average_row(spec, x, shared)
    for figures in sparserows.figures(x):
        yield Row(*figures)


def seconds(act: Act, clock: Callable[[], float]) -> float:
    """How long one call takes."""
    start = clock()
    act()
    return clock() - start


def measure(chosen: Sequence[Row], x: Floats, repeats: int, cpu: bool) -> list[dict[str, object]]:
    """Medians, in GB/s of fp32 read; `repeats` turns through everything after one that is thrown away.

    cpu: what one core does is timed by its CPU seconds, which others on the machine do not lengthen.
    """
    target = np.empty_like(x)
    acts: dict[tuple[str, str], Act] = {("copy", ""): lambda: np.copyto(target, x)}
    for row in chosen:
        acts[row.name, "one"], acts[row.name, "two"] = row.ours(1), row.ours(2)
        if row.plain is not None:
            acts[row.name, "torch"] = row.plain
    times: dict[tuple[str, str], list[float]] = {key: [] for key in acts}
    for turn in range(repeats + 1):
        for key, act in acts.items():
            spent = seconds(act, time.thread_time if cpu and key[1] != "two" else time.perf_counter)
            if turn:
                times[key].append(spent)
    median = {key: statistics.median(found) for key, found in times.items()}
    copy = x.nbytes / median["copy", ""] / 1e9
    found: list[dict[str, object]] = [{"row": "copyto", "one": copy, "by copy": 1.0}]
    for row in chosen:
        speed = {
            column: row.reads / median[row.name, column] / 1e9
            for column in ("one", "two", "torch")
            if (row.name, column) in median
        }
        line: dict[str, object] = {
            "row": row.name,
            **speed,
            "by copy": speed["one"] / copy,
            "scaling": speed["two"] / speed["one"],
        }
        if "torch" in speed:
            line["by torch"] = speed["one"] / speed["torch"]
        found.append(line)
    return found


COLUMNS = {"one": "one core GB/s", "two": "two threads GB/s", "scaling": "two by one", "torch": "torch, one core GB/s"}
COLUMNS |= {"by copy": "by copyto", "by torch": "by torch"}


def show(found: Sequence[dict[str, object]]) -> str:
    """The table as Markdown."""
    lines = [f"| | {' | '.join(COLUMNS.values())} |", "|---" * (len(COLUMNS) + 1) + "|"]
    for line in found:
        cells = (f"{value:.2f}" if isinstance(value := line.get(key), float) else "" for key in COLUMNS)
        lines.append(f"| {str(line['row']).replace('|', '&#124;')} | {' | '.join(cells)} |")
    return "\n".join(lines)


def main() -> None:
    """Parse the options, measure, print."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--mib", type=int, default=64)
    parser.add_argument("--repeats", type=int, default=7)
    parser.add_argument("--only", default="")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--cpu", action="store_true", help="CPU seconds where one core works: for a busy machine")
    parser.add_argument("--json", action="store_true")
    options = parser.parse_args()
    if options.repeats < 5 or options.mib < 4:
        parser.error("at least 5 repeats, of 4 MiB at least")
    torch.set_num_threads(1)
    x = np.random.default_rng(options.seed).standard_normal(options.mib << 18).astype(np.float32)
    chosen = [row for row in rows(x) if options.only in row.name]
    others = machine.wait_until_quiet(0.05, 0.0)
    found = measure(chosen, x, options.repeats, options.cpu)
    gpu: dict[str, float] | str = "not measured: no GPU"
    if torch.cuda.is_available():
        from benchmarks.compression.gpucodecs import measure as measure_gpu

        gpu = measure_gpu(options.seed, options.repeats)
    if options.json:
        where = {"machine": machine.describe(), "others": others, "mib": options.mib, "cpu": options.cpu}
        json.dump({**where, "rows": found, "gpu": gpu}, sys.stdout)
        print()
        return
    how = f"medians of {options.repeats}" + (", CPU seconds of one core" if options.cpu else "")
    print(f"\n{machine.describe()}; others used {others:.0%}; {options.mib} MiB, {how}\n")
    print(show(found))
    print(f"\nGPU: {gpu}")


if __name__ == "__main__":
    main()
