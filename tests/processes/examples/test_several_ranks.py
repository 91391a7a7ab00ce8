"""Several processes of torch.distributed as one peer, with gloo on the CPU."""

from __future__ import annotations

import re
import subprocess
import sys
import time
from pathlib import Path

import pytest
from kit.real.warm_process import WarmProcess

ROOT = Path(__file__).parents[3]
PROGRAM, EXAMPLE = ROOT / "tests" / "kit" / "programs" / "rank.py", ROOT / "examples" / "several_ranks.py"
MANIFEST = """
[run]
rounds = 4
[model]
kind = "custom"
[outer]
{outer}
[exchange]
codec = "fp32"
"""


@pytest.fixture
def run(tmp_path):
    """Runs two ranks in a mode; their exit codes and outputs."""

    def both(mode, outer="sync_every = 2"):
        (tmp_path / "run.toml").write_text(MANIFEST.format(outer=outer))
        given = [str(tmp_path / "store"), str(tmp_path / "run.toml"), str(tmp_path / "home")]
        files = [(tmp_path / f"stdout{rank}", tmp_path / f"stderr{rank}") for rank in range(2)]
        children = [WarmProcess([mode, str(rank), *given], *files[rank], program=str(PROGRAM)) for rank in range(2)]
        try:
            if mode == "missing":
                children[0].wait(timeout=60)
                children[1].kill()
            codes = [child.wait(timeout=120) for child in children]
            return [(out.read_text() + err.read_text(), code) for (out, err), code in zip(files, codes, strict=True)]
        finally:
            for child in children:
                child.kill()

    return both


@pytest.mark.parametrize(
    "how",
    [
        pytest.param([], id="DistributedDataParallel", marks=pytest.mark.soak),
        pytest.param(["--shard"], id="fully_shard", marks=pytest.mark.soak),
    ],
)
def test_example_of_several_ranks_and_another_peer_end_with_one_model(how):
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2", EXAMPLE, *how]
    done = subprocess.run(command, capture_output=True, text=True, timeout=240)
    assert done.returncode == 0, done.stderr
    assert sorted(re.findall(r"rank (\d): model", done.stdout)) == ["0", "1"], done.stdout
    assert len(set(re.findall(r"model (\w{16}), round 12", done.stdout))) == 1, done.stdout
    digests = re.findall(r"digest (\w{16})", done.stdout)
    assert len(digests) == 2 and len(set(digests)) == 1, done.stdout


@pytest.mark.trial
@pytest.mark.parametrize(
    "outer",
    [
        'method = "delayed-nesterov"\nsync_every = 2',
        *(
            pytest.param(outer, marks=pytest.mark.soak)
            for outer in ("sync_every = 2", 'method = "eager"\nsync_every = 2', 'method = "diloco"\nsync_every = 1')
        ),
    ],
)
def test_ranks_have_equal_models_after_every_step(run, outer):
    (first, code), (second, other) = run("train", outer)
    assert (code, other) == (0, 0), first + second
    steps = [re.findall(r"step (\d+) (\w+)", output) for output in (first, second)]
    assert steps[0] == steps[1] and len(steps[0]) >= 4
    states = [re.findall(r"state (\w+)", output) for output in (first, second)]
    assert states[0] == states[1] and len(states[0]) == 1, "buffers are equal, too"
    assert "digest " in first and "invite: only the first rank" in second
    numbers = [list(map(int, re.findall(r" at (\d+)", output))) for output in (first, second)]
    assert numbers[0] == numbers[1] == sorted(numbers[0]) and numbers[0][-1] >= 2, "the step of the swarm is the same"
    rounds = dict(re.findall(r"step \d+ \w+ \((\d+), (\d+), 1\)", first))
    assert rounds and set(rounds.values()) <= {"4", "8", "12"}, "a report counts the weight of its rank"


@pytest.mark.soak
def test_ranks_with_groups_of_their_own_are_separate_peers(run):
    (first, code), (second, other) = run("each")
    assert (code, other) == (0, 0), first + second
    assert re.findall(r"step 4 \w+", first) and re.findall(r"step 4 \w+", second)


@pytest.mark.trial
def test_join_without_group_among_several_processes_is_refused(run):
    for rank, (output, code) in enumerate(run("alone")):
        assert code == 2, output
        assert f"GroupError: this process is rank {rank} of 2 in torch.distributed" in output
        assert "hint: pass group=torch.distributed.group.WORLD" in output


@pytest.mark.trial
def test_rank_that_does_not_join_ends_the_others_in_bounded_time(run):
    began = time.monotonic()
    output, code = run("missing")[0]
    assert code == 2 and "not all 2 ranks of the group have called thinwire.join within 5 s" in output, output
    assert "hint: call thinwire.join with the same group on every rank" in output
    assert time.monotonic() - began < 60


@pytest.mark.soak
def test_error_of_the_first_rank_reaches_the_others(run):
    (first, code), (second, other) = run("refused")
    assert code != 0 and first.startswith("InviteError: "), first
    reason = first.splitlines()[0].removeprefix("InviteError: ")
    assert other == 2 and second.startswith(f"GroupError: the first rank of the group: {reason}"), second


@pytest.mark.trial
def test_statistics_of_ranks_are_averaged_and_ranks_that_do_not_go_together_end(run):
    (first, code), (second, other) = run("fail")
    assert (code, other) == (0, 0), first + second
    for output in (first, second):
        assert "statistics: 1.5 1.5 1\n" in output, output
        assert "models: GroupError: the ranks of the group have different models; give " in output, output
        assert "apart: GroupError: the ranks of the group have different parameters" in output, output
        assert "wrap the model in DistributedDataParallel" in output
    assert "frozen: ValueError: the model has no trainable parameters" in second, second
    assert "frozen: GroupError: rank 1 of the group: the model has no trainable parameters" in first, first
    assert "changed: ValueError: weight is float32 (5, 6) now" in second, second
    assert "changed: GroupError: rank 1 of the group: weight is float32 (5, 6) now" in first, first


@pytest.mark.trial
def test_death_of_a_rank_ends_the_others(run):
    began = time.monotonic()
    (first, code), (_, other) = run("killed")
    assert (other, code) == (-9, 2), first
    assert "GroupError: another rank of the group has ended" in first and "hint: see the output of" in first, first
    assert time.monotonic() - began < 60
