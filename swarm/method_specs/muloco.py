"""MuLoCo (arXiv:2505.23725): DiLoCo with Muon as the inner optimizer."""

from __future__ import annotations

from collections.abc import Mapping
from typing import ClassVar

from thinwire.swarm.method_specs.base import Defaults, LearningRate, Momentum, Steps
from thinwire.swarm.method_specs.diloco import DiLoCo


class MuLoCo(DiLoCo, frozen=True, tag="muloco"):
    """[outer] of the method "muloco": the keys of "diloco", with defaults of the MuLoCo paper."""

    defaults: ClassVar[Defaults] = {"inner": {"optimizer": "muon"}}
    required: ClassVar[Mapping[str, tuple[Mapping[str, object], str, str]]] = {
        "inner": (
            {"optimizer": "muon"},
            "the method 'muloco' is DiLoCo with Muon: inner.optimizer must be 'muon'",
            "remove inner.optimizer, or set outer.method = 'diloco'",
        )
    }

    sync_every: Steps = 30
    lr: LearningRate = 0.7
    momentum: Momentum = 0.6
