"""Fuzzing targets for files of strangers: tensors and manifests of checkpoints, manifests of runs.

Each target refuses an input with CodecError, or accepts it.
"""

from __future__ import annotations

from collections.abc import Callable

import msgspec
import numpy as np
from kit.planted.cards import NOW, RUN, identity
from thinwire.compression.core.codec import CodecError
from thinwire.node.state import checkpoint_manifest, tensor_file
from thinwire.node.state.checkpoint_manifest import CheckpointContents, CheckpointManifestError, Hasher
from thinwire.node.state.tensor_file import TensorFileError
from thinwire.swarm.manifest import manifest, parser, validation
from thinwire.swarm.manifest.manifest import ManifestError
from thinwire.swarm.method_specs.registry import METHODS

MODULES = (tensor_file, checkpoint_manifest, parser, manifest, validation)
"""Modules whose functions are instrumented."""

Target = tuple[str, Callable[[bytes], None], list[bytes]]


def targets() -> list[Target]:
    """Every reader of files."""
    return [_tensors(), _checkpoint_manifest(), _run_manifest()]


def _tensors() -> Target:
    """The first two bytes are the length of the header, which a file has in eight."""

    def take(data: bytes) -> None:
        try:
            tensors = tensor_file.parse(data[:2] + bytes(6) + data[2:])
        except TensorFileError as error:
            raise CodecError(str(error)) from None
        assert all(np.isfinite(tensor).all() for tensor in tensors.values() if tensor.dtype.kind == "f")
        again = tensor_file.parse(b"".join(tensor_file.pieces(tensors, 64)))
        assert again.keys() == tensors.keys()
        assert all(np.array_equal(again[name], tensor) for name, tensor in tensors.items())

    made = [
        {"w": np.ones((2, 3), np.float32), "n": np.int64(7)},
        {"b": np.array([True]), "u": np.arange(3, dtype="u1")},
    ]
    files = [b"".join(tensor_file.pieces({k: np.asarray(v) for k, v in one.items()}, 64)) for one in made]
    return "tensor file", take, [file[:2] + file[8:] for file in files]


def _checkpoint_manifest() -> Target:
    """The input is the contents, which a peer signs, so that inputs come past the signature."""
    signer, file = identity(1), Hasher()
    file.update(b"content")

    def take(body: bytes) -> None:
        parts = b'{"body":', body, f',"signer":"{signer.public_key.hex()}","signature":"'.encode()
        sealed = b"".join((*parts, signer.sign("checkpoint", body).hex().encode(), b'"}'))
        try:
            files = checkpoint_manifest.files_of(sealed)
        except CheckpointManifestError as error:
            raise CodecError(str(error)) from None
        for one in files:
            try:
                one.check(b"content")
            except CheckpointManifestError:
                continue
        try:
            contents = checkpoint_manifest.unseal(sealed, signer)
        except CheckpointManifestError:
            return  # the files of every format are read
        assert contents.files == files
        assert checkpoint_manifest.unseal(checkpoint_manifest.seal(contents, signer), signer) == contents

    one = CheckpointContents(
        serial=1,
        run_id=RUN.hex(),
        round=3,
        digest="a" * 64,
        members=("b" * 64,),
        written=float(NOW),
        previous="",
        files=(file.entry("f"),),
        values={"loss": 0.5},
    )
    return "checkpoint manifest", take, [msgspec.json.encode(one), b'{"files":[],"format":2}']


def _run_manifest() -> Target:
    def take(data: bytes) -> None:
        try:
            found = parser.parse(data)
        except ManifestError as error:
            raise CodecError(f"{error}{error.hint}") from None
        assert len(found.run_id(bytes(32))) == 32 and parser.parse(data) == found

    made = [f'[outer]\nmethod = "{method}"\n'.encode() for method in METHODS]
    made.append(
        b'[run]\nname = "a"\nrounds = 3\n[exchange]\ncodec = "int4(block=32)"\nquorum = 0.7\n[model]\nlayers = 2\n'
    )
    return "run manifest", take, made
