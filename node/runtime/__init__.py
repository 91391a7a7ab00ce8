"""The process around a peer: settings, directories, disk, lock, console, event log, threads."""
