"""Metrics of a daemon in the text format of Prometheus."""

from __future__ import annotations

from collections.abc import Callable, Iterator

from prometheus_client import CollectorRegistry, generate_latest
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, Metric
from thinwire.node.peer.status import Status

Number = Callable[[Status], float | None]

GAUGES: dict[str, tuple[str, Number]] = {
    "round": ("Last committed round.", lambda status: status.round),
    "rounds": ("Rounds of the run; 0: no end.", lambda status: status.rounds),
    "loss": ("Training loss of this peer in its last round, nats per token.", lambda status: status.loss),
    "held_out_loss": ("Loss on held-out text, nats per token.", lambda status: status.held_out),
    "tokens_per_second": ("Training speed of this peer.", lambda status: status.tokens_per_second),
    "sync_seconds": ("Seconds of the last exchange.", lambda status: status.sync_seconds),
    "alike": ("1 if all peers have the same weights.", lambda status: float(status.alike)),
    "alarm": ("1 if a problem needs a person.", lambda status: float(bool(status.alarm))),
    "stalled": (
        "1 if a round does not end: members are absent or do not answer.",
        lambda status: float(bool(status.stalled)),
    ),
    "status_timestamp_seconds": ("Time of the status.", lambda status: status.wall),
}

COUNTERS: dict[str, tuple[str, Number]] = {
    "sent_bytes": ("Bytes sent in this run.", lambda status: status.bytes_up),
    "received_bytes": ("Bytes received in this run.", lambda status: status.bytes_down),
    "fp32_bytes": (
        "Bytes that synchronous data parallelism in fp32 would have sent.",
        lambda status: status.fp32_bytes,
    ),
    "relayed_bytes": ("Bytes relayed between other peers.", lambda status: status.relayed_bytes),
}


def exposition(status: Status | None, running: bool) -> bytes:
    """Return all metrics. `status`: the last status of the daemon; None if no daemon has run here."""
    registry = CollectorRegistry()
    registry.register(_Collected(status, running))
    return bytes(generate_latest(registry))


class _Collected:
    def __init__(self, status: Status | None, running: bool) -> None:
        self._status, self._running = status, running

    def collect(self) -> Iterator[Metric]:
        yield GaugeMetricFamily("thinwire_up", "1 if the daemon runs.", value=float(self._running))
        status = self._status
        if status is None:
            return
        labels, values = ("run", "peer"), (status.run[:16], status.peer[:16])
        for kind, table in ((GaugeMetricFamily, GAUGES), (CounterMetricFamily, COUNTERS)):
            for name, (text, number) in table.items():
                value = number(status)
                if value is not None:
                    metric = kind(f"thinwire_{name}", text, labels=labels)
                    metric.add_metric(values, value)
                    yield metric
        peers = GaugeMetricFamily("thinwire_peers", "Other peers by state.", labels=(*labels, "state"))
        states = [peer.state for peer in status.peers]
        for state in sorted({"alive", *states}):  # a peer alone reports 0 alive instead of no figure
            peers.add_metric((*values, state), states.count(state))
        yield peers
