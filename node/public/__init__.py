"""thinwire: train one model on many machines that share nothing but ordinary internet links.

    with thinwire.join(invite_or_toml) as swarm:
        optimizer = swarm.wrap(model, inner_optimizer)
        ...  # your loop, unchanged

What is heavy (torch, sockets, kernels) is imported with the first name that is used.
"""

import typing as _typing

if _typing.TYPE_CHECKING:
    from thinwire.collectives.ports import PortTaken
    from thinwire.node.api import Swarm, join
    from thinwire.node.averages import Average, AverageError, Pending
    from thinwire.node.background import SwarmError
    from thinwire.node.companion import RoundReport
    from thinwire.node.config import ConfigError
    from thinwire.node.duties import DuplicateKey
    from thinwire.node.knock import NoSwarm, Refused
    from thinwire.node.lock import InUseError
    from thinwire.node.optimizer import SwarmOptimizer
    from thinwire.node.status import PeerStatus, Status
    from thinwire.swarm.errors import HintedError
    from thinwire.swarm.invite import InviteError
    from thinwire.swarm.manifest import Manifest, ManifestError, ManifestMismatch

    __version__: str

__all__ = [
    "Average",
    "AverageError",
    "ConfigError",
    "DuplicateKey",
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
    "SwarmOptimizer",
    "__version__",
    "join",
]

_HOME = {
    "Average": "node.averages",
    "AverageError": "node.averages",
    "ConfigError": "node.config",
    "DuplicateKey": "node.duties",
    "HintedError": "swarm.errors",
    "InUseError": "node.lock",
    "InviteError": "swarm.invite",
    "Manifest": "swarm.manifest",
    "ManifestError": "swarm.manifest",
    "ManifestMismatch": "swarm.manifest",
    "NoSwarm": "node.knock",
    "PeerStatus": "node.status",
    "Pending": "node.averages",
    "PortTaken": "collectives.ports",
    "Refused": "node.knock",
    "RoundReport": "node.companion",
    "Status": "node.status",
    "Swarm": "node.api",
    "SwarmError": "node.background",
    "SwarmOptimizer": "node.optimizer",
    "join": "node.api",
}


if not _typing.TYPE_CHECKING:  # a type checker shall know that there are no other names

    def __getattr__(name: str) -> object:
        """Public names on their first use (PEP 562)."""
        if name == "__version__":
            from importlib.metadata import version

            return version("thinwire")
        if name not in _HOME:
            raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
        from importlib import import_module

        value = globals()[name] = getattr(import_module(f"{__name__}.{_HOME[name]}"), name)
        return value


def __dir__() -> list[str]:
    """What there is, without importing it."""
    return sorted({*globals(), *__all__})
