"""Completion in the shell: names and ids of runs of this machine, and ids of its daemon's peers.

An error means no suggestions: text on the terminal would disturb the line that a person types.
"""

from __future__ import annotations

import os
import re
from collections.abc import Mapping
from contextlib import suppress
from typing import TYPE_CHECKING

import typer
from thinwire.swarm.identity.errors import HintedError

if TYPE_CHECKING:
    from thinwire.node.runtime.load_settings import Config

VARIABLE = "_THINWIRE_COMPLETE"
"""Environment variable with which the shell asks for suggestions."""


def runs(context: typer.Context, incomplete: str) -> list[tuple[str, str]]:
    """Return (suggestion, help) for the runs of this machine: names, and ids where a name is not unique."""
    config = _config(context)
    names: Mapping[str, str] = {}
    with suppress(PermissionError):
        names = config.directories.run_names() if config is not None else {}
    every = list(names.values())
    pairs = [(name if name and every.count(name) == 1 else run, run) for run, name in names.items()]
    if not any(word.startswith(incomplete) for word, _ in pairs):
        pairs = [(run, _harmless(names[run])) for run in names]
    return pairs


def peers(context: typer.Context, incomplete: str) -> list[tuple[str, str]]:
    """Return (suggestion, help) for the peers that the daemon of this machine knows: ids and names."""
    from thinwire.node.peer.status import read_status

    config = _config(context)
    status = None
    with suppress(PermissionError):
        status = None if config is None else read_status(config.directories.status)
    return [(one.peer, _harmless(one.name) or one.state) for one in status.peers] if status is not None else []


def _harmless(text: str) -> str:
    """Return the text of a stranger without what a shell would evaluate: letters, digits and `._-` stay."""
    return re.sub(r"[^A-Za-z0-9 ._-]", "_", text)


def first_word(arguments: list[str]) -> str:
    """Return the command in a command line, also in one that the shell asks to complete; "": none."""
    environment = os.environ
    if VARIABLE in environment:
        line = environment.get("_TYPER_COMPLETE_ARGS", "")
        typed = (environment.get("COMP_WORDS") or line).split()
        # The last word may be incomplete.
        arguments = typed[1:] if line.endswith(" ") else typed[1:-1]
    return next((word for word in arguments if not word.startswith("-")), "")


def _config(context: typer.Context) -> Config | None:
    from thinwire.node.runtime.load_settings import load

    try:
        return load({"home": context.params.get("home")}, os.environ)
    except (HintedError, OSError):
        return None
