"""Founding and joining from Python: changed manifests, names, waiting for peers, the log file."""

from concurrent.futures import ThreadPoolExecutor

import pytest
import thinwire
import torch
from torch import nn

MANIFEST = (
    '[run]\nname = "mine"\nrounds = 8\n[model]\nkind = "custom"\n[outer]\nsync_every = 2\n[exchange]\ncodec = "fp32"\n'
)


@pytest.fixture
def run(tmp_path):
    path = tmp_path / "run.toml"
    path.write_text(MANIFEST)
    return path


def net(seed=0):
    torch.manual_seed(seed)
    return nn.Linear(6, 3)


def train(swarm, steps):
    """Make inner steps; return the model."""
    model = net()
    optimizer = swarm.wrap(model, torch.optim.SGD(model.parameters(), 0.1))
    for _ in range(steps):
        optimizer.zero_grad()
        model(torch.ones(4, 6)).square().mean().backward()
        optimizer.step()
    return model


def test_join_with_a_changed_manifest_begins_another_run_only_if_asked(run, tmp_path):
    settings = dict(home=tmp_path / "home", host="127.0.0.1")
    with thinwire.join(run, **settings) as swarm:
        train(swarm, 4)
        first = swarm.status.run
    run.write_text(MANIFEST.replace("sync_every = 2", "sync_every = 3"))
    with pytest.raises(thinwire.ManifestMismatch, match=r"outer\.sync_every was 2, is 3") as error:
        thinwire.join(run, **settings)
    assert "new=True" in error.value.hint and "--from" not in error.value.hint
    with thinwire.join(run, new=True, **settings) as swarm:
        assert swarm.status.run != first
    run.write_text(MANIFEST)
    with thinwire.join(run, **settings) as swarm:
        train(swarm, 2)
        assert swarm.status.run == first and swarm.round == 3


def test_name_of_a_peer_is_visible_to_the_others(run, tmp_path):
    with (
        thinwire.join(run, home=tmp_path / "one", host="127.0.0.1", name="the attic") as one,
        thinwire.join(one.invite, home=tmp_path / "two", host="127.0.0.1") as two,
    ):
        # Both first rounds: a joiner knows the founder from its admission, before any round.
        with ThreadPoolExecutor() as pool:
            list(pool.map(lambda swarm: train(swarm, 4), (one, two)))
        assert [peer.name for peer in two.peers] == ["the attic"]
        assert [peer.name for peer in one.peers] == [""], "the name of a machine is not published unasked"
        assert one.status.name == "the attic" and two.status.name
