"""Page, API and metrics of a daemon, served by another process from the daemon's files."""
