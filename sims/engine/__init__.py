"""Event loop and disk in virtual time."""
