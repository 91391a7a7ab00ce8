"""A loop with the library accelerate in a swarm: two processes, each with half of a text, train one language model.

    python examples/libraries/accelerate_loop.py

`Swarm.wrap` comes between the preparation of the model, which moves it to its device, and that of the optimizer, which
accumulates gradients: only its real steps count in the swarm.
"""

import argparse
import inspect
import subprocess
import sys
import tempfile
from pathlib import Path

import thinwire
import torch
from accelerate import Accelerator
from torch import nn
from torch.utils.data import DataLoader

torch.set_num_threads(1)
text = torch.tensor(list(inspect.getsource(argparse).encode()))
pairs = torch.stack((text[:-1], text[1:]), dim=1)  # each byte and the next one


def train(swarm: thinwire.Swarm, half: int) -> str:
    accelerator = Accelerator(cpu=True, gradient_accumulation_steps=2)
    model = nn.Sequential(nn.Embedding(256, 32), nn.Linear(32, 256))
    loader: DataLoader[torch.Tensor] = DataLoader(pairs[1000 + half :: 2], batch_size=256, shuffle=True)  # type: ignore[arg-type]
    model, loader = accelerator.prepare(model, loader)
    inner = torch.optim.AdamW(model.parameters(), lr=1e-2)
    optimizer = accelerator.prepare(swarm.wrap(accelerator.unwrap_model(model), inner, batch=2 * 256))
    batches = 0
    while not swarm.done:
        for batch in loader:
            with accelerator.accumulate(model):
                accelerator.backward(nn.functional.cross_entropy(model(batch[:, 0]), batch[:, 1]))
                optimizer.step()
                optimizer.zero_grad()
            batches += 1
            if swarm.done:
                break
    loss = nn.functional.cross_entropy(model(pairs[:1000, 0]), pairs[:1000, 1]).item()
    return (
        f"process {half + 1}: loss {loss:.4f} after round {swarm.round}, {batches} batches, digest {swarm.digest[:16]}"
    )


def second(invite: str, home: str) -> None:
    with thinwire.join(invite, home=home, host="127.0.0.1", port=0) as swarm:
        print(train(swarm, half=1))


def first(home: Path) -> None:
    with thinwire.join(Path(__file__).with_name("trainer.toml"), home=home / "1", host="127.0.0.1") as swarm:
        command = [sys.executable, __file__, swarm.invite, str(home / "2")]
        other = subprocess.Popen(command, stdout=subprocess.PIPE, text=True)
        print(train(swarm, half=0))
    said = other.communicate()[0]
    print(said, end="")
    print("the digests agree" if swarm.digest[:16] in said else "THE DIGESTS DIFFER")


if __name__ == "__main__":
    if sys.argv[1:]:
        second(*sys.argv[1:])
    else:
        with tempfile.TemporaryDirectory() as directory:
            first(Path(directory))
