"""Discovery: directories in which a run can be found without an invite."""
