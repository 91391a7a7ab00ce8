"""Command-line options of `start` and `join` besides node.toml, and the line with which others join."""

from __future__ import annotations

import re
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from thinwire.swarm.manifest.tables import Model


def seconds_of(text: str) -> int:
    """Return the seconds of a duration such as "90s", "30m", "12h" or "7d". Raises ValueError."""
    found = re.fullmatch(r"\s*(\d{1,6})\s*([smhd])\s*", text)
    if found is None or not int(found[1]):
        raise ValueError(f"{text!r} is no duration")
    return int(found[1]) * {"s": 1, "m": 60, "h": 3600, "d": 86400}[found[2]]


def join_line(invite: str, model: Model) -> str:
    """Return the command with which others join a run.

    A model of the user is an option of the command, because each joiner must agree to it; a joiner may have the folder of a
    model of transformers at another path. model: the manifest's table, whose name has no character that a shell changes.
    """
    from thinwire.node.runtime.settings import HF  # not for the help of a command

    prefixes = {"module": "", "hf": HF}
    option = f" --model {prefixes[model.kind]}{model.name}" if model.kind in prefixes else ""
    return f"thinwire join {invite}{option}"


@dataclass(frozen=True, slots=True)
class Options:
    """Options for one call only, never from a file.

    - local: peers to start on this machine, each a process with a separate home; 0: only this one.
    - weak: additional local peers, each with `memory` for training.
    - chaos: kill one of the local peers during the run, a weak one if there are any, and let another join late.
    - rounds: leave after this round; None: after the manifest's last round.
    - place: which shards of the data this peer has; None: derived from its key.
    - memory: bytes that this peer has for training; if the model does not fit, share it with others; None: unlimited.
    - stage: the stage of the model that this peer holds; None: derived from its memory.
    - search: seconds for which a joiner looks for the swarm.
    - weights: files and checkpoints with the first parameters of the run; none: random ones.
    - new: a manifest that has changed since an earlier run of the same name begins another run.
    - public: publish this peer and its run in the public directory.
    - lan: publish this peer and its run on the local network.
    - wait_for: peers that a founder waits for before it trains, for a minute at most.
    - log: "auto", "rich", "plain" or "json" (see console.log_style).
    - debug: print tracebacks to the terminal, too.
    """

    local: int = 0
    weak: int = 0
    chaos: bool = False
    rounds: int | None = None
    place: int | None = None
    memory: int | None = None
    stage: int | None = None
    search: float = 60.0
    weights: tuple[Path, ...] = ()
    new: bool = False
    public: bool = False
    lan: bool = False
    wait_for: int = 1
    log: str = "auto"
    debug: bool = False
