"""Command line: its frame, its commands, and the entry point of child processes."""
