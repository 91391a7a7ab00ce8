"""`thinwire init`: manifests that parse, and that `thinwire plan` accepts."""

import json

import blake3
import pytest
from kit.real.terminal import Terminal
from thinwire.collectives.costs.access_links import ACCESS, MBIT
from thinwire.node.cli import main
from thinwire.node.cli.new_run import ADMISSION, LINKS, SIZES
from thinwire.swarm.manifest.parser import parse


@pytest.fixture(autouse=True)
def no_settings_of_this_machine(monkeypatch, tmp_path):
    monkeypatch.delenv("THINWIRE_PORT", raising=False)
    monkeypatch.setenv("THINWIRE_HOME", str(tmp_path / "home"))


def outcome(capsys, *arguments):
    code = main.main([str(argument) for argument in arguments])
    said = capsys.readouterr()
    return code, said.out, said.err


def planned(capsys, said):
    """Run the command that `init` proposes, with a duration of a step; return its exit code and its errors."""
    words = said.split("thinwire plan ")[1].splitlines()[0].replace("SECONDS", "0.5").split()
    code, out, err = outcome(capsys, "plan", *words)
    assert out
    return code, err


@pytest.mark.parametrize("link", LINKS)
@pytest.mark.parametrize("admission", ADMISSION)
def test_init_writes_a_manifest_for_each_link_and_admission(tmp_path, capsys, link, admission):
    file = tmp_path / "new" / "run.toml"
    code, out, err = outcome(capsys, "init", file, "--yes", "--link", link, "--admission", admission)
    assert code == 0 and err == ""
    manifest = parse(file.read_bytes())
    assert (manifest.run.name, manifest.model.layers) == ("first", 4) and manifest.admission.mode == admission
    assert manifest.outer.method == LINKS[link].method
    assert f"# {link}, {ACCESS[link].up / MBIT:g} Mbit/s up: " in file.read_text()
    assert [path.name for path in file.parent.iterdir()] == ["run.toml"]
    assert manifest.admission.trial == (8 if admission == "open" else 0)
    assert ("node.toml" in out) == (LINKS[link].share < 1)
    if admission == "invited":
        assert planned(capsys, out) == (0, "")


@pytest.mark.parametrize("size", SIZES)
def test_init_writes_the_model_of_each_size_and_data_for_the_machine(tmp_path, capsys, size):
    file, text = tmp_path / "run.toml", tmp_path / "text.txt"
    text.write_text("x")
    code, out, _ = outcome(capsys, "init", file, "--yes", "--model", size, "--data", text)
    manifest = parse(file.read_bytes())
    assert code == 0 and manifest.model.width == SIZES[size].width and f'data = "{text}"' in out
    assert str(text) not in file.read_text()  # the place of a text concerns one machine only


def test_init_takes_a_folder_of_transformers_with_its_tokenizer(tmp_path, capsys):
    folder = tmp_path / "tiny"
    folder.mkdir()
    shape = {"n_embd": 32, "n_layer": 2, "n_head": 2, "vocab_size": 300, "n_positions": 64}
    content = json.dumps({"model_type": "gpt2", **shape}).encode()
    (folder / "config.json").write_bytes(content)
    (folder / "tokenizer.json").write_bytes(b"{}")
    code, out, err = outcome(capsys, "init", tmp_path / "run.toml", "--yes", "--model", "hf:tiny")
    manifest = parse((tmp_path / "run.toml").read_bytes())
    assert code == 0 and err == "" and manifest.model.config_hash == blake3.blake3(content).hexdigest()
    assert (manifest.model.kind, manifest.model.name, manifest.model.context) == ("hf", "tiny", 64)
    assert (manifest.data.tokenizer, manifest.data.tokenizer_hash) == ("tiny", blake3.blake3(b"{}").hexdigest())
    assert planned(capsys, out) == (0, "")
    (folder / "config.json").write_text("[]")
    code, _, err = outcome(capsys, "init", tmp_path / "b.toml", "--yes", "--model", "hf:tiny")
    assert code == 2 and "cannot be used" in err and not (tmp_path / "b.toml").exists()


@pytest.mark.parametrize(
    ("words", "told"),
    [
        (["--name", "a b"], "up to 64 letters"),
        (["--model", "huge"], "one of: tiny, small"),
        (["--model", "hf:none"], "has no config.json"),
        (["--link", "pigeon"], "one of: office"),
        (["--data", "no/such/file"], "a file or folder that exists"),
        (["--admission", "all"], "one of: closed"),
    ],
)
def test_init_refuses_wrong_flags_and_writes_no_file(tmp_path, capsys, words, told):
    code, out, err = outcome(capsys, "init", tmp_path / "run.toml", "--yes", *words)
    assert code == 2 and out == "" and err.startswith("error: ") and told in err.splitlines()[1]
    assert not (tmp_path / "run.toml").exists()


def test_init_replaces_a_file_with_force_only_and_needs_a_terminal_to_ask(tmp_path, capsys):
    file = tmp_path / "run.toml"
    file.write_text("mine")
    code, _, err = outcome(capsys, "init", file, "--yes")
    assert code == 2 and "exists" in err and "--force" in err and file.read_text() == "mine"
    assert outcome(capsys, "init", file, "--yes", "--force")[0] == 0 and parse(file.read_bytes()).run.name == "first"
    code, _, err = outcome(capsys, "init", tmp_path / "other.toml")
    assert code == 2 and "there is no terminal" in err and "--yes" in err


def test_init_asks_on_a_terminal_again_after_a_wrong_answer(tmp_path):
    terminal = Terminal("init", tmp_path / "run.toml", "--link", "dsl")
    try:
        end = 0
        for question, answer in (
            *(("Name of the run", "no name"), ("Name of the run", "mine"), ("Model: tiny, small", "small")),
            *(("Text to train on", ""), ("Admission of other", "closed")),
        ):
            end = terminal.wait_for(question, after=end)
            terminal.type(f"{answer}\n")
        assert terminal.exit() == 0 and "'no name' cannot be used: up to 64 letters" in terminal.text
    finally:
        terminal.end()
    manifest = parse((tmp_path / "run.toml").read_bytes())
    assert (manifest.run.name, manifest.model.layers, manifest.admission.mode) == ("mine", 8, "closed")
    assert manifest.outer.method == "sparseloco" and manifest.outer.sync_every == 100
