"""Stage of a weak peer, with the layout of the whole model, so that it takes part in its rounds."""

from __future__ import annotations

import numpy as np
from thinwire.collectives.transport.payload_assembly import PayloadAssembly
from thinwire.compression.core.types import Floats
from thinwire.node.pipeline.model.frozen_embedding import FrozenEmbedding, nbytes
from thinwire.node.pipeline.model.staged_model import StagedModel
from thinwire.node.pipeline.model.whole_model_view import WholeModelView
from thinwire.node.state.fragments import fragments_of
from thinwire.node.training.models.transformer import Transformer


class HeldStage:
    """Stage `stage` of a model, with its first values. Raises ModelError for a model that cannot be cut.

    Vectors have the size of the whole layout, but only the stage's elements are ever touched: the operating system
    reserves addresses for the others, and no memory. With a subspace codec the section is confined to the subspace, see
    WholeModelView.
    """

    def __init__(self, model: StagedModel, stage: int) -> None:
        manifest, self.stage, self.layout = model.manifest, stage, model.layout
        self.section = model.section(model.first_values(stage), stage)
        self._part = fragments_of(manifest, self.layout)[stage]
        self.boundary = model.boundary()
        self._projection: WholeModelView | None = None
        self.frozen = FrozenEmbedding()
        """Frozen part of the embedding as this stage knows it."""
        self._table = model.vocab, model.width
        if self.boundary.confined:
            assert isinstance(self.section.module, Transformer)  # the manifest allows a subspace for no other model
            self._projection = WholeModelView(
                self.section.module, self.layout, self.boundary.confined, manifest.run.seed
            )
            self._refreeze()

    def parameters(self) -> Floats:
        """Copy the stage's parameters to their places in the whole vector; other elements are zero."""
        theta = np.zeros(self.layout.total, np.float32)
        for start, stop in self._part.spans:
            self.read(start, stop, theta[start:stop])
        return theta

    def read(self, start: int, stop: int, out: Floats) -> None:
        """Copy parameters [start, stop), which must belong to the stage."""
        if self._projection is None:
            self.layout.read(self.section.module, out, start)
        else:
            self._projection.read(start, stop, out)

    def write(self, theta: Floats, start: int = 0, keep: float = 0.0) -> None:
        """Set parameters [start, start + theta.size), which must belong to the stage; see Learner."""
        if self._projection is None:
            self.layout.write(self.section.module, theta, start, keep)
        else:
            self._projection.write(theta, start, keep)
            self._refreeze()

    def _refreeze(self) -> None:
        """Take note that the embedding may have changed."""
        if self._projection is not None and self._projection.frozen.tag:
            self.freeze(self._projection.frozen)

    def freeze(self, frozen: FrozenEmbedding) -> None:
        """Add these rows to the stage's input from now on. Raises CodecError if they do not fit."""
        if frozen != self.frozen:
            self.boundary.freeze(frozen.rows(*self._table))
            self.frozen = frozen

    @property
    def assembly(self) -> PayloadAssembly:
        """Return an assembly for frozen rows that are about to arrive."""
        return PayloadAssembly(nbytes(*self._table))
