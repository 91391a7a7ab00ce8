"""Real daemons: separate processes with separate homes, observed through the events that they write.

Nothing here sleeps for a fixed time: `Daemon.wait` reads the event log until the wanted event appears. Its cap only
ends a test that hangs. No daemon outlives its test or this process.
"""

from __future__ import annotations

import random
import shutil
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

from kit.programs.fork_server import end_with_parent
from kit.real.waiting import CAP, until
from kit.real.warm_process import WarmProcess
from thinwire.node.peer.status import read_status
from thinwire.node.runtime.directories import directories
from thinwire.node.runtime.event_log import read_events

MANIFEST = """
[run]
name = "e2e"
seed = {seed}
rounds = {rounds}
[model]
layers = 1
width = 32
heads = 2
context = 32
[data]
shards = 16
[inner]
batch = 2
[outer]
method = "{method}"
sync_every = {steps}
{outer}
[exchange]
straggler_timeout = {grace}
{exchange}
"""

COMMAND = str(Path(sys.executable).with_name("thinwire"))
Event = dict[str, Any]


class Daemon:
    """One `thinwire` process. A second `start` in the same home restarts the peer, with the same event log."""

    def __init__(self, home: Path) -> None:
        self.home, self.name = home, home.name
        self.program: tuple[str, ...] = ()
        """Words that start `thinwire` in another way than by fork, which is the fastest."""
        self.script: tuple[str, ...] = ("",)
        """Python file that runs `thinwire` in another way, and words of the file; "": `thinwire` itself."""
        self.folder = ""
        self.host, self.network = "127.0.0.1", ""
        self.process: subprocess.Popen[bytes] | WarmProcess | None = None
        self.events: list[Event] = []
        self.starts: list[int] = []
        """Indices in `events` at which each process begins."""
        self._offsets: dict[Path, int] = {}
        """Bytes read of each run's event log."""
        self._said = home.with_name(f"{home.name}.said")

    def run(self, *arguments: object) -> Daemon:
        """Start the process and return at once."""
        self.poll()
        self.starts.append(len(self.events))
        self._said.mkdir(exist_ok=True)
        words = [*map(str, arguments), "--home", str(self.home)]
        if not self.program:
            script, *first = self.script
            streams = self._said / "stdout", self._said / "stderr"
            self.process = WarmProcess([*first, *words], *streams, self.network, program=script, folder=self.folder)
            return self
        with open(self._said / "stdout", "wb") as out, open(self._said / "stderr", "wb") as errors:
            self.process = subprocess.Popen(
                [*self.program, *words],
                stdin=subprocess.DEVNULL,
                stdout=out,
                stderr=errors,
                start_new_session=True,
                preexec_fn=end_with_parent,
            )
        return self

    @property
    def stdout(self) -> str:
        file = self._said / "stdout"
        return file.read_text() if file.exists() else ""  # it has just begun

    @property
    def stderr(self) -> str:
        return (self._said / "stderr").read_text()

    def wait_for_stderr(self, text: str) -> None:
        """Wait until stderr contains this text."""
        over = lambda: self.process.poll() is not None  # noqa: E731
        until(text, lambda: text in self.stderr or over(), state=lambda: self.stderr[-1000:])
        assert text in self.stderr, self.stderr[-1000:]

    # --- its outputs

    def poll(self) -> list[Event]:
        """Return all events of all its processes so far."""
        for log in directories(self.home).runs.glob("*/events.jsonl"):
            tail = read_events(log, self._offsets.get(log, 0))
            assert tail.damaged == 0
            self.events += tail.events
            self._offsets[log] = tail.offset
        return self.events

    def alarms(self):
        """Return the alarms that do not depend on the speed of this machine."""
        return [event for event in self.of("alarm") if not event["detail"].startswith("contributed to ")]

    def of(self, kind: str, **fields: object) -> list[Event]:
        """Return the events of the present process with this kind and these values."""
        begin = self.starts[-1]
        return [e for e in self.poll()[begin:] if e["kind"] == kind and all(e.get(k) == v for k, v in fields.items())]

    def wait(self, kind: str, *, after: float = 0.0, least: int | None = None, **fields: object) -> Event:
        """Return the first event of the present process with this kind and these values.

        It is later than `after` (monotonic seconds), and of round `least` or a later one. Fails if the process ends
        first, or after CAP seconds.
        """
        end, seen = time.monotonic() + CAP, self.starts[-1]
        while True:
            over = self.process.poll() is not None
            self.poll()
            for event in self.events[seen:]:
                if event["kind"] == kind and event["at"] > after and (least is None or event["round"] >= least):
                    if all(event.get(key) == value for key, value in fields.items()):
                        return event
            seen = len(self.events)
            wanted = f"{kind} {fields} from {least} on"
            assert not over, f"{self.name} ended with {self.process.returncode} before {wanted}\n{self.stderr[-1000:]}"
            assert time.monotonic() < end, f"{self.name} never said {wanted}\n{self.stderr[-1000:]}"
            time.sleep(0.02)

    @property
    def round(self) -> int:
        """Newest round whose state it has."""
        return max((e["round"] for kind in ("ready", "synced", "round") for e in self.of(kind)), default=0)

    @property
    def id(self) -> str:
        return self.wait("start")["peer"]

    def invite(self) -> str:
        """Invite that it printed."""
        self.wait("ready")
        until("the invite", lambda: self.stdout.endswith("\n"))
        program, command, code, *_ = self.stdout.splitlines()[0].split()
        assert (program, command) == ("thinwire", "join")
        return code

    def newest_invite(self) -> str:
        """Newest invite in the status of any peer; it has the addresses of all present peers."""
        me = self.wait("ready") and self.id

        def code() -> str:
            said = read_status(directories(self.home).status)
            return said.invite if said is not None and said.peer == me else ""

        return until(f"an invite in the status of {self.name}", code)

    def complaint(self) -> tuple[str, str]:
        """Return its one `error:` line and its one `hint:` line; fail if other lines follow."""
        lines = self.stderr.splitlines()
        assert len(lines) >= 2 and lines[-2].startswith("error: ") and lines[-1].startswith("hint: "), self.stderr
        assert sum(line.startswith(("error:", "hint:")) for line in lines) == 2, self.stderr
        assert "Traceback" not in self.stderr
        return lines[-2].removeprefix("error: "), lines[-1].removeprefix("hint: ")

    # --- actions

    def command(self, *arguments: str) -> subprocess.CompletedProcess[str]:
        """Run another command of `thinwire` in this home."""
        words = [COMMAND, *arguments, "--home", str(self.home)]
        return subprocess.run(words, capture_output=True, text=True, timeout=CAP)

    def signal(self, number: int) -> float:
        """Send a signal; the monotonic time just before."""
        now = time.monotonic()
        self.process.send_signal(number)
        return now

    def kill(self) -> float:
        return self.signal(signal.SIGKILL)

    def lose_folder(self, *, key: bool = False) -> None:
        """Remove the run folder, or with `key` all of the home; the process has ended. `events` remain."""
        self.poll()
        shutil.rmtree(self.home if key else directories(self.home).runs)
        self._offsets.clear()

    def exit(self, cap: float = CAP) -> int:
        """Its exit code."""
        try:
            return self.process.wait(cap)
        except subprocess.TimeoutExpired:
            raise AssertionError(f"{self.name} does not end\n{self.stderr[-1000:]}") from None

    def end(self) -> None:
        """Kill the process in any state, and wait for its end."""
        if self.process is not None:
            self.process.kill()
            self.process.wait()


class Machine:
    """Daemons in one directory, with one manifest and one text. `outer`, `exchange`: more lines of these tables."""

    def __init__(
        self,
        path: Path,
        *,
        rounds: int = 0,
        steps: int = 30,
        grace: float = 5.0,
        seed: int = 1,
        method: str = "diloco",
        outer: str = "",
        exchange: str = "",
    ) -> None:
        path.mkdir(exist_ok=True)
        self.path = path
        self.daemons: dict[str, Daemon] = {}
        self._passed: dict[str, int] = {}
        self.manifest = path / "run.toml"
        text = MANIFEST.format(
            rounds=rounds, steps=steps, grace=grace, seed=seed, method=method, outer=outer, exchange=exchange
        )
        self.manifest.write_text(text)
        self.text = path / "text.txt"
        draw = random.Random(0)
        self.text.write_text(" ".join(draw.choice(["lorem", "ipsum", "dolor", "sit", "amet"]) for _ in range(20_000)))

    def daemon(self, name: str) -> Daemon:
        """Return a daemon with a new home, not started."""
        if name not in self.daemons:
            self.daemons[name] = Daemon(self.path / name)
        return self.daemons[name]

    def found(self, name: str, *more: object) -> Daemon:
        """`thinwire start`."""
        daemon = self.daemon(name)
        return daemon.run("start", self.manifest, *self._common(daemon), *more)

    def join(self, name: str, invite: str, *more: object) -> Daemon:
        """`thinwire join`."""
        daemon = self.daemon(name)
        return daemon.run("join", invite, *self._common(daemon), *more)

    def _common(self, daemon: Daemon) -> list[object]:
        return ["--host", daemon.host, "--threads", "1", "--log", "plain", "--data", self.text]

    def check(self) -> int:
        """Check that each round has one digest on all peers with its state; return the number of compared rounds."""
        said: dict[int, dict[str, str]] = {}
        for daemon in self.daemons.values():
            for event in daemon.poll()[self._passed.get(daemon.name, 0) :]:
                if "digest" in event:
                    digest = said.setdefault(event["round"], {}).setdefault(daemon.name, event["digest"])
                    assert digest == event["digest"], f"{daemon.name} has two states of round {event['round']}"
        for number, digests in sorted(said.items()):
            assert len(set(digests.values())) == 1, f"round {number}: {digests}"
        return sum(len(digests) > 1 for digests in said.values())

    def turn_page(self) -> None:
        """Check, and compare only later events from now on.

        A founder that restarts a run from a checkpoint is its only member, which changes the state digest.
        """
        self.check()
        self._passed = {daemon.name: len(daemon.poll()) for daemon in self.daemons.values()}

    def end(self) -> None:
        for daemon in self.daemons.values():
            daemon.end()
