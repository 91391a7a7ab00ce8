"""Programs that train the same model on emulated home links, for loss.py and overlap.py."""

from __future__ import annotations

import os
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from thinwire.node.training.batches import Batches, Split, shards_of, split
from thinwire.node.training.corpus import open_corpus
from thinwire.node.training.models import transformer
from thinwire.node.training.models.tokenizer import load_tokenizer

from benchmarks.support import machine
from benchmarks.support.actors import Actor, Lighthouse, close, free_port
from benchmarks.support.homelinks import HomeLinks

SHARDS = 256

RUN = """[run]
name = "learning"
seed = {seed}
rounds = {rounds}
[model]
kind = "custom"
[outer]
sync_every = {H}
{outer}
[exchange]
codec = "{codec}"
"""


@dataclass(frozen=True)
class Task:
    """Training that all programs have in common. `pace`: least seconds of a step."""

    peers: int
    layers: int
    width: int
    context: int
    batch: int
    lr: float
    warmup: int
    seed: int
    pace: float = 0.0

    @property
    def model(self) -> dict[str, Any]:
        """Sizes of the built-in model."""
        return {"layers": self.layers, "width": self.width, "heads": 4, "context": self.context}


@dataclass(frozen=True)
class Program:
    """One way to train. `outer`: keys of [outer], None for other programs; `part`: our rounds in one window of H steps."""

    name: str
    script: str
    codec: str = ""
    outer: str | None = None
    part: int = 1
    options: dict[str, Any] = field(default_factory=dict)


@dataclass
class Run:
    """Result of a training: begin and end (monotonic clock), report of each peer, CPU seconds of peers and of the emulation.

    foreign: share of the machine that other processes used.
    """

    began: float
    ended: float
    answers: list[dict[str, Any]]
    cpu: float
    emulation: float
    foreign: float
    snapshots: list[Path]


def prepare(task: Task, steps: int, place: Path) -> Split:
    """Write every peer's batches to `place`; return the text, cut into shards."""
    cut = split(open_corpus(None, load_tokenizer("bytes", Path()), place), task.context, task.seed, SHARDS, 0.02)
    peers = [bytes([rank]) * 32 for rank in range(task.peers)]
    for rank, me in enumerate(peers):
        batches = Batches(cut, task.batch, shards_of(task.seed, SHARDS, peers, me))
        tokens = np.empty((steps, task.batch, task.context + 1), np.uint8)
        for row in tokens:
            inputs, targets = batches.next()
            row[:, :-1], row[:, -1] = inputs.numpy(), targets[:, -1].numpy()
        np.save(place / f"tokens-{rank}.npy", tokens)
    return cut


def losses(task: Task, cut: Split, snapshots: Path, samples: int) -> list[float]:
    """Held-out loss of every snapshot, nats per byte."""
    model = transformer.Transformer(transformer.ModelConfig(256, **task.model), task.seed).eval()
    batches, found = list(cut.evaluation(64, samples // 64)), []
    rows: NDArray[np.float32]
    for rows in np.load(snapshots):
        flat = torch.from_numpy(rows)
        with torch.no_grad():
            for parameter in model.parameters():
                parameter.copy_(flat[: parameter.numel()].view_as(parameter))
                flat = flat[parameter.numel() :]
            found.append(float(np.mean([model(*batch)[1].item() for batch in batches])))
    return found


def train(
    task: Task, program: Program, links: HomeLinks | None, place: Path, *, steps: int, windows: int, every: int, H: int
) -> Run:
    """Train `windows` times H steps, or `steps` steps, with a snapshot at every `every`-th exchange (0: none)."""
    home = place / f"{program.name}-{time.monotonic_ns()}"
    home.mkdir()
    toml = ""
    if program.outer is not None:
        rounds = windows * program.part
        text = RUN.format(seed=task.seed, rounds=rounds, H=H, outer=program.outer, codec=program.codec)
        if "noloco" not in program.outer:
            text += f"min_peers = {task.peers}\n"
        toml = str(home / "run.toml")
        Path(toml).write_text(text)
    hosts = [site.host for site in links.sites] if links else ["127.0.0.1"] * task.peers
    prefixes = [site.prefix for site in links.sites] if links else [()] * task.peers
    common = {
        "peers": task.peers,
        "hosts": hosts,
        "links": links is not None,
        "port": free_port(),
        "source": transformer.__file__,
        "model": task.model,
        "seed": task.seed,
        "batch": task.batch,
        "lr": task.lr,
        "warmup": task.warmup,
        "clip": 1.0,
        "every": every,
        "pace": task.pace,
        "steps": steps,
        "rounds": windows,
        "H": H,
        **program.options,
    }
    snapshots = [home / f"snapshots-{rank}.npy" for rank in range(task.peers)]
    with _meeting(program, hosts[0], prefixes[0], common):
        python = common.pop("python", sys.executable)
        actors = [
            Actor(
                program.script,
                python=python,
                prefix=prefixes[rank],
                rank=rank,
                tokens=str(place / f"tokens-{rank}.npy"),
                home=str(home / str(rank)),
                toml=None if program.outer is None else "" if rank else toml,
                snapshots=str(snapshots[rank]),
                **common,
            )
            for rank in range(task.peers)
        ]
        try:
            return _run(actors, program, links, snapshots)
        finally:
            close(actors)


def _run(actors: list[Actor], program: Program, links: HomeLinks | None, snapshots: list[Path]) -> Run:
    for actor in actors:
        actor.receive()
    first, others = actors[0], actors[1:]
    first.say(invite="")
    invite = ""
    if program.outer is not None:
        invite = first.receive()["invite"]
        first.receive()  # it has the state that the others fetch
    for actor in others:
        actor.say(invite=invite)
    for actor in others if program.outer is not None else actors:
        while "ready" not in actor.receive():
            pass
    pids = machine.family(actor.process.pid for actor in actors)
    emulation = links.load() if links else machine.Load([])
    own = machine.Load([*pids, os.getpid()])
    cpu = machine.Load(pids)
    began = time.monotonic() + 0.1
    for actor in actors:
        actor.say(at=began)
    answers = [actor.receive(7200) for actor in actors]
    ended = max(answer["end"] for answer in answers)
    return Run(began, ended, answers, cpu.spent(), emulation.spent(), own.foreign(), snapshots)


@contextmanager
def _meeting(program: Program, host: str, prefix: tuple[str, ...], common: dict[str, Any]) -> Iterator[None]:
    """torchft's lighthouse, with the first peer."""
    if program.script != "comparison/torchft_learner.py":
        yield
        return
    with Lighthouse(common["python"], host, prefix=prefix) as lighthouse:
        common["lighthouse"] = lighthouse.address
        yield
