"""Locations of a daemon's files: the platform's directories, or everything under one home."""

from __future__ import annotations

import tomllib
from dataclasses import dataclass
from pathlib import Path

from platformdirs import PlatformDirs

DEFAULT_NAME = "demo"
"""Name of a run whose manifest has none, see `Run` in swarm/manifest/tables.py."""


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
