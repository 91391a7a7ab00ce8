"""Listening sockets, and control connections: a libzmq socket behind a TCP relay each."""
