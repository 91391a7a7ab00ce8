"""Locations of a daemon's files: the platform's directories, or everything under one home."""

from __future__ import annotations

import tomllib
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import ClassVar

from platformdirs import PlatformDirs
from thinwire.swarm.identity.errors import HintedError

DEFAULT_NAME = "demo"
"""Name of a run whose manifest has none, see `Run` in swarm/manifest/tables.py."""


class NoRunError(HintedError):
    """No run of this machine, or more than one, is meant."""

    exit_code: ClassVar[int] = 2


@dataclass(frozen=True, slots=True)
class Directories:
    """Four directories, which need not exist yet.

    With separate homes each daemon of a machine has its own key.
    """

    config: Path
    data: Path
    cache: Path
    state: Path

    @property
    def node_file(self) -> Path:
        """node.toml, this machine's settings."""
        return self.config / "node.toml"

    @property
    def key(self) -> Path:
        """The identity: any process with this file is this peer."""
        return self.data / "identity.key"

    @property
    def log(self) -> Path:
        """All log messages and tracebacks."""
        return self.state / "thinwire.log"

    @property
    def status(self) -> Path:
        """Last status of the running daemon."""
        return self.state / "status.json"

    @property
    def dht_nodes(self) -> Path:
        """Addresses of nodes of the DHT with the public directory, see node/discovery/dht_source.py."""
        return self.state / "dht-nodes.json"

    @property
    def lock(self) -> Path:
        """Held while a daemon runs with these directories."""
        return self.state / "daemon.lock"

    @property
    def runs(self) -> Path:
        """One directory per run."""
        return self.state / "runs"

    def run(self, run_id: bytes) -> RunDirectory:
        """The files of one run."""
        return RunDirectory(self.runs / run_id.hex()[:16])

    def run_names(self) -> dict[str, str]:
        """Return the names of all runs by the first half of their ids; "" if the manifest cannot be read."""
        folders = sorted(self.runs.iterdir()) if self.runs.is_dir() else []
        return {folder.name: _name_of(RunDirectory(folder).manifest) for folder in folders if folder.is_dir()}

    def runs_called(self, wanted: str) -> list[str]:
        """Return the first halves of the ids of the runs with this name, or else of those whose id begins so."""
        names = self.run_names()
        called = [run for run, name in names.items() if wanted and name == wanted]
        return called or [run for run in names if run.startswith(wanted[:16].lower())]

    def only_run(
        self, wanted: str, default: str = "", preferred: Callable[[RunDirectory], bool] = lambda run: True
    ) -> tuple[RunDirectory, str]:
        """Return files and name of the only run with this name or start of its id; "" means the only run.

        default: id of the run that an empty `wanted` stands for if there are several. preferred: if it is True for some of
        several matches, the others do not count. Raises NoRunError.
        """
        names, found = self.run_names(), self.runs_called(wanted)
        if not names:
            raise NoRunError(
                f"there are no runs in {self.runs}", "train first, or give the daemon's directory with --home"
            )
        if not wanted and default[:16] in names:
            found = [default[:16]]
        found = [run for run in found if preferred(RunDirectory(self.runs / run))] or found
        if len(found) != 1:
            problem = f"there are {len(found)} runs"
            if wanted:
                count = f"{len(found)} runs of this machine have" if found else "no run of this machine has"
                problem = f"{count} the name {wanted!r}, or an id that begins with it"
            known = ", ".join(f"{run} ({name})" if name else run for run, name in names.items())
            raise NoRunError(problem, f"name one of: {known}")
        return RunDirectory(self.runs / found[0]), names[found[0]]


@dataclass(frozen=True, slots=True)
class RunDirectory:
    """Files of one run."""

    path: Path

    @property
    def manifest(self) -> Path:
        """The run's TOML, as its author signed it."""
        return self.path / "run.toml"

    @property
    def signature(self) -> Path:
        """Public key of the manifest's author, and its signature of the manifest, see node/peer/admission.py."""
        return self.path / "run.toml.signature"

    @property
    def tokenizer(self) -> Path:
        """Copy of the run's tokenizer file, for `thinwire export`; absent if tokens are bytes."""
        return self.path / "tokenizer.json"

    @property
    def model_config(self) -> Path:
        """Copy of config.json of a model of transformers, for `thinwire export`; absent for other models."""
        return self.path / "config.json"

    @property
    def adapter_config(self) -> Path:
        """Description of a trained adapter, for `thinwire export`; absent in runs without one."""
        return self.path / "adapter_config.json"

    @property
    def recover_request(self) -> Path:
        """Request of `thinwire recover` to the running daemon, see node/peer/recover_command_file.py."""
        return self.path / "recover.json"

    @property
    def revocations(self) -> Path:
        """Revocations of `thinwire revoke`, which the daemon reads, see node/membership/ban_file.py."""
        return self.path / "revocations"

    def votes(self, fragment: int) -> Path:
        """Promises and votes of this peer in the rounds of a fragment, see node/state/vote_file.py."""
        return self.path / f"votes-{fragment:05d}"

    @property
    def port(self) -> Path:
        """Port of the gate in this run, see node/membership/port_file.py."""
        return self.path / "port"

    @property
    def token(self) -> Path:
        """Admission token of this peer, see node/peer/admission.py."""
        return self.path / "token"

    @property
    def bans(self) -> Path:
        """Evidence against banned peers, see node/membership/ban_file.py."""
        return self.path / "bans"

    @property
    def checkpoints(self) -> Path:
        """Checkpoints, see node/state/checkpoint_store.py."""
        return self.path / "checkpoints"

    @property
    def events(self) -> Path:
        """Event log, see node/runtime/event_log.py."""
        return self.path / "events.jsonl"


def _name_of(manifest: Path) -> str:
    try:
        name = tomllib.loads(manifest.read_text()).get("run", {}).get("name", DEFAULT_NAME)
    except (OSError, ValueError, AttributeError):
        return ""
    return name if isinstance(name, str) and name.isprintable() else ""


def directories(home: Path | None) -> Directories:
    """Return the directories under `home`, or those of the platform.

    Config and key are at the top of `home`.
    """
    if home is not None:
        return Directories(home, home, home / "cache", home / "state")
    platform = PlatformDirs("thinwire", appauthor=False)
    return Directories(
        platform.user_config_path, platform.user_data_path, platform.user_cache_path, platform.user_state_path
    )
