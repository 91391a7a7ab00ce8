"""Processes that start without loading torch again, which takes two seconds of a core each."""

from __future__ import annotations

import json
import os
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Mapping, Sequence
from functools import cache
from pathlib import Path

from kit.programs import fork_server

START_SECONDS = 100.0
"""Longest start of the server on a busy machine."""


@cache
def _server() -> Path:
    """Start the server of this process of tests; return the path of its socket."""
    path = Path(tempfile.mkdtemp(prefix="warm")) / "socket"
    words = [sys.executable, "-P", str(Path(fork_server.__file__)), str(path)]
    process = subprocess.Popen(
        words, stdin=subprocess.DEVNULL, stdout=subprocess.DEVNULL, preexec_fn=fork_server.end_with_parent
    )
    until = time.monotonic() + START_SECONDS
    while not path.exists():
        assert process.poll() is None and time.monotonic() < until, "the server of processes does not start"
        time.sleep(0.02)
    return path


class WarmProcess:
    """Process with the methods of subprocess.Popen that the tests use.

    `program`: the Python file that it runs, "": `thinwire`. `network`: file of its namespace, "": ours. `environment`: more
    variables than ours. `folder`: its working directory, "": ours.
    """

    def __init__(
        self,
        arguments: Sequence[str],
        out: Path,
        errors: Path,
        network: str = "",
        environment: Mapping[str, str] | None = None,
        program: str = "",
        folder: str = "",
    ) -> None:
        wanted = {
            "program": program,
            "arguments": list(arguments),
            # Processes of other namespaces stand for other machines.
            "env": {**os.environ, **({"THINWIRE_SHARED_MEMORY": "false"} if network else {}), **(environment or {})},
            "cwd": folder or os.getcwd(),
            "network": network,
            "out": str(out),
            "err": str(errors),
        }
        self._socket = socket.socket(socket.AF_UNIX)
        self._socket.connect(str(_server()))
        self._socket.sendall(json.dumps(wanted).encode() + b"\n")
        with self._socket.makefile("rb", buffering=0) as lines:
            self.pid = int(lines.readline())
        self.returncode: int | None = None

    def wait(self, timeout: float | None = None) -> int:
        """Return the exit code, negative for a signal. Raises subprocess.TimeoutExpired."""
        if self.returncode is None:
            self._socket.settimeout(timeout)
            try:
                status = self._socket.recv(32)
            except (BlockingIOError, TimeoutError):
                raise subprocess.TimeoutExpired("thinwire", timeout or 0.0) from None
            assert status.endswith(b"\n"), "the server of processes has ended"
            self.returncode = os.waitstatus_to_exitcode(int(status))
            self._socket.close()
        return self.returncode

    def poll(self) -> int | None:
        """Return the exit code; None while it runs."""
        try:
            return self.wait(0.0)
        except subprocess.TimeoutExpired:
            return None

    def send_signal(self, number: int) -> None:
        """Send a signal, unless the process has ended."""
        if self.poll() is None:
            os.kill(self.pid, number)

    def kill(self) -> None:
        self.send_signal(9)
