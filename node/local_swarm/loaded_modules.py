"""Import of the modules that every process of a local swarm needs.

The server from which the processes are forked does it. Loading takes about two seconds of a core.
"""

import gc

import psutil as psutil
import torch._dynamo as _dynamo  # The first step of an optimizer would load it.
from thinwire.node.daemon import daemon as daemon
from thinwire.node.local_swarm import baseline as baseline

assert _dynamo
gc.freeze()  # A collection would write to the shared pages, and so copy them.
