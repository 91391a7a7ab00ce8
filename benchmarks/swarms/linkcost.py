"""Time to a held-out loss on home links, beside that of the same peers on links without cost, in virtual time.

    python -m benchmarks.swarms.linkcost             # 50 Mbit/s down, 10 up, 60 ms; ten minutes on one core
    python -m benchmarks.swarms.linkcost --only sparseloco --models 124e6:1 5e6:0.25

Membership, agreement, exchange and training loop are the product's code; the network is simulated. A byte language model
really trains, on the demo's text; an inner step takes a given time, other computations take none. Each byte of a payload counts
on the links as often as the stated model is larger than the trained one, while control messages have their real size. The
loss is that of the outer parameters, on a line between the two commits around it; time counts from the first inner step.
"steps/s" is the share for all steps, whatever their loss: both are equal where both kinds of links lead to the same parameters.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import math
import time
from collections.abc import Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, field
from functools import cache
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any
from unittest.mock import patch

import torch
from blake3 import blake3
from thinwire.collectives.costs.access_links import MBIT
from thinwire.collectives.outcome import Outcome
from thinwire.collectives.rounds.data_planes.allgather import payload_pieces
from thinwire.collectives.topology import shards
from thinwire.compression.core.types import Floats
from thinwire.node.training.learner import StepReport
from thinwire.node.training.local_learner import Computing, LocalLearner, build_learner
from thinwire.sims.engine import virtual_loop
from thinwire.sims.network.link import Gateway
from thinwire.sims.network.network import SimNet
from thinwire.sims.network.translator import Translator
from thinwire.sims.peers.learners import TorchLearner
from thinwire.sims.peers.machine import Machine, SimLearner
from thinwire.sims.scenario.scenario import PeerSpec
from thinwire.swarm.identity.admission_token import Inviter
from thinwire.swarm.identity.identity import Identity
from thinwire.swarm.identity.invite import Invite, Seed
from thinwire.swarm.identity.stage_claim import Seat
from thinwire.swarm.manifest.manifest import Manifest
from thinwire.swarm.manifest.parser import SignedManifest, parse, sign
from thinwire.swarm.membership.presets import WAN

from benchmarks.support import machine
from benchmarks.training.loss import reached

MANIFEST = """
[run]
seed = {seed}
rounds = {rounds}
[model]
layers = {layers}
width = {width}
context = {context}
[inner]
lr = {lr}
batch = {batch}
[outer]
sync_every = {H}
{outer}
[exchange]
{exchange}
"""

SPARSE = 'codec = "topk(k=64,chunk=4096)|2bit|rice"'
INT4 = 'codec = "int4(block=256)"'
STREAMING = 'method = "streaming"'

METHODS: Mapping[str, tuple[str, str]] = {
    "diloco, int8": ('method = "diloco"', ""),
    "sparseloco": ('method = "sparseloco"', ""),
    "streaming, int4, overlap 1": (f"{STREAMING}\noverlap = 1", INT4),
    "streaming, int4": (STREAMING, INT4),
    "streaming, int4, overlap 10": (f"{STREAMING}\noverlap = 10", INT4),
    "streaming, sparse, overlap 1": (f"{STREAMING}\noverlap = 1", SPARSE),
    "streaming, sparse": (STREAMING, SPARSE),
    "streaming, sparse, overlap 10": (f"{STREAMING}\noverlap = 10", SPARSE),
    "eager, int4": ('method = "eager"', INT4),
    "noloco, int4": ('method = "noloco"', INT4),
}
"""Name -> keys of [outer] and of [exchange]."""

FREE = 1e15
"""Bytes per second of a link without cost."""

SAMPLES = 128
"""Held-out sequences on which the outer parameters are evaluated."""


@dataclass(frozen=True)
class Links:
    """Links of every peer: bytes/s up and down, and seconds of one way."""

    up: float = FREE
    down: float = FREE
    latency: float = 1e-6


@dataclass(frozen=True)
class Case:
    """One training: keys of [outer] and [exchange], and the model that it stands for."""

    outer: str
    exchange: str
    H: int
    rounds: int
    parameters: float
    step: float


@dataclass
class Course:
    """Course of one training, as the first peer sees it.

    began: when its first inner step began. curve: (seconds since then, held-out loss) of each commit. sent: its bytes up
    until then. states: hashes of the outer parameters. lost: rounds that did not commit, or not with all peers.
    """

    began: float = math.nan
    curve: list[tuple[float, float]] = field(default_factory=list)
    sent: list[int] = field(default_factory=list)
    states: list[bytes] = field(default_factory=list)
    lost: int = 0


class Judge:
    """Held-out loss of outer parameters, computed once for each state."""

    def __init__(self, learner: LocalLearner) -> None:
        self.learner = learner
        self._known: dict[bytes, float] = {}

    def loss(self, digest: bytes, theta: Floats) -> float:
        """Return the loss in nats per byte of parameters with this digest."""
        if digest not in self._known:
            self.learner.write(theta)
            batch = self.learner.manifest.inner.batch
            self._known[digest] = self.learner.trainer.evaluate(self.learner.split.evaluation(batch, SAMPLES // batch))
        return self._known[digest]


class _Learner(TorchLearner):
    """Learner that notes when the first inner step of a course began."""

    def __init__(self, course: Course, *given: Any) -> None:
        super().__init__(*given)
        self._course = course

    async def steps(self, n: int, stop: asyncio.Event) -> StepReport:
        if math.isnan(self._course.began):
            self._course.began = virtual_loop.current().time()
        return await super().steps(n, stop)


class HomeSwarm:
    """Peers that train over simulated links: what their machines need of the world."""

    def __init__(
        self, signed: SignedManifest, links: Links, case: Case, peers: int, judge: Judge, folder: Path
    ) -> None:
        self.loop, self.preset, self.seed, self.folder = virtual_loop.current(), WAN, 1, folder
        self.signed, self.manifest = signed, signed.verify()
        self.run_id = self.manifest.run_id(identity(0).public_key)
        self.net = SimNet(1, latency=links.latency, payload_factor=case.parameters / judge.learner.layout.total)
        self.gateways: Mapping[str, Gateway] = {}
        self.translators: Mapping[str, Translator] = {}
        specs = (PeerSpec(index, f"peer-{index}", "home", case.step, links.up, links.down) for index in range(peers))
        self.machines: Sequence[Machine] = [Machine(self, spec, identity(spec.index)) for spec in specs]
        self.course, self._judge, self._step = Course(), judge, case.step
        self._over: asyncio.Future[None] = self.loop.create_future()

    async def play(self) -> Course:
        """Run until the first peer has made the run's last round; return its course."""
        for one in self.machines:
            one.boot()
        await self._over
        for one in self.machines:
            one.kill("the end", crash=False)
        return self.course

    # Interface of machines

    def contacts(self, me: int) -> Invite:
        """Return an invite that names the first peer."""
        first = self.machines[0]
        invite = Invite(self.run_id, (Seed(first.address, first.identity.transport_public),))
        policy = self.manifest.admission.policy(self.run_id, first.identity.public_key)
        return Inviter(first.identity, b"", policy).invite(invite)

    def learner(self, machine: Machine, manifest: Manifest) -> SimLearner:
        """Return a learner that trains on the demo's text and notes the first step."""
        return _Learner(self.course, manifest, None, self.folder, self._step)

    def stage(self, machine: Machine, manifest: Manifest, vocab: int, seat: Seat) -> SimLearner:
        """Raise: there are no stages."""
        raise NotImplementedError

    def wait_for(self, machine: Machine) -> int:
        """Return the number of peers that the founder waits for."""
        return len(self.machines) if not machine.index else 1

    def event(self, machine: Machine, kind: str, fields: Mapping[str, Any]) -> None:
        """Count rounds that did not commit."""
        self.course.lost += kind == "uncommitted"

    def committed(self, machine: Machine, outcome: Outcome) -> None:
        """Judge the outer parameters of the first peer."""
        process = machine.process
        if machine.index or process is None or process.transport is None:
            return
        replica, course = process.peer.replica, self.course
        course.lost += len(outcome.contributors) < min(len(self.machines), self.manifest.exchange.min_peers)
        course.curve.append((self.loop.time() - course.began, self._judge.loss(replica.digest, replica.theta)))
        course.sent.append(process.transport.totals()[0])
        course.states.append(blake3(replica.theta.tobytes()).digest())
        if replica.round >= self.manifest.run.rounds and not self._over.done():
            self._over.set_result(None)

    def booted(self, machine: Machine) -> None:
        """Do nothing."""

    def ended(self, machine: Machine, reason: str, failure: BaseException | None) -> None:
        """Fail if a process ends before the run."""
        if failure is not None and not self._over.done():
            self._over.set_exception(failure)


@cache
def identity(index: int) -> Identity:
    """Return the identity of a peer."""
    return Identity.generate(index.to_bytes(32, "big"))


def train(case: Case, links: Links, judges: dict[str, Judge], options: argparse.Namespace, folder: Path) -> Course:
    """Play one training."""
    shape = {name: getattr(options, name) for name in ("seed", "layers", "width", "context", "lr", "batch")}
    text = MANIFEST.format(**shape, rounds=case.rounds, H=case.H, outer=case.outer, exchange=case.exchange)
    signed = sign(text.encode(), identity(0))

    async def play() -> Course:
        # A small model has as many pieces and chunks as a large one, or nearly: the links carry one after the other.
        stack.enter_context(patch.object(payload_pieces, "LEAST", 256))
        stack.enter_context(patch.object(shards, "MIN_CHUNK", 512))
        if text not in judges:
            judges[text] = Judge(
                build_learner(
                    signed.verify(), Computing("cpu", 1), data=None, cache=folder, here=folder, clock=time.perf_counter
                )
            )
        return await HomeSwarm(signed, links, case, options.peers, judges[text], folder).play()

    with ExitStack() as stack:
        return virtual_loop.run(play(), seed=1, limit=1e7)


def compare(
    name: str, model: tuple[float, float], judges: dict[str, Judge], options: argparse.Namespace, folder: Path
) -> dict[str, Any]:
    """Play one method over both kinds of links; return a row of the table."""
    (outer, exchange), (parameters, step) = METHODS[name], model
    spec = parse(f"[outer]\nsync_every = {options.H}\n{outer}\n[exchange]\n{exchange}").outer
    rounds = options.windows * options.H // spec.round_steps
    exchange += "" if spec.gossip else f"\nmin_peers = {options.peers}"
    case = Case(outer, exchange, options.H, rounds, parameters, step)
    home = Links(options.up * MBIT, options.down * MBIT, options.rtt / 2e3)
    free, slow = (train(case, links, judges, options, folder) for links in (Links(), home))
    times = [reached(course.curve, options.loss) for course in (free, slow)]
    return {
        "method": name,
        "parameters": parameters,
        "step": step,
        "mb": slow.sent[-1] / len(slow.sent) / 1e6 * rounds / options.windows,
        "free": times[0],
        "home": times[1],
        "pace": free.curve[-1][0] / slow.curve[-1][0],
        "same": free.states == slow.states,
        "lost": free.lost + slow.lost,
        "last": slow.curve[-1][1],
    }


def _model(text: str) -> tuple[float, float]:
    parameters, step = text.split(":")
    return float(parameters), float(step)


def main() -> None:
    """Parse the options, play every case, print a table."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--only", nargs="+", default=list(METHODS), choices=list(METHODS))
    parser.add_argument(
        "--models",
        type=_model,
        nargs="+",
        default=[(25e6, 1.0)],
        help="PARAMETERS:SECONDS of an inner step, of the models",
    )
    parser.add_argument("--peers", type=int, default=4)
    parser.add_argument("--up", type=float, default=10.0, help="Mbit/s of every peer")
    parser.add_argument("--down", type=float, default=50.0, help="Mbit/s of every peer")
    parser.add_argument("--rtt", type=float, default=60.0, help="ms")
    parser.add_argument("--H", type=int, default=30, help="inner steps between two exchanges of a parameter")
    parser.add_argument("--windows", type=int, default=20, help="times H steps that are trained")
    parser.add_argument("--loss", type=float, default=2.4, help="nats per byte to be reached")
    parser.add_argument("--layers", type=int, default=2)
    parser.add_argument("--width", type=int, default=64)
    parser.add_argument("--context", type=int, default=64)
    parser.add_argument("--batch", type=int, default=4)
    parser.add_argument("--lr", type=float, default=4e-3)
    parser.add_argument("--seed", type=int, default=1)
    options = parser.parse_args()
    torch.set_num_threads(1)
    judges: dict[str, Judge] = {}
    rows = []
    print(
        "| method | parameters | step, s | MB up in H steps | free links, s | home links, s | share | steps/s | last loss |"
    )
    print("|---|---|---|---|---|---|---|---|---|")
    with TemporaryDirectory() as folder:
        for model in options.models:
            for name in options.only:
                rows.append(row := compare(name, model, judges, options, Path(folder)))
                print(line(row), flush=True)
    print(json.dumps({"machine": machine.describe(), "rows": rows}))


def line(row: Mapping[str, Any]) -> str:
    """Return a row of the table. A star: the outer parameters differ, so the two trainings do; lost rounds are named."""
    times = [row["free"], row["home"]]
    share = f"{times[0] / times[1]:.1%}" if all(times) else "–"
    name = row["method"] + ("" if row["same"] else " *") + (f" ({row['lost']} lost)" if row["lost"] else "")
    cells = (name, f"{row['parameters'] / 1e6:g} M", f"{row['step']:g}", f"{row['mb']:.2f}")
    cells = (*cells, *("–" if time is None else f"{time:.0f}" for time in times), share, f"{row['pace']:.1%}")
    return "| " + " | ".join((*cells, f"{row['last']:.3f}")) + " |"


if __name__ == "__main__":
    main()
