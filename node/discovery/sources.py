"""Opening of the directories that the settings of this machine name."""

from __future__ import annotations

import os
import random
import time
from collections.abc import Callable, Sequence

from thinwire.node.discovery.dht_source import DhtSource, child_command
from thinwire.node.discovery.lan_source import LanSource
from thinwire.node.discovery.public_runs import Directory, DirectorySource
from thinwire.node.runtime.disk import RealDisk
from thinwire.node.runtime.load_settings import Config


def open_directory(
    config: Config,
    *,
    public: bool,
    lan: bool,
    publishes: bool,
    warn: Callable[[str], None],
    opened: Callable[[Sequence[str], bool], None] = lambda addresses, begun: None,
) -> Directory:
    """Return a directory with the sources asked for. Raises NotInstalled if one lacks its package.

    publishes: whether this machine's DHT node takes part in the DHT, or only asks other nodes. opened: called with the
    addresses of that node, and True if it has begun a DHT alone.
    """
    rng = random.Random(os.urandom(16))
    sources: list[DirectorySource] = []
    if lan:
        sources.append(LanSource(config.host))
    if public:
        kind = "ip6" if ":" in config.host else "ip4"
        sources.append(
            DhtSource(
                child_command(config.directory_python),
                bootstrap=config.bootstrap,
                listen=[f"/{kind}/{config.host}/tcp/0"] if publishes else [],
                known=config.directories.dht_nodes,
                disk=RealDisk(),
                rng=rng,
                now=time.monotonic,
                opened=opened,
            )
        )
    return Directory(sources, wall=time.time, rng=rng, warn=warn)
