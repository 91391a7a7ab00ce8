"""Construction of a real peer without a swarm; tests/swarms and tests/processes run whole peers."""

import asyncio
import gc
import threading
import warnings

import numpy as np
import pytest
import torch
from thinwire.node.peer.bootstrap import founding
from thinwire.node.runtime.asyncio_extra import at_once
from thinwire.node.runtime.load_settings import load
from thinwire.node.state.checkpoint_store import LATEST
from thinwire.node.state.checkpointer import CheckpointsLost
from thinwire.node.state.layout import layout_of
from thinwire.node.training.models.initial_weights import WeightsError


def test_peer_announces_site_of_its_settings(tmp_path):
    entry = founding(b"", load({"home": tmp_path, "site": "loft"}, {}), "run.toml")
    assert entry.peer(lambda kind, fields: None).admission.site == "loft"


def test_daemon_executor_runs_in_a_thread(tmp_path):
    peer = founding(b"", load({"home": tmp_path}, {}), "run.toml").peer(lambda kind, fields: None)
    assert asyncio.run(peer.environment.aside(threading.get_ident)) != threading.get_ident()


def take_up(entry, theta, layout):
    """Let a founder take up its state; its model is not used."""

    def copy(*arguments):
        raise AssertionError("the model is not used")

    async def main():
        peer = entry.peer(lambda kind, fields: None)
        joins = await entry.begin(peer)
        try:
            await peer.take_up(layout, theta, read=copy, write=copy, work=at_once, joins=joins)
        finally:
            await peer.leave()

    asyncio.run(main())


def founder(folder):
    return founding(b"", load({"home": folder, "host": "127.0.0.1", "port": 0}, {}), "run.toml")


def test_founder_refuses_first_weights_that_are_not_finite_and_names_the_parameter(tmp_path):
    layout = layout_of(torch.nn.Linear(2, 2))
    theta = np.ones(layout.total, np.float32)
    theta[layout.pieces[1].start] = np.nan
    with pytest.raises(WeightsError, match="the first weights of weight are not finite") as found:
        take_up(founder(tmp_path), theta, layout)
    assert found.value.exit_code == 2


def test_lone_founder_with_damaged_checkpoints_ends_with_a_code_that_no_service_tries_again(tmp_path):
    entry, layout = founder(tmp_path), layout_of(torch.nn.Linear(2, 2))
    checkpoints = entry.config.directories.run(entry.run_id).checkpoints
    (checkpoints / "step-00000003").mkdir(parents=True)
    (checkpoints / "step-00000003" / "manifest.json").write_text("damaged")
    (checkpoints / LATEST).write_text("step-00000003\n")
    with pytest.raises(CheckpointsLost, match="no checkpoint of the run can be read") as found:
        take_up(entry, np.ones(layout.total, np.float32), layout)
    assert found.value.exit_code == 2 and f"restore {checkpoints} from a copy" in found.value.hint


def test_peer_that_ends_at_once_leaves_no_coroutine_without_a_task(tmp_path):
    async def main():
        entry = founding(b"", load({"home": tmp_path, "host": "127.0.0.1", "port": 0}, {}), "run.toml")
        peer = entry.peer(lambda kind, fields: None)
        await entry.begin(peer)
        await peer.vanish()

    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        asyncio.run(main())
        gc.collect()
    assert [one for one in caught if "never awaited" in str(one.message)] == []
