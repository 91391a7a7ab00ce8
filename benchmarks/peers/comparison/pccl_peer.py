"""One peer of PCCL's all-reduce: python pccl_peer.py '{"rank": 0, "peers": 4, "mb": 100, "codec": "fp32", …}'.

master: address and port of the master, "127.0.0.1:29611". codec: "fp32", or "uint8", with one scale and one zero point for each
part of an array that a peer sends, which is the closest that PCCL has to int8 in blocks. Rank 0 starts the master, a process
of its own, so its CPU counts as PCCL's.
"""

import json
import os
import subprocess
import sys
import time

import numpy as np
from pccl import (
    Attribute,
    Communicator,
    DataType,
    DistributionHint,
    QuantizationAlgorithm,
    QuantizationOptions,
    ReduceDescriptor,
    ReduceOp,
    ReduceOpDescriptor,
    ReduceOperandDescriptor,
)

from benchmarks.peers.turns import arrays, listen, say, until

IN_FLIGHT = 25
"""Arrays that are reduced at the same time, and connections between two peers.

With fp32 it was the fastest of 1, 2, 4 (PCCL's default), 8, 12, 16 and 25; with uint8 the number makes no difference.
"""

MASTER = """
import sys
from pccl import MasterNode
master = MasterNode(listen_address=sys.argv[1])
master.run()
sys.stdin.read()
master.interrupt()
"""

# PCCL writes its log to standard output, which here has the messages to the script.
sys.stdout = os.fdopen(os.dup(1), "w")
os.dup2(2, 1)
options = json.loads(sys.argv[1])
if options["rank"] == 0:
    master = subprocess.Popen([sys.executable, "-c", MASTER, options["master"]], stdin=subprocess.PIPE)
    time.sleep(1.0)
communicator = Communicator(options["master"], 0, p2p_connection_pool_size=IN_FLIGHT)
communicator.connect(n_attempts=60)
while communicator.get_attribute(Attribute.GLOBAL_WORLD_SIZE) < options["peers"]:
    communicator.update_topology()

own = arrays(options["mb"], options["rank"])
result = [np.empty_like(array) for array in own]
quantization = {
    "fp32": QuantizationOptions(DataType.FLOAT, QuantizationAlgorithm.NONE),
    "uint8": QuantizationOptions(DataType.UINT8, QuantizationAlgorithm.ZERO_POINT_SCALE),
}[options["codec"]]
operations = [
    ReduceOpDescriptor.from_numpy(
        source,
        target,
        ReduceDescriptor(
            source.size,
            ReduceOp.AVG,
            tag,
            ReduceOperandDescriptor(DataType.FLOAT, DistributionHint.NONE),
            quantization,
        ),
    )
    for tag, (source, target) in enumerate(zip(own, result, strict=True))
]
firsts = [arrays(min(options["mb"], 4), rank)[0].astype(np.float64) for rank in range(options["peers"])]
exact = sum(firsts) / len(firsts)
say(ready=True)
while True:
    try:
        moment = listen()["at"]
    except SystemExit:
        break
    until(moment)
    info = communicator.all_reduce_multiple_with_retry(operations, max_in_flight=IN_FLIGHT)
    say(end=time.monotonic())
    listen()
    error = float(np.linalg.norm(result[0] - exact) / np.linalg.norm(exact))
    say(whole=info.local_world_size == options["peers"], error=error)
del communicator
if options["rank"] == 0:
    master.communicate()
