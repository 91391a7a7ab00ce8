"""Entry of a user's own process into a run, by an invite or by the manifest that founds it."""

from __future__ import annotations

import os
from pathlib import Path

from thinwire.node.api.arguments import seconds, whole_number
from thinwire.node.api.background_peer import BackgroundPeer
from thinwire.node.api.group_peer import GroupPeer
from thinwire.node.api.ranks import Ranks, check_alone, check_launch
from thinwire.node.api.swarm import Swarm
from thinwire.node.peer.bootstrap import RunEntry, arriving, founding
from thinwire.node.peer.peer_services import GATHER_SECONDS
from thinwire.node.runtime.load_settings import Config, load
from thinwire.swarm.identity.invite import InviteError
from thinwire.swarm.identity.regular_file import content_of
from thinwire.swarm.manifest.manifest import ManifestError
from thinwire.swarm.manifest.parser import parse as parse_manifest
from torch.distributed import ProcessGroup


def join(
    invite_or_toml: str | os.PathLike[str],
    *,
    home: str | os.PathLike[str] | None = None,
    name: str | None = None,
    host: str | None = None,
    port: int | None = None,
    ports: str | None = None,
    advertise: str | None = None,
    site: str | None = None,
    group: ProcessGroup | None = None,
    new: bool = False,
    wait_for: int = 1,
    wait_seconds: float = GATHER_SECONDS,
) -> Swarm:
    """Take part in a run, given an invite, or the path of your own manifest (a name that ends in .toml).

    A manifest founds the run, or returns to it; its [model] has kind = "custom". Blocks until the run's manifest is known:
    with an invite, until a peer has admitted this one.

    `home`, `name`, `host`, `port`, `ports`, `advertise` and `site` are settings of node.toml (docs/reference/node-toml.md) and
    override the environment and the file; None: do not override. Each peer of a machine needs a separate `home`. `new`: a
    manifest that has changed since an earlier run of the same name begins another run; without `new` it is an error.
    `wait_for`: number of peers, this one included, that `Swarm.wrap` waits for before training begins, for at most
    `wait_seconds` seconds. All of them contribute to the first round if none is later than `exchange.straggler_timeout`
    allows.

    `group`: processes of torch.distributed that train one model together (DistributedDataParallel, fully_shard) and are one
    peer. All of them call `join`, `wrap`, each step and `leave` alike. Buffers that the swarm averages (the statistics of
    BatchNorm) are the mean of the ranks', others those of the first rank. The first rank is connected to the swarm; only its
    arguments count, and only there `invite`, `digest`, `status`, `peers`, `outer` and averages work.

    Raises InviteError, ManifestError, ConfigError, InUseError (that home), PortTaken, NoSwarm, Refused and
    ManifestMismatch, all of them HintedError; GroupError if the ranks of `group` do not all call this, and if
    torch.distributed runs several processes and there is no `group`. Raises ValueError for a `wait_for` that is below 1 or
    no whole number, and for `wait_seconds` that are negative or no number; TypeError for an `invite_or_toml` of another type.
    """
    if group is None:
        check_launch(os.environ)
        check_alone()
    place = os.fspath(home) if isinstance(home, os.PathLike) else home
    settings = dict(home=place, name=name, host=host, port=port, ports=ports, advertise=advertise, site=site)

    def peer() -> BackgroundPeer:
        count = whole_number("wait_for", wait_for, "of peers from 1, which is this one", 1)
        longest = seconds("wait_seconds", wait_seconds)
        if not isinstance(invite_or_toml, str | os.PathLike):
            kind = type(invite_or_toml).__name__
            raise TypeError(f"invite_or_toml must be an invite or the path of a manifest, not {kind}")
        config, text = load(settings, os.environ, named="argument {}"), os.fspath(invite_or_toml)
        if isinstance(invite_or_toml, str) and not text.endswith(".toml"):
            entry = _arriving(text, config)
        else:
            entry = founding(_read_custom(Path(text)), config, Path(text).name, new=new)
        return BackgroundPeer(entry, count, longest)

    if group is not None and (ranks := Ranks(group)).size > 1:
        return Swarm(GroupPeer(ranks, peer))
    return Swarm(peer(), alone=group is None)


def _arriving(text: str, config: Config) -> RunEntry:
    try:
        return arriving(text, config)
    except InviteError as error:
        raise InviteError(str(error), f"{error.hint}; the path of a manifest ends in .toml") from None


def _read_custom(path: Path) -> bytes:
    try:
        toml = content_of(path)
    except OSError as error:
        raise ManifestError(f"cannot read {path}: {error.strerror}", "give the path of the run's TOML file") from None
    if parse_manifest(toml, path.name).model.kind != "custom":
        raise ManifestError(
            f"{path.name}: model.kind is not custom",
            'write kind = "custom" under [model] to train your own module',
        )
    return toml
