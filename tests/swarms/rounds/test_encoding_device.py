"""Contributions that torch encodes on the device of the parameters: swarms behave exactly as with the CPU kernels."""

import pytest
from kit.scenarios import INT8, TOPK, manifest_of, play, swarm_of
from thinwire.compression import device
from thinwire.compression.dense import torch_backend as dense
from thinwire.compression.sparse import torch_backend as sparse

MODEL = "[model]\nlayers = 1\nwidth = 8\nheads = 2\ncontext = 8\n[inner]\nbatch = 1\n"
METHODS = {
    "diloco": ("", INT8),
    "stochastic": ("", "int4(block=64,asymmetric=1,stochastic=1)"),
    "fedbuff": ('method = "buffered-async"', INT8),
    "eager": ('method = "eager"', INT8),
    "noloco": ('method = "noloco"', "int4(block=64)"),
    "streaming": ('method = "streaming"\nfragments = 2', INT8),
    "sparseloco": ('method = "sparseloco"', TOPK),
    "demo": ('method = "demo"', "demo(k=32,chunk=4096)|2bit|rice"),
}


@pytest.fixture
def calls(monkeypatch):
    """Names of the torch implementations that were called, one entry for each call."""
    found = []
    for name, module, function in (("dense", dense, "encode"), ("sparse", sparse, "part")):
        real = getattr(module, function)
        monkeypatch.setattr(
            module, function, lambda *given, real=real, name=name: (found.append(name), real(*given))[1]
        )
    return found


@pytest.mark.parametrize("method", METHODS)
def test_two_peers_with_torch_encoding_send_the_same_bytes(method, calls, monkeypatch):
    outer, codec = METHODS[method]
    lines = outer if method == "demo" else f"{outer}\nsync_every = 2"
    manifest = manifest_of(lines, codec=codec, tables=MODEL)
    scenario = swarm_of(2, manifest, seconds=7.0, compute="torch", region="Oregon")
    on_host = play(scenario)
    assert calls == [] and on_host.journal.of("round")
    monkeypatch.setattr(device, "DEVICES", {"cpu"})
    assert play(scenario).trace == on_host.trace
    assert set(calls) == {"sparse" if method in ("sparseloco", "demo") else "dense"}
