"""Python interface for user training loops: swarm, optimizer wrapper, and all-reduce calls."""
