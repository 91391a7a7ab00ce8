"""Player of a scenario with daemons in real time, on a testbed with the scenario's links.

It uses the same scenario file as virtual time, and produces the same journal, from the daemons' own event logs.
Everything it creates (processes, home directories, networks) is removed afterwards, however the run ends; the remains
of a killed player are removed by the next one.
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
from thinwire.node.local_swarm.event_analysis import compare_digests
from thinwire.node.methods.registry import METHODS
from thinwire.sims.peers.training_text import training_text
from thinwire.sims.processes.actor_processes import TEXT, ActorProcesses, ActorSlot
from thinwire.sims.processes.fault_injector import ProcessFaultInjector
from thinwire.sims.processes.testbed import PeerNetworks, Unplayable
from thinwire.sims.results.journal import WORLD, Journal, fault_fields
from thinwire.sims.results.live_view import LiveView, Stopped
from thinwire.sims.results.report import PlayResult
from thinwire.sims.scenario.faults import Fault, draw
from thinwire.sims.scenario.scenario import Scenario
from thinwire.swarm.identity.errors import HintedError
from thinwire.swarm.manifest.parser import parse

MOST = 16
"""Maximum number of peers on one machine: each is a process of some 300 MB and needs CPU time."""

POLL_SECONDS = 0.1
LOAD_SECONDS = 300.0
"""Seconds that processes may take to load."""

END_SECONDS = 30.0
"""Seconds that processes may take to leave."""

PREFIX = "thinwire-sim-"


class RealError(HintedError):
    """Scenario that cannot be played by real processes."""

    exit_code: ClassVar[int] = 2


class PlayerError(HintedError):
    """Processes did not start."""

    exit_code: ClassVar[int] = 1


@dataclass(frozen=True, slots=True)
class SeenViolation:
    """Violation that real processes show by themselves."""

    at: float
    oracle: str
    peer: int
    detail: str


def player(level: str, scenario: Scenario) -> Callable[[Scenario, LiveView], PlayResult]:
    """Return the function that plays `scenario` at "L1" (proxies) or "L2" (namespaces).

    Raises RealError, EmulationError.
    """
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
    if scenario.translated:
        raise RealError(
            "real peers are behind no address translators", "play it without --real and --namespaces, in virtual time"
        )
    networks: PeerNetworks
    if level == "L1":
        from thinwire.sims.processes.proxy_testbed import ProxyTestbed

        networks = ProxyTestbed(scenario)
    else:
        from thinwire.sims.processes.netns_testbed import NetnsTestbed

        networks = NetnsTestbed(scenario)
    return lambda scenario, view: asyncio.run(_play(level, scenario, networks, view))


async def _play(level: str, scenario: Scenario, networks: PeerNetworks, view: LiveView) -> PlayResult:
    sweep(Path(tempfile.gettempdir()))
    place = Path(tempfile.mkdtemp(prefix=f"{PREFIX}{os.getpid()}-"))
    play = None
    try:
        sites = await networks.open()
        manifest = place / "run.toml"
        manifest.write_text(scenario.manifest, encoding="utf-8")
        (place / TEXT).write_text(training_text())
        early = sum(peer.join <= 0 for peer in scenario.peers)
        slots = [
            ActorSlot(peer, site, scenario, manifest, place / peer.name, early if peer.index == 0 else 1)
            for peer, site in zip(scenario.peers, sites, strict=True)
        ]
        play = Player(scenario, networks, ActorProcesses(slots), view)
        await play.load()
        await play.run()
    finally:
        if play is not None:
            play.clear()
        await networks.close()
        shutil.rmtree(place, ignore_errors=True)
    return PlayResult(level, 0.0, violations=play.violations())


def sweep(directory: Path) -> int:
    """Remove home directories that a killed player left in `directory`; return their number."""
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


class Player:
    """One play: arrivals, departures and faults."""

    def __init__(self, scenario: Scenario, networks: PeerNetworks, actors: ActorProcesses, view: LiveView) -> None:
        self._scenario, self._networks, self._actors, self._view = scenario, networks, actors, view
        self.journal = view.journal = Journal(tuple(peer.name for peer in scenario.peers))
        self._faults = ProcessFaultInjector(networks, actors, scenario.seed, self._later)
        self._due: list[tuple[float, int, Callable[[], None]]] = []
        self._number = itertools.count()
        self._began = time.monotonic()
        self._sampled = -scenario.interval
        self._founded = False

    @property
    def now(self) -> float:
        """Return the seconds since the start of the play."""
        return time.monotonic() - self._began

    async def load(self) -> None:
        """Start all processes. Raises PlayerError, Stopped."""
        print(f"loading {len(self._actors)} processes", file=sys.stderr, flush=True)
        until = time.monotonic() + LOAD_SECONDS
        while not self._actors.load_some():
            self._raise_if_stopped()
            broken = [slot for slot in self._actors.slots if slot.child is not None and slot.child.code is not None]
            if broken and broken[0].child is not None:
                raise PlayerError(f"{broken[0].spec.name} did not start: {broken[0].child.error()}", "see above")
            if time.monotonic() > until:
                raise PlayerError(f"the processes have not loaded within {LOAD_SECONDS:.0f} s", "use fewer --peers")
            await asyncio.sleep(POLL_SECONDS)

    async def run(self) -> None:
        """Run until the scenario's duration is over, or all peers have left. Raises Stopped."""
        self._plan()
        self._began = time.monotonic()
        self._actors.begin()
        while self.now < self._scenario.duration:
            self._raise_if_stopped()
            while self._due and self._due[0][0] <= self.now:
                heapq.heappop(self._due)[2]()
            self._actors.load_some()
            self._networks.meet(self._actors.processes)
            self._enter()
            self._poll_and_sample()
            if self._founded and not any(slot.child is not None or slot.wanted for slot in self._actors.slots):
                break
            await asyncio.sleep(POLL_SECONDS)
        await self._leave()

    def clear(self) -> None:
        """End all processes."""
        self._actors.end(now=True)
        self._actors.wait()
        self._actors.poll(self.journal)
        self.journal.events.sort(key=lambda event: event.at)

    def violations(self) -> list[SeenViolation]:
        """Return violations in the processes' own reports: replicas that differ, and processes that failed."""
        seen = []
        if METHODS[parse(self._scenario.manifest).outer.method].replica.alike:
            diaries = [slot.analysis for slot in self._actors.slots]
            seen = [
                SeenViolation(self.now, "one aggregate", WORLD, text)
                for text in compare_digests(diaries, diaries).differences
            ]
        for event in self.journal.of("down"):
            if str(event.fields["reason"]).startswith("failed"):
                seen.append(SeenViolation(event.at, "processes live", event.peer, str(event.fields["reason"])))
        return seen

    def _plan(self) -> None:
        scenario = self._scenario
        drawn = draw(scenario.seed, scenario.mix, len(scenario.peers), scenario.duration)
        for fault in (*scenario.faults, *drawn):
            self._at(fault.at, lambda fault=fault: self._inject(fault))  # type: ignore[misc]
        for peer, slot in zip(scenario.peers, self._actors.slots, strict=True):
            if peer.leave is not None:
                self._at(peer.leave, lambda slot=slot: self._ask_to_leave(slot))  # type: ignore[misc]

    def _at(self, when: float, action: Callable[[], None]) -> None:
        heapq.heappush(self._due, (when, next(self._number), action))

    def _later(self, seconds: float, action: Callable[[], None]) -> None:
        self._at(self.now + seconds, action)

    def _inject(self, fault: Fault) -> None:
        try:
            self._faults.begin(fault)
        except Unplayable as reason:
            self.journal.event(self.now, WORLD, "unplayed", {**fault_fields(fault), "detail": str(reason)})
            return
        self.journal.event(self.now, WORLD, "fault", fault_fields(fault))
        if fault.kind != "kill":
            self._later(fault.seconds, lambda: self._end_fault(fault))

    def _end_fault(self, fault: Fault) -> None:
        self._faults.end(fault)
        self.journal.event(self.now, WORLD, "fault", fault_fields(fault, over=True))

    def _ask_to_leave(self, slot: ActorSlot) -> None:
        slot.wanted = False
        if slot.child is not None and slot.plays:
            slot.child.end(now=False)

    def _enter(self) -> None:
        """Start loaded peers that are due: the first founds the run, the others get an invite of a peer."""
        invite = ""
        for slot in self._actors.slots:
            due = slot.loaded and not slot.plays and not slot.waits and slot.wanted and slot.spec.join <= self.now
            if not due:
                continue
            if slot.spec.index == 0:
                # After a restart, too: it returns to its run if other peers are present.
                start_line, self._founded = "found", True
            else:
                start_line = invite = invite or next((one.invite for one in self._actors.slots if one.invite), "")
            if start_line:
                slot.play(start_line)
                self.journal.event(self.now, slot.spec.index, "up")

    def _poll_and_sample(self) -> None:
        self._actors.poll(self.journal)
        if self.now >= self._sampled + self._scenario.interval:
            self._sampled = self.now
            self.journal.sample(self.now, tuple(slot.sample() for slot in self._actors.slots))
        self._view.watch(self.journal)

    def _raise_if_stopped(self) -> None:
        """Raise Stopped if the user has asked to stop."""
        if self._view.signal:
            raise Stopped(self._view.signal)

    async def _leave(self) -> None:
        self.journal.sample(self.now, tuple(slot.sample() for slot in self._actors.slots))
        until = time.monotonic() + END_SECONDS
        there = self._actors.end(now=False)
        while there and time.monotonic() < until:
            self._raise_if_stopped()
            await asyncio.sleep(POLL_SECONDS)
            self._actors.poll(self.journal)
            there = any(slot.child is not None for slot in self._actors.slots)
