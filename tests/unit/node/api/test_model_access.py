"""Access to a user's module."""

from __future__ import annotations

import pytest
import torch
import torch.distributed as dist
from thinwire.node.api.model_access import unwrapped
from thinwire.node.api.ranks import GroupError
from torch import nn
from torch.distributed.fsdp import FullyShardedDataParallel


def test_flat_shards_are_refused_inside_a_module_too(tmp_path):
    dist.init_process_group("gloo", init_method=f"file://{tmp_path}/store", rank=0, world_size=1)
    try:
        sharded = FullyShardedDataParallel(nn.Linear(2, 2), device_id=torch.device("cpu"))
        for module in (sharded, nn.Sequential(sharded)):
            with pytest.raises(GroupError, match="FullyShardedDataParallel") as caught:
                unwrapped(module)
            assert "fully_shard" in caught.value.hint
    finally:
        dist.destroy_process_group()
