"""The same code on a fake wire: virtual time and an in-memory network."""
