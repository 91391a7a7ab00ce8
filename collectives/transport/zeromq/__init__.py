"""Transport over real networks: ZeroMQ for control messages, encrypted TCP streams for bulk data."""
