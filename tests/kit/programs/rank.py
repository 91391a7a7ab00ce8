"""One rank of a peer of two processes: `rank.py MODE RANK STORE MANIFEST HOME`."""

from __future__ import annotations

import hashlib
import os
import signal
import sys
import time
from datetime import timedelta

import thinwire
import torch
import torch.distributed as dist
from thinwire.node.api import ranks
from torch import nn
from torch.nn.parallel import DistributedDataParallel


def train(swarm: thinwire.Swarm, model: nn.Module, rank: int, mode: str) -> None:
    trained = model if mode == "each" else DistributedDataParallel(model)
    optimizer = swarm.wrap(trained, torch.optim.SGD(model.parameters(), lr=0.1), batch=4 + rank)
    generator = torch.Generator().manual_seed(rank)
    while not swarm.done:
        x = torch.randn(4 + rank, 6, generator=generator)
        optimizer.zero_grad()
        loss = nn.functional.cross_entropy(trained(x), x[:, :3].argmax(1))
        loss.backward()
        if mode == "killed" and swarm.round == 2 and swarm.step % 2 and rank == 1:  # the other one exchanges now
            os.kill(os.getpid(), signal.SIGKILL)
        optimizer.step(loss=loss)
        state = b"".join(value.detach().numpy().tobytes() for value in model.parameters())
        last = swarm.last
        counted = (last.round, last.weight, last.contributors) if last is not None else None
        print(f"step {swarm.round} {hashlib.sha256(state).hexdigest()[:12]} {counted} at {swarm.step}", flush=True)


def fail(manifest: str, home: str, rank: int) -> None:
    """Join with different statistics on the ranks; then with ranks that do not match, so that both must end with an error."""
    for case in ("statistics", "models", "frozen", "apart", "changed"):
        torch.manual_seed(0)
        model: nn.Module = nn.Linear(6, 4, bias=False)
        if case == "statistics":
            model = nn.Sequential(model, nn.BatchNorm1d(4))
        model.requires_grad_(case != "frozen" or rank == 0)
        if case == "models" and rank:
            model = nn.Linear(4, 6, bias=False)
        try:
            with thinwire.join(manifest, home=f"{home}-{case}", group=dist.group.WORLD) as swarm:
                optimizer = swarm.wrap(
                    model, torch.optim.SGD(model.parameters(), lr=0.0 if case == "statistics" else 0.1)
                )
                if case == "changed" and rank:
                    model.weight = nn.Parameter(torch.zeros(5, 6))
                while not swarm.done:
                    optimizer.zero_grad()
                    (model(torch.ones(2, 6)).sum() * (rank + 1 if case == "apart" else 1)).backward()
                    for buffer in model.buffers():
                        buffer.fill_(rank + 1)
                    optimizer.step()
                if case == "statistics":
                    print("statistics:", *(buffer.flatten()[0].item() for buffer in model.buffers()), flush=True)
        except (thinwire.GroupError, ValueError) as error:
            print(f"{case}: {type(error).__name__}: {error}; {getattr(error, 'hint', '')}", flush=True)


def main(mode: str, rank: int, store: str, manifest: str, home: str) -> None:
    dist.init_process_group(
        "gloo", init_method=f"file://{store}", rank=rank, world_size=2, timeout=timedelta(seconds=120)
    )
    ranks.JOIN_SECONDS = 5.0 if mode == "missing" else 60.0
    if mode == "missing" and rank == 1:
        time.sleep(60)
        return
    if mode == "fail":
        fail(manifest, home, rank)
        return
    torch.manual_seed(rank)
    model = nn.Sequential(nn.Linear(6, 8), nn.BatchNorm1d(8), nn.ReLU(), nn.Linear(8, 3))
    group = None if mode == "alone" else dist.new_group([rank]) if mode == "each" else dist.group.WORLD
    target = "tw1-nonsense" if mode == "refused" else manifest
    try:
        with thinwire.join(target, home=f"{home}-{rank}" if mode == "each" else home, group=group) as swarm:
            if rank and mode == "train":
                try:
                    print(swarm.invite)
                except thinwire.GroupError as error:
                    print(f"invite: {error}", flush=True)
            train(swarm, model, rank, mode)
            state = b"".join(value.numpy().tobytes() for value in model.state_dict().values())
            print(f"state {hashlib.sha256(state).hexdigest()}")
            if rank == 0:
                print(f"digest {swarm.digest}", flush=True)
        dist.destroy_process_group()
    except thinwire.HintedError as error:
        print(f"{type(error).__name__}: {error}\nhint: {error.hint}", flush=True)
        raise SystemExit(error.exit_code) from None


if __name__ == "__main__":
    main(sys.argv[1], int(sys.argv[2]), *sys.argv[3:])
