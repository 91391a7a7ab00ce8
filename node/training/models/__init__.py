"""Models that a run can train, their first weights, and their tokenizers."""
