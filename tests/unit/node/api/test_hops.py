"""Path of one exchange from `SwarmOptimizer.step` to the socket, in modules."""

from __future__ import annotations

import inspect
import threading
from collections.abc import Callable
from pathlib import Path
from types import FrameType

import thinwire
import torch
from thinwire.collectives.transport.zeromq.streams.record_writer import RecordWriter
from thinwire.node.runtime.loop_thread import LoopThread
from torch import nn

MANIFEST = '[run]\nname = "mine"\n[model]\nkind = "custom"\n[outer]\nsync_every = 1\n[exchange]\ncodec = "fp32"\n'
TO_TRANSPORT, TO_SOCKET = 9, 11
"""Modules from the optimizer to the transport, and to the socket behind link and stream pool."""


def chain(frame: FrameType | None) -> list[str]:
    """Return the product modules on the stack, outermost first, consecutive frames of a module once."""
    found: list[str] = []
    while frame is not None:
        name = str(frame.f_globals.get("__name__", ""))
        if name.startswith("thinwire.") and (not found or found[-1] != name):
            found.append(name)
        frame = frame.f_back
    return found[::-1]


def test_step_reaches_socket_in_few_modules(tmp_path: Path, monkeypatch) -> None:
    calls: list[list[str]] = []
    sent: list[list[str]] = []
    call, post, write = LoopThread.call, RecordWriter.post, RecordWriter.write

    def calling(self, what):
        calls.append(chain(inspect.currentframe().f_back))
        return call(self, what)

    def noting(original: Callable) -> Callable:
        def noted(self, *given, **named):
            sent.append(chain(inspect.currentframe().f_back))
            return original(self, *given, **named)

        return noted

    (tmp_path / "run.toml").write_text(MANIFEST)
    with thinwire.join(tmp_path / "run.toml", home=tmp_path / "a", host="127.0.0.1") as first:
        model = nn.Linear(2, 2)
        optimizer = first.wrap(model, torch.optim.SGD(model.parameters(), lr=0.1))
        other = nn.Linear(2, 2)

        def second() -> None:
            with thinwire.join(first.invite, home=tmp_path / "b", host="127.0.0.1") as swarm:
                theirs = swarm.wrap(other, torch.optim.SGD(other.parameters(), lr=0.1))
                for _ in range(2):
                    other(torch.ones(1, 2)).sum().backward()
                    theirs.step()

        thread = threading.Thread(target=second)
        thread.start()
        monkeypatch.setattr(LoopThread, "call", calling)
        monkeypatch.setattr(RecordWriter, "post", noting(post))
        monkeypatch.setattr(RecordWriter, "write", noting(write))
        while thread.is_alive():
            optimizer.zero_grad()
            model(torch.ones(1, 2)).sum().backward()
            optimizer.step()
    upper = max((one for one in calls if one[0] == "thinwire.node.api.optimizer"), key=len)
    # An exchange also sends what catching up or the end of a round needs. The shortest path is that of the announcement.
    lower = min((one for one in sent if "thinwire.node.peer.peer_services" in one), key=len)
    # The background peer's thread continues where the training loop's thread has left.
    modules = list(dict.fromkeys([*upper, *lower, "thinwire.collectives.transport.zeromq.streams.record_writer"]))
    assert len(modules) == TO_SOCKET, modules
    assert modules.index("thinwire.collectives.transport.zeromq.transport") == TO_TRANSPORT - 1, modules
