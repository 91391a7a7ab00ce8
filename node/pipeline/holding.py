"""What a weak peer has of a run's model: one stage, beside the layout of all, so that it takes part in that stage's rounds."""

from __future__ import annotations

import numpy as np
from thinwire.compression.codec import Floats
from thinwire.swarm.manifest import Manifest

from ..fragments import layout_of
from ..model import ModelConfig, Transformer
from ..parts import fragments_of, shares
from .boundary import Boundary
from .frozen import Frozen, nbytes
from .parcel import Parcel
from .projection import Projection
from .section import ENDS, Section, cut, fragment_of


class Holding:
    """Stage `stage` of a manifest's model, with its first values; `vocab`: token ids that its tokenizer knows.

    Vectors are those of the whole layout, and only the stage's elements of them are ever touched: of the others a system
    gives addresses and no memory. Where boundaries are of a subspace the section is confined to it, see Projection.
    """

    def __init__(self, manifest: Manifest, vocab: int, stage: int) -> None:
        shape = manifest.model
        config = ModelConfig(vocab, shape.layers, shape.width, shape.heads, shape.context, shape.mlp, shape.tied)
        layers = cut(shape.layers, shares(shape.layers, manifest.pipeline.stages))[stage]
        held = {f"blocks.{layer}" for layer in layers} | (set() if stage else {ENDS})
        model = Transformer(config, manifest.run.seed, lambda name: fragment_of(name) in held)
        self.stage, self.layout = stage, layout_of(model)
        self.section = Section(model, layers, ends=not stage)
        self._part = fragments_of(manifest, self.layout)[stage]
        self.boundary = Boundary(manifest.pipeline.codec, shape.width, vocab, manifest.run.seed)
        self._projection: Projection | None = None
        self.frozen = Frozen()
        """The frozen part of the embedding, as this stage knows it."""
        self._table = vocab, shape.width
        if self.boundary.confined:
            self._projection = Projection(self.section, self.layout, self.boundary.confined, manifest.run.seed)
            self._refreeze()

    def parameters(self) -> Floats:
        """A copy of the stage's parameters, at their places in the whole vector; zeros elsewhere."""
        theta = np.zeros(self.layout.total, np.float32)
        for start, stop in self._part.spans:
            self.read(start, stop, theta[start:stop])
        return theta

    def read(self, start: int, stop: int, out: Floats) -> None:
        """Copy parameters [start, stop), which are the stage's."""
        if self._projection is None:
            self.layout.read(self.section, out, start)
        else:
            self._projection.read(start, stop, out)

    def write(self, theta: Floats, start: int = 0, keep: float = 0.0) -> None:
        """Set parameters [start, start + theta.size), which are the stage's; see Learner."""
        if self._projection is None:
            self.layout.write(self.section, theta, start, keep)
        else:
            self._projection.write(theta, start, keep)
            self._refreeze()

    def _refreeze(self) -> None:
        """The embedding may be another one."""
        if self._projection is not None and self._projection.frozen.tag:
            self.freeze(self._projection.frozen)

    def freeze(self, frozen: Frozen) -> None:
        """From now on add these to what comes to the stage. Raises CodecError, with nothing changed, when they do not fit."""
        if frozen != self.frozen:
            self.boundary.freeze(frozen.rows(*self._table))
            self.frozen = frozen

    @property
    def parcel(self) -> Parcel:
        """For frozen rows that are to come."""
        return Parcel(nbytes(*self._table))
