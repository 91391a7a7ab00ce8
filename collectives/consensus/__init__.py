"""Single-decree Paxos of one round: who contributes, and whether the round commits."""
