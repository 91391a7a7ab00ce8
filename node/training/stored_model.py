"""Trained model on this machine: weights and manifest, from a run's checkpoint or an exported file."""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import ClassVar

from safetensors import SafetensorError, safe_open
from thinwire.node.runtime.console import warn
from thinwire.node.runtime.device import choose_device
from thinwire.node.runtime.directories import Directories, RunDirectory, directories
from thinwire.node.runtime.disk import RealDisk, present
from thinwire.node.runtime.load_settings import Config
from thinwire.node.state.checkpoint_store import CheckpointStore
from thinwire.node.state.fragments import joined
from thinwire.node.state.layout import layout_of
from thinwire.node.state.snapshot import FragmentState, Snapshot
from thinwire.node.state.tensor_file import Array
from thinwire.node.training.local_learner import Computing, LocalLearner, build, build_learner
from thinwire.node.training.models.initial_weights import WeightsError, read_weights, vector_of
from thinwire.node.training.models.tokenizer import Tokenizer, load_tokenizer
from thinwire.node.training.models.user_model import check_named
from thinwire.swarm.identity.errors import HintedError
from thinwire.swarm.identity.identity import Identity
from thinwire.swarm.manifest.manifest import Manifest
from thinwire.swarm.manifest.parser import parse
from torch import nn

MANIFEST_KEY = "thinwire.manifest"
"""Entry of an exported file's header with the run's manifest."""


class NoModelError(HintedError):
    """No weights, or no manifest for them, are on this machine."""

    exit_code: ClassVar[int] = 2


@dataclass(frozen=True, slots=True)
class StoredModel:
    """Weights by parameter name, read from `path`, a checkpoint's directory or a file.

    toml: the run's manifest; None: it is not here. directory: place of copies of the run's other files. rounds: last rounds
    of its fragments, ascending; () if unknown.
    """

    weights: Mapping[str, Array]
    path: Path
    toml: str | None
    directory: RunDirectory
    rounds: tuple[int, ...] = ()

    @property
    def origin(self) -> str:
        """Round and path, for people."""
        if not self.rounds:
            return str(self.path)
        first, last = self.rounds[0], self.rounds[-1]
        text = (
            f"round {first}"
            if first == last
            else f"rounds {first} to {last}, because its stages are in different rounds"
        )
        return f"{text}, {self.path}"

    def described(self) -> Manifest:
        """Return the manifest. Raises NoModelError if there is none, and ManifestError if it is invalid."""
        if self.toml is None:
            raise NoModelError(
                f"there is no manifest for {self.path}",
                "a run folder of a daemon has it, and so has a file of `thinwire export`",
            )
        return parse(self.toml, "the run's manifest")

    def tokenizer(self, here: Path) -> Tokenizer:
        """Return the run's tokenizer: the daemon's copy, or that in the directory `here`. Raises DataError."""
        data, copy = self.described().data, self.directory.tokenizer
        name, place = (copy.name, copy.parent) if copy.exists() else (data.tokenizer, here)
        return load_tokenizer(data.tokenizer if data.tokenizer == "bytes" else name, place, data.tokenizer_hash)

    def model(self, config: Config, here: Path) -> tuple[nn.Module, Tokenizer]:
        """Return the model on the device of the settings, and its tokenizer.

        here: directory of modules that are not installed. Raises NoModelError, ModelError, WeightsError, DataError.
        """
        self.check(config)
        tokenizer = self.tokenizer(here)
        model = build(self.described(), tokenizer.vocab, config.model, here, config.threads)
        layout = layout_of(model)
        layout.write(model, vector_of(self.weights, layout, self.path))
        return model.to(choose_device(config.device)), tokenizer

    def learner(self, config: Config, here: Path, say: Callable[[str], object]) -> LocalLearner:
        """Return a learner with the model and the data of the settings. It raises what `model` does."""
        self.check(config)
        learner = build_learner(
            self.described(),
            Computing(choose_device(config.device), config.threads),
            data=config.data,
            cache=config.directories.cache,
            here=here,
            clock=time.perf_counter,
            model=config.model,
            tokenizer=self.tokenizer(here),
            say=say,
        )
        learner.write(vector_of(self.weights, learner.layout, self.path))
        return learner

    def check(self, config: Config) -> None:
        """Check that the owner of this machine agrees to the model. Raises NoModelError, ModelError."""
        manifest = self.described()
        if manifest.model.kind == "custom":
            raise NoModelError(
                f"run {manifest.run.name} trains a custom model, which only its training loop has",
                "thinwire export FILE writes its weights",
            )
        check_named(manifest, config.model)


def stored_model(home: Directories, wanted: str, default: str = "", homes: Sequence[Path] = ()) -> StoredModel:
    """Return the model of a run's newest valid checkpoint, of a file, or of a checkpoint's directory.

    wanted: name of a run, start of its id, or path; "": the run `default`, or the only one. homes: directories of daemons
    that hold other stages of the model. Raises NoModelError, NoRunError, and WeightsError for a path.
    """
    if wanted and present(Path(wanted)) and not home.runs_called(wanted):
        return _from_path(Path(wanted))
    if Path(wanted).suffix and not home.runs_called(wanted):
        raise NoModelError(f"there is no file {wanted}", "give a file of `thinwire export`, or the name or id of a run")
    directory = _trained(home, wanted, default)
    snapshot, path = _newest(home, directory)
    rounds, fragments = _rounds(snapshot), dict(snapshot.fragments)
    for other_home in homes:
        others = directories(other_home)
        other, _ = _newest(others, _trained(others, snapshot.run_id.hex()))
        added = other.fragments.keys() - fragments.keys()
        fragments |= {stage: other.fragments[stage] for stage in added}
        rounds |= {stage: _rounds(other)[stage] for stage in added}
    weights, toml = all_weights(fragments), _toml(directory)
    stages = parse(toml, str(directory.manifest)).pipeline.stages if toml is not None else 0
    if missing := [str(stage) for stage in range(stages) if stage not in fragments]:
        named = f"stage {missing[0]}" if len(missing) == 1 else f"stages {', '.join(missing[:-1])} and {missing[-1]}"
        raise NoModelError(
            f"the model has {stages} stages (0 to {stages - 1}), and the checkpoint does not contain {named}",
            "add the directories of daemons that hold the missing stages: --with DIRECTORY",
        )
    return StoredModel(weights, path, toml, directory, tuple(sorted({rounds[stage] for stage in fragments})))


def _from_path(path: Path) -> StoredModel:
    try:
        weights = read_weights([path])
    except WeightsError as error:
        raise WeightsError(str(error), f"{error.hint}; the text for `thinwire evaluate` goes to --data PATH") from None
    if path.is_dir():
        directory = RunDirectory(path.absolute().parents[1])
        return StoredModel(weights, path, _toml(directory), directory)
    try:
        with safe_open(path, "np") as file:
            toml = (file.metadata() or {}).get(MANIFEST_KEY)
    except (OSError, SafetensorError) as error:
        raise NoModelError(f"cannot read {path}: {error}", "give a file of `thinwire export`") from None
    return StoredModel(weights, path, toml, RunDirectory(path.absolute().parent))


def _toml(directory: RunDirectory) -> str | None:
    try:
        return directory.manifest.read_text()
    except FileNotFoundError:
        return None
    except (OSError, ValueError) as error:
        raise NoModelError(f"cannot read {directory.manifest}: {error}", "restore the file, or join again") from None


def _newest(home: Directories, run: RunDirectory) -> tuple[Snapshot, Path]:
    loaded = CheckpointStore(run.checkpoints, RealDisk(), Identity.load(home.key)).load()
    if loaded.snapshot is None or loaded.path is None:
        if not loaded.remarks:
            raise NoModelError(
                f"there is no checkpoint in {run.checkpoints} yet",
                "the first one comes after the first round: `thinwire status` shows the round",
            )
        raise NoModelError(
            f"no good checkpoint in {run.checkpoints}: {'; '.join(loaded.remarks)}", loaded.advice(run.checkpoints)
        )
    for remark in loaded.damaged:
        warn(f"skipped a damaged checkpoint, {remark}; the newest good one, of round {loaded.snapshot.round}, is used")
    return loaded.snapshot, loaded.path


def _rounds(snapshot: Snapshot) -> dict[int, int]:
    """Return the last round by fragment."""
    separate = {stage: standing[0] for stage, standing in (snapshot.standings or {}).items()}
    return dict.fromkeys(snapshot.fragments, snapshot.round) | separate


def _trained(home: Directories, wanted: str, default: str = "") -> RunDirectory:
    """Return a run as `only_run` does.

    A start that failed leaves a run without checkpoints, which does not count beside another one.
    """
    return home.only_run(wanted, default, lambda run: any(run.checkpoints.glob("step-*")))[0]


def all_weights(fragments: Mapping[int, FragmentState]) -> dict[str, Array]:
    """Return the slow weights of all fragments by parameter name.

    Raises NoModelError if two fragments have the same name, or if part of a parameter is missing: the checkpoint belongs to
    a peer that holds a part of the model.
    """
    weights: dict[str, Array] = {}
    for index, fragment in sorted(fragments.items()):
        if twice := weights.keys() & fragment.weights.keys():
            raise NoModelError(f"fragment {index} holds {min(twice)} again", "the checkpoint is not of one model")
        weights |= fragment.weights
    try:
        return joined(weights)
    except ValueError as error:
        raise NoModelError(
            f"{error} in this checkpoint", "add the directories of daemons that hold the rest: --with"
        ) from None
