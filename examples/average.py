"""Averages without any training: three processes, and one of them dies in the middle of an average.

    python examples/average.py

The first process founds a run and starts the other two, which join it with the invite, as processes anywhere would.
"""

import os
import signal
import subprocess
import sys
import tempfile
from pathlib import Path

import thinwire
import torch

torch.set_num_threads(1)


def say(line: str) -> None:
    # Three processes write to one terminal: a line and its end are written in one piece.
    print(line + "\n", end="", flush=True)


def take_part(swarm: thinwire.Swarm, number: int) -> None:
    # `least`: the average waits until all three take part.
    met = swarm.average({"loss": torch.tensor(number / 10), "parts": torch.ones(5)}, name="met", least=3, grace=60)
    say(f"process {number}: the mean loss of {len(met.contributors)} is {met.value['loss']:.2f}")

    # In the background; meanwhile this process can do something else, or be killed.
    big = swarm.start_average(torch.full((4_000_000,), 2.0**number), op="sum", name="big", grace=5)
    if number == 3:
        big.wait(0.05)
        os.kill(os.getpid(), signal.SIGKILL)
    result = big.result()
    inside = int(result.value[0])  # 2 + 4, and 8 if the third process contributed
    equal = bool((result.value == inside).all())
    say(f"process {number}: {len(result.contributors)} were in it, sum {inside}, all equal: {equal}")


def main() -> None:
    with tempfile.TemporaryDirectory() as directory:
        home = Path(directory)
        (home / "run.toml").write_text('[run]\nname = "averages"\n[model]\nkind = "custom"\n')
        with thinwire.join(home / "run.toml", home=home / "1", host="127.0.0.1") as swarm:
            others = [
                subprocess.Popen([sys.executable, __file__, swarm.invite, str(home / str(number)), str(number)])
                for number in (2, 3)
            ]
            take_part(swarm, 1)
            codes = [other.wait() for other in others]
        print(f"the others ended with {codes[0]} and {codes[1]}")


if __name__ == "__main__":
    if sys.argv[1:]:
        # The first process has the default port.
        with thinwire.join(sys.argv[1], home=sys.argv[2], host="127.0.0.1", port=0) as joined:
            take_part(joined, int(sys.argv[3]))
    else:
        main()
