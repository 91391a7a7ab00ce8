"""The daemon: one process that is one peer."""
