"""An own training loop in a swarm: two processes, each with half of scikit-learn's digits, train one network.

    python examples/own_loop.py

The first process founds the run and starts the second one, which joins it with the invite, as a process anywhere would.
"""

import subprocess
import sys
import tempfile
from pathlib import Path

import thinwire
import torch
from sklearn.datasets import load_digits
from torch import nn

torch.set_num_threads(1)
digits = load_digits()
x, y = torch.tensor(digits.data / 16, dtype=torch.float32), torch.tensor(digits.target)
number = torch.arange(len(x))
test, known = number[number % 5 == 0], number[number % 5 > 0]


def train(swarm: thinwire.Swarm, half: int) -> str:
    mine = known[half::2]
    model = nn.Sequential(nn.Linear(64, 64), nn.ReLU(), nn.Linear(64, 10))
    optimizer = swarm.wrap(model, torch.optim.AdamW(model.parameters(), lr=3e-3), batch=32)
    while not swarm.done:
        for batch in mine[torch.randperm(len(mine))].split(32):
            loss = nn.functional.cross_entropy(model(x[batch]), y[batch])
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()  # every 25th time this exchanges what was learned with the other process
    accuracy = (model(x[test]).argmax(1) == y[test]).float().mean().item()
    return f"process {half + 1}: test accuracy {accuracy:.3f} after round {swarm.round}, digest {swarm.digest[:16]}"


def second(invite: str, home: str) -> None:
    with thinwire.join(invite, home=home, host="127.0.0.1", port=0) as swarm:  # the first process has the default port
        print(train(swarm, half=1))


def first(home: Path) -> None:
    with thinwire.join(Path(__file__).with_suffix(".toml"), home=home / "1", host="127.0.0.1") as swarm:
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
