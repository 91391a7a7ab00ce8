"""A scenario with real processes in real time: a stage of daemons on a ground that is shaped as the scenario says.

The same scenario file as in virtual time; what comes out is the same journal, made of the daemons' own event logs. All that
is made for it (processes, homes, networks) is removed afterwards, however it ends; what a stage that was killed has left is
removed by the next one.
"""

from __future__ import annotations

import asyncio
import heapq
import itertools
import os
import shutil
import stat
import sys
import tempfile
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import ClassVar

import psutil
from thinwire.node.diary import proof
from thinwire.node.methods import METHODS
from thinwire.swarm.errors import HintedError
from thinwire.swarm.manifest import parse

from .compute import CORPUS
from .faults import Fault, draw
from .ground import Ground, Unplayable
from .journal import WORLD, Journal, fault_fields
from .realfaults import RealFaults
from .report import Play
from .scenario import Scenario
from .troupe import TEXT, Seat, Troupe
from .view import Stopped, View

MOST = 16
"""Peers of one machine: each is a process of some 300 MB that needs a part of a core."""

POLL_SECONDS = 0.1
LOAD_SECONDS = 300.0
"""How long processes may take to load."""

END_SECONDS = 30.0
"""How long they may take to say goodbye."""

PREFIX = "thinwire-sim-"


class RealError(HintedError):
    """A scenario that cannot be played by real processes."""

    exit_code: ClassVar[int] = 2


class StageError(HintedError):
    """Processes did not come up."""

    exit_code: ClassVar[int] = 1


@dataclass(frozen=True, slots=True)
class Seen:
    """A broken promise: what real processes show by themselves."""

    at: float
    oracle: str
    peer: int
    detail: str


def player(level: str, scenario: Scenario) -> Callable[[Scenario, View], Play]:
    """Who plays `scenario` at "L1" (proxies) or "L2" (namespaces). Raises RealError, GroundError."""
    if len(scenario.peers) > MOST:
        raise RealError(
            f"{len(scenario.peers)} real processes are too many for one machine",
            f"--peers {MOST} or fewer, or leave --real out",
        )
    liars = [peer.name for peer in scenario.peers if peer.liar]
    if liars:
        raise RealError(f"{liars[0]} is a liar, and real daemons cannot lie", "play it without --real, in virtual time")
    if scenario.lines:
        raise RealError("real peers cannot share the line of a site", "play it without --real, in virtual time")
    ground: Ground
    if level == "L1":
        from .mesh import Mesh

        ground = Mesh(scenario)
    else:
        from .namespaces import Namespaces

        ground = Namespaces(scenario)
    return lambda scenario, view: asyncio.run(_play(level, scenario, ground, view))


async def _play(level: str, scenario: Scenario, ground: Ground, view: View) -> Play:
    sweep(Path(tempfile.gettempdir()))
    place = Path(tempfile.mkdtemp(prefix=f"{PREFIX}{os.getpid()}-"))
    stage = None
    try:
        sites = await ground.open()
        manifest = place / "run.toml"
        manifest.write_text(scenario.manifest, encoding="utf-8")
        (place / TEXT).write_text(CORPUS * 400)
        early = sum(peer.join <= 0 for peer in scenario.peers)
        seats = [
            Seat(peer, site, scenario, manifest, place / peer.name, early if peer.index == 0 else 1)
            for peer, site in zip(scenario.peers, sites, strict=True)
        ]
        stage = Stage(scenario, ground, Troupe(seats), view)
        await stage.load()
        await stage.run()
    finally:
        if stage is not None:
            stage.clear()
        await ground.close()
        shutil.rmtree(place, ignore_errors=True)
    return Play(level, 0.0, violations=stage.violations())


def sweep(directory: Path) -> int:
    """Remove the homes that a stage left in `directory` when it was killed; how many."""
    swept = 0
    for left in directory.glob(f"{PREFIX}*"):
        number = left.name.removeprefix(PREFIX).partition("-")[0]
        try:
            about = left.lstat()
        except FileNotFoundError:
            continue
        ours = stat.S_ISDIR(about.st_mode) and about.st_uid == os.getuid() and number.isdigit()
        if ours and not psutil.pid_exists(int(number)):
            shutil.rmtree(left, ignore_errors=True)
            swept += 1
    return swept


class Stage:
    """The play itself: who comes and goes, what goes wrong, and when."""

    def __init__(self, scenario: Scenario, ground: Ground, troupe: Troupe, view: View) -> None:
        self._scenario, self._ground, self._troupe, self._view = scenario, ground, troupe, view
        self.journal = view.journal = Journal(tuple(peer.name for peer in scenario.peers))
        self._faults = RealFaults(ground, troupe, scenario.seed, self._later)
        self._due: list[tuple[float, int, Callable[[], None]]] = []
        self._number = itertools.count()
        self._began = time.monotonic()
        self._sampled = -scenario.interval
        self._founded = False

    @property
    def now(self) -> float:
        """Seconds since the play began."""
        return time.monotonic() - self._began

    async def load(self) -> None:
        """Start all processes. Raises StageError, Stopped."""
        print(f"loading {len(self._troupe)} processes", file=sys.stderr, flush=True)
        until = time.monotonic() + LOAD_SECONDS
        while not self._troupe.load_some():
            self._attend()
            broken = [seat for seat in self._troupe.seats if seat.child is not None and seat.child.code is not None]
            if broken and broken[0].child is not None:
                raise StageError(f"{broken[0].spec.name} did not come up: {broken[0].child.complaint()}", "see above")
            if time.monotonic() > until:
                raise StageError(f"the processes have not come up in {LOAD_SECONDS:.0f} s", "take fewer --peers")
            await asyncio.sleep(POLL_SECONDS)

    async def run(self) -> None:
        """Until the scenario's duration is over, or all have left. Raises Stopped."""
        self._plan()
        self._began = time.monotonic()
        self._troupe.begin()
        while self.now < self._scenario.duration:
            self._attend()
            while self._due and self._due[0][0] <= self.now:
                heapq.heappop(self._due)[2]()
            self._troupe.load_some()
            self._ground.meet(self._troupe.processes)
            self._enter()
            self._look()
            if self._founded and not any(seat.child is not None or seat.wanted for seat in self._troupe.seats):
                break
            await asyncio.sleep(POLL_SECONDS)
        await self._leave()

    def clear(self) -> None:
        """No process stays behind."""
        self._troupe.end(now=True)
        self._troupe.wait()
        self._troupe.poll(self.journal)
        self.journal.events.sort(key=lambda event: event.at)

    def violations(self) -> list[Seen]:
        """What the processes' own words give away: replicas that differ, and processes that failed."""
        seen = []
        if METHODS[parse(self._scenario.manifest).outer.method].replica.alike:
            diaries = [seat.diary for seat in self._troupe.seats]
            seen = [Seen(self.now, "one aggregate", WORLD, text) for text in proof(diaries, diaries).differences]
        for event in self.journal.of("down"):
            if str(event.fields["reason"]).startswith("failed"):
                seen.append(Seen(event.at, "processes live", event.peer, str(event.fields["reason"])))
        return seen

    def _plan(self) -> None:
        scenario = self._scenario
        drawn = draw(scenario.seed, scenario.mix, len(scenario.peers), scenario.duration)
        for fault in (*scenario.faults, *drawn):
            self._at(fault.at, lambda fault=fault: self._strike(fault))  # type: ignore[misc]
        for peer, seat in zip(scenario.peers, self._troupe.seats, strict=True):
            if peer.leave is not None:
                self._at(peer.leave, lambda seat=seat: self._dismiss(seat))  # type: ignore[misc]

    def _at(self, when: float, action: Callable[[], None]) -> None:
        heapq.heappush(self._due, (when, next(self._number), action))

    def _later(self, seconds: float, action: Callable[[], None]) -> None:
        self._at(self.now + seconds, action)

    def _strike(self, fault: Fault) -> None:
        try:
            self._faults.begin(fault)
        except Unplayable as reason:
            self.journal.event(self.now, WORLD, "unplayed", {**fault_fields(fault), "detail": str(reason)})
            return
        self.journal.event(self.now, WORLD, "fault", fault_fields(fault))
        if fault.kind != "kill":
            self._later(fault.seconds, lambda: self._relieve(fault))

    def _relieve(self, fault: Fault) -> None:
        self._faults.end(fault)
        self.journal.event(self.now, WORLD, "fault", fault_fields(fault, over=True))

    def _dismiss(self, seat: Seat) -> None:
        seat.wanted = False
        if seat.child is not None and seat.plays:
            seat.child.end(now=False)

    def _enter(self) -> None:
        """Who is loaded and due may play: the first founds the run, the others are invited by whoever is there."""
        invite = ""
        for seat in self._troupe.seats:
            due = seat.loaded and not seat.plays and not seat.waits and seat.wanted and seat.spec.join <= self.now
            if not due:
                continue
            if seat.spec.index == 0:
                # Also later: it comes back to its run when others are there.
                word, self._founded = "found", True
            else:
                word = invite = invite or next((one.invite for one in self._troupe.seats if one.invite), "")
            if word:
                seat.tell(word)
                self.journal.event(self.now, seat.spec.index, "up")

    def _look(self) -> None:
        self._troupe.poll(self.journal)
        if self.now >= self._sampled + self._scenario.interval:
            self._sampled = self.now
            self.journal.sample(self.now, tuple(seat.sample() for seat in self._troupe.seats))
        self._view.watch(self.journal)

    def _attend(self) -> None:
        """To the person in front of the stage. Raises Stopped."""
        if self._view.signal:
            raise Stopped(self._view.signal)

    async def _leave(self) -> None:
        self.journal.sample(self.now, tuple(seat.sample() for seat in self._troupe.seats))
        until = time.monotonic() + END_SECONDS
        there = self._troupe.end(now=False)
        while there and time.monotonic() < until:
            self._attend()
            await asyncio.sleep(POLL_SECONDS)
            self._troupe.poll(self.journal)
            there = any(seat.child is not None for seat in self._troupe.seats)
