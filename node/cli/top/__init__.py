"""The command `thinwire top`: one screen about the daemon of this machine."""
