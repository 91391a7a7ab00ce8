"""Text form of a plan: figures, and a lane for every peer."""

from __future__ import annotations

from thinwire.node.pipeline.planner.makespan import Timeline
from thinwire.node.pipeline.planner.plan_summary import PlanSummary
from thinwire.node.pipeline.planner.problem import Problem
from thinwire.node.runtime.console import plain

LETTERS = "abcdefghijklmnopqrstuvwxyz"


def text(instance: Problem, timeline: Timeline, summary: PlanSummary, width: int = 100) -> str:
    """Return lines of at most `width` columns, except notes, without control characters of names."""
    paths = f"{len(summary.paths)} over {instance.length} stages each, {instance.rounds} times"
    facts = [
        ("pipeline", f"{instance.name or 'unnamed'}: {instance.peers} peers, {len(instance.stages)} stages"),
        ("paths", f"{paths}: {summary.microbatches} micro-batches"),
        ("step", f"{summary.makespan:.2f} s by this plan"),
        ("full", f"{summary.full:.2f} s when no stage is skipped: {summary.factor:.2f} times as long"),
        ("alone", f"{summary.alone:.2f} s for a micro-batch alone, {summary.links:.2f} s of it on links"),
    ]
    lines = [f"{name:<9} {fact}" for name, fact in facts]
    lines += ["", *lanes(instance, timeline, summary, width), ""]
    lines += [f"{letter(number)}  {_route(instance, path)}" for number, path in enumerate(summary.paths)]
    return "\n".join(plain(line) for line in [*lines, "", *(f"note: {note}" for note in summary.notes)])


def letter(path: int) -> str:
    """Return the letter of a path in the lanes; letters repeat after 26 paths."""
    return LETTERS[path % len(LETTERS)]


def lanes(instance: Problem, timeline: Timeline, summary: PlanSummary, width: int) -> list[str]:
    """Return one line per peer, by stage, with the longest activity in each slice of time.

    Small letters are forwards, capitals backwards.
    """
    names = {peer: instance.label(peer) for stage in instance.stages for peer in stage}
    margin = max(len(name) for name in names.values())
    columns = max(width - margin - 12, 20)
    slice_ = timeline.makespan / columns if timeline.makespan else 1.0
    cells: dict[int, list[tuple[float, str]]] = {peer: [(0.0, ".")] * columns for peer in names}
    for op in timeline.operations:
        mark = {"forward": letter(op.path), "loss": "*", "backward": letter(op.path).upper()}[op.kind]
        for column in range(int(op.start / slice_), min(int(op.end / slice_) + 1, columns)):
            share = min(op.end, (column + 1) * slice_) - max(op.start, column * slice_)
            if share > cells[op.peer][column][0]:
                cells[op.peer][column] = (share, mark)
    scale = f"0{f'{timeline.makespan:.1f} s':>{columns - 1}}"
    lines = [f"{'stage':<6}{'peer':<{margin}} {scale}"]
    for number, stage in enumerate(instance.stages):
        for place, peer in enumerate(stage):
            line = "".join(mark for _, mark in cells[peer])
            head = str(number) if not place else ""
            lines.append(f"{head:<6}{names[peer]:<{margin}} {line} {100 * summary.working[peer]:3.0f}%")
    return [*lines, "small letters go forward, capitals backward, * is a loss; at the right: part of the step at work"]


def _route(instance: Problem, path: tuple[int, ...]) -> str:
    return " > ".join(f"{instance.label(peer)} ({instance.stage[peer]})" for peer in path)
