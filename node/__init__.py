"""Everything a user touches: the command line, the daemon, training, checkpoints."""
