"""Compute utilisation of a peer: a simulation of processor and network, each with one task at a time.

This is the compute-utilisation model of Streaming DiLoCo (arXiv:2501.18512, section on bandwidth): a step of S seconds
over L equal layers is S/3 forward, S/3 backward for activations (the first layer needs none) and S/3 backward for
weights. A layer that is exchanged occupies the network, first come, first served, from the moment its weight gradients
exist; its forward pass of the next step, or of τ steps later, waits for the result. The model reproduces the published
tables with one fitted constant (the bits of a parameter on the wire, 13.3, or 3.3 for fp4), because the papers state
neither bits nor horizon; tests/simulator/planner/test_utilisation.py compares the two.
"""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

FRAGMENT = 3
"""Layers per fragment of a streaming run (as published)."""

WARM_UP, MEASURED = 20, 40
"""Minimum number of steps before and in the measurement, rounded up to whole periods of the schedule."""


@dataclass(frozen=True, slots=True)
class TrainingWorkload:
    """Training workload: parameters, layers, and seconds of one inner step."""

    parameters: float
    layers: int
    step: float


@dataclass(frozen=True, slots=True)
class ExchangeSchedule:
    """Schedule of the exchange of layers.

    every: H, inner steps between two exchanges of a layer (1: data parallel training). streaming: strided fragments of
    FRAGMENT layers one after another instead of all at once. overlap: τ, inner steps that may pass before a result is
    needed.
    """

    every: int = 1
    streaming: bool = False
    overlap: int = 0

    def sends(self, layers: int) -> dict[int, list[int]]:
        """Return the layers exchanged after each step of a period, by step."""
        if not self.streaming:
            return {0: list(range(layers))}
        fragments = -(-layers // FRAGMENT)
        stride = self.every // (fragments + 1)
        found: dict[int, list[int]] = {}
        for fragment in range(fragments):
            at = stride * fragment if stride else fragment * self.every // fragments
            found.setdefault(at, []).extend(range(fragment, layers, fragments))
        return found


def utilisation(
    work: TrainingWorkload, schedule: ExchangeSchedule, transfer: NDArray[np.float64], latency: float = 0.0
) -> NDArray[np.float64]:
    """Return the fraction of time spent computing in steady state, for each of several network speeds.

    transfer: seconds for which one layer occupies the network, one value per speed. latency: additional seconds until it
    arrives.
    """
    sends, layers = schedule.sends(work.layers), work.layers
    moments = sorted(sends)
    unit = work.step / 3 / layers
    computing = unit * (3 * layers - 1)
    before = -(-WARM_UP // schedule.every) * schedule.every
    steps = before + -(-MEASURED // schedule.every) * schedule.every
    now, free = np.zeros_like(transfer), np.zeros_like(transfer)
    began = now
    needed: dict[int, dict[int, NDArray[np.float64]]] = {}
    step = 0
    while step < steps:
        if step == before:
            began = now
        quiet = min(
            min(needed, default=steps), _next(moments, step, schedule.every), before if step < before else steps
        )
        if quiet > step:
            now, step = now + computing * (quiet - step), quiet
            continue
        passed = 0
        for layer, arrival in sorted(needed.pop(step, {}).items()):
            now, passed = np.maximum(now + unit * (layer - passed), arrival), layer
        now = now + unit * (layers - passed)
        sent, step = sends.get(step % schedule.every, []), step + 1
        if not sent:
            now = now + (computing - unit * layers)
            continue
        done = layers
        arrivals = needed.setdefault(step + schedule.overlap, {})
        for layer in sorted(sent, reverse=True):
            now = now + unit * (2 * (done - layer) - (layer == 0))
            free, done = np.maximum(free, now) + transfer, layer
            arrivals[layer] = free + latency
        now = now + unit * max(0, 2 * done - 1)
    result: NDArray[np.float64] = computing * (steps - before) / (now - began)
    return result


def _next(moments: Sequence[int], step: int, every: int) -> int:
    """Return the first step from `step` on after which layers are sent."""
    at = bisect_left(moments, step % every)
    start = step - step % every
    return start + moments[at] if at < len(moments) else start + every + moments[0]


def needed(found: NDArray[np.float64], gbits: NDArray[np.float64], targets: Sequence[float]) -> list[float | None]:
    """Return the first bandwidth that reaches each target, or None if no bandwidth does."""
    return [float(gbits[np.argmax(found >= target)]) if (found >= target).any() else None for target in targets]
