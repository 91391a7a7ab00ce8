"""Everything a user touches: command line, daemon, Python interface, training, checkpoints."""
