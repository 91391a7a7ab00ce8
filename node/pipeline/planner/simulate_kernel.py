"""Event simulation of one training step of a replica, compiled: the search runs it a million times.

A peer is one server. A micro-batch of path p goes forward over the path's peers (w seconds each), its loss is computed
at the first peer (w/4), and it goes back the same way (1.5 w). A slot of a peer is held from the start of its forward
to the end of its backward; without a free slot a forward waits, and later work overtakes it. Otherwise first come,
first served.
"""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray
from thinwire.compression.kernels.common import kernel

LOSS, BACKWARD = 0.25, 1.5
"""Seconds of a loss and of a backward, in forwards (measured in SkipPipe's reference code)."""


@kernel
def _before(times: NDArray[np.float64], a: int, b: int) -> bool:
    return times[a] < times[b] or (times[a] == times[b] and a < b)


@kernel
def simulate(
    paths: NDArray[np.int64],
    delays: NDArray[np.float64],
    work: NDArray[np.float64],
    memory: NDArray[np.int64],
    rounds: int,
    gap: float,
    limit: float,
    starts: NDArray[np.float64],
) -> float:
    """Return the seconds until the last micro-batch is back; infinite if later than `limit`, or never.

    `paths` (n, length): peers of each path; `delays` (peers, peers) seconds; `work` (peers,) seconds of a forward;
    `memory` (peers,) slots; every path is used `rounds` times, the next time after it came back; `gap`: seconds after
    each operation. `starts` (n * rounds, 2 * length + 1) is filled with the start times, in the order of the
    operations.
    """
    count, length = paths.shape
    peers, steps = delays.shape[0], starts.shape[1]
    # Time that a micro-batch needs from the start of an operation on without contention.
    rest = np.empty((count, steps))
    for path in range(count):
        ahead = 0.0
        for step in range(steps - 1, -1, -1):
            place = 0 if step == length else step if step < length else 2 * length - step
            peer = paths[path, place]
            if step < length:
                ahead += work[peer] + delays[peer, paths[path, (step + 1) % length]]
            elif step == length:
                ahead += LOSS * work[peer] + delays[peer, paths[path, length - 1]]
            else:
                ahead += BACKWARD * work[peer]
                if step < steps - 1:
                    ahead += delays[peer, paths[path, place - 1]]
            rest[path, step] = ahead
    size = count * steps  # Operation o of path p in the current round: p * steps + o.
    due = np.empty(size + peers)
    heap = np.empty(size + peers, np.int64)  # Arrivals, and peers that become free: size + peer.
    waiting = np.empty((peers, size), np.int64)
    queued = np.zeros(peers, np.int64)
    idle = np.ones(peers, np.bool_)
    free = memory.copy()
    went = np.zeros(count, np.int64)
    filled = 0
    for path in range(count):
        due[path * steps] = 0.0
        heap[filled] = path * steps
        filled += 1
    last, left = 0.0, count * rounds
    while filled:
        event = heap[0]
        filled -= 1
        moved, hole = heap[filled], 0
        while 2 * hole + 1 < filled:
            child = 2 * hole + 1
            if child + 1 < filled and _before(due, heap[child + 1], heap[child]):
                child += 1
            if _before(due, moved, heap[child]):
                break
            heap[hole] = heap[child]
            hole = child
        heap[hole] = moved
        now = due[event]
        if event >= size:
            peer = event - size
            idle[peer] = True
        else:
            path, step = event // steps, event % steps
            place = step if step < length else 2 * length - step
            peer = paths[path, 0] if step == length else paths[path, place]
            waiting[peer, queued[peer]] = event
            queued[peer] += 1
        if not idle[peer]:
            continue
        for index in range(queued[peer]):
            event = waiting[peer, index]
            path, step = event // steps, event % steps
            if step < length and free[peer] == 0:
                continue
            queued[peer] -= 1
            for k in range(index, queued[peer]):
                waiting[peer, k] = waiting[peer, k + 1]
            if step < length:
                free[peer] -= 1
                took = work[peer]
                nearest = paths[path, (step + 1) % length]
            elif step == length:
                took = LOSS * work[peer]
                nearest = paths[path, length - 1]
            else:
                free[peer] += 1  # No other event looks before the peer is free again.
                took = BACKWARD * work[peer]
                nearest = paths[path, 2 * length - step - 1] if step < 2 * length else peer
            if now + rest[path, step] + (rounds - 1 - went[path]) * rest[path, 0] > limit:
                return np.inf
            starts[path * rounds + went[path], step] = now
            idle[peer] = False
            due[size + peer] = now + took + gap
            pushes = 1
            follower = event + 1
            if step == 2 * length:
                last = max(last, now + took)
                left -= 1
                went[path] += 1
                follower = path * steps
                due[follower] = now + took
                pushes = 2 if went[path] < rounds else 1
            else:
                due[follower] = now + took + delays[peer, nearest]
                pushes = 2
            for push in range(pushes):
                new = size + peer if push == 0 else follower
                hole = filled
                filled += 1
                while hole and _before(due, new, heap[(hole - 1) // 2]):
                    heap[hole] = heap[(hole - 1) // 2]
                    hole = (hole - 1) // 2
                heap[hole] = new
            break
    return last if left == 0 else np.inf
