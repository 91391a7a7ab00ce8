"""A LightningModule in a swarm: two processes, each with half of a text, train one language model.

    pip install thinwire lightning
    python examples/libraries/lightning_loop.py

`configure_optimizers` returns `Swarm.wrap(...)`: Lightning calls it when the model is on its device, and accumulates
gradients before it steps, so only real steps count in the swarm. A callback ends the Trainer with the run.
"""

import argparse
import inspect
import logging
import subprocess
import sys
import tempfile
from pathlib import Path

import lightning
import thinwire
import torch
from torch import nn
from torch.utils.data import DataLoader

torch.set_num_threads(1)
logging.getLogger("lightning.pytorch").setLevel(logging.ERROR)  # no advice about devices and workers
text = torch.tensor(list(inspect.getsource(argparse).encode()))
pairs = torch.stack((text[:-1], text[1:]), dim=1)  # each byte and the next one


class Bigrams(lightning.LightningModule):
    def __init__(self, swarm: thinwire.Swarm) -> None:
        super().__init__()
        self.swarm = swarm
        self.model = nn.Sequential(nn.Embedding(256, 32), nn.Linear(32, 256))

    def loss(self, batch: torch.Tensor) -> torch.Tensor:
        return nn.functional.cross_entropy(self.model(batch[:, 0]), batch[:, 1])

    def training_step(self, batch: torch.Tensor) -> torch.Tensor:
        return self.loss(batch)

    def configure_optimizers(self) -> torch.optim.Optimizer:
        inner = torch.optim.AdamW(self.model.parameters(), lr=1e-2)
        return self.swarm.wrap(self.model, inner, batch=2 * 256)


class EndWithRun(lightning.Callback):
    """Ends the Trainer after the last round of the run."""

    def __init__(self, swarm: thinwire.Swarm) -> None:
        self.swarm, self.batches = swarm, 0

    def on_train_batch_end(self, trainer: lightning.Trainer, *_: object) -> None:
        self.batches += 1
        trainer.should_stop = self.swarm.done


def train(swarm: thinwire.Swarm, half: int) -> str:
    loader: DataLoader[torch.Tensor] = DataLoader(pairs[1000 + half :: 2], batch_size=256, shuffle=True)  # type: ignore[arg-type]
    module, end = Bigrams(swarm), EndWithRun(swarm)
    trainer = lightning.Trainer(
        accelerator="cpu",
        max_epochs=-1,
        accumulate_grad_batches=2,
        callbacks=[end],
        logger=False,
        enable_checkpointing=False,
        enable_progress_bar=False,
        enable_model_summary=False,
    )
    trainer.fit(module, loader)
    loss = module.loss(pairs[:1000]).item()
    return f"process {half + 1}: loss {loss:.4f} after round {swarm.round}, {end.batches} batches, digest {swarm.digest[:16]}"


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
