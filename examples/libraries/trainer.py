"""Trainer of the library transformers in a swarm: two processes, each with half of a text, train one language model.

    python examples/libraries/trainer.py

The first process founds the run and starts the second one, which joins it with the invite, as a process anywhere would.
Only the argument `callbacks` differs from a script for one machine.
"""

import argparse
import inspect
import subprocess
import sys
import tempfile
from pathlib import Path

import thinwire
import torch
from transformers import AutoConfig, AutoModelForCausalLM, Trainer, TrainingArguments

torch.set_num_threads(1)
text = torch.tensor(list(inspect.getsource(argparse).encode()))
pieces = [{"input_ids": piece, "labels": piece} for piece in text[: len(text) // 64 * 64].split(64)]


def train(swarm: thinwire.Swarm, half: int, directory: str) -> str:
    size = dict(n_embd=32, n_layer=1, n_head=2, n_positions=64, vocab_size=256, bos_token_id=0, eos_token_id=0)
    model = AutoModelForCausalLM.from_config(AutoConfig.for_model("gpt2", **size))
    arguments = TrainingArguments(
        output_dir=directory, num_train_epochs=100, per_device_train_batch_size=4, gradient_accumulation_steps=2,
        learning_rate=1e-2, use_cpu=True, report_to="none", save_strategy="no", logging_strategy="no", disable_tqdm=True,
    )  # fmt: skip
    mine = pieces[8 + half :: 2]
    trainer = Trainer(model, arguments, None, mine, pieces[:8], callbacks=[swarm.trainer_callback()])
    trainer.train()
    loss = trainer.evaluate()["eval_loss"]
    steps = trainer.state.global_step
    return f"process {half + 1}: loss {loss:.4f} after round {swarm.round}, {steps} steps, digest {swarm.digest[:16]}"


def second(invite: str, home: str) -> None:
    with thinwire.join(invite, home=home, host="127.0.0.1", port=0) as swarm:  # the first process has the default port
        print(train(swarm, half=1, directory=home))


def first(home: Path) -> None:
    with thinwire.join(Path(__file__).with_name("trainer.toml"), home=home / "1", host="127.0.0.1") as swarm:
        command = [sys.executable, __file__, swarm.invite, str(home / "2")]
        other = subprocess.Popen(command, stdout=subprocess.PIPE, text=True)
        print(train(swarm, half=0, directory=str(home)))
    said = other.communicate()[0]
    print(said, end="")
    print("the digests agree" if swarm.digest[:16] in said else "THE DIGESTS DIFFER")


if __name__ == "__main__":
    if sys.argv[1:]:
        second(*sys.argv[1:])
    else:
        with tempfile.TemporaryDirectory() as directory:
            first(Path(directory))
