"""One peer of one run, from the join handshake to its departure, and what it reports."""
