"""All outer methods by name."""

from __future__ import annotations

from collections.abc import Mapping

from thinwire.swarm.methods.base import MethodSpec, method_name
from thinwire.swarm.methods.buffered_async import BufferedAsync
from thinwire.swarm.methods.co2 import CO2
from thinwire.swarm.methods.delayed_nesterov import DelayedNesterov
from thinwire.swarm.methods.demo import DeMo
from thinwire.swarm.methods.diloco import DiLoCo
from thinwire.swarm.methods.eager import Eager
from thinwire.swarm.methods.merge import Merge
from thinwire.swarm.methods.muloco import MuLoCo
from thinwire.swarm.methods.noloco import NoLoCo
from thinwire.swarm.methods.powersgd import PowerSGDMethod
from thinwire.swarm.methods.sparseloco import SparseLoCo
from thinwire.swarm.methods.streaming import Streaming

METHODS: Mapping[str, type[MethodSpec]] = {
    method_name(kind): kind
    for kind in (
        *(DiLoCo, MuLoCo, NoLoCo, SparseLoCo, DeMo, PowerSGDMethod),
        *(Streaming, Eager, CO2, BufferedAsync, DelayedNesterov, Merge),
    )
}
"""Name in a manifest -> method."""
