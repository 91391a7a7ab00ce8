"""`start --local N`: a whole swarm on this machine, one process per peer, connected as over a network."""

from __future__ import annotations

import os
import signal
import time
from pathlib import Path
from types import FrameType
from typing import ClassVar

from thinwire.node.daemon.options import Options
from thinwire.node.local_swarm import chaos as plans
from thinwire.node.local_swarm.child_process import Child
from thinwire.node.local_swarm.event_analysis import commits, usual_round
from thinwire.node.local_swarm.forked_process import prepare
from thinwire.node.local_swarm.live_view import Display, News, Snapshot, rows
from thinwire.node.runtime import plotting
from thinwire.node.runtime.console import log_style, set_up_logging
from thinwire.node.runtime.load_settings import Config
from thinwire.node.runtime.signals import HANGUP, ending
from thinwire.swarm.identity.errors import HintedError, NotInstalled
from thinwire.swarm.identity.regular_file import content_of
from thinwire.swarm.manifest.manifest import Manifest
from thinwire.swarm.manifest.parser import parse

POLL_SECONDS = 0.2
STALL_SECONDS = 180.0
"""Seconds without a new event after which a swarm has failed."""

LOADING_SECONDS = 900.0
"""The same while the first peer is not ready: it compiles kernels and tokenizes without events."""

END_SECONDS = 30.0
"""Seconds that the peers have to leave after a signal before they are killed."""


class LocalError(HintedError):
    """The swarm on this machine failed; the message names the peer and its log."""

    exit_code: ClassVar[int] = 1


class UsageError(HintedError):
    """Options that have no meaning for a whole swarm."""

    exit_code: ClassVar[int] = 2


class PlaceError(HintedError):
    """No place for the peers' files."""

    exit_code: ClassVar[int] = 3


def start_local(run: Path, config: Config, options: Options) -> int:
    """Run the swarm to its end and print the result. Return the exit code.

    Raises LocalError, UsageError, PlaceError.
    """
    run = run.absolute()
    manifest = parse(content_of(run), run.name)
    style = log_style(options.log)
    set_up_logging(style, config.directories.log, debug=options.debug)
    swarm = LocalSwarm(run, manifest, config, options)
    display = Display(style)
    before = {number: signal.signal(number, swarm.signalled) for number in ending()}
    try:
        try:
            plotting.check()
        except NotInstalled as error:
            display.say(f"{error}; {error.hint}", warn=True)
        swarm.run(display)
        display.close()
        from thinwire.node.local_swarm.evaluation import conclude  # It loads torch, for which no peer should wait.

        faults = conclude(swarm, style, display)
    finally:
        swarm.end()
        display.close()
        for number, handler in before.items():
            signal.signal(number, handler)
    if swarm.stopped:
        return 128 + swarm.stopped
    if faults:
        raise LocalError("; ".join(faults), f"the events of every peer are in {swarm.directory}")
    return 0


_FLAGS = {name: f"--{name}" for name in ("host", "port", "ports", "advertise", "site", "name", "bootstrap")} | {
    "relay": "--no-relay",
    "map_port": "--map-port",
}
"""Settings whose flags have no meaning for a local swarm."""

_OPTIONS = {name: f"--{name.replace('_', '-')}" for name in ("place", "public", "lan", "wait_for", "new")}
"""Options that have none."""


class LocalSwarm:
    """The processes of a local swarm and their history. `run` starts them and returns when all have ended."""

    def __init__(self, file: Path, manifest: Manifest, config: Config, options: Options) -> None:
        """Check the options. Raises UsageError."""
        odd = [flag for name, flag in _FLAGS.items() if config.sources[name].startswith("flag")]
        usual = Options()
        odd += [flag for name, flag in _OPTIONS.items() if getattr(options, name) != getattr(usual, name)]
        if odd:
            raise UsageError(
                f"{odd[0]} does not apply with --local",
                "remove it: local peers stay on this machine, choose free ports and names, and begin together",
            )
        self.file, self.manifest, self.config, self.options = file, manifest, config, options
        self.rounds = options.rounds or manifest.run.rounds
        self.chaos: plans.Chaos | None = None
        if options.chaos:
            try:
                self.chaos = plans.plan(manifest.run.seed, options.local, self.rounds, weak=options.weak)
            except ValueError as error:
                raise UsageError(f"--chaos does not fit into {error}", "use at least 4 rounds and 2 peers") from None
        # Several swarms may start in one second; a directory is never reused.
        name = f"{manifest.run.name}-{time.strftime('%Y%m%d-%H%M%S')}-{os.getpid()}"
        self.directory = config.directories.state / "local" / name
        self.began = time.time()
        self.peers: list[Child] = []
        self.alone: Child | None = None
        self.joined_at: float | None = None
        """Wall time at which the late joiner was started; `joined_round` was the last committed round then."""
        self.joined_round = 0
        self.stopped = 0
        """The signal that asked us to stop."""
        self._kill_at: float | None = None
        self._news = News(time.monotonic())

    # --- watching

    def run(self, display: Display) -> None:
        """Run until every process has ended. Raises PlaceError, and LocalError on failures and stalls."""
        try:
            self.directory.mkdir(mode=0o700, parents=True)
            self.config.directories.cache.mkdir(mode=0o700, parents=True, exist_ok=True)
        except OSError as error:
            raise PlaceError(
                f"cannot create {error.filename}: {error.strerror}", "choose another directory with --home"
            ) from None
        display.say(f"starting {self.count} peers; their files are in {self.directory}")
        prepare()
        self.peers.append(
            self._start_peer(["start", str(self.file), "--wait-for", str(self.count), *self._weight_options])
        )
        self._news = News(time.monotonic())
        progressed_at, written = time.monotonic(), 0
        while any(child.code is None for child in self._children()):
            for child in self._children():
                child.poll()
            self._check()
            if not self.stopped:
                self._act(display)
            display.show(self.snapshot())
            events = sum(len(child.analysis.events) for child in self._children())
            if events != written:
                progressed_at, written = time.monotonic(), events
            limit = STALL_SECONDS if len(self.peers) >= self.count else LOADING_SECONDS
            limit = END_SECONDS if self.stopped else limit
            if time.monotonic() > progressed_at + limit:
                if self.stopped:
                    return
                raise LocalError(
                    f"the swarm has made no progress for {limit:.0f} s", f"the logs are in {self.directory}"
                )
            time.sleep(POLL_SECONDS)
        for child in self._children():
            child.poll()
        self._check()
        display.show(self.snapshot())

    def snapshot(self) -> Snapshot:
        """Return the present state for display."""
        note = ""
        if self.alone is not None and self.alone.code is None:
            done = self.alone.analysis.last("alone")
            note = f"one peer alone, to compare: round {done['round'] if done else 0} of {self.rounds}"
        elapsed = time.time() - self.began
        return Snapshot(self.manifest.run.name, self.round, self.rounds, elapsed, rows(self.peers), note)

    @property
    def count(self) -> int:
        """Number of peers at the start."""
        return self.options.local + self.options.weak

    @property
    def round(self) -> int:
        """The newest round of any peer."""
        return max((child.analysis.round for child in self.peers), default=0)

    @property
    def victim(self) -> Child | None:
        """The peer that was killed on purpose."""
        return next((child for child in self.peers if child.killed_at is not None), None)

    @property
    def newcomer(self) -> Child | None:
        """The peer that joined late."""
        return self.peers[self.count] if len(self.peers) > self.count else None

    def signalled(self, number: int, frame: FrameType | None) -> None:
        """Handle a signal: pass on the first one; at the second end everything and raise SystemExit."""
        if self.stopped and number == HANGUP:
            return
        repeated, self.stopped = bool(self.stopped), self.stopped or number
        for child in self._children():
            child.end(now=repeated or child is self.alone)
        if repeated:
            raise SystemExit(128 + number)

    def end(self) -> None:
        """Kill all remaining processes."""
        for child in self._children():
            child.end(now=True)
        for child in self._children():
            child.process.wait()

    def _children(self) -> list[Child]:
        return [*self.peers, *([self.alone] if self.alone is not None else [])]

    def _check(self) -> None:
        for child in self._children():
            if child.code and child.killed_at is None and not self.stopped:
                hint = "; ".join(filter(None, (child.hint(), f"see {child.log}")))
                raise LocalError(f"{child.name} ended with code {child.code}: {child.error()}", hint)

    # --- acting

    def _act(self, display: Display) -> None:
        if len(self.peers) < self.count:
            if message := self._news.of(self.peers[0].last_message(), time.monotonic()):
                display.say(f"{self.peers[0].name}: {message}")  # The others start when it is ready.
            printed = [line for line in self.peers[0].printed().splitlines() if line.startswith("thinwire join ")]
            if printed:
                for number in range(1, self.count):
                    arguments = ["join", printed[0].split()[2]]
                    self.peers.append(
                        self._start_peer([*arguments, *(self._weak_options if number >= self.options.local else ())])
                    )
            return
        starters = self.peers[: self.count]
        if self.alone is None and self.rounds and all(child.analysis.last("ready") for child in starters):
            self._start_alone(starters[: self.options.local])
        if self.chaos is not None:
            self._inject_faults(self.chaos, display)

    def _inject_faults(self, chaos: plans.Chaos, display: Display) -> None:
        now = time.monotonic()
        if self._kill_at is None and self.round >= chaos.kill_round:
            self._kill_at = now + chaos.moment * self._usual()
        if self.victim is None and self._kill_at is not None and now >= self._kill_at:
            victim = self.peers[chaos.victim]
            if victim.code is None:
                victim.kill()
                display.say(f"kill -9 of {victim.name} after round {self.round}", warn=True)
        if self.newcomer is None and self.round >= chaos.join_round:
            # Any running peer can invite.
            invite = next((status.invite for child in self.peers if child.live and (status := child.status())), "")
            if invite:
                self.joined_at, self.joined_round = time.time(), self.round
                self.peers.append(self._start_peer(["join", invite, *self._weak_options]))
                display.say(f"{self.peers[-1].name} joins late, after round {self.joined_round}", warn=True)

    def _usual(self) -> float:
        return usual_round(commits(child.analysis for child in self.peers))

    def _start_peer(self, command: list[str]) -> Child:
        name = f"peer {len(self.peers) + 1}"
        home = self.directory / name.replace(" ", "-")
        self._share_cache(home)
        arguments = ["--home", str(home), "--host", "127.0.0.1", "--port", "0", "--name", name, "--log", "plain"]
        arguments += ["--device", self.config.device, "--threads", str(self.threads)]
        arguments += ["--data", str(self.config.data)] if self.config.data else []
        arguments += ["--model", self.config.model] if self.config.model else []
        arguments += ["--evaluate-every", str(self.config.evaluate_every), *self._speed_options]
        arguments += ["--up", str(self.config.up)] if self.config.up else []
        arguments += ["--monitor", ",".join(self.config.monitor)] if self.config.monitor else []
        arguments += ["--rounds", str(self.options.rounds)] if self.options.rounds else []
        arguments += ["--debug"] if self.options.debug else []
        # A tokenizer file of the manifest is searched beside the run's file.
        return Child(name, home, [*command, *arguments], self.file.parent)

    @property
    def _weak_options(self) -> list[str]:
        """Options of a weak peer."""
        return ["--memory", str(self.options.memory)] if self.options.weak else []

    def _start_alone(self, starters: list[Child]) -> None:
        model = starters[self.model_peer]
        home = self.directory / "alone"
        events = home / "events.jsonl"
        arguments = [str(self.file), "--events", str(events), "--cache", str(self.config.directories.cache)]
        arguments += ["--device", self.config.device, "--threads", str(self.threads), "--rounds", str(self.rounds)]
        arguments += ["--data", str(self.config.data)] if self.config.data else []
        arguments += ["--model", self.config.model] if self.config.model else []
        arguments += self._speed_options
        arguments += [
            "--me",
            model.analysis.peer.hex(),
            "--group",
            ",".join(one.analysis.peer.hex() for one in starters),
        ]
        self.alone = Child(
            "the peer alone", home, ["alone", *arguments, *self._weight_options], self.file.parent, events
        )

    @property
    def _speed_options(self) -> list[str]:
        """Options of speed and memory."""
        wanted = {"--compile": self.config.compile, "--gradient-checkpointing": self.config.gradient_checkpointing}
        return [option for option, on in wanted.items() if on]

    @property
    def _weight_options(self) -> list[str]:
        """Options with the first parameters of the run, for the founder; joiners fetch them."""
        return [word for path in self.options.weights for word in ("--from", str(path.resolve()))]

    @property
    def model_peer(self) -> int:
        """Index of the peer whose shard and steps the baseline has: the first that survives the run."""
        return 1 if self.chaos is not None and self.chaos.victim == 0 else 0

    @property
    def threads(self) -> int:
        """Threads of each peer, so that together they use as many as there are cores."""
        cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
        return self.config.threads or max(1, cores // (self.count + 1))

    def _share_cache(self, home: Path) -> None:
        """Share one token cache: all peers read the same text."""
        home.mkdir(mode=0o700, parents=True)
        (home / "cache").symlink_to(self.config.directories.cache, target_is_directory=True)
