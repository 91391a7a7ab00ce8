"""Sealed streams of a link, over TCP or through shared memory."""
