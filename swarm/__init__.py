"""Who is here and what we run. Sans-IO: nothing in this package opens a socket or reads a clock."""
