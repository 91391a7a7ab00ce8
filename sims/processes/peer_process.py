"""Actor: a separate daemon process that plays one peer of a scenario, at the given pace.

    python -m thinwire.sims.processes.peer_process PART.json

It loads its slow modules, prints "loaded", and waits for a line on its input: an invite, or "found", with which it
founds the run. The process ends when its input ends, so no actor outlives its player.
"""

from __future__ import annotations

import asyncio
import sys
from dataclasses import replace
from pathlib import Path

import msgspec
import uvloop
from thinwire.compression.compile_kernels import warm_up
from thinwire.node.daemon.daemon import Daemon
from thinwire.node.daemon.options import Options
from thinwire.node.peer.bootstrap import RunEntry, arriving, founding
from thinwire.node.runtime.console import set_up_logging, tell
from thinwire.node.runtime.load_settings import Config, load
from thinwire.node.runtime.parent_watch import watch
from thinwire.node.runtime.process_lock import hold
from thinwire.node.training.learner import Learner, StepReport
from thinwire.sims.peers.learners import DelegatingLearner, StubLearner
from thinwire.swarm.identity.errors import HintedError
from thinwire.swarm.manifest.manifest import Manifest
from thinwire.swarm.manifest.parser import parse
from thinwire.swarm.membership.presets import WAN


class ActorPart(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """Settings of one actor, read from its JSON file.

    `manifest`: file of the run. `data`: file to train on, for a real model. `port`, `ports`: listening ports at `host`;
    `advertise`: address for other peers.
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

    def config(self) -> Config:
        """Return the settings of the daemon. Memory is not shared, because links are emulated."""
        return load(
            {
                "name": self.name, "home": self.home, "host": self.host, "port": self.port, "advertise": self.advertise,
                "ports": f"{self.ports[0]}-{self.ports[1]}", "device": "cpu", "threads": 1,
                "data": Path(self.data), "site": self.site, "shared_memory": False,
            },
            {},
        )  # fmt: skip


class PacedLearner(DelegatingLearner):
    """Learner whose inner steps take at least `seconds` each."""

    def __init__(self, inner: Learner, seconds: float) -> None:
        super().__init__(inner)
        self._seconds = seconds

    async def steps(self, n: int, stop: asyncio.Event) -> StepReport:
        """Make steps one after the other; wait for the rest of each step's time, unless `stop` is set."""
        loop = asyncio.get_running_loop()
        began, made, tokens, losses = loop.time(), 0, 0, 0.0
        last = float("nan")
        while made < n and not stop.is_set():
            done = await self.inner.steps(1, stop)
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


class Actor(Daemon):
    """Daemon that plays one peer of a scenario, as an `ActorPart` describes it."""

    def __init__(self, entry: RunEntry, part: ActorPart) -> None:
        super().__init__(entry, Options(log="plain", wait_for=part.wait_for), here=Path(part.home))
        self._part = part

    async def _learn(self, manifest: Manifest) -> Learner:
        part = self._part
        if part.compute == "stub":
            return StubLearner(manifest, part.parameters, part.seed, part.step_seconds)
        return PacedLearner(await super()._learn(manifest), part.step_seconds)


def main(file: Path) -> int:
    """Load, wait for the start line, and play the part. Returns the exit code."""
    part = msgspec.json.decode(file.read_bytes(), type=ActorPart)
    config = part.config()
    warm_up(parse(Path(part.manifest).read_bytes()).exchange.codec)
    print("loaded", flush=True)
    start_line = sys.stdin.readline().strip()
    if not start_line:
        return 0
    watch(sys.stdin.fileno())
    set_up_logging("plain", config.directories.log)
    try:
        file = Path(part.manifest)
        entry = (
            founding(file.read_bytes(), config, file.name) if start_line == "found" else arriving(start_line, config)
        )
        # The members count as remote, although all addresses belong to this machine.
        with hold(config.directories.lock):
            return uvloop.run(Actor(replace(entry, preset=WAN), part).run())
    except HintedError as error:
        tell(str(error), error.hint)
        return error.exit_code


if __name__ == "__main__":
    sys.exit(main(Path(sys.argv[1])))
