"""Rules of faults: number of peers, and range of the amount, for each kind."""

from __future__ import annotations

from collections.abc import Mapping

from thinwire.sims.scenario.faults import ALL_LIES, KINDS, Fault
from thinwire.sims.scenario.toml_table_reader import nearest

ALONE = frozenset(
    {
        "kill",
        "restart",
        "lost-folder",
        "pause",
        "clock-jump",
        "clock-drift",
        "slow-disk",
        "bit-rot",
        "no-space",
        "lying-sync",
    }
    | {"liar"}
)
"""Kinds that affect one peer; with several peers each gets a separate fault."""

PAIRS = frozenset({"clog", "half-open", "reset", "slow-close", "corrupt", "duplicate", "reorder"})
"""Kinds that affect the link between two peers."""

DIRECTED = frozenset({"one-way", "refuse-one-way", "flap"})
"""Kinds that affect the links of the first peer to the others named."""

DIVISIVE = frozenset({"partition", "isolate", "refuse", "majority-lost"})
"""Kinds that need a peer that is not named."""

MOMENTARY = frozenset(
    {"kill", "majority-lost", "restart", "lost-folder", "bit-rot", "half-open", "reset", "slow-close", "clock-jump"}
)
"""Kinds that may have zero seconds; the others would change nothing."""

AMOUNTS: Mapping[str, tuple[float, float]] = {
    "loss": (0.0, 1.0),
    "clock-jump": (-1e8, 1e8),
    "clock-drift": (-0.5, 0.5),
    "slow-disk": (0.0, 1e3),
}
"""Kind with an amount -> range of the amount."""


def problem_of(fault: Fault, peers: int) -> tuple[str, str] | None:
    """Return an error and a hint for an invalid fault in a swarm of `peers`, or None."""
    if fault.kind not in KINDS:
        return f"{fault.kind!r} is no kind of fault", nearest(fault.kind, KINDS, "kinds: ")
    wrong = [index for index in fault.peers if not 0 <= index < peers]
    if wrong:
        return f"there is no peer {wrong[0]}", f"peers are 0 to {peers - 1}"
    if fault.kind == "liar" and (hint := unknown_lie_hint(fault.detail)):
        return f"detail: {fault.detail!r} is no way to lie", hint
    means, named = f"{fault.kind}: {KINDS[fault.kind]}", len(set(fault.peers))
    least = 0 if fault.kind == "loss" else 2 if fault.kind in PAIRS | DIRECTED else 1
    if named < least:
        return f"{fault.kind} concerns {least} peers at least", means
    most = 1 if fault.kind in ALONE else 2 if fault.kind in PAIRS else peers
    if named > most:
        return f"{fault.kind} concerns {most} {'peer' if most == 1 else 'peers'}, {named} are named", means
    if fault.kind in DIVISIVE and named == peers:
        return f"{fault.kind} needs a peer on the other side", "leave out a peer"
    if fault.seconds <= 0 and fault.kind not in MOMENTARY:
        return f"seconds: {fault.kind} needs a duration", means
    if fault.kind not in AMOUNTS:
        return (f"amount: {fault.kind} has none", "remove it") if fault.amount else None
    low, high = AMOUNTS[fault.kind]
    if not low <= fault.amount <= high or not fault.amount:
        return f"amount: {fault.amount:g} is not from {low:g} to {high:g}, without 0", means
    return None


def unknown_lie_hint(kind: str) -> str:
    """Return a hint for an unknown kind of lie; "" for a known one."""
    return "" if kind in ALL_LIES else nearest(kind, ALL_LIES, "ways to lie: ")
