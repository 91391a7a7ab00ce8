"""Processes of a player: actors with their home directories, event logs and states."""

from __future__ import annotations

import os
import random
import sys
import time
from collections.abc import Sequence
from pathlib import Path

import msgspec
from thinwire.node.local_swarm.child_process import Child
from thinwire.node.local_swarm.event_analysis import EventAnalysis
from thinwire.node.runtime.directories import directories
from thinwire.node.runtime.event_log import read_events
from thinwire.sims.processes.peer_process import ActorPart
from thinwire.sims.processes.testbed import Site
from thinwire.sims.results.journal import Journal, PeerSample
from thinwire.sims.scenario.scenario import PeerSpec, Scenario

PROGRAM = (sys.executable, "-P", "-m", "thinwire.sims.processes.peer_process")
TEXT = "text.txt"
"""Training text beside the manifest, the same as in virtual time."""

LOADING = 3
"""Number of processes that load at the same time: each takes some seconds of a core."""


class ActorSlot:
    """One peer: its home directory, and its processes, one after the other.

    `wait_for`: peers that the founder waits for before it starts.
    """

    def __init__(
        self, spec: PeerSpec, site: Site, scenario: Scenario, manifest: Path, home: Path, wait_for: int
    ) -> None:
        self.spec, self.home, self._site = spec, home, site
        self.child: Child | None = None
        self.plays = False
        """True if the process has got the command to play."""
        self.wanted = True
        """True if a process is wanted: not after a kill, nor after the end."""
        self.waits = False
        """True if the process must not play yet: it was killed, and returns later."""
        self.ended = ""
        """Reason why the last process ended, until it is read."""
        self.frozen = False
        self.analysis = EventAnalysis(spec.name)
        self.busy = 0.0
        self._offset, self._read = 0, 0
        home.mkdir(mode=0o700, parents=True)
        self._part = home / "part.json"
        part = ActorPart(
            name=spec.name,
            home=str(home),
            manifest=str(manifest),
            data=str(manifest.with_name(TEXT)),
            host=site.host,
            port=site.port,
            ports=site.ports,
            advertise=site.advertise,
            step_seconds=spec.step_seconds,
            compute=scenario.compute,
            parameters=scenario.parameters,
            seed=scenario.seed * 1009 + spec.index,
            wait_for=wait_for,
            site=spec.site,
        )
        self._part.write_bytes(msgspec.json.encode(part))

    def load(self) -> None:
        """Start a process that waits for its start line."""
        self.child = Child(
            self.spec.name, self.home, [str(self._part)], self.home, program=(*self._site.prefix, *PROGRAM)
        )
        self.plays, self.wanted, self.frozen = False, True, False

    @property
    def loaded(self) -> bool:
        """True if the process waits for its start line, or plays."""
        return self.child is not None and "loaded" in self.child.printed()

    @property
    def invite(self) -> str:
        """Return an invite of this peer; "" if it has none."""
        if not self.plays or self.child is None or self.child.code is not None:
            return ""
        printed = [line for line in self.child.printed().splitlines() if line.startswith("thinwire join ")]
        status = self.child.status()
        known = status.invite if status is not None and status.process == self.child.process.pid else ""
        return known or (printed[-1].split()[2] if printed else "")

    def play(self, start_line: str) -> None:
        """Let the process play: "found", or an invite."""
        assert self.child is not None
        self.child.write_line(start_line)
        self.plays = True

    def poll(self, seconds: float) -> None:
        """Check whether the process has ended, and read its output; `seconds` have passed since the last call."""
        child = self.child
        if child is not None and child.code is not None:
            if child.killed_at is not None:
                reason = "killed"
            else:
                reason = "left" if child.code == 0 else f"failed: {child.error()}"
                self.wanted = False
            self.ended = reason if self.plays else ""
            self.child, self.plays = None, False
        found = sorted(directories(self.home).runs.glob("*/events.jsonl"))
        if found:
            tail = read_events(found[0], self._offset)
            self.analysis.events += tail.events
            self._offset = tail.offset
        if child is not None and self.phase == "training":
            self.busy += seconds

    def news(self) -> Sequence[dict[str, object]]:
        """Return the events since the last call."""
        fresh = self.analysis.events[self._read :]
        self._read = len(self.analysis.events)
        return fresh

    @property
    def phase(self) -> str:
        """Return the phase in one word."""
        if self.child is None or not self.plays:
            return ""
        if self.frozen:
            return "stopped"
        status = self.child.status()
        return status.phase if status is not None and status.process == self.child.process.pid else "starting"

    def sample(self) -> PeerSample | None:
        """Return the present state; None if the process does not play."""
        phase = self.phase
        if not phase or self.child is None:
            return None
        status = self.child.status()
        up, down = 0, 0
        if status is not None and status.process == self.child.process.pid:
            up, down = status.bytes_up, status.bytes_down
        newest = self.analysis.last("round") or {}
        return PeerSample(up, down, self.analysis.round, newest.get("loss"), phase, round(self.busy, 3))


class ActorProcesses:
    """All actors, by index."""

    def __init__(self, slots: Sequence[ActorSlot]) -> None:
        self.slots = slots
        self._began = 0.0
        self._polled = time.monotonic()

    def __len__(self) -> int:
        return len(self.slots)

    def begin(self) -> None:
        """Start the clock of the play."""
        self._began = time.time()

    @property
    def processes(self) -> dict[int, int]:
        """Return peer -> process number of all running processes."""
        return {slot.spec.index: slot.child.process.pid for slot in self.slots if slot.child is not None}

    def load_some(self) -> bool:
        """Start wanted processes, a few at a time; return True if all are loaded."""
        loading = sum(slot.child is not None and not slot.loaded for slot in self.slots)
        for slot in self.slots:
            if slot.wanted and slot.child is None and loading < LOADING:
                slot.load()
                loading += 1
        return all(slot.loaded for slot in self.slots if slot.wanted)

    def poll(self, journal: Journal) -> None:
        """Read the output of all processes into the journal."""
        now = time.monotonic()
        fresh = []
        for slot in self.slots:
            slot.poll(now - self._polled)
            index = slot.spec.index
            for event in slot.news():
                fields = {name: value for name, value in event.items() if name not in ("at", "wall", "kind")}
                fresh.append((float(str(event["wall"])) - self._began, index, str(event["kind"]), fields))
            if slot.ended:
                fresh.append((time.time() - self._began, index, "down", {"reason": slot.ended}))
                slot.ended = ""
        for at, index, kind, fields in sorted(fresh, key=lambda one: one[0]):
            journal.event(max(0.0, at), index, kind, fields)
        self._polled = now

    # Faults

    def kill(self, index: int, *, again: bool) -> bool:
        slot = self.slots[index]
        # A process that is to return loads at once, which takes seconds, and waits for `revive`.
        slot.wanted = slot.waits = again
        if slot.child is None or slot.child.code is not None:
            return False
        slot.child.kill()
        return True

    def send(self, index: int, number: int) -> bool:
        import signal

        slot = self.slots[index]
        if slot.child is None or slot.child.code is not None:
            return False
        slot.child.process.send_signal(number)
        slot.frozen = number == signal.SIGSTOP
        return True

    def revive(self, index: int) -> None:
        self.slots[index].waits = False

    def rot(self, index: int, rng: random.Random) -> None:
        files = sorted(
            path for path in directories(self.slots[index].home).runs.glob("*/checkpoints/**/*") if path.is_file()
        )
        if files:
            path = rng.choice(files)
            data = bytearray(path.read_bytes())
            if data:
                data[rng.randrange(len(data))] ^= 1 << rng.randrange(8)
                descriptor = os.open(path, os.O_WRONLY | os.O_TRUNC)
                with open(descriptor, "wb") as file:
                    file.write(data)

    def end(self, *, now: bool) -> bool:
        """Ask all processes to leave, or with `now` kill them; return True if one still runs."""
        for slot in self.slots:
            slot.wanted = False
            if slot.child is not None and (now or slot.frozen or not slot.plays):
                slot.child.kill()  # A stopped or waiting process cannot be asked.
            elif slot.child is not None:
                slot.child.end(now=False)
        return any(slot.child is not None and slot.child.code is None for slot in self.slots)

    def wait(self) -> None:
        """Wait until all processes have ended; after `end(now=True)`."""
        for slot in self.slots:
            if slot.child is not None:
                slot.child.process.wait()
