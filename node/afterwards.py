"""After a local swarm has ended: measure what it made, prove that it is one model, draw it, and say so."""

from __future__ import annotations

import math
import sys
import time
from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

import msgspec
import numpy as np
import torch
from thinwire.swarm.identity import Identity

from . import picture
from .alone import evaluate
from .checkpoint import CheckpointStore
from .children import Child
from .device import choose_device
from .diary import Diary, Proof, bytes_sent, commits, proof, recovery, round_at, saved_factor, usual_round
from .directories import directories
from .disk import RealDisk
from .export import all_weights
from .livetable import Display
from .methods import METHODS
from .model import generate
from .training import Training, prepare
from .verdict import Kill, Newcomer, Sent, Verdict, as_json, screen

if TYPE_CHECKING:
    from .local import LocalSwarm

PROMPT_TOKENS = 48
SAMPLE_TOKENS = 240
TEMPERATURE, TOP_K = 0.7, 40


@dataclass(frozen=True, slots=True)
class Made:
    """What the swarm made, read back from a checkpoint on disk. `fault` says what is wrong with it."""

    checkpoint: str = ""
    after: float | None = None
    prompt: str = ""
    sample: str = ""
    fault: str = ""


def conclude(swarm: LocalSwarm, style: str, display: Display) -> list[str]:
    """Print the last screen to stdout (with style "json" as one line of JSON). Returns what is wrong with the run."""
    diaries = [child.diary for child in swarm.peers]
    alike = METHODS[swarm.manifest.outer.method].replica.alike
    found = proof(diaries, [child.diary for child in swarm.peers if child.live], alike=alike)
    # Who stopped the swarm wants the terminal back: nothing that takes seconds.
    made = Made() if swarm.stopped else _made(swarm, found)
    path = ""
    try:
        path = _draw(swarm, diaries, made)
    except (picture.NoPlots, OSError) as error:
        display.say(f"no picture: {error}", warn=True)
    verdict = _verdict(swarm, found, made, path)
    said = msgspec.json.encode(as_json(verdict)).decode() if style == "json" else f"\n{screen(verdict)}"
    sys.stdout.write(f"{said}\n")
    sys.stdout.flush()
    return verdict.faults() + ([made.fault] if made.fault else [])


def _made(swarm: LocalSwarm, found: Proof) -> Made:
    """Load the checkpoint of a live peer into a new model, measure it, and let it write."""
    for child in swarm.peers:
        if child.live and child.diary.end:
            return _load(swarm, child, found)
    return Made(fault="no peer is left that could have a checkpoint")


def _load(swarm: LocalSwarm, child: Child, found: Proof) -> Made:
    identity = Identity.load(directories(child.home).key)
    loaded = CheckpointStore(child.run_directory().checkpoints, RealDisk(), identity).load(child.diary.run)
    if loaded.snapshot is None or loaded.path is None:
        return Made(fault=f"no good checkpoint of {child.name}: {'; '.join(loaded.remarks) or 'there is none'}")
    end = child.diary.end
    final = found.final if found.alike or end is None else end["digest"]
    if end is not None and "state" in end:
        final = end["state"]  # of all its fragments, each of which the others have too
    if loaded.snapshot.digest.hex() != final:
        return Made(str(loaded.path), fault=f"the checkpoint of {child.name} is not what the replicas ended with")
    config = swarm.config
    training = prepare(
        swarm.manifest,
        data=config.data,
        device=choose_device(config.device),
        threads=swarm.threads,
        cache=config.directories.cache,
        here=swarm.file.parent,
        clock=time.perf_counter,
    )
    weights = all_weights(loaded.snapshot)
    training.write(np.concatenate([weights[piece.name].reshape(-1) for piece in training.layout.pieces]))
    prompt, sample = write_on(training, swarm.manifest.run.seed)
    return Made(str(loaded.path), evaluate(training), prompt, sample)


def write_on(training: Training, seed: int) -> tuple[str, str]:
    """A held-out (or, without one, a training) piece of text, and how the model continues it; drawn from `seed`."""
    split = training.split
    source = split.held_out if split.held_out.size else split.training
    start = split.batch(source[:1])[0][:, :PROMPT_TOKENS]
    generator = torch.Generator().manual_seed(seed)
    model = training.trainer.model
    tokens = generate(model, start.to(training.trainer.device), SAMPLE_TOKENS, TEMPERATURE, TOP_K, generator)  # type: ignore[arg-type]
    ids = tokens[0].tolist()
    decode = training.tokenizer.decode
    return decode(ids[: start.shape[1]]), decode(ids[start.shape[1] :])


def _verdict(swarm: LocalSwarm, found: Proof, made: Made, path: str) -> Verdict:
    diaries = [child.diary for child in swarm.peers]
    looks = list(swarm.alone.diary.of("held_out")) if swarm.alone else []
    ended = bool(looks) and looks[-1]["round"] == swarm.rounds
    return Verdict(
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
        sent=tuple(Sent(one.name, bytes_sent(one), saved_factor(one)) for one in diaries),
        proof=found,
        kill=_kill(swarm, diaries),
        newcomer=_newcomer(swarm),
        picture=path,
        checkpoint=made.checkpoint,
        prompt=made.prompt,
        sample=made.sample,
        directory=str(swarm.directory),
    )


def _kill(swarm: LocalSwarm, diaries: Sequence[Diary]) -> Kill | None:
    victim = swarm.victim
    if victim is None or victim.killed_at is None:
        return None
    survivors = [child.diary for child in swarm.peers if child is not victim]
    committed = commits(diaries)
    # What we knew when we killed is a moment old.
    before = max((number for number, wall in committed.items() if wall <= victim.killed_at), default=0)
    return Kill(victim.name, before, recovery(survivors, victim.killed_at), usual_round(committed))


def _newcomer(swarm: LocalSwarm) -> Newcomer | None:
    late = swarm.newcomer
    if late is None:
        return None
    synced, first = next(late.diary.of("synced"), None), next(late.diary.of("round"), None)
    weak = bool(swarm.options.weak)
    return Newcomer(
        late.name,
        swarm.joined_round,
        synced["round"] if synced else None,
        first["round"] if first else None,
        held=held_by(late.diary) if weak else (),
        lost=held_by(swarm.victim.diary) if weak and swarm.victim is not None else (),
        tokens=sum(event["tokens"] for event in late.diary.of("round")),
    )


def held_by(diary: Diary) -> tuple[int, ...]:
    """The fragments whose state a peer got."""
    return tuple(sorted({event["fragment"] for event in diary.of("synced") if "fragment" in event}))


def _draw(swarm: LocalSwarm, diaries: Sequence[Diary], made: Made) -> str:
    committed = commits(diaries)
    if not committed:
        return ""
    marks = []
    if (victim := swarm.victim) is not None and victim.killed_at is not None:
        marks.append(picture.Mark(round_at(committed, victim.killed_at), f"kill -9 of {victim.name}", "tab:red"))
    if (late := swarm.newcomer) is not None and swarm.joined_at is not None:
        marks.append(picture.Mark(round_at(committed, swarm.joined_at), f"{late.name} comes", "tab:green"))
        if (first := next(late.diary.of("round"), None)) is not None:
            marks.append(picture.Mark(first["round"], f"{late.name} takes part", "tab:olive"))
    alone = swarm.alone.diary if swarm.alone else None
    first_look = next(alone.of("held_out"), None) if alone else None
    held_out = [(0.0, float(first_look["loss"]))] if first_look and first_look["loss"] is not None else []
    if made.after is not None and math.isfinite(made.after):
        held_out.append((float(swarm.round), made.after))
    path = swarm.directory / "loss.png"
    title = f"{swarm.manifest.run.name}: {swarm.count} peers, {swarm.manifest.outer.steps} steps a round"
    picture.draw(path, title=title, diaries=diaries, alone=alone, held_out=held_out, marks=marks)
    return str(path)
