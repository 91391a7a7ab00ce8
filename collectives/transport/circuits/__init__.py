"""TCP connections between two peers that cannot reach each other, spliced by a third one."""
