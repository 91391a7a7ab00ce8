"""Keys, signed peer records, invites, addresses, and the errors that carry a hint."""
