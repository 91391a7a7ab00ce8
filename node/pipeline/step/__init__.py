"""One pipelined training step: the origin that drives it, the hosts that compute, and its bookkeeping."""
