"""Processes that a benchmark controls with lines of JSON, and that may be killed; and the lighthouse of torchft."""

from __future__ import annotations

import json
import queue
import socket
import subprocess
import sys
import tempfile
import threading
import time
import venv
from collections.abc import Iterable, Sequence
from pathlib import Path
from types import TracebackType
from typing import Any

from benchmarks.support.peer_script import PEERS, environment

TORCHFT = ["torch==2.13.0", "numpy", "torchft-nightly"]
PATIENCE = 180.0
"""Seconds of silence after which a process counts as stuck."""


class Actor:
    """Script of peers/ with its options.

    `prefix`: words before the command, such as those that enter a namespace. `patience`: seconds of silence
    that `receive` accepts.
    """

    def __init__(
        self,
        script: str,
        *,
        python: str = sys.executable,
        prefix: Sequence[str] = (),
        patience: float = PATIENCE,
        **options: Any,
    ) -> None:
        self._patience = patience
        self.name = f"{script} {options.get('rank', '')}"
        self._stderr = tempfile.TemporaryFile()
        self.process = subprocess.Popen(
            [*prefix, python, str(PEERS / script), json.dumps(options)],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=self._stderr,
            text=True,
            # All peers are on this machine, and the links between them are what is measured.
            env=environment(OMP_NUM_THREADS="1", THINWIRE_SHARED_MEMORY="false"),
        )
        self._received: queue.SimpleQueue[dict[str, Any] | None] = queue.SimpleQueue()
        threading.Thread(target=self._listen, daemon=True).start()

    def _listen(self) -> None:
        assert self.process.stdout is not None
        for line in self.process.stdout:
            try:
                self._received.put(json.loads(line))
            except ValueError:
                sys.stderr.write(line)  # output of a library
        self._received.put(None)

    def say(self, **fields: Any) -> None:
        """Send a line; without effect if the process has ended."""
        assert self.process.stdin is not None
        try:
            self.process.stdin.write(json.dumps(fields) + "\n")
            self.process.stdin.flush()
        except BrokenPipeError:
            pass

    def receive(self, seconds: float | None = None) -> dict[str, Any]:
        """Return the next line. Raises RuntimeError at its end, or after `seconds` of silence (None: its patience)."""
        try:
            message = self._received.get(timeout=self._patience if seconds is None else seconds)
        except queue.Empty:
            message = None
        if message is None:
            self.kill()
            self._stderr.seek(0)
            tail = self._stderr.read().decode(errors="replace")[-4000:]
            raise RuntimeError(f"{self.name} ended with code {self.process.returncode}, or was stuck:\n{tail}")
        return message

    def kill(self) -> None:
        """SIGKILL."""
        self.process.kill()
        self.process.wait()

    def close(self) -> None:
        """End the input of the process; kill it if it does not end then."""
        assert self.process.stdin is not None
        try:
            self.process.stdin.close()
        except BrokenPipeError:
            pass
        try:
            self.process.wait(20)
        except subprocess.TimeoutExpired:
            self.kill()
        self._stderr.close()


def close(actors: Iterable[Actor]) -> None:
    """Close all actors at the same time."""
    everyone = list(actors)
    for actor in everyone:
        threading.Thread(target=actor.close).start()
    for actor in everyone:
        actor.process.wait()


class Lighthouse:
    """torchft's meeting point, with the settings of its runs here: a replica is dead after `heartbeat` seconds of silence."""

    def __init__(
        self, python: str, host: str = "127.0.0.1", *, heartbeat: float = 5.0, prefix: Sequence[str] = ()
    ) -> None:
        port = free_port()
        self.address = f"http://{host}:{port}"
        program = str(Path(python).with_name("torchft_lighthouse"))
        settings = {"min_replicas": 1, "quorum_tick_ms": 100, "join_timeout_ms": 10_000}
        settings["heartbeat_timeout_ms"] = round(heartbeat * 1e3)
        flags = [word for name, value in settings.items() for word in (f"--{name}", str(value))]
        self._process = subprocess.Popen(
            [*prefix, program, "--bind", f"{host}:{port}", *flags],
            stdout=subprocess.DEVNULL,
            stderr=subprocess.DEVNULL,
        )
        time.sleep(0.5)

    def __enter__(self) -> Lighthouse:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, at: TracebackType | None) -> None:
        self._process.kill()
        self._process.wait()


def torchft_python(folder: Path) -> str:
    """Return the interpreter of torchft's own environment, which is made if there is none."""
    python = folder / "bin" / "python"
    if not (folder / "bin" / "torchft_lighthouse").exists():
        venv.create(folder, with_pip=True)
        subprocess.run([python, "-m", "pip", "install", "--quiet", *TORCHFT], check=True)
    return str(python)


def free_port() -> int:
    """Return a port that is free now."""
    with socket.create_server(("127.0.0.1", 0)) as server:
        port: int = server.getsockname()[1]
        return port
