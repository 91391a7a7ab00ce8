"""Look-ups in directories: the command `thinwire runs`, and a run by name or id for `thinwire join`."""

from __future__ import annotations

import asyncio
import re
from collections.abc import Awaitable, Callable
from typing import TypeVar

import msgspec
from rich.console import Console
from rich.table import Table
from thinwire.node.daemon.options import Options
from thinwire.node.discovery.directory import Directory, DirectoryError, ListedRun
from thinwire.node.discovery.sources import open_directory
from thinwire.node.runtime.config import Config
from thinwire.node.runtime.console import warn
from thinwire.swarm.identity.invite import PREFIX, Invite

Result = TypeVar("Result")
_RUN = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]{0,63}")


def is_run(text: str) -> bool:
    """Return True if an argument of `join` is the name or the id of a run, and not an invite."""
    return _RUN.fullmatch(text) is not None and not text.lower().startswith(PREFIX)


def find(target: str, config: Config, options: Options) -> Invite:
    """Return an invite to the run called `target`, looking again for `options.search` seconds.

    One look may miss it: a peer on the local network repeats no answer within a second (RFC 6762, section 6). Raises
    DirectoryError, AmbiguousRun, NotInstalled.
    """

    async def search(directory: Directory) -> Invite:
        until, shown = directory.wall() + options.search, False
        while True:
            try:
                return await directory.invite_to(target)
            except DirectoryError as error:
                if directory.wall() >= until:
                    raise
                if not shown:
                    warn(f"{error}; looking again for {options.search:.0f} s")
                shown = True
            await asyncio.sleep(1.0)

    public = options.public or bool(config.bootstrap) or not options.lan
    return _ask(config, search, public=public, lan=options.lan)


def show(config: Config, *, lan: bool, as_json: bool) -> None:
    """Print the runs of the directory. Raises DirectoryError, NotInstalled."""
    public = not lan or bool(config.bootstrap)

    async def read(directory: Directory) -> tuple[tuple[ListedRun, ...], float]:
        return await directory.runs(), directory.wall()

    found, wall = _ask(config, read, public=public, lan=lan)
    if as_json:
        print(msgspec.json.encode([_as_json(run) for run in found]).decode())
        return
    table = Table(box=None, header_style="bold", pad_edge=False)
    for column in ("name", "run", "model", "method", "admission"):
        table.add_column(column)
    for column in ("round", "peers", "loss", "age"):
        table.add_column(column, justify="right")
    for run in found:
        loss = "-" if run.loss is None else f"{run.loss:.3f}"
        age = f"{max(0, int(wall) - run.issued)} s"
        cells = (run.name, run.run_id.hex()[:16], run.model, run.method, run.admission)
        table.add_row(*cells, str(run.round), str(run.peers), loss, age)
    console = Console()
    (console if console.is_terminal else Console(width=200)).print(table, highlight=False, markup=False)


def _as_json(run: ListedRun) -> dict[str, object]:
    return {**msgspec.to_builtins(run, builtin_types=(bytes,)), "run_id": run.run_id.hex()}


def _ask(config: Config, question: Callable[[Directory], Awaitable[Result]], *, public: bool, lan: bool) -> Result:
    async def ask() -> Result:
        directory = open_directory(
            config,
            public=public,
            lan=lan,
            publishes=False,
            warn=warn,
        )
        try:
            return await question(directory)
        finally:
            await directory.close()

    return asyncio.run(ask())
