"""Commands of the simulator: `thinwire sim` and `thinwire plan`."""
