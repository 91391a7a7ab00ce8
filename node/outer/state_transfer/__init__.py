"""Transfer of a replica's state: served to readers, and fetched from other peers."""
