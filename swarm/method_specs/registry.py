"""All outer methods by name."""

from __future__ import annotations

from collections.abc import Mapping

from thinwire.swarm.method_specs.base import MethodSpec, method_name
from thinwire.swarm.method_specs.buffered_async import BufferedAsync
from thinwire.swarm.method_specs.co2 import CO2
from thinwire.swarm.method_specs.delayed_nesterov import DelayedNesterov
from thinwire.swarm.method_specs.demo import DeMo
from thinwire.swarm.method_specs.diloco import DiLoCo
from thinwire.swarm.method_specs.eager import Eager
from thinwire.swarm.method_specs.merge import Merge
from thinwire.swarm.method_specs.muloco import MuLoCo
from thinwire.swarm.method_specs.noloco import NoLoCo
from thinwire.swarm.method_specs.powersgd import PowerSGDMethod
from thinwire.swarm.method_specs.sparseloco import SparseLoCo
from thinwire.swarm.method_specs.streaming import Streaming

METHODS: Mapping[str, type[MethodSpec]] = {
    method_name(kind): kind
    for kind in (
        *(DiLoCo, MuLoCo, NoLoCo, SparseLoCo, DeMo, PowerSGDMethod),
        *(Streaming, Eager, CO2, BufferedAsync, DelayedNesterov, Merge),
    )
}
"""Name in a manifest -> method."""
