"""Screen of `thinwire top`: lines of text that fit the terminal, made from a state of RunView."""

from __future__ import annotations

import time
from collections.abc import Mapping, Sequence
from typing import Any, TypeAlias

from rich.cells import cell_len
from rich.text import Text
from thinwire.node.runtime.console import bytes_text, count_text, plain, saved_text
from thinwire.node.runtime.event_log import event_text

Fields: TypeAlias = Mapping[str, Any]

TABS = ("swarm", "links", "round", "log")
PHASES = ("announce", "open", "record", "vote", "commit")
"""Phases of a round in their order."""

GLYPHS = "▁▂▃▄▅▆▇█"
PLAIN_GLYPHS = "_.-=+*#@"
"""Levels of a sparkline, and those for a terminal without UTF-8."""

SYMBOLS = {"alive": "#", "suspect": "?", "dead": "_", "left": "_", "banned": "!"}
"""State of a peer -> its symbol. An alive peer that is not a member yet is joining: `J`."""

COLOURS = {"#": "green", "J": "cyan", "?": "yellow", "_": "dim", "!": "bold red"}
LEGEND = "# in   J joining   ? suspect   _ gone   ! banned"
GPU = "gpu_memory"
NAME = 24
"""Letters of a run's name in the title, so that the round has room."""

FRAME_ROWS = 3
"""Rows of a screen around a tab: title, names of the tabs, and legend or alarm."""


class Rates:
    """Bytes per second between the last two statuses, by link; "" stands for all links together."""

    def __init__(self) -> None:
        self._before: dict[str, tuple[int, int]] = {}
        self._at = 0.0
        self._rates: dict[str, tuple[float, float]] = {}

    def update(self, status: Fields) -> None:
        """Take a status; the same one changes nothing."""
        at = float(status["wall"])
        if at <= self._at:
            return
        now = {"": (status["bytes_up"], status["bytes_down"])}
        now |= {peer["peer"]: (peer["up"], peer["down"]) for peer in status["peers"]}
        if self._before:
            seconds = at - self._at
            self._rates = {
                # A new process counts its links from zero.
                one: (max(0, up - self._before[one][0]) / seconds, max(0, down - self._before[one][1]) / seconds)
                for one, (up, down) in now.items()
                if one in self._before
            }
        self._before, self._at = now, at

    def of(self, peer: str = "") -> tuple[str, str]:
        """Return the rates to and from a peer as text; "-" if unknown."""
        rates = self._rates.get(peer)
        return ("-", "-") if rates is None else (f"{bytes_text(rates[0])}/s", f"{bytes_text(rates[1])}/s")


def screen(state: Fields, rates: Rates, tab: str, columns: int, rows: int, *, utf8: bool = True) -> list[Text]:
    """Return exactly `rows` lines of at most `columns` cells. state: of RunView, with a status."""
    body = section(state, rates, tab, columns, rows - FRAME_ROWS, utf8=utf8)[: rows - FRAME_ROWS]
    body += [Text()] * (rows - FRAME_ROWS - len(body))
    status = state["status"]
    last = Text(f"alarm: {plain(status['alarm'])}", "bold red") if status["alarm"] else Text(LEGEND, "dim")
    return [_fit(line, columns) for line in (_title(state), _tabs(tab), *body, last)]


def everything(state: Fields, rates: Rates, columns: int, *, utf8: bool = True) -> list[Text]:
    """Return all tabs one below the other, for an output that is no terminal."""
    lines = [_title(state)]
    for tab in TABS:
        lines += [Text(), Text(f"{tab}:"), *section(state, rates, tab, columns, 1000, utf8=utf8)]
    if state["status"]["alarm"]:
        lines.append(Text(f"alarm: {plain(state['status']['alarm'])}"))
    return [_fit(line, columns) for line in lines]


def section(state: Fields, rates: Rates, tab: str, columns: int, rows: int, *, utf8: bool) -> list[Text]:
    """Return the lines of one tab; `rows` is the room for them."""
    match tab:
        case "links":
            return _links(state, rates, rows)
        case "round":
            return _round(state, rows)
        case "log":
            return _log(state, rows)
        case _:
            return _swarm(state, rates, columns, rows, utf8=utf8)


def symbol(peer: Fields, members: Sequence[str]) -> str:
    """Return the symbol of a peer. members: short ids after the last round; empty if unknown."""
    found = SYMBOLS.get(peer["state"], "?")
    return "J" if found == "#" and members and peer["peer"][:8] not in members else found


def sparkline(values: Sequence[float | None], width: int, glyphs: str = GLYPHS) -> str:
    """Return the last values as `width` levels at most; neighbours are averaged if there are more of them."""
    known = [float(value) for value in values if value is not None]
    if not known or width < 1:
        return ""
    width = min(width, len(known))
    cuts = [len(known) * place // width for place in range(width + 1)]
    means = [sum(known[a:b]) / (b - a) for a, b in zip(cuts, cuts[1:], strict=False)]
    low, high = min(means), max(means)
    scale = (len(glyphs) - 1) / (high - low) if high > low else 0.0
    return "".join(glyphs[round((mean - low) * scale)] for mean in means)


def _title(state: Fields) -> Text:
    status = state["status"]
    of = f" of {status['rounds']}" if status["rounds"] else ""
    phase = plain(status["phase"]) if state["running"] else "not running"
    name = plain(status["run_name"])
    name = f"{name[: NAME - 3]}..." if len(name) > NAME else name
    title = Text(f"thinwire {name} {status['run'][:8]}", "bold")
    return title.append(f"  round {status['round']}{of}  {phase}", "green" if state["running"] else "bold red")


def _tabs(chosen: str) -> Text:
    line = Text()
    for number, tab in enumerate(TABS, start=1):
        line.append(f"[{number} {tab}]" if tab == chosen else f" {number} {tab} ", "bold" if tab == chosen else "")
    return line.append("   tab: next   q: quit", "dim")


def _members(state: Fields) -> list[str]:
    return list(state["rounds"][-1].get("members", ())) if state["rounds"] else []


def _swarm(state: Fields, rates: Rates, columns: int, rows: int, *, utf8: bool) -> list[Text]:
    status, members = state["status"], _members(state)
    losses = [one.get("loss") for one in state["rounds"]]
    loss = "-" if status["loss"] is None else f"{status['loss']:.3f}"
    if status["held_out"] is not None:
        loss += f", held out {status['held_out']:.3f} after round {status['held_out_round']}"
    up, down = rates.of()
    saved = saved_text(state["saved_factor"])
    # The log of a past run names neither the device nor the memory of its processes.
    speed = f"{count_text(status['tokens_per_second'])} tokens/s"
    speed += f" on {plain(status['device'])}" if status["device"] else ""
    speed += f", memory {bytes_text(status['memory'])}" if status["memory"] else ""
    speed += f", GPU {bytes_text(status[GPU])}" if status[GPU] else ""
    own = "_" if not state["running"] else "J" if status["phase"] in ("starting", "joining") else "#"
    symbols = Text("peers   ").append(own, f"bold {COLOURS[own]}")
    for peer in status["peers"]:
        symbols.append(mark := symbol(peer, members), COLOURS[mark])
    width = columns - 8
    chart = sparkline(losses[-4 * width :], width, GLYPHS if utf8 else PLAIN_GLYPHS)
    lines = [
        symbols,
        Text(f"loss    {loss}"),
        Text("        ").append(chart, "cyan"),
        Text(f"speed   {speed}"),
        Text(f"up      {up}, {bytes_text(status['bytes_up'])} in all{saved}"),
        Text(f"down    {down}, {bytes_text(status['bytes_down'])} in all"),
        Text(f"round   {status['sync_seconds']:.1f} s for the exchange"),
        *([Text(f"fetches {plain(status['fetching'])}", "yellow")] if status["fetching"] else []),
        Text(),
        Text(f"  {'peer':<9}{'name':<17}{'round':>8}{'loss':>8}{'seen':>8}  note", "bold"),
    ]

    def row(peer: Fields) -> Text:
        mark = symbol(peer, members)
        seen = f"{peer['age']:.0f} s" if peer["age"] else "-"
        note = " ".join(plain(peer[key]) for key in ("reason", "diagnosis", "seat") if peer[key])
        loss = "-" if peer["loss"] is None else f"{peer['loss']:.3f}"
        text = f" {peer['peer'][:8]:<9}{_cut(peer['name'], 16)} {peer['round']:>8}{loss:>8}{seen:>8}  {note}"
        return Text(mark, COLOURS[mark]).append(text, "default")

    return lines + _some([row(peer) for peer in status["peers"]], rows - len(lines))


def _links(state: Fields, rates: Rates, rows: int) -> list[Text]:
    status, members = state["status"], _members(state)
    names = {peer["peer"]: peer["name"] for peer in status["peers"]}
    head = Text(f"  {'peer':<9}{'name':<13}{'rtt':>8}{'up':>11}{'down':>11}{'sent':>9}{'received':>9}  by", "bold")
    found = []
    for peer in status["peers"]:
        up, down = rates.of(peer["peer"])
        trip = f"{1000 * peer['rtt']:.1f} ms" if peer["rtt"] else "-"
        by = plain(names.get(peer["relay"]) or peer["relay"][:8]) if peer["relay"] else "-"
        mark = symbol(peer, members)
        text = f" {peer['peer'][:8]:<9}{_cut(peer['name'], 12)} {trip:>8}{up:>11}{down:>11}"
        text += f"{bytes_text(peer['up']):>9}{bytes_text(peer['down']):>9}  {by}"
        found.append(Text(mark, COLOURS[mark]).append(text, "default"))
    return [head, *_some(found, rows - 1)]


def _round(state: Fields, rows: int) -> list[Text]:
    status = state["status"]
    names = {peer["peer"]: peer["name"] or peer["peer"][:8] for peer in status["peers"]} | {status["peer"]: "this one"}
    ready = [plain(names.get(peer, peer[:8])) for peer in status["ready"]]
    absent = [
        plain(names[one["peer"]])
        for one in status["peers"]
        if one["peer"] not in status["ready"] and one["state"] == "alive"
    ]
    phases = Text(f"round {status['round'] + 1}:  ")
    # The event of a commit is the last one before the inner steps of the next round.
    present = "" if status["phase"] == "training" and state["phase"] == "commit" else state["phase"]
    for name in PHASES:
        phases.append(f"[{name}] " if name == present else f" {name}  ", "bold green" if name == present else "dim")
    lines = [
        phases,
        Text(f"ready   {len(ready)}: {', '.join(ready) or '-'}"),
        Text(f"absent  {len(absent)}: {', '.join(absent) or '-'}"),
        *([Text(f"waits   {plain(status['stalled'])}", "yellow")] if status["stalled"] else []),
        Text(),
        Text(f"{'round':>8}{'loss':>9}{'in':>8}{'exchange':>9}{'tokens/s':>10}  missing", "bold"),
    ]
    found = []
    for one in reversed(state["rounds"][-max(1, rows) :]):
        loss = "-" if one.get("loss") is None else f"{one['loss']:.3f}"
        missing = ", ".join(f"{peer} ({why})" for peer, why in one.get("missing", {}).items())
        count = f"{one.get('contributors', '-')}/{one.get('peers', '-')}"
        sync = f"{one.get('sync_seconds') or 0:.1f} s"
        speed = count_text(one.get("tokens_per_second") or 0)
        found.append(Text(f"{one.get('round', 0):>8}{loss:>9}{count:>8}{sync:>9}{speed:>10}  {plain(missing)}"))
    return lines + found[: max(0, rows - len(lines))]


def _log(state: Fields, rows: int) -> list[Text]:
    lines = []
    for note in state["notes"][-rows:]:
        clock = time.strftime("%H:%M:%S", time.localtime(note.get("wall", 0)))
        style = "bold red" if note["kind"] in ("alarm", "lineage") else ""
        rest = {name: value for name, value in note.items() if name not in ("kind", "wall")}
        lines.append(Text(f"{clock} {plain(event_text(note['kind'], rest))}", style))
    return lines or [Text("no events yet")]


def _some(lines: list[Text], room: int) -> list[Text]:
    """Return the lines that fit. If some do not, the last line has their number."""
    if len(lines) <= room:
        return lines
    return [*lines[: max(0, room - 1)], Text(f"  … and {len(lines) - max(0, room - 1)} more", "dim")]


def _cut(text: str, width: int) -> str:
    """Return text of exactly `width` cells."""
    fitted = Text(plain(text))
    fitted.truncate(width, overflow="ellipsis", pad=True)
    return fitted.plain


def _fit(line: Text, columns: int) -> Text:
    if cell_len(line.plain) > columns:
        line = line.copy()
        line.truncate(columns, overflow="ellipsis")
    return line
