"""State of training: parameter layout, fragments, replica, data ledger and checkpoints."""
