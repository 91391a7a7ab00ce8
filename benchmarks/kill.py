"""SIGKILL of one of six peers in the middle of an outer step: seconds to the survivors' commit; ours and torchft's, by turns.

    python benchmarks/kill.py --torchft out/torchft          6 peers, 40 MB, 20 kills of ours, 5 of torchft's

Every peer is a process that makes outer steps without pause. One of them, any, kills itself at a random moment of a step; time
counts from then to the last survivor's next commit. Then a new process joins while the others step on; time counts from its
knock to the end of the first step that its contribution is in. torchft's replicas have a heartbeat time-out of 5 s, as in
their usual settings, and get a virtual environment at the path given. After each kill they are founded anew: a newcomer of
theirs found no quorum with the five that were left within two minutes.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import random
import statistics
import sys
import tempfile
from pathlib import Path
from typing import Any

import machine
import outersteps
from actors import Actor, Lighthouse, torchft_python

NORMAL = 3
"""Steps of all peers before each kill."""

MOMENTS = (0.2, 0.7)
"""When somebody is killed, in parts of a usual step."""


def main() -> None:
    """Parse the options, kill by turns, print."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--peers", type=int, default=6)
    parser.add_argument("--mb", type=float, default=40.0)
    parser.add_argument("--codec", default="int8(block=256)")
    parser.add_argument("--kills", type=int, default=20, help="of ours")
    parser.add_argument("--their-kills", type=int, default=5, help="of torchft's, which take longer")
    parser.add_argument("--torchft", type=Path, help="virtual environment of torchft; without it only ours runs")
    parser.add_argument("--heartbeat", type=float, default=5.0, help="seconds of silence that torchft takes for death")
    parser.add_argument("--seed", type=int, default=1)
    options = parser.parse_args()
    rows = []
    with contextlib.ExitStack() as stack:
        place = Path(stack.enter_context(tempfile.TemporaryDirectory()))
        plans = [(outersteps.ours(sys.executable, place / "ours", options.mb, options.codec), options.kills)]
        if options.torchft:
            python = torchft_python(options.torchft)
            lighthouse = stack.enter_context(Lighthouse(python, heartbeat=options.heartbeat))
            plans.append((outersteps.torchft(python, lighthouse, options.mb), options.their_kills))
        stages = [(Stage(program, options.peers, random.Random(options.seed)), kills) for program, kills in plans]
        for stage, _ in stages:
            stack.callback(stage.program.close)
            stage.open()
        for number in range(max(kills for _, kills in stages)):
            for stage, kills in stages:
                # Both in the same stretch of time: theirs are spread over all of ours.
                if number * kills // stages[0][1] < (number + 1) * kills // stages[0][1]:
                    print(f"{number + 1}: {stage.program.name:16} {stage.kill()}", file=sys.stderr)
        rows = [stage.summary() for stage, _ in stages]
    report = {"machine": machine.describe(), "peers": options.peers, "mb": options.mb, "rows": rows}
    print(f"\n{report['machine']}; {options.peers} peers, {options.mb:g} MB\n")
    print(
        "| program | kills | normal step s | kill to commit s | worst | minus a step s | knock to contribution s | worst |"
    )
    print("|---|---|---|---|---|---|---|---|")
    for row in rows:
        cells = [
            row[key] for key in ("program", "kills", "normal", "commit", "commit_worst", "beyond", "join", "join_worst")
        ]
        print("| " + " | ".join(map(str, cells)) + " |")
    print("\n" + json.dumps(report, indent=1))


class Stage:
    """One program's peers, killed and replaced one by one."""

    def __init__(self, program: outersteps.Steps, peers: int, rng: random.Random) -> None:
        self.program, self._peers, self._rng = program, peers, rng
        self._normal: list[float] = []
        self._commits: list[float] = []
        self._joins: list[float] = []

    def open(self) -> None:
        """Found it, and step until memory is there and all are in every step."""
        self.program.open(self._peers)
        known = len(self._normal)
        for _ in range(2 * NORMAL):
            self._step()
        del self._normal[known:]

    def _step(self, newcomer: Actor | None = None) -> tuple[float, int]:
        """When a step of those who are members ended, and how many were in it."""
        moment, answers = self.program.step()
        end = max(answer["end"] for answer in answers)
        count = min(answer["contributors"] for answer in answers)
        if newcomer is None and count == len(self.program.actors):
            self._normal.append(end - moment)
        return end, count

    def kill(self) -> str:
        """Some steps, one that kills, and a newcomer, or a new beginning."""
        program, newcomer = self.program, None
        if program.place is not None:
            newcomer = program.load()  # it takes seconds of a core, so it is over before we measure
            program.actors.append(newcomer)  # where it is closed, whatever happens
            newcomer.hear()
            program.actors.remove(newcomer)
        for _ in range(NORMAL):
            self._step()
        victim = self._rng.choice(program.actors)
        die = statistics.median(self._normal) * self._rng.uniform(*MOMENTS)
        moment, answers = program.step(victim, die)
        program.actors.remove(victim)
        said = victim.hear()
        died = (said if "dies" in said else victim.hear())["dies"]  # it may have ended the step before
        victim.close()
        self._commits.append(max(answer["end"] for answer in answers) - died)
        told = f"killed after {died - moment:.3f} s, commit after {self._commits[-1]:.3f} s"
        if newcomer is None:
            program.close()
            self.open()
            return told
        newcomer.say(invite=program.invite)
        newcomer.hear()
        while not newcomer.speaks:
            self._step(newcomer)
        began = newcomer.hear()["began"]
        program.actors.append(newcomer)
        end, count = self._step(newcomer)
        while count < len(program.actors):
            end, count = self._step(newcomer)
        self._joins.append(end - began)
        return f"{told}, in a step after {self._joins[-1]:.3f} s"

    def summary(self) -> dict[str, Any]:
        """Medians, and the worst."""
        normal, commit = statistics.median(self._normal), statistics.median(self._commits)
        return {
            "program": self.program.name,
            "kills": len(self._commits),
            "normal": round(normal, 3),
            "commit": round(commit, 3),
            "commit_worst": round(max(self._commits), 3),
            "beyond": round(commit - normal, 3),
            "join": round(statistics.median(self._joins), 3) if self._joins else "-",
            "join_worst": round(max(self._joins), 3) if self._joins else "-",
            "all": {"commits": self._commits, "joins": self._joins},
        }


if __name__ == "__main__":
    main()
