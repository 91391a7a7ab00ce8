"""The state of any run gives the first weights of any other one of the same model.

The source may be full replicas or stages, in any number, and of any outer method; so may the target.
"""

from __future__ import annotations

import random
from types import SimpleNamespace

import numpy as np
import pytest
from thinwire.node.methods.registry import METHODS, fitted
from thinwire.node.runtime.disk import RealDisk
from thinwire.node.state.checkpoint_store import CheckpointStore, Saved
from thinwire.node.state.checkpointer import Checkpointer
from thinwire.node.state.layout import layout_of
from thinwire.node.training.models.initial_weights import WeightsError, load_weights
from thinwire.node.training.models.transformer import ModelConfig, Transformer
from thinwire.node.training.stored_model import all_weights
from thinwire.swarm.identity.identity import Identity
from thinwire.swarm.manifest.parser import parse

MODEL = '[run]\nname = "u"\nrounds = 2\n[model]\nlayers = 4\nwidth = 32\nheads = 4\ncontext = 16\n'
LAYOUT = layout_of(Transformer(ModelConfig(vocab=40, layers=4, width=32, heads=4, context=16), 1))
ME = Identity.generate(bytes(32))


def pipeline(stages):
    return f'[outer]\nsync_every = 60\nmethod = "streaming"\nfragments = {stages}\n[pipeline]\nstages = {stages}\n'


FORMS = {name: f'[outer]\nmethod = "{name}"\n' for name in METHODS if name != "streaming"}
FORMS["streaming"] = (
    '[outer]\nmethod = "streaming"\nsync_every = 28\nfragments = 7\n'  # more than the layers: parameters are cut
)
FORMS |= {f"{stages} stages": pipeline(stages) for stages in (2, 3, 4)}


def replica_of(form, theta, held=None):
    """Return the replica of a peer that starts a run of this form, or joins it to hold some stages."""
    manifest = parse((MODEL + FORMS[form]).encode())
    codec, cut = fitted(manifest, LAYOUT)
    only = {} if held is None else {"held": held}
    return METHODS[manifest.outer.method].replica.begin(manifest, LAYOUT, codec, cut, theta, (ME.peer_id,), **only)


def checkpoint(folder, replica):
    store = CheckpointStore(folder, RealDisk(), ME)
    environment = SimpleNamespace(rng=random.Random(1), wall=lambda: 1.0)
    saved = Checkpointer(store, bytes(32), environment, lambda name, fields: None).save(replica, LAYOUT, None)
    assert isinstance(saved, Saved)
    return saved.path


def stages_of(form):
    return int(form.split()[0]) if form.endswith("stages") else 0


def trained(replica, seed):
    """Fill the state, also momentum and what the method adds, with the values of a later round."""
    rng = np.random.default_rng(seed)
    for _, one, _ in replica.each(LAYOUT):
        one.state[:] = rng.standard_normal(one.state.size).astype(np.float32)
        one.seal()
    return replica


FIRST = np.zeros(LAYOUT.total, np.float32)


@pytest.mark.parametrize(
    ("source", "whole"), [(form, True) for form in FORMS] + [(form, False) for form in FORMS if stages_of(form)]
)
def test_state_of_every_run_starts_every_other_run(tmp_path, source, whole):
    """The weights are equal bit for bit; outer momentum and other state start from their first values.

    whole: the source is a peer with the whole model; otherwise peers that hold some of its stages each.
    """
    if whole:
        replica = trained(replica_of(source, FIRST), 1)
        paths, theta = [checkpoint(tmp_path / "whole", replica)], replica.theta
    else:  # A peer with the last two stages, and one for each of the others.
        count = stages_of(source)
        groups, theta, paths = [*([stage] for stage in range(count - 2)), range(count - 2, count)], FIRST.copy(), []
        for group in groups:
            part = trained(replica_of(source, FIRST, held=group), group[0])
            paths.append(checkpoint(tmp_path / f"{group[0]}", part))
            for fragment in part.fragments.values():
                fragment.part.put(theta, fragment.replica.theta)
    assert np.unique(theta).size > LAYOUT.total // 2, "the parts are not empty"
    found = load_weights(paths, LAYOUT)
    assert found.tobytes() == theta.tobytes()
    for target in FORMS:
        replica = replica_of(target, found)
        assert replica.theta.tobytes() == theta.tobytes(), target
        for stage in range(stages_of(target)):
            fragment = replica_of(target, found, held=[stage]).fragments[stage]
            assert fragment.replica.theta.tobytes() == fragment.part.take(theta).tobytes(), (target, stage)


def test_missing_stage_is_named_and_two_states_of_one_stage_are_refused(tmp_path):
    parts = [checkpoint(tmp_path / f"{stage}", trained(replica_of("3 stages", FIRST, held=[stage]), stage))
             for stage in range(3)]  # fmt: skip
    load_weights([*parts, parts[0]], LAYOUT)
    with pytest.raises(WeightsError, match="no such tensor") as error:
        load_weights(parts[:2], LAYOUT)
    assert "--from once for each stage" in error.value.hint
    later = checkpoint(tmp_path / "later", trained(replica_of("3 stages", FIRST, held=[1]), 9))
    with pytest.raises(WeightsError, match="another source has other values"):
        load_weights([*parts, later], LAYOUT)


@pytest.mark.parametrize("form", ["diloco", "streaming", "3 stages"])
def test_export_has_the_weights_of_every_form(tmp_path, form):
    replica = trained(replica_of(form, FIRST), 1)
    checkpoint(tmp_path, replica)
    found = all_weights(CheckpointStore(tmp_path, RealDisk(), ME).load().snapshot.fragments)
    assert LAYOUT.flat(found).tobytes() == replica.theta.tobytes()
