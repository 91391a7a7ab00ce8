"""SIGKILL of one of six peers in an outer step: seconds to the survivors' commit; thinwire and torchft by turns.

    python -m benchmarks.exchange.kill --torchft out/torchft          6 peers, 40 MB, 20 kills of thinwire, 5 of torchft

Every peer is a process that makes outer steps without pause. A random one kills itself at a random moment of a step; time
counts from then to the last survivor's next commit. Then a new process joins while the others step on; time counts from its
first request to the end of the first step that its contribution is in; it steps by itself until then. torchft's replicas have
a heartbeat time-out of 5 s, as in their usual settings, and get a virtual environment at the path given. Each kill of torchft
has processes and a lighthouse of its own: a newcomer found no quorum with the five that were left within two minutes. A kill
after which a process is silent for a minute and a half counts as failed.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import random
import statistics
import sys
import tempfile
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager
from functools import partial
from pathlib import Path
from typing import Any

from benchmarks.exchange import outersteps
from benchmarks.support import machine
from benchmarks.support.actors import Lighthouse, torchft_python

NORMAL = 3
"""Steps of all peers before each kill."""

DEADLINE = 90.0
"""Seconds of silence after which a process of torchft is stuck."""

MOMENTS = (0.2, 0.7)
"""Earliest and latest moment of a kill, in parts of a usual step."""


def main() -> None:
    """Parse the options, kill by turns, print."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--peers", type=int, default=6)
    parser.add_argument("--mb", type=float, default=40.0)
    parser.add_argument("--codec", default="int8(block=256)")
    parser.add_argument("--kills", type=int, default=20, help="kills of thinwire")
    parser.add_argument("--their-kills", type=int, default=5, help="kills of torchft, which take longer")
    parser.add_argument("--torchft", type=Path, help="virtual environment of torchft; without it only ours runs")
    parser.add_argument("--heartbeat", type=float, default=5.0, help="seconds of silence that torchft takes for death")
    parser.add_argument("--seed", type=int, default=1)
    options = parser.parse_args()
    rows = []
    with contextlib.ExitStack() as stack:
        place = Path(stack.enter_context(tempfile.TemporaryDirectory()))
        mine = partial(ours, place / "ours", options.mb, options.codec)
        swarms = [(KilledSwarm(mine, options.peers, random.Random(options.seed), newcomers=True), options.kills)]
        if options.torchft:
            found = partial(theirs, torchft_python(options.torchft), options.heartbeat, options.mb)
            swarm = KilledSwarm(found, options.peers, random.Random(options.seed), newcomers=False)
            swarms.append((swarm, options.their_kills))
        for swarm, _ in swarms:
            stack.callback(swarm.close)
        for number in range(max(kills for _, kills in swarms)):
            for swarm, kills in swarms:
                # The kills of torchft are spread over those of thinwire, so that both programs meet the same load.
                if number * kills // swarms[0][1] < (number + 1) * kills // swarms[0][1]:
                    result = swarm.kill()
                    print(f"{number + 1}: {swarm.name:16} {result}", file=sys.stderr)
        rows = [swarm.summary() for swarm, _ in swarms]
    report = {"machine": machine.describe(), "peers": options.peers, "mb": options.mb, "rows": rows}
    print(f"\n{report['machine']}; {options.peers} peers, {options.mb:g} MB\n")
    print(
        "| program | kills | failed | normal step s | kill to commit s | worst | minus a step s "
        "| request to contribution s | worst |"
    )
    print("|---|---|---|---|---|---|---|---|---|")
    keys = ("program", "kills", "failed", "normal", "commit", "commit_worst", "beyond", "join", "join_worst")
    for row in rows:
        cells = [row[key] for key in keys]
        print("| " + " | ".join(map(str, cells)) + " |")
    print("\n" + json.dumps(report, indent=1))


@contextlib.contextmanager
def ours(place: Path, mb: float, codec: str) -> Iterator[outersteps.Steps]:
    """thinwire."""
    program = outersteps.ours(sys.executable, place, mb, codec)
    try:
        yield program
    finally:
        program.close()


@contextlib.contextmanager
def theirs(python: str, heartbeat: float, mb: float) -> Iterator[outersteps.Steps]:
    """torchft, with a new lighthouse."""
    with Lighthouse(python, heartbeat=heartbeat) as lighthouse:
        program = outersteps.torchft(python, lighthouse, mb, DEADLINE)
        try:
            yield program
        finally:
            program.close()


class KilledSwarm:
    """Peers of one program, of which each turn kills one.

    `newcomers`: a new peer replaces it. Otherwise the next turn founds a new swarm. `found`: context that founds one.
    """

    program: outersteps.Steps

    def __init__(
        self,
        found: Callable[[], AbstractContextManager[outersteps.Steps]],
        peers: int,
        rng: random.Random,
        *,
        newcomers: bool,
    ) -> None:
        self.name = ""
        self._found, self._peers, self._rng, self._newcomers = found, peers, rng, newcomers
        self._normal: list[float] = []
        self._commits: list[float] = []
        self._joins: list[float] = []
        self._failures: list[str] = []
        self._resources = contextlib.ExitStack()
        self._open = False

    def open(self) -> None:
        """Found the swarm, and make steps until memory is allocated and all peers contribute to every step."""
        self.program = self._resources.enter_context(self._found())
        self.name, self._open = self.program.name, True
        self.program.open(self._peers)
        known = len(self._normal)
        for _ in range(2 * NORMAL):
            self._step()
        del self._normal[known:]

    def close(self) -> None:
        """End all of its processes."""
        self._open = False
        self._resources.close()

    def _step(self, *, usual: bool = True) -> int:
        """Make a step of the members; return the number of contributors. A step with all of them counts as `usual`."""
        moment, answers = self.program.step()
        count: int = min(answer["contributors"] for answer in answers)
        if usual and count == len(self.program.actors):
            self._normal.append(max(answer["end"] for answer in answers) - moment)
        return count

    def kill(self) -> str:
        """Make some steps, one with a kill, and let a newcomer join; return the result, or the failure, as text.

        A swarm without newcomers is ended afterwards. Raises RuntimeError for a failure of one with newcomers.
        """
        try:
            if not self._open:
                self.open()
            return self._kill()
        except RuntimeError as error:
            if self._newcomers:
                raise
            self._failures.append(str(error))
            return f"failed: {error}"
        finally:
            if not self._newcomers:
                self.close()

    def _kill(self) -> str:
        program, newcomer = self.program, None
        if self._newcomers:
            newcomer = program.load()  # it takes seconds of a core, so it is over before we measure
            program.actors.append(newcomer)  # so that `close` ends it after any error
            newcomer.receive()
            program.actors.remove(newcomer)
        for _ in range(NORMAL):
            self._step()
        victim = self._rng.choice(program.actors)
        die = statistics.median(self._normal) * self._rng.uniform(*MOMENTS)
        moment, answers = program.step(victim, die)
        program.actors.remove(victim)
        message = victim.receive()
        died = (message if "dies" in message else victim.receive())["dies"]  # it may have ended the step before
        victim.close()
        self._commits.append(max(answer["end"] for answer in answers) - died)
        result = f"killed after {died - moment:.3f} s, commit after {self._commits[-1]:.3f} s"
        if newcomer is None:
            return result
        newcomer.say(invite=program.invite, alone=True)
        newcomer.receive()
        # Usual steps have no newcomer that takes the processor for its arrival.
        while newcomer.process.poll() is None and self._step(usual=False) <= len(program.actors):
            pass
        began = newcomer.receive()["began"]
        self._joins.append(newcomer.receive()["end"] - began)
        program.actors.append(newcomer)
        return f"{result}, in a step after {self._joins[-1]:.3f} s"

    def summary(self) -> dict[str, Any]:
        """Medians, and the worst."""

        def of(what: Callable[[list[float]], float], seconds: list[float]) -> float | str:
            return round(what(seconds), 3) if seconds else "-"

        beyond = [commit - statistics.median(self._normal) for commit in self._commits]
        return {
            "program": self.name,
            "kills": len(self._commits),
            "failed": len(self._failures),
            "normal": of(statistics.median, self._normal),
            "commit": of(statistics.median, self._commits),
            "commit_worst": of(max, self._commits),
            "beyond": of(statistics.median, beyond),
            "join": of(statistics.median, self._joins),
            "join_worst": of(max, self._joins),
            "all": {"commits": self._commits, "joins": self._joins, "failures": self._failures},
        }


if __name__ == "__main__":
    main()
