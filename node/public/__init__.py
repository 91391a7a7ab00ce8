"""thinwire: train one model on many machines that share nothing but ordinary internet links.

    with thinwire.join(invite_or_toml) as swarm:
        optimizer = swarm.wrap(model, inner_optimizer)
        ...  # your loop, unchanged

Heavy modules (torch, sockets, kernels) are imported when a name is first used.
"""

import typing as _typing

if _typing.TYPE_CHECKING:
    from thinwire.collectives.transport.zeromq.sockets.listener import PortTaken
    from thinwire.node.api.allreduce import Average, AverageError, Pending
    from thinwire.node.api.exchange import RoundReport
    from thinwire.node.api.join import join
    from thinwire.node.api.optimizer import SwarmLR, SwarmOptimizer
    from thinwire.node.api.ranks import GroupError
    from thinwire.node.api.swarm import Swarm
    from thinwire.node.membership.join import DuplicateKey, NoSwarm, Refused
    from thinwire.node.peer.status import PeerStatus, Status
    from thinwire.node.runtime.load_settings import ConfigError
    from thinwire.node.runtime.loop_thread import SwarmError
    from thinwire.node.runtime.process_lock import InUseError
    from thinwire.swarm.identity.errors import HintedError
    from thinwire.swarm.identity.invite import InviteError
    from thinwire.swarm.manifest.manifest import Manifest, ManifestError, ManifestMismatch

    __version__: str

__all__ = [
    "Average",
    "AverageError",
    "ConfigError",
    "DuplicateKey",
    "GroupError",
    "HintedError",
    "InUseError",
    "InviteError",
    "Manifest",
    "ManifestError",
    "ManifestMismatch",
    "NoSwarm",
    "PeerStatus",
    "Pending",
    "PortTaken",
    "Refused",
    "RoundReport",
    "Status",
    "Swarm",
    "SwarmError",
    "SwarmLR",
    "SwarmOptimizer",
    "__version__",
    "join",
]

_HOME = {
    "Average": "node.api.allreduce",
    "AverageError": "node.api.allreduce",
    "ConfigError": "node.runtime.load_settings",
    "DuplicateKey": "node.membership.join",
    "GroupError": "node.api.ranks",
    "HintedError": "swarm.identity.errors",
    "InUseError": "node.runtime.process_lock",
    "InviteError": "swarm.identity.invite",
    "Manifest": "swarm.manifest.manifest",
    "ManifestError": "swarm.manifest.manifest",
    "ManifestMismatch": "swarm.manifest.manifest",
    "NoSwarm": "node.membership.join",
    "PeerStatus": "node.peer.status",
    "Pending": "node.api.allreduce",
    "PortTaken": "collectives.transport.zeromq.sockets.listener",
    "Refused": "node.membership.join",
    "RoundReport": "node.api.exchange",
    "Status": "node.peer.status",
    "Swarm": "node.api.swarm",
    "SwarmError": "node.runtime.loop_thread",
    "SwarmLR": "node.api.optimizer",
    "SwarmOptimizer": "node.api.optimizer",
    "join": "node.api.join",
}


if not _typing.TYPE_CHECKING:  # so that a type checker knows that there are no other names

    def __getattr__(name: str) -> object:
        """Import a public name on its first use (PEP 562)."""
        if name == "__version__":
            from importlib.metadata import version

            return version("thinwire")
        if name not in _HOME:
            raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
        from importlib import import_module

        value = globals()[name] = getattr(import_module(f"{__name__}.{_HOME[name]}"), name)
        return value


def __dir__() -> list[str]:
    """Return all names without importing them."""
    return sorted({*globals(), *__all__})
