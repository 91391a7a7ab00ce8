"""A daemon that reports its memory: daemon_peer.py start RUN.toml … or join INVITE …, as the command line.

Writes lines of JSON to stderr: `base`, bytes resident at the end of the second step, with gradients and moments, and,
once a second and at the end, `peak`, the most since then; both with the memory that is swapped out. On a GPU also
`gpu_base` and `gpu_peak`, bytes of torch's allocator: the first is the peak of the two steps, with gradients and
activations.

With the environment variable TIGHT set, the daemon finds no memory for copies for checkpoints.
"""

import json
import os
import sys
import threading
import time
from typing import Any

import torch
from thinwire.node.cli import main
from thinwire.node.daemon import daemon
from thinwire.node.peer import bootstrap
from thinwire.node.training.local_learner import build_learner

from benchmarks.support import machine


def measured(*arguments: Any, **options: Any) -> Any:
    """Prepare the training, make two steps, and report the memory that they take."""
    training = build_learner(*arguments, **options)
    found = {"parameters": training.layout.total}

    def after_step(*arguments: Any) -> None:
        now = machine.memory(os.getpid())
        found["base"] = now.resident + now.swapped

    hook = training.trainer.optimizer.register_step_post_hook(after_step)
    training.trainer.run_steps(2)
    hook.remove()
    if torch.cuda.is_initialized():
        found["gpu_base"] = torch.cuda.max_memory_allocated()
        torch.cuda.reset_peak_memory_stats()
    print(json.dumps(found), file=sys.stderr)
    machine.forget_peak(os.getpid())
    threading.Thread(target=PEAK.keep_reporting, daemon=True).start()
    return training


class Peak:
    """The most memory of this process since `base` was measured.

    The kernel knows the peak of resident memory only. So once pages were swapped out, the largest of 20 samples a second
    counts.
    """

    def __init__(self) -> None:
        self._swapped, self._most = False, 0

    def sample(self) -> None:
        """Compare the memory and swap in use now with the most so far."""
        now = machine.memory(os.getpid())
        self._swapped |= now.swapped > 0
        self._most = max(self._most, now.resident + now.swapped)

    def report(self) -> None:
        """Write the peaks so far."""
        self.sample()
        peaks = {"peak": self._most if self._swapped else machine.memory(os.getpid()).peak}
        if torch.cuda.is_initialized():
            peaks["gpu_peak"] = torch.cuda.max_memory_allocated()
        print(json.dumps(peaks), file=sys.stderr)

    def keep_reporting(self) -> None:
        """Report once a second, for benchmarks that kill the daemon."""
        while True:
            for _ in range(20):
                time.sleep(0.05)
                self.sample()
            self.report()


PEAK = Peak()


if __name__ == "__main__":
    if os.environ.get("TIGHT"):
        bootstrap.spare_memory = lambda cgroup=None: 0  # type: ignore
    daemon.build_learner = measured  # type: ignore[attr-defined]  # a name that it imports
    code = main.main(sys.argv[1:])
    PEAK.report()
    raise SystemExit(code)
