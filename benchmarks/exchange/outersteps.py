"""Swarms that make outer steps without pause, ours and torchft's: start, step, kill one peer, add one."""

from __future__ import annotations

import time
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from benchmarks.support.actors import PATIENCE, Actor, Lighthouse, close

HEADSTART = 0.05
"""Seconds between the request to begin and the beginning, so that all processes begin together."""

RUN = """[run]
name = "steps"
[model]
kind = "custom"
[outer]
sync_every = 1
[exchange]
codec = "{codec}"
[admission]
mode = "open"
trial_rounds = 0
"""
"""Run that any peer may join and invite others to, also when its founder was killed."""


@dataclass
class Steps:
    """Peers of one program.

    `options`: those of all peers. `place`: folder of the homes of thinwire's peers. `patience`: seconds of
    silence after which a peer counts as stuck.
    """

    name: str
    script: str
    python: str
    options: dict[str, Any]
    place: Path | None = None
    patience: float = PATIENCE
    actors: list[Actor] = field(default_factory=list)
    born: int = 0
    invite: str = ""
    round: int = 0

    def load(self) -> Actor:
        """Start a process that waits for the request to join; loading takes seconds of a core."""
        own: dict[str, Any] = {"rank": self.born}
        if self.place is not None:
            own |= {
                "home": str(self.place / str(self.born)),
                "toml": "" if self.born else str(self.place / "run.toml"),
            }
        self.born += 1
        return Actor(self.script, python=self.python, patience=self.patience, **self.options, **own)

    def open(self, count: int) -> None:
        """Found a swarm of `count` new peers."""
        self.invite, self.round = "", 0
        loading = [self.load() for _ in range(count)]
        self.actors = loading
        for actor in loading:
            actor.receive()
        for number, actor in enumerate(loading):
            actor.say(invite=self.invite)
            invite = actor.receive()["invite"]
            self.invite = self.invite or invite
            if number == 0:
                actor.receive()  # ready: it has the state that the others fetch
        for actor in loading[1:]:
            actor.receive()

    def step(self, victim: Actor | None = None, die: float = 0.0) -> tuple[float, list[dict[str, Any]]]:
        """Make one outer step; return its begin and the reports of all peers. `victim` dies `die` seconds after the begin."""
        for actor in self.actors:
            actor.say(prepare=True)
        prepared = [(actor, actor.receive()) for actor in self.actors]
        self.invite = next(answer["invite"] for actor, answer in prepared if actor is not victim)
        moment = time.monotonic() + HEADSTART
        for actor in self.actors:
            actor.say(at=moment, round=self.round + 1, die=die if actor is victim else None)
        answers = [actor.receive() for actor in self.actors if actor is not victim]
        self.round = answers[0]["round"]
        if len({(answer["round"], answer["digest"]) for answer in answers}) > 1:
            raise RuntimeError(f"{self.name}: replicas differ: {answers}")
        return moment, answers

    def close(self) -> None:
        """End all."""
        close(self.actors)


def ours(python: str, place: Path, mb: float, codec: str) -> Steps:
    """thinwire, whose homes are made in `place`."""
    place.mkdir()
    (place / "run.toml").write_text(RUN.format(codec=codec))
    name = f"thinwire {codec.partition('(')[0]}"
    return Steps(name, "thinwire_outer.py", python, {"mb": mb}, place)


def torchft(python: str, lighthouse: Lighthouse, mb: float, patience: float = PATIENCE) -> Steps:
    """torchft's DiLoCo over gloo, fp32."""
    options = {"mb": mb, "lighthouse": lighthouse.address}
    return Steps("torchft fp32", "comparison/torchft_outer.py", python, options, patience=patience)
