"""Display of a running local swarm: one live table on a terminal, one line per round elsewhere."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

from rich.console import Console
from rich.live import Live
from rich.table import Table
from rich.text import Text
from thinwire.node.local_swarm.child_process import Child
from thinwire.node.local_swarm.event_analysis import EventAnalysis, bytes_sent, saved_factor
from thinwire.node.runtime.console import LOGGER, bytes_text, clock_text, count_text, factor_text, plain, saved_text


@dataclass(frozen=True, slots=True)
class Row:
    """Display data of one peer.

    `speed` is tokens/s, `up` and `down` bytes, `sync` seconds of its last exchange.
    """

    name: str
    peer: str
    state: str
    round: int
    loss: float | None
    speed: float
    up: int
    down: int
    factor: float
    sync: float


def row(name: str, state: str, analysis: EventAnalysis) -> Row:
    """Return the display data of a peer from its events."""
    newest = analysis.last("round") or {}
    running = state not in ("killed", "done", "failed")
    return Row(
        name=name,
        peer=analysis.peer.hex()[:8],
        state=state,
        round=analysis.round,
        loss=newest.get("loss"),
        speed=newest.get("tokens_per_second") or 0.0 if running else 0.0,
        up=bytes_sent(analysis),
        down=newest.get("bytes_down", 0),
        factor=saved_factor(analysis),
        sync=newest.get("sync_seconds", 0.0),
    )


@dataclass(frozen=True, slots=True)
class Snapshot:
    """Display data of one moment. `elapsed` is seconds since the start, `rounds` 0 in an endless run."""

    run: str
    round: int
    rounds: int
    elapsed: float
    rows: Sequence[Row]
    note: str


def title(snapshot: Snapshot) -> str:
    """Return a title such as "run demo · round 12 of 40 · 4 peers running · 21k tokens/s · 1:12"."""
    running = [one for one in snapshot.rows if one.state not in ("killed", "done", "failed")]
    of = f" of {snapshot.rounds}" if snapshot.rounds else ""
    speed = count_text(math.fsum(one.speed for one in running))
    return (
        f"run {snapshot.run} · round {snapshot.round}{of} · {len(running)} peers running · {speed} tokens/s · "
        f"{clock_text(snapshot.elapsed)}"
    )


NEWS_SECONDS = 2.0
"""Seconds between two messages of a process that are shown."""

_COLOURS = {"training": "green", "exchanging": "cyan", "killed": "bold red", "failed": "bold red", "done": "dim"}


def table(snapshot: Snapshot) -> Table:
    """Return the live table."""
    result = Table(title=title(snapshot), title_justify="left", box=None, header_style="bold", pad_edge=False)
    result.caption, result.caption_justify = snapshot.note or None, "left"
    for column in ("peer", "id", "state"):
        result.add_column(column)
    for column in ("round", "loss", "tokens/s", "up", "down", "saved", "exchange"):
        result.add_column(column, justify="right")
    for one in snapshot.rows:
        cells = (
            "-" if one.loss is None else f"{one.loss:.3f}",
            count_text(one.speed) if one.speed else "-",
            bytes_text(one.up),
            bytes_text(one.down),
            factor_text(one.factor),
            f"{one.sync:.1f} s",
        )
        state = Text(plain(one.state), style=_COLOURS.get(one.state, ""))
        result.add_row(one.name, one.peer, state, str(one.round), *cells)
    return result


def line(snapshot: Snapshot) -> str:
    """Return one line about the newest round."""
    current = [one for one in snapshot.rows if one.round == snapshot.round and one.loss is not None]
    losses = [one.loss for one in current if one.loss is not None]
    up, down = sum(one.up for one in snapshot.rows), sum(one.down for one in snapshot.rows)
    factor = math.fsum(one.factor * one.up for one in snapshot.rows) / max(1, up)
    loss = f"{math.fsum(losses) / len(losses):.3f}" if losses else "-"
    return (
        f"{title(snapshot)} · loss {loss} · up {bytes_text(up)}, down {bytes_text(down)}{saved_text(factor)} "
        f"· exchange {max((one.sync for one in current), default=0):.1f} s"
    )


class Display:
    """Displays snapshots in a log style ("rich", "plain", "json").

    The style "rich" uses the last lines of the terminal.
    """

    def __init__(self, style: str) -> None:
        self._live = Live(console=Console(stderr=True), auto_refresh=False) if style == "rich" else None
        self._round = 0
        if self._live is not None:
            self._live.start()

    def show(self, snapshot: Snapshot) -> None:
        """Redraw the table, or print a line if there is a new round."""
        if self._live is not None:
            self._live.update(table(snapshot), refresh=True)
        elif snapshot.round > self._round:
            LOGGER.info("%s", line(snapshot))
        self._round = max(self._round, snapshot.round)

    def say(self, text: str, *, warn: bool = False) -> None:
        """Print one permanent line."""
        if self._live is not None:
            self._live.console.print(Text(text, style="bold yellow" if warn else ""), highlight=False)
        else:
            LOGGER.log(30 if warn else 20, "%s", text)

    def close(self) -> None:
        """Leave the last table on the screen."""
        if self._live is not None:
            self._live.stop()


class News:
    """Choice of a process's messages that are shown: the newest one, every NEWS_SECONDS."""

    def __init__(self, now: float) -> None:
        self._shown, self._at = "", now

    def of(self, newest: str, now: float) -> str:
        """Return what is shown at `now` (seconds), "" for nothing. newest: the newest message so far."""
        if newest == self._shown or now < self._at + NEWS_SECONDS:
            return ""
        self._shown, self._at = newest, now
        return newest


def rows(children: Sequence[Child]) -> list[Row]:
    """Return one row for each peer."""
    return [row(child.name, child.state, child.analysis) for child in children]
