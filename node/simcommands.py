"""The commands that ask the simulator, which lies above this folder: the one place in node/ that may reach for sims.

Only inside a function: a daemon never loads a simulation, and `tests/test_layers.py` allows no more than this.
"""

from __future__ import annotations

from pathlib import Path

import typer

from .commands import InputError, Session


def _debug(context: typer.Context, debug: bool) -> None:
    (context.find_object(Session) or Session()).debug = debug


def _read(run: Path | None) -> bytes:
    if run is None:
        return b""
    try:
        return run.read_bytes()
    except OSError as error:
        raise InputError(
            f"cannot read {run}: {error.strerror}", "name a run's TOML, such as examples/demo.toml"
        ) from None
