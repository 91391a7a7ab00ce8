"""Access to a module on several ranks, in one process that is the first of them."""

from __future__ import annotations

from types import SimpleNamespace

import numpy as np
import pytest
from thinwire.node.api.rank_parameters import GroupAccess
from thinwire.node.state.layout import layout_of
from torch import nn


@pytest.mark.parametrize(("keep", "expected"), [(0.0, 3.0), (0.25, 2.5)])
def test_write_sets_the_values_and_replaces_nan(keep, expected):
    module = nn.Linear(2, 2)
    access = GroupAccess(layout_of(module), module, SimpleNamespace(first=True))
    access.values[:] = 1.0 if keep else np.nan
    access.write(np.full(4, 3.0, np.float32), 2, keep)
    assert access.values[2:].tolist() == [expected] * 4 and access.written
