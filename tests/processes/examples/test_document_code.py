"""Commands and Python of the documents, run as they are written.

Commands that are not run here are listed with the place of their test.
"""

from __future__ import annotations

import os
import re
import shlex
import shutil
import socket
import subprocess
import sys

import pytest
import thinwire
import torch
from kit.daemons import Machine
from kit.real.documents import ROOT, blocks, shell_lines
from thinwire.node.cli import main

# --- commands

RUN = {
    "thinwire export model.safetensors": 0,
    "thinwire export w.safetensors": 0,
    "thinwire export folder --format transformers": 0,
    'thinwire generate --prompt "def " --tokens 100': 0,
    'thinwire generate RUN --prompt "def " --tokens 100 --temperature 0.7 --seed 1': 0,
    "thinwire evaluate --data my/texts": 0,
    "thinwire evaluate model.safetensors --data my/texts": 0,
    "thinwire id": 0,
    "thinwire status": 0,
    "thinwire top": 0,
    "thinwire invite": 0,
    "thinwire recover": 6,  # a quorum is here
    "thinwire recover --now": 6,
    "thinwire replay first": 0,
    "thinwire plan run.toml --step 2 --json": 0,
    "thinwire plan run.toml --step 2 --link 6xdsl --link 2xfibre": 0,
    "thinwire plan --parameters 1.3B --layers 24 --speed 20 --tokens 8192 --link 8x50/10 --memory 24GiB": 0,
    "thinwire plan --parameters 350M --layers 24 --step 1.5 --peers 8 --link cable": 0,
    "thinwire plan --parameters 350M --layers 24 --step 1.5 --peers 8 --link fibre": 0,
    "thinwire plan run.toml --link 50/10 --rtt 60 --outcome first": 2,  # this run has one peer, so no round with others
    "thinwire sim list": 0,
    "thinwire sim new mine.toml": 0,
}
"""Exit code by command, in the order in which they are run beside a daemon of one peer."""

LIFE = "tests/processes/discovery/test_start_and_join.py::test_two_daemons_start_join_finish_and_resume"
DEMO = "tests/processes/test_local_demo.py::test_local_demo_with_kill_and_late_peer_prints_every_figure"
LIBRARIES = "tests/processes/examples/test_examples.py::test_example_of_a_library_trains_two_processes_as_one_swarm"
CHECKS = "itself a test run: .ci/run"
ROOT_NEEDED = "changes a machine, and needs root"
UNIT = "tests/processes/examples/test_examples.py::test_service_unit_runs_and_stops_a_daemon_as_systemd_would"
CONTAINER = "tests/processes/examples/test_examples.py::test_container_file_names_the_default_ports_and_existing_files"
FIGURES = "takes minutes to hours, and prints figures of a machine: `make bench`"
PLAYED = "tests/processes/test_scenarios.py::test_scenario_is_played_by_real_daemons"
SPACES = "tests/processes/test_scenarios.py::test_scenario_is_played_in_network_namespaces"
STAGES = "tests/processes/test_pipeline.py::test_three_processes_train_one_model_and_survive_a_kill"
DIRECTORY = "tests/processes/discovery/test_directories.py::test_run_is_found_in_a_dht_full_of_garbage"
ADMISSION = "tests/processes/test_refusals.py::test_closed_run_admits_the_invited_and_excludes_the_revoked"

ELSEWHERE = {
    r"thinwire (start (run|examples/demo)\.toml|join tw1-…)( --data my/texts)?( --home out/[ab] --port 0)?": LIFE,
    r"thinwire join \S+ --model hf:FOLDER": "tests/processes/methods/test_user_models.py"
    "::test_two_peers_train_a_model_of_transformers_and_export_it",
    r"thinwire join \S+ --(memory 2GiB|stage 1)": STAGES,
    r"thinwire doctor": "tests/unit/node/cli/test_main.py::test_doctor_prints_one_line_a_check_and_fails_with_one_of_them",
    r"thinwire init": "tests/unit/node/cli/test_new_run.py::test_init_asks_on_a_terminal_again_after_a_wrong_answer",
    r"thinwire logs -f": "tests/unit/node/cli/test_log_tail.py::test_tail_follows_added_lines_a_rotation_and_a_truncation",
    r"thinwire page": "tests/processes/commands/test_page.py::test_page_shows_the_api_and_survives_a_restart_of_the_daemon",
    r"thinwire (start run\.toml --data my/texts --public|runs|join first) --bootstrap ADDRESS( --data my/texts)?": DIRECTORY,
    r"thinwire (invite --for PEER-ID|revoke (PEER-)?ID)": ADMISSION,
    r"thinwire --install-completion": "tests/unit/node/cli/test_completion.py::test_completion_script_works_in_bash",
    r"thinwire plan --pipeline .*": "tests/unit/node/pipeline/planner/test_plan_summary.py"
    "::test_plan_pipeline_command_writes_json_and_picture",
    r"thinwire sim churn-storm.*": "tests/simulator/cli/test_play.py::test_sim_command_writes_report",
    r"thinwire sim mine\.toml --real": PLAYED,
    r"thinwire sim mine\.toml --namespaces": SPACES,
    r"make demo.*": DEMO,
    r"make (test|trial|lint|lowest)|\.ci/run": CHECKS,
    r"make bench.*|python -m benchmarks\.swarms\.simulation.*": FIGURES,
    r"pip install \.": "`make .venv/ready`, which every target does first, installs the package",
    r"sudo .*|echo RUN=.*": UNIT,
    r"docker .*": CONTAINER,
    r"python examples/own_loop\.py": "tests/processes/examples/test_examples.py"
    "::test_own_loop_example_two_processes_learn_digits",
    r"python examples/average\.py": "tests/processes/examples/test_examples.py"
    "::test_average_example_two_processes_finish_when_third_is_killed",
    r"python examples/libraries/\w+\.py": LIBRARIES,
    r"torchrun .* examples/several_ranks\.py": "tests/processes/examples/test_several_ranks.py"
    "::test_example_of_several_ranks_and_another_peer_end_with_one_model",
    r"python loop\.py (run\.toml out/a|tw1-… out/b)": "tests/processes/examples/test_document_code.py"
    "::test_loop_of_the_own_loop_page_trains_two_processes",
}
"""Test by pattern of a command that starts a daemon, waits for a person, or changes the machine.

A text without `::` is the reason why no test runs the command.
"""


def test_every_command_of_the_documents_is_run_by_a_test_or_has_a_reason():
    for line in shell_lines():
        found = [test for pattern, test in ELSEWHERE.items() if re.fullmatch(pattern, line)]
        assert (line in RUN) + len(found) == 1, line
    for pattern, test in ELSEWHERE.items():
        file, _, name = test.partition("::")
        assert not name or re.search(rf"^def {name}\(", (ROOT / file).read_text(), re.MULTILINE), pattern
        assert any(re.fullmatch(pattern, line) for line in shell_lines()), f"no document has {pattern}"
    assert RUN.keys() <= set(shell_lines())


@pytest.fixture(scope="module")
def beside(tmp_path_factory):
    """A directory with the files that the documents name, and the home of a daemon that trains the run "first" there."""
    here = Machine(tmp_path_factory.mktemp("documents"), steps=20)
    here.manifest.write_text(here.manifest.read_text().replace('"e2e"', '"first"'))
    (here.path / "my" / "texts").mkdir(parents=True)
    shutil.copy(here.text, here.path / "my" / "texts")
    daemon = here.found("a")
    daemon.wait("round", least=2)
    assert daemon.newest_invite(), "the status has what the commands print"
    yield here.path, daemon.home
    here.end()


@pytest.mark.trial
def test_commands_of_the_documents_beside_a_daemon(beside, monkeypatch, capfd):
    path, home = beside
    monkeypatch.chdir(path)
    monkeypatch.setenv("THINWIRE_HOME", str(home))
    for line, expected in RUN.items():
        words = ["first" if word == "RUN" else word for word in shlex.split(line)[1:]]
        code = main.main(words)
        said = capfd.readouterr()
        assert code == expected, f"{line}: {code}\n{said.err}"
        assert said.out or expected, line
        assert "Traceback" not in said.err, line


# --- Python

RANKS = "under torchrun, as in examples/several_ranks.py"
TITLES = {"", "loop.py", "mymodel.py", RANKS}
"""Titles of blocks. A test below runs each; tests/test_documents.py runs those without a title of the own-loop page."""


def python_of(document: str, title: str = "") -> list[str]:
    return [block.code for block in blocks("python") if (block.document, block.title) == (document, title)]


def test_every_python_block_of_the_documents_is_run_by_a_test():
    pages = {"README.md", "docs/guides/own-loop.md", "docs/guides/models-and-data.md", "docs/guides/pipelines.md"}
    assert [block for block in blocks("python") if block.document not in pages or block.title not in TITLES] == []


OWN_RUN = '[run]\nname = "page"\nrounds = {rounds}\n[model]\nkind = "custom"\n[outer]\nsync_every = 2\n'


@pytest.fixture
def swarm_file(tmp_path, monkeypatch):
    """Path of a manifest for user models, and settings of a separate peer."""
    monkeypatch.setenv("THINWIRE_HOME", str(tmp_path / "home"))
    monkeypatch.setenv("THINWIRE_HOST", "127.0.0.1")
    path = tmp_path / "run.toml"
    path.write_text(OWN_RUN.format(rounds=3))
    return path


def one_step(model, batch, optimizer):
    optimizer.zero_grad()
    model(batch).square().mean().backward()
    optimizer.step()


@pytest.mark.trial
def test_python_of_the_readme_runs(swarm_file, monkeypatch):
    monkeypatch.chdir(swarm_file.parent)
    (code,) = python_of("README.md")
    (own,) = [block.code for block in blocks("toml") if block.document == "README.md" and '"mine"' in block.code]
    swarm_file.write_text(own.replace("sync_every = 20", "sync_every = 2").replace("[model]", "rounds = 3\n\n[model]"))
    names = {
        "model": torch.nn.Linear(4, 1),
        "torch": torch,
        "batches": torch.ones(6, 2, 4),
        "train": one_step,
    }
    exec(compile(code, "README.md", "exec"), names)  # noqa: S102
    assert names["swarm"].round == 3


@pytest.mark.trial
def test_loop_of_the_own_loop_page_trains_two_processes(tmp_path):
    page = "docs/guides/own-loop.md"
    (code,) = python_of(page, "loop.py")
    (toml,) = [block.code for block in blocks("toml") if (block.document, block.title) == (page, "run.toml")]
    (tmp_path / "loop.py").write_text(code)
    (tmp_path / "run.toml").write_text(toml)

    def process(source, home):
        words = [sys.executable, "loop.py", source, home]
        return subprocess.Popen(
            words, cwd=tmp_path, env={**os.environ, "THINWIRE_HOST": "127.0.0.1"}, stdout=subprocess.PIPE, text=True
        )

    with process("run.toml", "out/a") as first:
        invite = first.stdout.readline().strip()
        with process(invite, "out/b") as second:
            ends = [one.stdout.read().splitlines()[-1] for one in (first, second)]
    assert first.returncode == second.returncode == 0 and ends[0] == ends[1]
    assert re.fullmatch(r"10 2 [0-9a-f]{64}", ends[0])


@pytest.mark.trial
def test_python_for_ranks_of_the_own_loop_page_runs_with_one_rank(swarm_file, monkeypatch):
    import torch.distributed as dist

    (code,) = python_of("docs/guides/own-loop.md", RANKS)
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        place = {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(free.getsockname()[1]), "RANK": "0", "WORLD_SIZE": "1"}
    for name, value in place.items():
        monkeypatch.setenv(name, value)
    names = {"dist": dist, "thinwire": thinwire, "torch": torch, "invite_or_toml": swarm_file}
    names["model"] = torch.nn.Linear(4, 1)
    try:
        exec(compile(code, "ranks", "exec"), names)  # noqa: S102
    finally:
        dist.destroy_process_group()
    assert names["optimizer"].param_groups and names["swarm"].round == 0


@pytest.mark.parametrize("page", ["models-and-data", "pipelines"])
def test_module_of_a_page_is_a_language_model(page):
    (code,) = python_of(f"docs/guides/{page}.md", "mymodel.py")
    names = {}
    exec(compile(code, "mymodel.py", "exec"), names)  # noqa: S102
    assert names["make"](vocab=11, context=8)(torch.zeros(2, 8, dtype=torch.int64)).shape == (2, 8, 11)


def gpt2():
    from transformers import AutoConfig, AutoModelForCausalLM

    size = dict(n_embd=8, n_layer=1, n_head=1, n_positions=16, vocab_size=32, bos_token_id=0, eos_token_id=0)
    return AutoModelForCausalLM.from_config(AutoConfig.for_model("gpt2", **size))


@pytest.mark.soak
def test_python_of_the_models_page_runs(swarm_file, tmp_path):
    """Loads transformers, accelerate and lightning, which takes five seconds of CPU."""
    from accelerate import Accelerator
    from transformers import Trainer, TrainingArguments

    with_trainer, with_accelerate, with_lightning = python_of("docs/guides/models-and-data.md")
    tokens = torch.arange(16)
    names = {
        "thinwire": thinwire,
        "torch": torch,
        "invite_or_toml": swarm_file,
        "Trainer": Trainer,
        "model": gpt2(),
        "mine": [{"input_ids": tokens, "labels": tokens}] * 64,
        "arguments": TrainingArguments(
            output_dir=str(tmp_path / "out"), num_train_epochs=9, use_cpu=True, report_to="none", save_strategy="no"
        ),
    }
    exec(compile(with_trainer, "trainer", "exec"), names)  # noqa: S102
    assert names["swarm"].round == 3

    swarm_file.write_text(OWN_RUN.format(rounds=4))
    names = {"torch": torch, "accelerator": Accelerator(cpu=True), "model": torch.nn.Linear(4, 1)}
    loader = torch.utils.data.DataLoader(torch.ones(16, 4), batch_size=2)
    with thinwire.join(swarm_file, new=True) as names["swarm"]:
        names["loader"] = loader
        exec(compile(with_accelerate, "accelerate", "exec"), names)  # noqa: S102
        for batch in names["loader"]:
            one_step(names["model"], batch, names["optimizer"])
        assert names["swarm"].round == 4

    import lightning

    swarm_file.write_text(OWN_RUN.format(rounds=2))
    with thinwire.join(swarm_file, new=True) as swarm:
        names = {"torch": torch, "swarm": swarm}
        exec(compile(with_lightning, "lightning", "exec"), names)  # noqa: S102

        class Module(lightning.LightningModule):
            configure_optimizers = names["configure_optimizers"]

            def __init__(self):
                super().__init__()
                self.model = torch.nn.Linear(4, 1)

            def training_step(self, batch):
                return self.model(batch).square().mean()

        lightning.Trainer(
            accelerator="cpu", max_epochs=1, logger=False, enable_checkpointing=False, enable_progress_bar=False
        ).fit(Module(), loader)
        assert swarm.round == 2
