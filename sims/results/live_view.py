"""Live view of a simulation, and its last screen: bar and table on a terminal, else lines."""

from __future__ import annotations

import math
import sys
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from rich.console import Console, Group
from rich.live import Live
from rich.progress import BarColumn, Progress, TextColumn
from rich.table import Table
from rich.text import Text
from thinwire.node.runtime.console import bytes_text, clock_text
from thinwire.sims.results.journal import Journal, PeerSample
from thinwire.sims.results.report import loss_of
from thinwire.sims.scenario.scenario import Scenario

ROWS = 16
"""Largest number of peers with a row each; more are shown by group."""

NAMED = 4
"""Most peers that a line names."""

LEVELS = {"L0": "virtual time", "L1": "real processes", "L2": "real processes in network namespaces"}
"""Level of a run -> its name on the last screen."""

_REDRAW = 0.2
_LINES = 10
"""Number of lines of a whole run without a terminal."""


class Stopped(Exception):
    """The user stopped the run; `number` is the signal."""

    def __init__(self, number: int) -> None:
        super().__init__(f"stopped by signal {number}")
        self.number = number


class LiveView:
    """View of a journal on stderr. `journal` is the one that `watch` got last, for the report.

    virtual: the journal has virtual times, and their pace is shown.
    """

    def __init__(self, scenario: Scenario, style: str, *, virtual: bool = True) -> None:
        self.journal = Journal(tuple(peer.name for peer in scenario.peers))
        self.signal = 0
        self._scenario, self._virtual, self._began = scenario, virtual, time.perf_counter()
        self._shown, self._lines = 0.0, 0
        self._events, self._round, self._loss = 0, 0, dict[int, float]()
        self._live = Live(console=Console(stderr=True), auto_refresh=False) if style == "rich" else None
        if self._live is not None:
            self._live.start()

    def watch(self, journal: Journal) -> None:
        """Update after each sample. Raises Stopped if `stop` was called."""
        self.journal = journal
        if self.signal:
            raise Stopped(self.signal)
        if self._live is not None:
            if time.perf_counter() > self._shown + _REDRAW:
                self._shown = time.perf_counter()
                self._live.update(self._screen(), refresh=True)
        elif journal.now >= self._scenario.duration * (self._lines + 1) / _LINES:
            self._lines = int(journal.now * _LINES / self._scenario.duration)
            print(self._line(), file=sys.stderr, flush=True)

    def stop(self, number: int) -> None:
        """Stop at the next sample. Raises KeyboardInterrupt on a second call."""
        if self.signal:
            raise KeyboardInterrupt
        self.signal = number

    def close(self) -> None:
        """Draw the last state, and end the view."""
        if self._live is not None:
            self._live.update(self._screen(), refresh=True)
            self._live.stop()

    def _read(self) -> None:
        """Process the events since the last call."""
        for event in self.journal.events[self._events :]:
            if event.name == "round":
                if event.fields["round"] > self._round:
                    self._round = event.fields["round"]
                    self._loss.clear()
                loss = loss_of(event)
                if event.fields["round"] == self._round and loss is not None:
                    self._loss[event.peer] = loss
        self._events = len(self.journal.events)

    def _line(self) -> str:
        self._read()
        journal, seconds = self.journal, time.perf_counter() - self._began
        samples = journal.samples[-1].peers if journal.samples else ()
        there = sum(one is not None for one in samples)
        factor = journal.now / seconds
        pace = f"{factor:.{0 if factor >= 10 else 1}f} × real time · " if self._virtual else ""
        loss = f"{sum(self._loss.values()) / len(self._loss):.3f}" if self._loss else "-"
        return (
            f"{clock_text(journal.now)} of {clock_text(self._scenario.duration)} · {pace}"
            f"round {self._round} · loss {loss} · {there} of {len(journal.names)} peers · "
            f"faults {sum(1 for _ in journal.of('fault') if not _.fields['over'])}"
        )

    def _screen(self) -> Group:
        title = Text(self._line())
        bar = Progress(TextColumn(self._scenario.name), BarColumn(None), TextColumn("{task.percentage:.0f} %"))
        part = min(1.0, self.journal.now / self._scenario.duration)
        bar.add_task("", total=1000, completed=int(1000 * part))
        table = Table(box=None, header_style="bold", pad_edge=False)
        few = len(self.journal.names) <= ROWS
        for column in ("peer" if few else "group", "state" if few else "peers"):
            table.add_column(column)
        for column in ("round", "loss", "up", "down"):
            table.add_column(column, justify="right")
        samples = self.journal.samples[-1].peers if self.journal.samples else ()
        for name, state, rows in self._rows(samples):
            losses = [one.loss for one in rows if one.loss is not None and math.isfinite(one.loss)]
            table.add_row(
                name,
                state,
                str(max((one.round for one in rows), default=0)),
                f"{sum(losses) / len(losses):.3f}" if losses else "-",
                bytes_text(sum(one.up for one in rows)),
                bytes_text(sum(one.down for one in rows)),
            )
        return Group(bar, title, table)

    def _rows(self, samples: tuple[PeerSample | None, ...]) -> list[tuple[str, str, list[PeerSample]]]:
        if len(samples) <= ROWS:
            names = self.journal.names
            return [(names[i], one.phase if one else "-", [one] if one else []) for i, one in enumerate(samples)]
        groups: dict[str, list[PeerSample]] = {}
        counts: dict[str, int] = {}
        for peer, one in zip(self._scenario.peers, samples, strict=True):
            counts[peer.group] = counts.get(peer.group, 0) + 1
            groups.setdefault(peer.group, []).extend([one] if one else [])
        return [(name, f"{len(groups[name])} of {count}", groups[name]) for name, count in counts.items()]


def ending(summary: Mapping[str, Any], directory: Path) -> str:
    """Return the lines of the last screen, with the results."""

    def shown(value: float | None, pattern: str = "{:.3f}") -> str:
        return "-" if value is None else pattern.format(value)

    times = summary["round_seconds"]
    pace = f" (×{shown(summary['factor'], '{:,.1f}')})" if summary["level"] == "L0" else ""
    pace += "" if summary["finished"] else ", interrupted"
    real = f"{summary['real_seconds']:.1f} s{pace}"
    pairs = [
        ("played", f"{summary['seconds']:.0f} s of {summary['peers']} peers in {real}"),
        ("rounds", f"{summary['rounds']}, one in {shown(times['median'], '{:.1f}')} s"
                   f" (95 %: {shown(times['p95'], '{:.1f}')} s)"),
        ("loss", f"{shown(summary['loss_first'])} → {shown(summary['loss_last'])}, {summary['loss_unit']}"),
        ("a peer sent", f"{bytes_text(summary['bytes_up']['mean'])}, received"
                        f" {bytes_text(summary['bytes_down']['mean'])}"),
        ("utilisation", shown(summary["utilisation"], "{:.1%}") + _without(summary["never_contributed"])),
        ("faults", str(len(summary["faults"]))
                   + (f" ({len(summary['not_played'])} not played)" if summary["not_played"] else "")),
        ("violations", str(len(summary["violations"]))),
        ("trace", summary["trace"] or "-"),
        ("report", str(directory)),
    ]  # fmt: skip
    head = f"{summary['scenario']} · seed {summary['seed']} · {LEVELS[summary['level']]}"
    return "\n".join([head, *(f"  {name:<12}{value}" for name, value in pairs)])


def _without(names: Sequence[str]) -> str:
    shown = ", ".join(names[:NAMED]) + (f" and {len(names) - NAMED} more" if len(names) > NAMED else "")
    return f", where the computing of {shown} does not count: their work went into no round" if names else ""
