"""Transfer of the state of a replica from many peers: offers, their search, and the chunks."""
