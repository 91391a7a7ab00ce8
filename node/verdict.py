"""The last screen of a local swarm: every figure with what it is compared to, and whether the run counts as a success."""

from __future__ import annotations

import math
import textwrap
from dataclasses import dataclass
from typing import Any

from .console import bytes_text
from .diary import Proof, Recovery
from .livetable import clock_text


@dataclass(frozen=True, slots=True)
class Sent:
    """What one peer put on the wire: bytes, and how many times more synchronous fp32 would have sent (0: unknown)."""

    name: str
    bytes: int
    factor: float


@dataclass(frozen=True, slots=True)
class Kill:
    """Who was killed after which round, and how it went on (None: it did not). `usual` is a usual round in seconds."""

    name: str
    round: int
    recovery: Recovery | None
    usual: float


@dataclass(frozen=True, slots=True)
class Newcomer:
    """The late joiner: the round that was committed last when it came, the one whose state it got, and the first that it
    took part in; the last two are None when it did not get that far. `held`, `lost`: the fragments that it holds, and those
    that the killed one held; empty for peers that hold all. `tokens`: that it has trained on.
    """

    name: str
    came: int
    synced: int | None
    first: int | None
    held: tuple[int, ...] = ()
    lost: tuple[int, ...] = ()
    tokens: int = 0


@dataclass(frozen=True, slots=True)
class Verdict:
    """Everything that is said at the end; None where it was not measured. Losses are nats per token.

    `steps` are the inner steps of one peer over the whole run; `alone` is the peer whose shard and steps the comparison had.
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
    sent: tuple[Sent, ...]
    proof: Proof
    kill: Kill | None
    newcomer: Newcomer | None
    picture: str
    checkpoint: str
    prompt: str
    sample: str
    directory: str

    def faults(self) -> list[str]:
        """Why this run is no success; empty when it is one."""
        found = []
        if self.wanted and self.rounds < self.wanted:
            found.append(f"the swarm ended in round {self.rounds} of {self.wanted}")
        found += [f"replicas differ in {difference}" for difference in self.proof.differences]
        if not self.proof.holds and not self.proof.differences:
            found.append("the live replicas did not end in one round with one digest")
        if self.kill is not None and self.kill.recovery is None:
            found.append("no round was committed after the kill")
        if self.newcomer is not None and self.newcomer.first is None:
            found.append(f"{self.newcomer.name} came late and never took part in a round")
        elif self.newcomer is not None and self.newcomer.held != self.newcomer.lost:
            found.append(f"{self.newcomer.name} did not take the stage of {self.kill.name if self.kill else 'anybody'}")
        elif self.newcomer is not None and self.newcomer.held and not self.newcomer.tokens:
            found.append(f"the group made no inner steps with {self.newcomer.name}")
        return found


def lines(verdict: Verdict) -> list[tuple[str, str]]:
    """(what, said) in the order of the screen."""
    proof = verdict.proof
    return [
        (
            "run",
            f"{verdict.run}: {verdict.rounds} rounds of {verdict.steps // max(1, verdict.rounds)} steps on "
            f"{verdict.peers} peers in {clock_text(verdict.seconds)} min",
        ),
        ("held-out loss", f"{_loss(verdict.before)} before, {_loss(verdict.after)} after {verdict.steps} steps a peer"),
        (
            "one peer alone",
            f"{_loss(verdict.alone_after)} after the same {verdict.steps} steps on the shard of {verdict.alone}",
        ),
        ("bytes sent", " · ".join(f"{one.name} {bytes_text(one.bytes)} (×{one.factor:.0f})" for one in verdict.sent)),
        ("", "× says how many times more synchronous data parallelism in fp32 would have sent for the same steps"),
        *([("kill -9", _kill(verdict.kill))] if verdict.kill else []),
        *([("late joiner", _newcomer(verdict.newcomer))] if verdict.newcomer else []),
        (
            "same weights",
            f"no: with this outer method each of the {proof.live} live replicas is a little different"
            if not proof.alike
            else f"digest {proof.final[:16]}… on all {proof.live} live replicas after round {proof.round}; equal in all "
            f"{proof.rounds} rounds ({proof.digests} digests compared)"
            if proof.holds
            else "NOT PROVED: " + ("; ".join(proof.differences) or "the live replicas did not end together"),
        ),
        ("picture", verdict.picture or "-"),
        ("checkpoint", verdict.checkpoint or "-"),
        ("sample", f"(prompt: {verdict.prompt!r})" if verdict.sample else "-"),
        ("files", verdict.directory),
    ]


def screen(verdict: Verdict) -> str:
    """The lines as text, with the sample below, indented."""
    said = "\n".join(f"{what:<15} {text}" for what, text in lines(verdict))
    if not verdict.sample:
        return said
    head, _, tail = said.rpartition("\n")
    return (
        f"{head}\n{textwrap.indent(_printable(verdict.prompt + verdict.sample), '    | ', lambda line: True)}\n{tail}"
    )


def as_json(verdict: Verdict) -> dict[str, Any]:
    """The same for programs."""
    import msgspec

    plain: dict[str, Any] = msgspec.to_builtins(verdict)
    return {**plain, "faults": verdict.faults()}


def _loss(value: float | None) -> str:
    return "-" if value is None or not math.isfinite(value) else f"{value:.3f}"


def _kill(kill: Kill) -> str:
    said = f"{kill.name} after round {kill.round}"
    if kill.recovery is None:
        return f"{said}; nothing was committed after it"
    return (
        f"{said}; round {kill.recovery.round} was committed {kill.recovery.first:.1f} s later, by all after "
        f"{kill.recovery.last:.1f} s (a usual round: {kill.usual:.1f} s)"
    )


def _newcomer(newcomer: Newcomer) -> str:
    said = f"{newcomer.name} came in round {newcomer.came + 1}"
    if newcomer.synced is not None:
        said += f", got the state of round {newcomer.synced} from the others"
    if newcomer.first is None:
        return f"{said}, never took part"
    if newcomer.held and newcomer.held == newcomer.lost:
        said += f", took the empty stage {', '.join(map(str, newcomer.held))}"
    return f"{said}, took part from round {newcomer.first}"


def _printable(text: str) -> str:
    return "".join(letter if letter.isprintable() or letter == "\n" else "·" for letter in text.replace("\t", "    "))
