"""Summary of a local swarm: every figure with its comparison, and whether the run was successful."""

from __future__ import annotations

import math
import textwrap
from dataclasses import dataclass
from typing import Any

from thinwire.node.local_swarm.event_analysis import DigestComparison, Recovery
from thinwire.node.runtime.console import bytes_text, clock_text, factor_text


@dataclass(frozen=True, slots=True)
class TrafficReport:
    """Traffic of one peer.

    `bytes`: sent; `factor`: how many times more synchronous fp32 would have sent (0: unknown).
    """

    name: str
    bytes: int
    factor: float


@dataclass(frozen=True, slots=True)
class KillReport:
    """The peer that was killed, after which round, and the recovery (None: there was none).

    `usual`: usual seconds per round.
    """

    name: str
    round: int
    recovery: Recovery | None
    usual: float


@dataclass(frozen=True, slots=True)
class JoinerReport:
    """The late joiner.

    `began`: last committed round when it was started; `synced`: round whose state it fetched; `first`: first round that
    it took part in; the last two are None if it did not get that far. `held`, `lost`: the fragments that it holds, and
    those of the killed peer; empty for peers that hold all. `tokens`: that it has trained on.
    """

    name: str
    began: int
    synced: int | None
    first: int | None
    held: tuple[int, ...] = ()
    lost: tuple[int, ...] = ()
    tokens: int = 0


@dataclass(frozen=True, slots=True)
class Summary:
    """All results; None where not measured. Losses are nats per token.

    `steps` are the inner steps of one peer over the whole run; `alone` is the peer whose shard and steps the baseline
    had. `lineages`: the alarms about peers that continued without a quorum.
    """

    run: str
    peers: int
    rounds: int
    wanted: int
    steps: int
    seconds: float
    before: float | None
    after: float | None
    alone: str
    alone_after: float | None
    sent: tuple[TrafficReport, ...]
    proof: DigestComparison
    kill: KillReport | None
    newcomer: JoinerReport | None
    picture: str
    checkpoint: str
    prompt: str
    sample: str
    directory: str
    lineages: tuple[str, ...] = ()

    def faults(self) -> list[str]:
        """Return the reasons why this run failed; empty if it succeeded."""
        found = []
        if self.wanted and self.rounds < self.wanted:
            found.append(f"the swarm ended in round {self.rounds} of {self.wanted}")
        found += [f"replicas differ in {difference}" for difference in self.proof.differences]
        if not self.proof.holds and not self.proof.differences:
            found.append("the live replicas did not end in one round with one digest")
        if self.kill is not None and self.kill.recovery is None:
            found.append("no round was committed after the kill")
        if self.newcomer is not None and self.newcomer.first is None:
            found.append(f"{self.newcomer.name} joined late and never took part in a round")
        elif self.newcomer is not None and self.newcomer.held != self.newcomer.lost:
            found.append(
                f"{self.newcomer.name} did not take the stage of {self.kill.name if self.kill else 'the killed peer'}"
            )
        elif self.newcomer is not None and self.newcomer.held and not self.newcomer.tokens:
            found.append(f"the group made no inner steps with {self.newcomer.name}")
        return found


def lines(summary: Summary) -> list[tuple[str, str]]:
    """Return (label, text) in the order of the screen."""
    proof, unit = summary.proof, "min" if summary.seconds < 3600 else "h"
    return [
        (
            "run",
            f"{summary.run}: {summary.rounds} rounds of {summary.steps // max(1, summary.rounds)} steps on "
            f"{summary.peers} peers in {clock_text(summary.seconds)} {unit}",
        ),
        ("held-out loss", f"{_loss(summary.before)} before, {_loss(summary.after)} after {summary.steps} steps a peer"),
        (
            "one peer alone",
            f"{_loss(summary.alone_after)} after the same {summary.steps} steps on the shard of {summary.alone}",
        ),
        (
            "bytes sent",
            " · ".join(f"{one.name} {bytes_text(one.bytes)} ({factor_text(one.factor)})" for one in summary.sent),
        ),
        ("", "×: how many times more synchronous data parallelism in fp32 would have sent for the same steps"),
        *([("kill -9", _kill(summary.kill))] if summary.kill else []),
        *([("late joiner", _newcomer(summary.newcomer))] if summary.newcomer else []),
        *(("lineage", text.replace(" continue as ", " continued as ")) for text in summary.lineages),
        (
            "same weights",
            f"no: with this outer method the {proof.live} live replicas differ a little"
            if not proof.alike
            else f"digest {proof.final[:16]}… on all {proof.live} live replicas after round {proof.round}; equal in all "
            f"{proof.rounds} rounds ({proof.digests} digests compared)"
            if proof.holds
            else "NOT PROVED: " + ("; ".join(proof.differences) or "the live replicas did not end together"),
        ),
        ("picture", summary.picture or "-"),
        ("checkpoint", summary.checkpoint or "-"),
        ("sample", f"(prompt: {summary.prompt!r})" if summary.sample else "-"),
        ("files", summary.directory),
    ]


def screen(summary: Summary) -> str:
    """Return the lines as text, with the sample below, indented."""
    text = "\n".join(f"{what:<15} {text}" for what, text in lines(summary))
    if not summary.sample:
        return text
    head, _, tail = text.rpartition("\n")
    return (
        f"{head}\n{textwrap.indent(_printable(summary.prompt + summary.sample), '    | ', lambda line: True)}\n{tail}"
    )


def as_json(summary: Summary) -> dict[str, Any]:
    """Return the summary in JSON types."""
    import msgspec

    plain: dict[str, Any] = msgspec.to_builtins(summary)
    return {**plain, "faults": summary.faults()}


def _loss(value: float | None) -> str:
    return "-" if value is None or not math.isfinite(value) else f"{value:.3f}"


def _kill(kill: KillReport) -> str:
    text = f"{kill.name} after round {kill.round}"
    if kill.recovery is None:
        return f"{text}; nothing was committed after it"
    return (
        f"{text}; round {kill.recovery.round} was committed {kill.recovery.first:.1f} s later, by all peers after "
        f"{kill.recovery.last:.1f} s (a usual round: {kill.usual:.1f} s)"
    )


def _newcomer(newcomer: JoinerReport) -> str:
    text = f"{newcomer.name} joined in round {newcomer.began + 1}"
    if newcomer.synced is not None:
        text += f", got the state of round {newcomer.synced} from the other peers"
    if newcomer.first is None:
        return f"{text}, never took part"
    if newcomer.held and newcomer.held == newcomer.lost:
        text += f", took the empty stage {', '.join(map(str, newcomer.held))}"
    return f"{text}, took part from round {newcomer.first}"


def _printable(text: str) -> str:
    return "".join(letter if letter.isprintable() or letter == "\n" else "·" for letter in text.replace("\t", "    "))
