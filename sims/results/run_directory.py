"""Run directory of a simulation: its summary, events, samples and plots as files."""

from __future__ import annotations

import itertools
from pathlib import Path
from typing import Any, ClassVar

import msgspec
from thinwire.sims.results.journal import Journal
from thinwire.sims.results.plots import draw_all
from thinwire.sims.scenario.scenario import Scenario
from thinwire.swarm.identity.errors import HintedError, NotInstalled


class OutputError(HintedError):
    """The report cannot be written."""

    exit_code: ClassVar[int] = 3


def unused(directory: Path) -> Path:
    """Return the directory, or if it exists the first one with a number from 2 that does not."""
    numbered = (directory.with_name(f"{directory.name}-{number}") for number in itertools.count(2))
    return next(path for path in itertools.chain([directory], numbered) if not path.exists())


def prepare(directory: Path, *, force: bool = False) -> None:
    """Create the run directory before the simulation starts, which may take hours. Raises OutputError.

    With `force` the files of an earlier run are replaced.
    """
    try:
        directory.mkdir(parents=True, exist_ok=True)
        if not force and any(directory.iterdir()):
            raise OutputError(
                f"{directory} has files already", "name another place with --out, or replace them with --force"
            )
        (directory / "summary.json").unlink(missing_ok=True)
    except OSError as error:
        raise OutputError(f"cannot write to {directory}: {error.strerror}", "name another place with --out") from None


def write(directory: Path, scenario: Scenario, journal: Journal, summary: dict[str, Any]) -> bool:
    """Write summary.json, events.jsonl, samples.jsonl and the plots. Raises OutputError.

    Return False without matplotlib, which the plots need.
    """
    try:
        journal.write(directory)
        text = msgspec.json.format(msgspec.json.encode(summary, enc_hook=str))
        (directory / "summary.json").write_bytes(text + b"\n")
        draw_all(directory, scenario, journal)
    except OSError as error:
        raise OutputError(f"cannot write to {directory}: {error.strerror}", "name another place with --out") from None
    except NotInstalled:
        return False
    return True
