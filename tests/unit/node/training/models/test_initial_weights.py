"""First parameters of a run from a file."""

from __future__ import annotations

from pathlib import Path

import blake3
import numpy as np
import pytest
import torch
from safetensors.numpy import save_file
from thinwire.node.state.checkpoint_manifest import CheckpointContents, Hasher, seal
from thinwire.node.state.checkpoint_store import MANIFEST
from thinwire.node.state.layout import layout_of
from thinwire.node.training.models.initial_weights import WeightsError, check_weights, digest_of, load_weights
from thinwire.node.training.models.missing_hashes import MissingHashError
from thinwire.swarm.identity.identity import Identity
from torch import nn

NAME = "fragment-00000.safetensors"


class Model(nn.Module):
    def __init__(self):
        super().__init__()
        self.a, self.b = nn.Parameter(torch.zeros(2, 3)), nn.Parameter(torch.zeros(4))


LAYOUT = layout_of(Model())
VALUES = {"a": np.arange(6, dtype=np.float32).reshape(2, 3), "b": np.array([9, 8, 7, 6], np.float32)}


def saved(folder, **changes):
    file = folder / "w.safetensors"
    save_file({name: values for name, values in {**VALUES, **changes}.items() if values is not None}, file)
    return file


def test_file_gives_all_parameters_in_order_of_the_layout(tmp_path):
    theta = load_weights([saved(tmp_path)], LAYOUT)
    assert theta.dtype == np.float32 and theta.tolist() == [0, 1, 2, 3, 4, 5, 9, 8, 7, 6]
    assert digest_of(theta) == blake3.blake3(np.array(theta, "<f4").tobytes()).hexdigest()


def test_checkpoint_directory_gives_the_weights_of_its_fragments_also_of_cut_parameters(tmp_path):
    parts = [
        {"weights/a[0:4 of 2x3]": VALUES["a"].reshape(-1)[:4]},
        {"weights/a[4:6 of 2x3]": VALUES["a"].reshape(-1)[4:]},
    ]
    parts[1]["weights/b"] = VALUES["b"]
    for index, part in enumerate(parts):
        save_file(part | {name.replace("weights", "momentum"): 0 * part[name] for name in part},
                  tmp_path / f"fragment-{index:05d}.safetensors")  # fmt: skip
    assert load_weights([tmp_path], LAYOUT).tolist() == load_weights([saved(tmp_path)], LAYOUT).tolist()


@pytest.mark.parametrize(
    ("damage", "text"),
    [
        (
            lambda folder: (folder / NAME).write_bytes((folder / NAME).read_bytes()[:-1] + b"\1"),
            "differs from its hash",
        ),
        (lambda folder: (folder / NAME).unlink(), "No such file"),
        (lambda folder: (folder / MANIFEST).write_bytes((folder / MANIFEST).read_bytes()[:-9]), "manifest is damaged"),
        (
            lambda folder: (folder / MANIFEST).write_bytes(
                (folder / MANIFEST).read_bytes().replace(b'"round":4', b'"round":5')
            ),
            "signature does not match",
        ),
    ],
)
def test_damaged_checkpoint_directory_is_refused(tmp_path, damage, text):
    """Otherwise the damaged weights would be named by their own hash, and trained."""
    save_file({f"weights/{name}": values for name, values in VALUES.items()}, tmp_path / NAME)
    hasher = Hasher()
    hasher.update((tmp_path / NAME).read_bytes())
    zero = "0" * 64
    body = CheckpointContents(
        serial=1,
        run_id=zero,
        round=4,
        digest=zero,
        members=(),
        written=0.0,
        previous="",
        files=(hasher.entry(NAME),),
        values={},
    )
    (tmp_path / MANIFEST).write_bytes(seal(body, Identity.generate(bytes(32))))
    assert load_weights([tmp_path], LAYOUT).tolist() == [0, 1, 2, 3, 4, 5, 9, 8, 7, 6]
    damage(tmp_path)
    with pytest.raises(WeightsError, match=text):
        load_weights([tmp_path], LAYOUT)


@pytest.mark.parametrize(
    ("changes", "text"),
    [
        ({"b": None}, r"no such tensor, where b \[4\]"),
        ({"a": np.zeros((3, 2), np.float32)}, r"float32 \[3, 2\], where a \[2, 3\]"),
        ({"b": np.zeros(4, np.int32)}, "int32"),
        ({"b": np.array([1, np.nan, 0, 0], np.float32)}, "b: not all values are finite"),
        ({"c": np.zeros(1, np.float32)}, "no parameter c"),
        ({"b": None, "b[0:2 of 4]": np.zeros(2, np.float32)}, "a part of b is missing"),
    ],
)
def test_file_of_another_model_is_refused(tmp_path, changes, text):
    with pytest.raises(WeightsError, match=text):
        load_weights([saved(tmp_path, **changes)], LAYOUT)


def test_missing_file_empty_folder_and_pickle_are_refused(tmp_path):
    with pytest.raises(WeightsError, match="cannot read /dev/zero: not a regular file"):
        load_weights([Path("/dev/zero")], LAYOUT)
    with pytest.raises(WeightsError, match="No such file"):
        load_weights([tmp_path / "none"], LAYOUT)
    with pytest.raises(WeightsError, match="no fragments"):
        load_weights([tmp_path], LAYOUT)
    torch.save(VALUES["a"], tmp_path / "p")
    with pytest.raises(WeightsError, match="pickle"):
        load_weights([tmp_path / "p"], LAYOUT)


def test_weights_must_have_the_hash_of_the_manifest(tmp_path):
    theta = load_weights([saved(tmp_path)], LAYOUT)
    check_weights(theta, digest_of(theta), tmp_path)
    with pytest.raises(MissingHashError) as missing:
        check_weights(theta, "", tmp_path)
    assert f'weights = "{digest_of(theta)}"' in missing.value.hint
    with pytest.raises(WeightsError, match="other weights"):
        check_weights(theta + 1, digest_of(theta), tmp_path)
