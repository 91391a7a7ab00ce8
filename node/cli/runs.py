"""The command `thinwire runs`, and look-ups in directories: a run by name or id for `thinwire join`."""

from __future__ import annotations

import asyncio
import re
from collections.abc import Awaitable, Callable, Sequence
from contextlib import suppress
from dataclasses import asdict, dataclass
from typing import TypeVar

import msgspec
from rich.console import Console
from rich.table import Table
from thinwire.node.cli.arguments import InputError
from thinwire.node.daemon.options import Options
from thinwire.node.discovery.public_runs import Directory, DirectoryError, ListedRun
from thinwire.node.discovery.sources import open_directory
from thinwire.node.peer.status import alive, read_status
from thinwire.node.runtime.console import warn
from thinwire.node.runtime.directories import Directories, RunDirectory
from thinwire.node.runtime.disk import RealDisk, present
from thinwire.node.runtime.load_settings import Config
from thinwire.node.state.checkpoint_store import LATEST
from thinwire.swarm.identity.errors import NotInstalled
from thinwire.swarm.identity.invite import PREFIX, Invite, is_invite

Result = TypeVar("Result")
DIRECTORY_HINT = (
    "--lan looks on the local network; "
    "--bootstrap, or the key bootstrap of node.toml, names nodes of the public directory"
)
"""Hint for a command to which no directory was named."""

_RUN = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]{0,63}")


def is_run(text: str) -> bool:
    """Return True if an argument of `join` is the name or the id of a run, and not an invite."""
    return _RUN.fullmatch(text) is not None and not is_invite(text)


def find(target: str, config: Config, options: Options) -> Invite:
    """Return an invite to the run called `target`, looking again for `options.search` seconds.

    One look may miss the run: a peer on the local network repeats no answer within a second (RFC 6762, section 6). Raises
    InputError without any directory to ask, DirectoryError, AmbiguousRun, NotInstalled.
    """
    if not (options.public or _directory_named(config, lan=options.lan)):
        here = (
            f"run {target!r} is on this machine"
            if config.directories.runs_called(target)
            else (f"no run of this machine is called {target!r}, and it is no invite")
        )
        begin = f"`thinwire start {target}` begins the run of a manifest; " if target.endswith(".toml") else ""
        raise InputError(
            f"{here}; no directory was named to find its peers in",
            f"{begin}an invite begins with {PREFIX}-; {DIRECTORY_HINT}",
        )

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


@dataclass(frozen=True, slots=True)
class LocalRun:
    """Run with a folder on this machine.

    run: the first half of its id. round: None before the first checkpoint.
    """

    name: str
    run: str
    round: int | None
    running: bool
    folder: str


def local_runs(home: Directories) -> list[LocalRun]:
    """Return the runs of this machine; the round of the running one is that of its daemon."""
    status = read_status(home.status)
    live = status if status is not None and alive(status, home.lock) else None
    found: list[LocalRun] = []
    for run, name in home.run_names().items():
        folder, running = RunDirectory(home.runs / run), live is not None and live.run[:16] == run
        round = live.round if live is not None and running else _saved_round(folder)
        found.append(LocalRun(name, run, round, running, str(folder.path)))
    return found


def _saved_round(run: RunDirectory) -> int | None:
    """Return the round of the newest checkpoint, from the name in the file LATEST; None without one."""
    with suppress(OSError, ValueError):
        pointed = RealDisk().read(run.checkpoints / LATEST, 64).decode()
        return int(pointed.strip().removeprefix("step-").partition(".")[0])
    return None


def show(config: Config, *, lan: bool, as_json: bool) -> None:
    """Print the runs of this machine, then those of the directory.

    Without a directory to ask, or without the package for the public one, print a warning instead of the second list.
    Raises DirectoryError after the runs of this machine are printed, and NotInstalled with `lan`.
    """
    here = local_runs(config.directories)
    if not as_json:
        _show_local(here)
    asked = _directory_named(config, lan=lan)
    found: tuple[ListedRun, ...] = ()
    failure: DirectoryError | None = None
    wall = 0.0
    if not asked:
        warn(f"no directory was asked for runs of others; {DIRECTORY_HINT}")
    try:
        if asked:
            found, wall = _listed(config, lan=lan)
    except NotInstalled as error:
        if lan:
            raise
        warn(f"{error}; {error.hint}")
        asked = False
    except DirectoryError as error:
        failure = error
    if as_json:
        answer = {"here": [asdict(run) for run in here], "directory": [_as_json(run) for run in found]}
        print(msgspec.json.encode(answer).decode())
    elif found:
        _show_listed(found, wall)
    elif asked and failure is None:
        print("no runs in the directory")
    if failure is not None:
        raise failure


def _directory_named(config: Config, *, lan: bool) -> bool:
    """Return True if there is a directory to ask.

    It is the local network, or the public one if the address of a node is known.
    """
    return lan or bool(config.bootstrap) or present(config.directories.dht_nodes)


def _listed(config: Config, *, lan: bool) -> tuple[tuple[ListedRun, ...], float]:
    """Return the runs of the directory, and its time. Raises DirectoryError, NotInstalled."""
    public = not lan or bool(config.bootstrap)

    async def read(directory: Directory) -> tuple[tuple[ListedRun, ...], float]:
        return await directory.runs(), directory.wall()

    return _ask(config, read, public=public, lan=lan)


def _show_local(runs: Sequence[LocalRun]) -> None:
    if not runs:
        print("no runs on this machine")
        return
    table = _table("on this machine")
    for column in ("name", "run", "round", "folder"):
        table.add_column(column, overflow="fold")
    for run in runs:
        shown = "-" if run.round is None else str(run.round)
        table.add_row(run.name or "-", run.run, f"{shown}, running" if run.running else shown, run.folder)
    _print(table)


def _show_listed(found: Sequence[ListedRun], wall: float) -> None:
    table = _table("in the directory")
    for column in ("name", "run", "model", "method", "admission"):
        table.add_column(column)
    for column in ("round", "peers", "loss", "age"):
        table.add_column(column, justify="right")
    for run in found:
        stated = run.description
        loss = "-" if stated.loss is None else f"{stated.loss:.3f}"
        age = f"{max(0, int(wall) - run.issued)} s"
        cells = (stated.name, run.run_id.hex()[:16], stated.model, stated.method, stated.admission)
        table.add_row(*cells, str(stated.round), str(stated.peers), loss, age)
    _print(table)


def _table(title: str) -> Table:
    return Table(title=title, title_justify="left", title_style="bold", box=None, header_style="bold", pad_edge=False)


def _print(table: Table) -> None:
    console = Console()
    (console if console.is_terminal else Console(width=200)).print(table, highlight=False, markup=False)


def _as_json(run: ListedRun) -> dict[str, object]:
    own = {"issued": run.issued, "publishers": run.publishers}
    return {"run_id": run.run_id.hex(), **asdict(run.description), **own}


def _ask(config: Config, question: Callable[[Directory], Awaitable[Result]], *, public: bool, lan: bool) -> Result:
    async def ask() -> Result:
        directory = open_directory(config, public=public, lan=lan, publishes=False, warn=warn)
        try:
            return await question(directory)
        finally:
            await directory.close()

    return asyncio.run(ask())
