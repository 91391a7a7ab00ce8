"""Random churn of real daemons: kill -9, restart with and without the folder, SIGSTOP, leave and rejoin."""

from __future__ import annotations

import random
import signal
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field

from kit.daemons import Daemon, Machine
from kit.real.one_history import (
    Event,
    Return,
    Slot,
    Span,
    commits,
    lineages,
    returns,
    reunion,
    silences,
    timeline,
    two_digests,
)

COUNT, LEAST = 6, 3
"""Number of daemons, and how many of them are always up."""

EVERY = 4.0
"""Mean time in seconds between two faults."""

BURST = 0.15
"""Probability that a fault hits up to three daemons at once."""

NEXT_COMMIT, ONE_DIGEST = 10.0, 15.0
"""Seconds in which the next commit comes, and in which all share one digest after the last fault, on an idle machine."""

DEPARTURE = 60.0
"""Seconds after which a daemon that was asked to leave should have ended."""

UP, AWAY = "up", ("starting", "stopped", "leaving", "gone")


@dataclass
class Player:
    """A daemon under churn."""

    daemon: Daemon
    state: str = "starting"
    since: float = 0.0
    ups: list[Span] = field(default_factory=list)
    folders: list[list[int]] = field(default_factory=lambda: [[]])
    """For each folder that it had, the indices of the events at which its processes begin."""

    @property
    def name(self) -> str:
        return self.daemon.name

    def enter(self, at: float) -> None:
        """Be up from this time on."""
        self.state, self.since = UP, at

    def go(self, at: float, state: str) -> None:
        """Be down from this time on."""
        if self.state == UP:
            self.ups.append(Span(self.since, at))
        self.state = state

    def spans(self, now: float) -> list[Span]:
        """Return the spans in which it was up."""
        return [*self.ups, Span(self.since, now)] if self.state == UP else list(self.ups)

    def lives(self) -> Iterator[list[list[Event]]]:
        """Yield for each folder the events of its processes."""
        ends = [*self.daemon.starts, len(self.daemon.events)]
        for begins in self.folders:
            yield [self.daemon.events[at : ends[ends.index(at) + 1]] for at in begins]


@dataclass(frozen=True)
class Figures:
    """Measures of a run under churn. `violations`: of safety; `slow`: of the time bounds."""

    seed: int
    seconds: float
    rounds: int
    faults: dict[str, int]
    silence: float
    """Longest time without a commit while at least four had been up for five seconds."""
    one_digest: float | None
    """Seconds from the last fault until all have committed one round; None: never."""
    one_digest_ready: float | None
    """The same from the last event "ready"."""
    lineages: int
    behind: int
    """Most rounds that a daemon with its folder had lost after a restart."""
    violations: list[str]
    slow: list[str]

    def __str__(self) -> str:
        faults = ", ".join(f"{count} {kind}" for kind, count in sorted(self.faults.items()))
        last = "never" if self.one_digest is None else f"{self.one_digest:.1f} s"
        ready = "never" if self.one_digest_ready is None else f"{self.one_digest_ready:.1f} s"
        return "\n".join(
            [
                f"seed {self.seed}, {self.seconds:.0f} s of faults",
                f"rounds                                {self.rounds}",
                f"faults                                {faults}",
                f"longest silence with four up for 5 s  {self.silence:.1f} s (bound {NEXT_COMMIT:.0f} s)",
                f"last fault to one digest              {last} (bound {ONE_DIGEST:.0f} s)",
                f"last ready to one digest              {ready}",
                f"lineages                              {self.lineages}",
                f"most rounds lost by a restart         {self.behind}",
                f"violations                            {len(self.violations)}",
                f"bounds exceeded                       {len(self.slow)}",
                *self.violations,
                *self.slow,
            ]
        )


class Churn:
    """Faults of some daemons from a seed. `say` is told each fault."""

    def __init__(
        self,
        machine: Machine,
        seed: int,
        *,
        count: int = COUNT,
        every: float = EVERY,
        say: Callable[[str], object] = lambda text: None,
    ) -> None:
        self.machine, self.seed, self._every, self._say = machine, seed, every, say
        self._draw = random.Random(seed)
        self._count = count
        self.players: list[Player] = []
        self.actions: list[tuple[float, str]] = []
        self.faults: dict[str, int] = {}
        self.troubles: list[str] = []
        self._due: list[tuple[float, Callable[[], None]]] = []
        self.zero = self.ended = time.monotonic()

    @property
    def logs(self) -> dict[str, list[Event]]:
        return {player.name: player.daemon.events for player in self.players}

    @property
    def up(self) -> list[Player]:
        return [player for player in self.players if player.state == UP]

    def begin(self) -> None:
        """Start all daemons and wait until a round has all contributions."""
        founder = self.machine.found("peer0", "--wait-for", self._count)
        invite = founder.invite()
        others = [self.machine.join(f"peer{index}", invite) for index in range(1, self._count)]
        self.players = [Player(daemon) for daemon in (founder, *others)]
        for player in self.players:
            player.folders[-1].append(player.daemon.starts[-1])
            player.daemon.wait("round", contributors=self._count)
            player.enter(player.daemon.wait("ready")["at"])
        self.zero = time.monotonic()

    def play(self, seconds: float) -> None:
        """Inject faults for a time, then end all faults; `settle` follows."""
        until, at = self.zero + seconds, self.zero
        while (now := time.monotonic()) < until:
            self._tick(now)
            if now >= at:
                self._fault()
                at = now + 0.5 + self._draw.expovariate(1 / self._every)
            time.sleep(0.1)
        for _, action in sorted(self._due, key=lambda one: one[0]):
            action()
        self._due.clear()

    def settle(self, cap: float) -> None:
        """Wait until all daemons are up and have committed one common round since the last fault."""
        until = time.monotonic() + cap
        while (now := time.monotonic()) < until:
            self._tick(now)
            if not self._due and len(self.up) == len(self.players):
                if reunion(self.logs, self.logs, max(self._last, *(player.since for player in self.players))):
                    return
            time.sleep(0.1)

    @property
    def _last(self) -> float:
        return max((at for at, _ in self.actions), default=self.zero)

    # --- faults

    def _note(self, player: Player, text: str, kind: str = "") -> float:
        now = time.monotonic()
        self.actions.append((now, f"{player.name} {text}"))
        self._say(f"{now - self.zero:8.2f}  {player.name} {text}")
        if kind:
            self.faults[kind] = self.faults.get(kind, 0) + 1
        return now

    def _later(self, seconds: float, action: Callable[[], None]) -> None:
        self._due.append((time.monotonic() + seconds, action))

    def _fault(self) -> None:
        draw = self._draw
        number = draw.choice([2, 3]) if draw.random() < BURST else 1
        candidates = self.up
        victims = draw.sample(candidates, min(number, max(0, len(candidates) - LEAST)))
        for player in victims:
            (kind,) = draw.choices(["kill", "stop", "leave"], [5, 4, 2])
            {"kill": self._kill, "stop": self._stop, "leave": self._leave}[kind](player)

    def _kill(self, player: Player) -> None:
        player.daemon.kill()
        (lost,) = self._draw.choices(["", "folder", "home"], [14, 4, 2])
        player.go(self._note(player, f"kill -9, loses its {lost or 'memory'}", "kills"), "gone")
        player.daemon.exit()
        if lost:
            player.daemon.lose_folder(key=lost == "home")
            player.folders.append([])
            self.faults[f"lost {lost}s"] = self.faults.get(f"lost {lost}s", 0) + 1
        self._later(self._draw.uniform(2.0, 8.0), lambda: self._start(player))

    def _stop(self, player: Player) -> None:
        seconds = self._draw.uniform(3.0, 25.0)
        player.daemon.signal(signal.SIGSTOP)
        player.go(self._note(player, f"SIGSTOP for {seconds:.1f} s", "stops"), "stopped")
        self._later(seconds, lambda: self._continue(player))

    def _continue(self, player: Player) -> None:
        player.enter(self._note(player, "SIGCONT"))
        player.daemon.signal(signal.SIGCONT)

    def _leave(self, player: Player) -> None:
        player.daemon.signal(signal.SIGTERM)
        player.go(self._note(player, "SIGTERM", "leaves"), "leaving")
        player.since = time.monotonic()

    def _start(self, player: Player) -> None:
        friend = self._draw.choice(self.up)
        player.state = "starting"
        self.machine.join(player.name, friend.daemon.newest_invite())
        player.folders[-1].append(player.daemon.starts[-1])
        self._note(player, f"joins by {friend.name}")

    def _tick(self, now: float) -> None:
        """Poll all daemons, notice their starts and ends, and do what is due."""
        for player in self.players:
            daemon = player.daemon
            daemon.poll()
            if player.state == "starting" and (ready := daemon.of("ready")):
                player.enter(ready[0]["at"])
            if player.state in ("gone", "stopped"):
                continue
            code = daemon.process.poll()
            if player.state == "leaving" and code is None:
                if now - player.since > DEPARTURE:
                    self.troubles.append(f"{daemon.name} has not left {DEPARTURE:.0f} s after SIGTERM")
                    daemon.end()
            elif code is not None:
                if player.state != "leaving" or code:
                    said = daemon.stderr[-600:]
                    self.troubles.append(f"{now - self.zero:.1f} s: {daemon.name} ended with {code}: {said}")
                player.go(self._note(player, f"ended with {code}"), "gone")
                self._later(self._draw.uniform(2.0, 8.0), lambda player=player: self._start(player))
        due = [one for one in self._due if one[0] <= now]
        self._due = [one for one in self._due if one[0] > now]
        for _, action in sorted(due, key=lambda one: one[0]):
            action()

    # --- figures

    def figures(self) -> Figures:
        """Return the figures of the run until now."""
        now, logs = time.monotonic(), self.logs
        ready = max([self._last, *(player.since for player in self.players)])
        met = reunion(logs, logs, self._last) if len(self.up) == len(self.players) else None
        quiet = silences(logs, {player.name: player.spans(now) for player in self.players})
        back = [one for player in self.players for folder in player.lives() for one in returns(player.name, folder)]
        violations = [*self.troubles, *self._unsafe(back)]
        slow = [self._explain(f"no commit for {one.seconds:.1f} s", one) for one in quiet if one.seconds > NEXT_COMMIT]
        if met is None:
            violations.append(self._explain("never one digest after the last fault", Span(self._last, now)))
        elif met[0] - ready > ONE_DIGEST:
            slow.append(self._explain(f"{met[0] - ready:.1f} s to one digest", Span(self._last, met[0])))
        return Figures(
            seed=self.seed,
            seconds=self._last - self.zero,
            rounds=len({slot for _, _, slot in commits(logs)}),
            faults=dict(self.faults),
            silence=quiet[0].seconds if quiet else 0.0,
            one_digest=met[0] - self._last if met else None,
            one_digest_ready=met[0] - ready if met else None,
            lineages=len(lineages(logs)),
            behind=max((one.before - one.after for one in back if one.alike), default=0),
            violations=violations,
            slow=slow,
        )

    def _unsafe(self, back: list[Return]) -> Iterator[str]:
        for slot, digests in sorted(two_digests(self.logs).items()):
            yield self._explain(f"two digests in {slot}: {digests}", self._span_of(slot))
        for one in back:
            if one.lost:
                yield self._explain(f"lost rounds: {one}", Span(one.at, one.at))

    def _span_of(self, slot: Slot) -> Span:
        times = [event["at"] for _, event, other in commits(self.logs) if other == slot]
        return Span(min(times), max(times))

    def _explain(self, text: str, span: Span) -> str:
        around = Span(span.since - 30.0, span.until + 5.0)
        lines = timeline(self.logs, self.actions, around, zero=self.zero, rounds=span.seconds < 1.0)
        begin, end = span.since - self.zero, span.until - self.zero
        return "\n    ".join([f"seed {self.seed}, {begin:.1f} to {end:.1f} s: {text}", *lines])
