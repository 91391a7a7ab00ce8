import pytest
from thinwire.node.daemon import daemon
from thinwire.swarm.identity.invite import Invite, Seed
from thinwire.swarm.manifest.parser import parse

INVITE = Invite(b"\x05" * 32, (Seed("45.0.2.1:7400", b"\x06" * 32),)).code()


@pytest.mark.parametrize(
    ("model", "option"),
    [
        ("", ""),
        ('kind = "module"\nname = "mine:make"', " --model mine:make"),
        ('kind = "hf"\nname = "tiny"', " --model hf:tiny"),
    ],
)
def test_printed_command_names_the_model_that_a_joiner_must_agree_to(capsys, model, option):
    daemon._hand_out(INVITE, parse(f"[model]\n{model}\n", "run.toml"))
    assert capsys.readouterr().out == f"thinwire join {INVITE}{option}\n"
