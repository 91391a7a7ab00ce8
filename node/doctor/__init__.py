"""Checks of this machine and its network before it trains: `thinwire doctor`."""
