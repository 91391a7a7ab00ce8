"""Custom training loops whose exchanges overlap training, in real swarms over loopback."""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor

import pytest
import thinwire
import torch
from torch import nn

MANIFEST = """
[run]
name = "mine"
rounds = 6
[model]
kind = "custom"
[outer]
{outer}
[exchange]
codec = "fp32"
"""
STREAMING = 'method = "streaming"\nsync_every = 6\nfragments = 2\noverlap = 2'
FRAGMENTS = 'method = "streaming"\nsync_every = 6\nfragments = 3\noverlap = 5'
EAGER = 'method = "eager"\nsync_every = 3'
DELAYED = 'method = "delayed-nesterov"\nsync_every = 3\nlr = 0.4'


def net(seed):
    torch.manual_seed(seed)
    return nn.Sequential(nn.Linear(6, 8), nn.ReLU(), nn.Linear(8, 3))


def vector(model):
    return torch.cat([p.detach().reshape(-1) for p in model.parameters()])


def train(swarm, model, seed):
    """Until the run's end; digests by round, and after how many steps each was seen."""
    optimizer = swarm.wrap(model, torch.optim.SGD(model.parameters(), lr=0.1))
    generator, digests, at, steps = torch.Generator().manual_seed(seed), {}, [], 0
    while not swarm.done:
        x = torch.randn(16, 6, generator=generator)
        optimizer.zero_grad()
        loss = nn.functional.cross_entropy(model(x), x[:, :3].argmax(1))
        loss.backward()
        before = swarm.last
        optimizer.step()
        steps += 1
        if swarm.last is not before:
            at.append(steps)
            if swarm.last.committed:
                digests[swarm.last.round] = swarm.last.contributors
    return digests, at, swarm.digest


@pytest.mark.parametrize("outer", [STREAMING, FRAGMENTS, EAGER, DELAYED])
def test_overlapped_peers_end_with_equal_parameters(tmp_path, outer):
    path = tmp_path / "run.toml"
    path.write_text(MANIFEST.format(outer=outer))
    ours, theirs = net(1), net(2)
    with thinwire.join(path, home=tmp_path / "a", host="127.0.0.1") as first:
        with thinwire.join(first.invite, home=tmp_path / "b", host="127.0.0.1") as second:
            with ThreadPoolExecutor(2) as pool:
                jobs = [pool.submit(train, first, ours, 1), pool.submit(train, second, theirs, 2)]
                (found, at, one), (_, _, other) = [job.result(timeout=240) for job in jobs]
            assert one == other and first.round == 6 and max(found) == 6
            assert torch.equal(vector(ours), vector(theirs))
            outer_state = first.outer()
            assert all(torch.equal(outer_state[name], p.detach()) for name, p in ours.named_parameters())
    assert not first.under_way


@pytest.mark.parametrize(
    ("outer", "expected"), [(STREAMING, [5, 8, 11, 14]), (FRAGMENTS, [7, 9, 11]), (EAGER, [6, 9, 12, 15])]
)
def test_lone_overlapped_swarm_applies_results_after_overlap_steps(tmp_path, outer, expected):
    path = tmp_path / "run.toml"
    path.write_text(MANIFEST.format(outer=outer))
    model, x = net(1), torch.randn(16, 6, generator=torch.Generator().manual_seed(3))
    with thinwire.join(path, home=tmp_path / "a", host="127.0.0.1") as swarm:
        optimizer = swarm.wrap(model, torch.optim.SGD(model.parameters(), lr=0.1))
        at, steps = [], 0
        while len(at) < len(expected):
            optimizer.zero_grad()
            model(x).square().mean().backward()
            before = swarm.last
            optimizer.step()
            steps += 1
            if swarm.last is not before and (outer != FRAGMENTS or swarm.last.committed):
                at.append(steps)
                assert swarm.last.committed
        assert at == expected
        apart = max(float((swarm.outer()[n] - p.detach()).abs().max()) for n, p in model.named_parameters())
        assert apart > 0
        # Left during an exchange, which is finished and committed.
        while not swarm.under_way:
            optimizer.step()
        last = (
            5 if outer == FRAGMENTS else swarm.last.round
        )  # fragments: rounds in progress at the end of the run are finished
    assert swarm.last.round == last + 1 and swarm.last.committed
    again = thinwire.join(path, home=tmp_path / "a", host="127.0.0.1")
    try:
        other = net(5)
        again.wrap(other, torch.optim.SGD(other.parameters(), lr=0.1))
        assert again.round == last + 1
        assert all(torch.equal(again.outer()[n], p.detach()) for n, p in other.named_parameters())
    finally:
        again.leave()


def test_error_in_loop_abandons_exchange_in_progress(tmp_path):
    path = tmp_path / "run.toml"
    path.write_text(MANIFEST.format(outer=EAGER))
    model = net(1)
    with pytest.raises(ZeroDivisionError):
        with thinwire.join(path, home=tmp_path / "a", host="127.0.0.1") as swarm:
            optimizer = swarm.wrap(model, torch.optim.SGD(model.parameters(), lr=0.1))
            while not swarm.under_way:
                optimizer.step()
            raise ZeroDivisionError
