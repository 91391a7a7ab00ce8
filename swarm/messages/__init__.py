"""All messages on the wire, and the number of each."""
