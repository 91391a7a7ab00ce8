import pytest
from thinwire.node.daemon import daemon
from thinwire.node.runtime.directories import RunDirectory
from thinwire.swarm.identity.errors import HintedError
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
    daemon.print_join_line(INVITE, parse(f"[model]\n{model}\n", "run.toml"))
    assert capsys.readouterr().out == f"thinwire join {INVITE}{option}\n"


@pytest.mark.parametrize("content", ["", "votes-00000", "checkpoints", "run.toml"])
def test_failed_start_leaves_no_run_unless_that_has_begun_or_was_there(tmp_path, content):
    run = RunDirectory(tmp_path / "run")
    if content == "run.toml":
        run.path.mkdir()
    with pytest.raises(HintedError), daemon.removed_if_never_begun(run):
        run.path.mkdir(exist_ok=True)
        (run.path / "events.jsonl").touch()
        if content:
            (run.path / content).mkdir()
        raise HintedError("no such weights", "give others")
    assert run.path.exists() == bool(content)
