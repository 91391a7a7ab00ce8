"""What `start` and `join` are told besides the settings of node.toml."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Options:
    """For one call only, never from a file.

    local: peers to start on this machine, each a process with a home of its own; 0: only this one.
    chaos: kill one of the local peers on the way and let another join late.
    rounds: leave after this round; None: when the manifest says so.
    place: which shards of the data are this peer's; None: derived from its key.
    search: seconds for which a joiner looks for the swarm.
    wait_for: peers that a founder waits for before it trains, a minute at most.
    log: "auto", "rich", "plain" or "json" (see console.log_style).
    debug: tracebacks on the terminal too.
    """

    local: int = 0
    chaos: bool = False
    rounds: int | None = None
    place: int | None = None
    search: float = 60.0
    wait_for: int = 1
    log: str = "auto"
    debug: bool = False
