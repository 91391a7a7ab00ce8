"""Boundary codecs that a manifest may name."""

import pytest
from thinwire.node.methods.registry import check_codec
from thinwire.swarm.manifest.manifest import ManifestError
from thinwire.swarm.manifest.parser import parse


def staged(codec, width):
    return parse(
        f'[model]\nwidth = {width}\nheads = 2\n[outer]\nmethod = "streaming"\n[pipeline]\nstages = 2\ncodec = "{codec}"\n'
    )


@pytest.mark.parametrize(
    ("codec", "width"), [("rows(bits=8)", 32), ("fp32", 8), ("bf16", 8), ("tah", 64), ("subspace(k=8)", 8)]
)
def test_boundary_codec_that_suits_the_model_is_accepted(codec, width):
    check_codec(staged(codec, width), "run.toml")


@pytest.mark.parametrize(
    ("codec", "width"), [("rows(bits=8)", 8), ("rows(bits=9)", 32), ("tah(x=1)", 64), ("subspace(k=9)", 8)]
)
def test_boundary_codec_that_does_not_suit_is_refused(codec, width):
    with pytest.raises(ManifestError, match=r"run\.toml: pipeline\.codec"):
        check_codec(staged(codec, width), "run.toml")
