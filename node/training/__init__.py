"""Local training: model, data, inner optimizers, the learner protocol, and export."""
