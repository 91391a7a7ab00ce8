"""One peer of several processes: two ranks of torchrun, each with a quarter of scikit-learn's digits, and another peer.

    torchrun --nproc-per-node 2 examples/several_ranks.py           # DistributedDataParallel
    torchrun --nproc-per-node 2 examples/several_ranks.py --shard   # fully_shard (FSDP2)

The first rank founds the run and starts an ordinary peer with the other half of the digits.
"""

import hashlib
import os
import subprocess
import sys
import tempfile
from pathlib import Path

import thinwire
import torch
import torch.distributed as dist
from sklearn.datasets import load_digits
from torch import nn
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor
from torch.nn.parallel import DistributedDataParallel

torch.set_num_threads(1)
digits = load_digits()
x, y = torch.tensor(digits.data / 16, dtype=torch.float32), torch.tensor(digits.target)


def train(swarm: thinwire.Swarm, model: nn.Module, part: int, parts: int, seed: int) -> str:
    """Train on one of `parts` parts of the digits; return a hash of parameters and buffers."""
    mine, generator = torch.arange(part, len(x), parts), torch.Generator().manual_seed(seed)
    optimizer = swarm.wrap(model, torch.optim.AdamW(model.parameters(), lr=3e-3), batch=32)
    while not swarm.done:
        batch = mine[torch.randint(len(mine), (32,), generator=generator)]
        optimizer.zero_grad()
        nn.functional.cross_entropy(model(x[batch]), y[batch]).backward()
        optimizer.step()
    state = {name.removeprefix("module."): value for name, value in model.state_dict().items()}
    whole = {name: value.full_tensor() if isinstance(value, DTensor) else value for name, value in state.items()}
    return hashlib.sha256(b"".join(whole[name].numpy().tobytes() for name in sorted(whole))).hexdigest()[:16]


def network() -> nn.Module:
    return nn.Sequential(nn.Linear(64, 64), nn.BatchNorm1d(64), nn.ReLU(), nn.Linear(64, 10))


def ordinary(invite: str, home: str) -> None:
    with thinwire.join(invite, home=home, host="127.0.0.1", port=0) as swarm:
        found = train(swarm, network(), 1, 2, seed=7)
        print(f"ordinary peer: model {found}, round {swarm.round}, digest {swarm.digest[:16]}")


def ranks(home: Path, *, shard: bool) -> None:
    dist.init_process_group("gloo")
    rank, size = dist.get_rank(), dist.get_world_size()
    torch.manual_seed(1)
    model = network()
    if shard:
        fully_shard(model)
    else:
        model = DistributedDataParallel(model)
    run = Path(__file__).with_name("own_loop.toml")
    with thinwire.join(run, home=home / "1", host="127.0.0.1", port=0, group=dist.group.WORLD) as swarm:
        other = None
        if rank == 0:
            command = [sys.executable, __file__, "--invite", swarm.invite, str(home / "2")]
            other = subprocess.Popen(command, stdout=subprocess.PIPE, text=True)
        found = train(swarm, model, 2 * rank, 2 * size, seed=rank)
        print(f"rank {rank}: model {found}, round {swarm.round}", flush=True)
        if rank == 0:
            print(f"peer of {size} ranks: model {found}, round {swarm.round}, digest {swarm.digest[:16]}")
    if other is not None:
        print(other.communicate()[0], end="")
    dist.destroy_process_group()


if __name__ == "__main__":
    if sys.argv[1:2] == ["--invite"]:
        for name in ("RANK", "WORLD_SIZE", "LOCAL_RANK"):
            os.environ.pop(name, None)
        ordinary(*sys.argv[2:])
    else:
        with tempfile.TemporaryDirectory() as directory:
            ranks(Path(directory), shard="--shard" in sys.argv)
