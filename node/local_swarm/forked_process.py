"""Processes that start in a fraction of a second: forks of a server that has loaded all modules.

The server is that of multiprocessing. Systems without fork start a new interpreter for each process instead.
"""

from __future__ import annotations

import multiprocessing
import os
import subprocess
import sys
from collections.abc import Mapping, Sequence
from functools import cache
from importlib import import_module
from multiprocessing.connection import Connection
from multiprocessing.context import ForkServerContext, SpawnContext
from pathlib import Path

PRIVATE = 0o600
"""Mode of the output files."""


@cache
def _context() -> ForkServerContext | SpawnContext:
    """Return the context of all forked processes, and start its server."""
    if "forkserver" not in multiprocessing.get_all_start_methods():
        return multiprocessing.get_context("spawn")
    from multiprocessing.forkserver import ensure_running

    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload(["thinwire.node.local_swarm.loaded_modules"])
    before = os.environ.get("PYTHONSAFEPATH")
    os.environ["PYTHONSAFEPATH"] = "1"  # The server must not import modules from the working directory.
    try:
        ensure_running()
    finally:
        if before is None:
            del os.environ["PYTHONSAFEPATH"]
        else:
            os.environ["PYTHONSAFEPATH"] = before
    return context


def prepare() -> None:
    """Start the server, which loads the modules meanwhile."""
    _context()


class ForkedProcess:
    """One process, with the interface of subprocess.Popen.

    Its standard input is a pipe from this process. It has a separate session, so a Ctrl-C in the terminal does not
    reach it.
    """

    def __init__(
        self,
        module: str,
        arguments: Sequence[str],
        *,
        out: Path,
        errors: Path,
        directory: Path,
        environment: Mapping[str, str],
    ) -> None:
        """Start it in `directory`; its output replaces the files `out` and `errors`. Raises OSError.

        The function `main` of `module` gets the arguments and returns the exit code.
        """
        for path in (out, errors):
            os.close(_create(path))
        reader, writer = multiprocessing.Pipe(duplex=False)
        given = (module, list(arguments), reader, str(out), str(errors), str(directory), dict(environment))
        self._process = _context().Process(target=_run, args=given)
        self._process.start()
        reader.close()
        self.stdin = os.fdopen(os.dup(writer.fileno()), "wb")
        writer.close()
        assert self._process.pid is not None
        self.pid = self._process.pid

    def poll(self) -> int | None:
        """Return the exit code, negative for a signal; None while the process runs."""
        return self._process.exitcode

    def wait(self, timeout: float | None = None) -> int:
        """Wait for the end and return the exit code. Raises subprocess.TimeoutExpired."""
        self._process.join(timeout)
        code = self._process.exitcode
        if code is None:
            raise subprocess.TimeoutExpired("thinwire", timeout or 0.0)
        self.stdin.close()
        return code

    def send_signal(self, number: int) -> None:
        """Send a signal, unless the process has ended."""
        if self.poll() is None:
            os.kill(self.pid, number)

    def terminate(self) -> None:
        """Send SIGTERM."""
        self._process.terminate()

    def kill(self) -> None:
        """Send SIGKILL."""
        self._process.kill()


def _create(path: str | Path) -> int:
    return os.open(path, os.O_WRONLY | os.O_CREAT | os.O_TRUNC | os.O_CLOEXEC, PRIVATE)


def _run(
    module: str,
    arguments: list[str],
    reader: Connection,
    out: str,
    errors: str,
    directory: str,
    environment: dict[str, str],
) -> None:
    """Run a command in the forked process, and end it with the command's exit code."""
    if hasattr(os, "setsid"):
        os.setsid()
    os.dup2(reader.fileno(), 0)
    reader.close()
    for number, path in ((1, out), (2, errors)):
        file = _create(path)
        os.dup2(file, number)
        os.close(file)
    sys.stdin = open(0, closefd=False)  # multiprocessing has replaced it
    os.environ.clear()
    os.environ.update(environment)
    os.chdir(directory)
    sys.exit(import_module(module).main(arguments))
