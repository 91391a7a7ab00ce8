"""The interface to the network, with the queues and rates that each implementation uses."""
