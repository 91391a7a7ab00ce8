"""Parts of a model: sections and stages, their optimizer, and the subspace variant."""
