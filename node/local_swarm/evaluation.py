"""Conclusion of a local swarm.

Evaluate the model, prove that the replicas are equal, draw the losses, print the summary.
"""

from __future__ import annotations

import math
import sys
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Protocol

import msgspec
import torch
from thinwire.node.daemon.options import Options
from thinwire.node.local_swarm import loss_plot
from thinwire.node.local_swarm.baseline import WORK, evaluate
from thinwire.node.local_swarm.child_process import Child
from thinwire.node.local_swarm.event_analysis import (
    DigestComparison,
    EventAnalysis,
    bytes_sent,
    commits,
    compare_digests,
    lineages,
    recovery,
    round_at,
    saved_factor,
    usual_round,
)
from thinwire.node.local_swarm.live_view import Display
from thinwire.node.local_swarm.summary import JoinerReport, KillReport, Summary, TrafficReport, as_json, screen
from thinwire.node.methods.registry import METHODS
from thinwire.node.runtime.device import choose_device
from thinwire.node.runtime.directories import directories
from thinwire.node.runtime.disk import RealDisk
from thinwire.node.runtime.load_settings import Config
from thinwire.node.state.checkpoint_store import CheckpointStore
from thinwire.node.training.local_learner import Computing, LocalLearner, build_learner
from thinwire.node.training.models.causal_model import generate
from thinwire.node.training.models.initial_weights import vector_of
from thinwire.node.training.stored_model import all_weights
from thinwire.swarm.identity.errors import NotInstalled
from thinwire.swarm.identity.identity import Identity
from thinwire.swarm.manifest.manifest import Manifest

PROMPT_TOKENS = 48
SAMPLE_TOKENS = 240
"""Tokens that the model writes, fewer if it is large: each is as much work as all before it."""

TEMPERATURE, TOP_K = 0.7, 40


class FinishedSwarm(Protocol):
    """A local swarm whose processes have ended: its processes, its settings, and what was done to it."""

    file: Path
    """The manifest's file."""
    manifest: Manifest
    config: Config
    options: Options
    directory: Path
    """Directory with the files of all peers; the plot goes there too."""
    peers: list[Child]
    alone: Child | None
    """The process that trained alone, for comparison."""
    rounds: int
    """Rounds that the run was to have."""
    began: float
    """Wall time of the start, in seconds since 1970."""
    joined_at: float | None
    """Wall time at which the late joiner was started."""
    joined_round: int
    stopped: int
    """The signal that stopped the swarm, or 0."""

    @property
    def count(self) -> int:
        """Number of peers at the start."""
        ...

    @property
    def round(self) -> int:
        """Newest round of any peer."""
        ...

    @property
    def victim(self) -> Child | None:
        """The peer that was killed on purpose."""
        ...

    @property
    def newcomer(self) -> Child | None:
        """The peer that joined late."""
        ...

    @property
    def model_peer(self) -> int:
        """Index of the peer whose data and steps the process that trained alone had."""
        ...

    @property
    def threads(self) -> int:
        """Threads of each peer."""
        ...


@dataclass(frozen=True, slots=True)
class SavedModel:
    """Model of the swarm, loaded from a checkpoint on disk.

    after: its held-out loss. fault: reason why there is no such model; empty: there is one.
    """

    checkpoint: str = ""
    after: float | None = None
    prompt: str = ""
    sample: str = ""
    fault: str = ""


def conclude(swarm: FinishedSwarm, style: str, display: Display) -> list[str]:
    """Print the summary to stdout (with style "json" as one line of JSON). Return the faults of the run."""
    analyses = [child.analysis for child in swarm.peers]
    alike = METHODS[swarm.manifest.outer.method].replica.alike
    found = compare_digests(analyses, [child.analysis for child in swarm.peers if child.live], alike=alike)
    # A user who stopped the swarm wants the terminal back: skip everything that takes seconds.
    if not swarm.stopped:
        display.say("evaluating the model of the swarm, from a checkpoint")
    made = SavedModel() if swarm.stopped else _made(swarm, found)
    path = ""
    try:
        path = _draw(swarm, analyses, made)
    except (NotInstalled, OSError) as error:
        display.say(f"no picture: {error}", warn=True)
    verdict = _summary(swarm, found, made, path)
    text = msgspec.json.encode(as_json(verdict)).decode() if style == "json" else f"\n{screen(verdict)}"
    sys.stdout.write(f"{text}\n")
    sys.stdout.flush()
    return verdict.faults() + ([made.fault] if made.fault else [])


def _made(swarm: FinishedSwarm, found: DigestComparison) -> SavedModel:
    """Load the checkpoint of a live peer into a new model, evaluate it, and generate text."""
    for child in swarm.peers:
        if child.live and child.analysis.end:
            return _load(swarm, child, found)
    return SavedModel(fault="no peer is left that could have a checkpoint")


def _load(swarm: FinishedSwarm, child: Child, found: DigestComparison) -> SavedModel:
    identity = Identity.load(directories(child.home).key)
    loaded = CheckpointStore(child.run_directory().checkpoints, RealDisk(), identity).load(child.analysis.run)
    if loaded.snapshot is None or loaded.path is None:
        return SavedModel(fault=f"no good checkpoint of {child.name}: {'; '.join(loaded.remarks) or 'there is none'}")
    end = child.analysis.end
    final = found.final if found.alike or end is None else end["digest"]
    if end is not None and "state" in end:
        final = end["state"]  # digest of all its fragments, each of which other peers have too
    if loaded.snapshot.digest.hex() != final:
        return SavedModel(
            str(loaded.path), fault=f"the checkpoint of {child.name} differs from the final state of the replicas"
        )
    config = swarm.config
    training = build_learner(
        swarm.manifest,
        Computing(choose_device(config.device), swarm.threads),
        data=config.data,
        cache=config.directories.cache,
        here=swarm.file.parent,
        clock=time.perf_counter,
        model=config.model,
    )
    weights = all_weights(loaded.snapshot.fragments)
    training.write(vector_of(weights, training.layout, loaded.path))
    prompt, sample = write_on(training, swarm.manifest.run.seed)
    return SavedModel(str(loaded.path), evaluate(training), prompt, sample)


def write_on(training: LocalLearner, seed: int) -> tuple[str, str]:
    """Return a piece of text and the model's continuation, drawn from `seed`.

    The text is held out, or training text if nothing is held out.
    """
    split = training.split
    source = split.held_out if split.held_out.size else split.training
    start = split.batch(source[:1])[0][:, :PROMPT_TOKENS]
    generator = torch.Generator().manual_seed(seed)
    model, most = training.trainer.model, math.isqrt(int(WORK // (2 * training.size)))
    length = min(SAMPLE_TOKENS, max(1, most))
    start_there, context = start.to(training.trainer.device), training.manifest.model.context
    tokens = generate(model, start_there, length, context, TEMPERATURE, TOP_K, generator, training.tokenizer.vocab)
    ids = tokens[0].tolist()
    decode = training.tokenizer.decode
    return decode(ids[: start.shape[1]]), decode(ids[start.shape[1] :])


def _summary(swarm: FinishedSwarm, found: DigestComparison, made: SavedModel, path: str) -> Summary:
    analyses = [child.analysis for child in swarm.peers]
    looks = list(swarm.alone.analysis.of("held_out")) if swarm.alone else []
    ended = bool(looks) and looks[-1]["round"] == swarm.rounds
    return Summary(
        run=swarm.manifest.run.name,
        peers=len(swarm.peers),
        rounds=swarm.round,
        wanted=swarm.rounds,
        steps=swarm.manifest.steps_after(swarm.round),
        seconds=time.time() - swarm.began,
        before=looks[0]["loss"] if looks else None,
        after=made.after,
        alone=swarm.peers[swarm.model_peer].name if len(swarm.peers) > swarm.model_peer else "",
        alone_after=looks[-1]["loss"] if ended else None,
        sent=tuple(TrafficReport(one.name, bytes_sent(one), saved_factor(one)) for one in analyses),
        proof=found,
        kill=_kill(swarm, analyses),
        newcomer=_newcomer(swarm),
        picture=path,
        checkpoint=made.checkpoint,
        prompt=made.prompt,
        sample=made.sample,
        directory=str(swarm.directory),
        lineages=lineages(analyses),
    )


def _kill(swarm: FinishedSwarm, analyses: Sequence[EventAnalysis]) -> KillReport | None:
    victim = swarm.victim
    if victim is None or victim.killed_at is None:
        return None
    survivors = [child.analysis for child in swarm.peers if child is not victim]
    committed = commits(analyses)
    # The round known at the kill may be a moment old.
    before = max((number for number, wall in committed.items() if wall <= victim.killed_at), default=0)
    return KillReport(victim.name, before, recovery(survivors, victim.killed_at), usual_round(committed))


def _newcomer(swarm: FinishedSwarm) -> JoinerReport | None:
    late = swarm.newcomer
    if late is None:
        return None
    synced, first = next(late.analysis.of("synced"), None), next(late.analysis.of("round"), None)
    weak = bool(swarm.options.weak)
    return JoinerReport(
        late.name,
        swarm.joined_round,
        synced["round"] if synced else None,
        first["round"] if first else None,
        held=held_by(late.analysis) if weak else (),
        lost=held_by(swarm.victim.analysis) if weak and swarm.victim is not None else (),
        tokens=sum(event["tokens"] for event in late.analysis.of("round")),
    )


def held_by(analysis: EventAnalysis) -> tuple[int, ...]:
    """Return the fragments whose state a peer fetched."""
    return tuple(sorted({event["fragment"] for event in analysis.of("synced") if "fragment" in event}))


def _draw(swarm: FinishedSwarm, analyses: Sequence[EventAnalysis], made: SavedModel) -> str:
    committed = commits(analyses)
    if not committed:
        return ""
    marks = []
    if (victim := swarm.victim) is not None and victim.killed_at is not None:
        marks.append(loss_plot.Marker(round_at(committed, victim.killed_at), f"kill -9 of {victim.name}", "tab:red"))
    if (late := swarm.newcomer) is not None and swarm.joined_at is not None:
        marks.append(loss_plot.Marker(round_at(committed, swarm.joined_at), f"{late.name} comes", "tab:green"))
        if (first := next(late.analysis.of("round"), None)) is not None:
            marks.append(loss_plot.Marker(first["round"], f"{late.name} takes part", "tab:olive"))
    alone = swarm.alone.analysis if swarm.alone else None
    first_look = next(alone.of("held_out"), None) if alone else None
    held_out = [(0.0, float(first_look["loss"]))] if first_look and first_look["loss"] is not None else []
    if made.after is not None and math.isfinite(made.after):
        held_out.append((float(swarm.round), made.after))
    path = swarm.directory / "loss.png"
    title = f"{swarm.manifest.run.name}: {swarm.count} peers, {swarm.manifest.outer.sync_every} steps a round"
    loss_plot.draw(path, title=title, analyses=analyses, alone=alone, held_out=held_out, marks=marks)
    return str(path)
