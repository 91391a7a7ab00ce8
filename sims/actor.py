"""One peer on the stage of `real.py`: the daemon itself, in a process of its own, that learns as slowly as its part says.

    python -m thinwire.sims.actor PART.json

It loads what takes seconds to load, prints "loaded", and waits for a line on its input: an invite, or "found", with which it
founds the run. When the input ends, the process ends: no actor outlives its stage.
"""

from __future__ import annotations

import asyncio
import os
import random
import sys
import time
from dataclasses import dataclass
from pathlib import Path

import msgspec
import uvloop
from thinwire.compression.codec import Floats
from thinwire.compression.warmup import warm_up
from thinwire.node.config import load
from thinwire.node.console import set_up_logging, tell
from thinwire.node.daemon import Daemon
from thinwire.node.disk import RealDisk
from thinwire.node.fragments import Layout
from thinwire.node.learner import Learner, Share, StepReport
from thinwire.node.lock import hold
from thinwire.node.opening import Entry, arriving, founding
from thinwire.node.options import Options
from thinwire.node.peer import Doors, Peer
from thinwire.node.presence import Emit
from thinwire.node.snapshot import PrivateState
from thinwire.node.ward import watch
from thinwire.swarm.errors import HintedError
from thinwire.swarm.manifest import Manifest
from thinwire.swarm.preset import WAN

from .compute import StubLearner


class Part(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """What an actor is told.

    `manifest`: file. `data`: file to train on, where the model is real. `port`, `ports`: where it listens at `host`;
    `advertise`: where others dial.
    """

    name: str
    home: str
    manifest: str
    data: str
    host: str
    port: int
    ports: tuple[int, int]
    advertise: str
    step_seconds: float
    compute: str
    parameters: int
    seed: int
    wait_for: int
    site: str = ""


class Paced:
    """A learner whose inner steps take `seconds` each at least."""

    def __init__(self, inner: Learner, seconds: float) -> None:
        self._inner, self._seconds = inner, seconds

    @property
    def layout(self) -> Layout:
        return self._inner.layout

    def parameters(self) -> Floats:
        return self._inner.parameters()

    def read(self, start: int, stop: int, out: Floats) -> None:
        self._inner.read(start, stop, out)

    def write(self, theta: Floats, start: int = 0, keep: float = 0.0) -> None:
        self._inner.write(theta, start, keep)

    def assign(self, share: Share) -> None:
        self._inner.assign(share)

    async def steps(self, n: int, stop: asyncio.Event) -> StepReport:
        """One after the other; the time that a step does not need is waited for, and cut short by `stop`."""
        loop = asyncio.get_running_loop()
        began, made, tokens, losses = loop.time(), 0, 0, 0.0
        last = float("nan")
        while made < n and not stop.is_set():
            done = await self._inner.steps(1, stop)
            if not done.steps:
                break
            made, tokens, last, losses = made + 1, tokens + done.tokens, done.loss, losses + done.loss
            rest = began + made * self._seconds - loop.time()
            if rest > 0:
                try:
                    async with asyncio.timeout(rest):
                        await stop.wait()
                except TimeoutError:
                    pass
        return StepReport(made, losses / made if made else last, last, tokens, loop.time() - began)

    def private(self) -> PrivateState | None:
        return self._inner.private()

    def restore(self, private: PrivateState) -> bool:
        return self._inner.restore(private)

    def skip_to(self, round: int, peers: int) -> None:
        self._inner.skip_to(round, peers)


@dataclass(frozen=True, slots=True)
class Abroad(Entry):
    """Into a run whose members are far away, though all addresses are of this machine."""

    def peer(self, emit: Emit) -> Peer:
        doors = Doors(time.monotonic, time.time, random.Random(os.urandom(16)), RealDisk(), asyncio.to_thread)
        directory, site = self.config.directories.run(self.run_id), self.config.site
        return Peer(self.identity, self.run_id, doors, directory, WAN, emit, site)


class Actor(Daemon):
    """A daemon with a part."""

    def __init__(self, entry: Entry, part: Part) -> None:
        super().__init__(entry, Options(log="plain", wait_for=part.wait_for), here=Path(part.home))
        self._part = part

    async def _learn(self, manifest: Manifest) -> Learner:
        part = self._part
        if part.compute == "stub":
            return StubLearner(manifest, part.parameters, part.seed, part.step_seconds)
        return Paced(await super()._learn(manifest), part.step_seconds)


def main(file: Path) -> int:
    """Load, wait for the word, and play the part. Returns the exit code."""
    part = msgspec.json.decode(file.read_bytes(), type=Part)
    config = load(
        {
            "name": part.name, "home": part.home, "host": part.host, "port": part.port, "advertise": part.advertise,
            "ports": f"{part.ports[0]}-{part.ports[1]}", "device": "cpu", "threads": 1,
            "data": Path(part.data), "site": part.site,
        },
        {},
    )  # fmt: skip
    warm_up()
    print("loaded", flush=True)
    word = sys.stdin.readline().strip()
    if not word:
        return 0
    watch(sys.stdin.fileno())
    set_up_logging("plain", config.directories.log)
    try:
        file = Path(part.manifest)
        entry = founding(file.read_bytes(), config, file.name) if word == "found" else arriving(word, config)
        with hold(config.directories.lock):
            return uvloop.run(Actor(Abroad(entry.identity, entry.run_id, config, entry.begin), part).run())
    except HintedError as error:
        tell(str(error), error.hint)
        return error.exit_code


if __name__ == "__main__":
    sys.exit(main(Path(sys.argv[1])))
