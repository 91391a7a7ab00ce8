"""All-gather: every payload goes to all peers, in pieces that any peer can supply."""
