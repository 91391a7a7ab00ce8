"""Start processes by fork from this one, which has loaded torch and the package already.

Argument: path of a socket. A client connects once per process and sends a JSON line: the Python file ("": `thinwire`), the
arguments, the environment, the folder, the network namespace ("": ours), and the files for stdout and stderr. The answer is
a line with the process id, and a line with the exit status of os.waitpid when the process ends. All processes end with this
one.
"""

from __future__ import annotations

import contextlib
import ctypes
import gc
import json
import os
import runpy
import selectors
import signal
import socket
import sys
from typing import Any

CLONE_NEWNET = 0x40000000
"""Kind of a network namespace, for setns(2)."""


def end_with_parent() -> None:
    """Request SIGKILL for this process at the end of its parent (prctl PR_SET_PDEATHSIG)."""
    if sys.platform == "linux":
        ctypes.CDLL(None).prctl(1, signal.SIGKILL)


def become(wanted: dict[str, Any]) -> None:
    """Take the environment, the folder, the files and the arguments of the wanted process."""
    os.setsid()
    end_with_parent()
    if wanted["network"]:
        with open(wanted["network"]) as network:
            assert ctypes.CDLL(None).setns(network.fileno(), CLONE_NEWNET) == 0
    signal.set_wakeup_fd(-1)
    signal.signal(signal.SIGCHLD, signal.SIG_DFL)
    for number, path, flags in ((0, os.devnull, os.O_RDONLY), (1, wanted["out"], 0), (2, wanted["err"], 0)):
        file = os.open(path, flags or os.O_WRONLY | os.O_CREAT | os.O_TRUNC, 0o644)
        os.dup2(file, number)
        os.close(file)
    os.environ.clear()
    os.environ.update(wanted["env"])
    os.chdir(wanted["cwd"])
    sys.argv[1:] = wanted["arguments"]


def serve(path: str) -> str:
    """Fork a process for each request. Return its Python file in each of the new processes, never in this one."""
    listening = socket.socket(socket.AF_UNIX)
    listening.bind(f"{path}.new")
    listening.listen(64)
    os.rename(f"{path}.new", path)  # No test connects before it listens.
    ended, wake = socket.socketpair()
    for one in (listening, ended, wake):
        one.setblocking(False)
    signal.set_wakeup_fd(wake.fileno())
    signal.signal(signal.SIGCHLD, lambda *_: None)
    living: dict[int, socket.socket] = {}
    selector = selectors.DefaultSelector()
    selector.register(listening, selectors.EVENT_READ)
    selector.register(ended, selectors.EVENT_READ)
    while True:
        for key, _ in selector.select():
            if key.fileobj is ended:
                ended.recv(4096)
                continue
            client, _ = listening.accept()
            client.setblocking(True)
            with client.makefile("rb") as file:
                line = file.readline()
            if not line:  # The client has ended.
                client.close()
                continue
            wanted = json.loads(line)
            child = os.fork()
            if not child:
                selector.close()
                for one in (listening, ended, wake, client, *living.values()):
                    one.close()
                become(wanted)
                return str(wanted["program"])
            living[child] = client
            with contextlib.suppress(OSError):
                client.sendall(b"%d\n" % child)
        while living:
            child, status = os.waitpid(-1, os.WNOHANG)
            if not child:
                break
            with living.pop(child) as client:
                with contextlib.suppress(OSError):  # The client has forgotten it.
                    client.sendall(b"%d\n" % status)


def load() -> None:
    """Load the modules and the compiled kernels of a daemon, and those that its first step and its first key need."""
    import psutil as psutil
    import torch
    import uvloop as uvloop
    from thinwire.compression.compile_kernels import warm_up
    from thinwire.node.daemon import daemon as daemon
    from thinwire.swarm.identity.identity import Identity

    Identity.generate()
    for codec in ("int8", "topk"):
        warm_up(codec)
    weight = torch.ones(2, 2, requires_grad=True)
    optimizer = torch.optim.AdamW([weight])
    weight.sum().backward()
    optimizer.step()


if __name__ == "__main__":
    end_with_parent()
    from thinwire.node.cli.main import main

    load()
    main(["start", "--help"])
    gc.freeze()
    if program := serve(sys.argv[1]):
        sys.argv[0] = program
        runpy.run_path(program, run_name="__main__")
        sys.exit()
    sys.exit(main())
