"""Scenarios of the outer methods and of the hierarchy. Keyword arguments are passed on to `swarm_of`."""

from __future__ import annotations

from typing import Any

from kit.scenarios import INT8, manifest_of, swarm_of
from thinwire.sims.scenario.scenario import Scenario

UNEVEN = tuple(0.5 + 0.01 * part for part in range(4))
"""Seconds of an inner step, by turns."""

UNEQUAL = (0.25, 0.3, 0.5, 0.25, 1.0, 0.3, 0.6, 0.3)
"""Seconds of an inner step of peers as unequal as machines are, by turns."""


def one_round_late(method: str, *, peers: int = 8, late: int = 2, **more: Any) -> Scenario:
    """Return a swarm of eager or co2."""
    return swarm_of(
        peers, manifest_of(f'method = "{method}"\nlr = 0.2\nsync_every = 4'), step=UNEVEN, late=late, **more
    )


def streaming(
    fragments: int = 3,
    overlap: int = 2,
    *,
    steps: int = 12,
    outer: str = "",
    codec: str = INT8,
    exchange: str = "",
    tables: str = "",
    grace: float = 1.0,
    peers: int = 8,
    late: int = 2,
    **more: Any,
) -> Scenario:
    """Return a swarm of streaming DiLoCo; with much overlap several rounds are in progress."""
    lines = f'method = "streaming"\nsync_every = {steps}\nfragments = {fragments}\noverlap = {overlap}\n{outer}'
    toml = manifest_of(lines, codec=codec, grace=grace, exchange=exchange, tables=tables)
    return swarm_of(peers, toml, **{"step": UNEVEN, "late": late, **more})


def asynchronous(method: str, *, outer: str = "", peers: int = 6, late: int = 2, **more: Any) -> Scenario:
    """Return a swarm of buffered-async or delayed-nesterov, whose peers are unequal."""
    toml = manifest_of(f'method = "{method}"\nlr = 0.4\nsync_every = 4\n{outer}', grace=0.3)
    return swarm_of(peers, toml, **{"step": UNEQUAL, "late": late, "seconds": 36.0, **more})


def two_levels(outer: str = "sync_every = 4", *, codec: str = INT8, peers: int = 8, **more: Any) -> Scenario:
    """Return a swarm of two sites, and of peers that are alone, with the hierarchy as its topology."""
    return swarm_of(
        peers,
        manifest_of(outer, codec=codec, exchange='topology = "hierarchy"'),
        step=tuple(0.25 + 0.005 * part for part in range(4)),
        late=2,
        spread={"region": ("Oregon", "London", "Iowa"), "site": ("", "home", "lab")},
        **{"seconds": 26.0, **more},
    )
