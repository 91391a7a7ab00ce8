"""Mutation run: change the code in small ways, and check that the unit tests notice.

    make mutants                                    # 240 mutants; exit code 1 below 95 % killed
    python tests/tools/mutants.py --count 40 --only error_feedback

Mutants come from cosmic-ray's operators (comparisons, numbers, negations, and/or, +/-), drawn at random with a fixed seed
from the modules of TARGETS. Each mutant runs the unit tests of its module in a copy of the working tree; a failure or a
time-out kills it. `equivalent_mutants.py` lists mutants that change nothing observable, with the reason; they are not run.
An entry that is not a mutant any more is an error. `planted_mutants.py` has mistakes of the agreement that are always run.
"""

from __future__ import annotations

import argparse
import os
import random
import shutil
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from queue import SimpleQueue

import cosmic_ray.ast
import cosmic_ray.plugins
from cosmic_ray.mutating import mutate_code
from equivalent_mutants import EQUIVALENT, NAMED
from planted_mutants import PLANTED

ROOT = Path(__file__).parents[2]
FOLDERS = ("swarm", "compression", "collectives", "node", "sims")
CONSENSUS = "tests/unit/collectives/consensus"
LIARS = f"{CONSENSUS}/liars"
ROUNDS = "tests/unit/collectives/rounds"
ANNOUNCEMENTS = f"{CONSENSUS}/test_announcements.py"
MEMBERS = f"{CONSENSUS}/members"
SESSION = tuple(f"tests/unit/node/outer/test_{name}.py" for name in ("round_session", "round_starter", "frame_router"))
TARGETS = {
    "collectives/consensus/acceptor.py": (f"{CONSENSUS}/test_acceptor.py", CONSENSUS),
    "collectives/consensus/blame.py": (f"{CONSENSUS}/test_blame.py", ANNOUNCEMENTS, CONSENSUS),
    "collectives/consensus/certificates.py": (f"{CONSENSUS}/test_certificates.py", CONSENSUS),
    "collectives/consensus/chain.py": (f"{CONSENSUS}/test_chain.py",),
    "collectives/consensus/electorate.py": (f"{CONSENSUS}/test_electorate.py", MEMBERS, CONSENSUS),
    "collectives/consensus/justification.py": (f"{CONSENSUS}/test_proposal.py", CONSENSUS),
    "collectives/consensus/proposal.py": (f"{CONSENSUS}/test_proposal.py", CONSENSUS),
    "collectives/consensus/announcements.py": (ANNOUNCEMENTS, CONSENSUS),
    "collectives/consensus/decision.py": (f"{CONSENSUS}/test_decision.py", CONSENSUS),
    "collectives/consensus/paxos.py": (f"{CONSENSUS}/test_paxos.py", CONSENSUS),
    "collectives/consensus/proposal_check.py": (
        f"{MEMBERS}/test_absent_members.py",
        f"{LIARS}/test_liars.py",
        ANNOUNCEMENTS,
        CONSENSUS,
    ),
    "collectives/consensus/proposer.py": (f"{CONSENSUS}/test_proposer.py", CONSENSUS),
    "collectives/consensus/farewells.py": (f"{CONSENSUS}/test_farewells.py", CONSENSUS),
    "collectives/consensus/turn.py": (f"{CONSENSUS}/test_paxos.py", f"{LIARS}/test_stopping_liars.py", CONSENSUS),
    "collectives/consensus/members/lives.py": (f"{MEMBERS}/test_lives.py", CONSENSUS),
    "collectives/consensus/members/quorum.py": (f"{MEMBERS}/test_quorum.py", CONSENSUS),
    "collectives/consensus/members/terms.py": (f"{MEMBERS}/test_lives.py", CONSENSUS),
    "collectives/rounds/data_planes/butterfly.py": (f"{ROUNDS}/test_round.py",),
    "collectives/rounds/data_planes/contributions.py": (f"{ROUNDS}/data_planes/test_contributions.py", ROUNDS),
    "collectives/rounds/data_planes/result_store.py": (
        f"{ROUNDS}/test_round.py",
        f"{ROUNDS}/data_planes/allgather/test_allgather.py",
    ),
    "collectives/rounds/data_planes/ring_schedule.py": (
        f"{ROUNDS}/data_planes/test_ring.py",
        f"{ROUNDS}/data_planes/test_ring_schedule.py",
    ),
    "collectives/topology/owner_pace.py": (
        "tests/unit/collectives/topology/test_owner_pace.py",
        f"{ROUNDS}/test_round.py",
    ),
    "collectives/topology/shards.py": ("tests/unit/collectives/topology/test_shards.py", ROUNDS),
    "node/membership/presence.py": ("tests/unit/node/membership/test_presence.py",),
    "node/outer/frame_router.py": SESSION,
    "node/outer/round_session.py": SESSION,
    "node/outer/round_starter.py": SESSION,
    "swarm/lineage.py": ("tests/unit/swarm/test_lineage.py",),
    "compression/sparse/error_feedback.py": ("tests/unit/compression/sparse",),
}
"""Module -> its unit tests, in the order in which they run: a failure ends the run."""

OPERATORS = (
    *("ReplaceComparisonOperator", "NumberReplacer", "AddNot", "ReplaceAndWithOr", "ReplaceOrWithAnd"),
    *("ReplaceTrueWithFalse", "ReplaceFalseWithTrue", "ReplaceBreakWithContinue", "ReplaceContinueWithBreak"),
    *("ReplaceBinaryOperator_Add_Sub", "ReplaceBinaryOperator_Sub_Add", "ReplaceUnaryOperator_Delete_Not"),
)
"""Beginnings of the names of cosmic-ray's operators. `Is` comparisons are left out: most compare with None."""

LEAST = 0.95
SEED = 16
COUNT = 240
LEAST_EACH = 10


@dataclass(frozen=True, slots=True)
class Mutant:
    """One small change of a module: `occurrence` counts the places where the operator applies.

    Without an operator it is a planted one, and `occurrence` is its place in PLANTED.
    """

    module: str
    operator: str
    occurrence: int
    line: int


def mutants(modules: Sequence[str]) -> Iterator[Mutant]:
    """Yield all mutants of these modules, except those of decorators (frozen, slots)."""
    names = sorted(cosmic_ray.plugins.operator_names())
    names = [name for name in names if name.split("/")[1].startswith(OPERATORS) and "_Is" not in name]
    for module in modules:
        text = (ROOT / module).read_text().split("\n")
        tree = cosmic_ray.ast.get_ast("\n".join(text))
        nodes = list(cosmic_ray.ast.ast_nodes(tree))
        for name in names:
            operator = cosmic_ray.plugins.get_operator(name)()
            places = [place for node in nodes for place in operator.mutation_positions(node)]
            made = (Mutant(module, name, at, place[0][0]) for at, place in enumerate(places))
            yield from (one for one in made if not text[one.line - 1].lstrip().startswith("@"))


def planted(module: str) -> list[Mutant]:
    """Return the mutants of a module that are always run."""
    text = (ROOT / module).read_text()
    found = ((at, old) for at, (name, _, old, _) in enumerate(PLANTED) if name == module)
    return [Mutant(module, "", at, text[: text.find(old)].count("\n") + 1) for at, old in found]


def outdated(module: str) -> list[str]:
    """Return the entries of the lists for a module that are no mutants of it."""
    made = [_lines(one) for one in mutants([module])]
    olds, news = {old for old, _ in made}, {new for _, new in made}
    listed = [new for name, new in EQUIVALENT if name == module]
    return [*(new for new in listed if new not in news), *(old for old in NAMED.get(module, ()) if old not in olds)]


def changed(mutant: Mutant) -> str:
    """Return the module's text with the mutation."""
    if not mutant.operator:
        _, _, old, new = PLANTED[mutant.occurrence]
        return (ROOT / mutant.module).read_text().replace(old, new)
    operator = cosmic_ray.plugins.get_operator(mutant.operator)()
    text = mutate_code((ROOT / mutant.module).read_text(), operator, mutant.occurrence)
    assert text is not None, mutant
    return str(text)


def copy_of(tree: Path) -> Path:
    """Copy the working tree; return the folder with links under which it is imported."""
    names = subprocess.run(["git", "ls-files"], cwd=ROOT, capture_output=True, check=True, text=True).stdout.split("\n")
    for name in filter(None, names):
        if (ROOT / name).is_file():
            (tree / name).parent.mkdir(parents=True, exist_ok=True)
            shutil.copy(ROOT / name, tree / name)
    links = tree / "build" / "links" / "thinwire"
    links.mkdir(parents=True)
    for file in ("__init__.py", "py.typed"):
        (links / file).symlink_to(tree / "node" / "public" / file)
    for folder in FOLDERS:
        (links / folder).symlink_to(tree / folder)
    return links.parent


def put(tree: Path, module: str, text: str) -> None:
    """Write a module into a copy, without its bytecode: that is recognized by size and second only."""
    path = tree / module
    path.write_text(text)
    for stored in (path.parent / "__pycache__").glob(f"{path.stem}.*.pyc"):
        stored.unlink()


def survives(tree: Path, tests: Sequence[str], limit: float) -> bool:
    """Run unit tests in a copy; return True if they pass within `limit` seconds."""
    options = ("-x", "-q", "-p", "no:cacheprovider", "-p", "no:xdist", "-m", "not soak")
    command = [sys.executable, "-m", "pytest", *options, *tests]
    environment = {**os.environ, "PYTHONPATH": str(tree / "build" / "links"), "PYTHONDONTWRITEBYTECODE": ""}
    try:
        run = subprocess.run(command, cwd=tree, env=environment, capture_output=True, timeout=limit)
    except subprocess.TimeoutExpired:
        return False
    return run.returncode == 0


def sample(count: int, seed: int) -> dict[str, list[Mutant]]:
    """Return all planted mutants and about `count` others, at least LEAST_EACH of a module, in proportion to what it has.

    The sample of a module depends on nothing else, so that a run of one module repeats a part of the whole run.
    """
    every = {module: list(mutants([module])) for module in TARGETS}
    total, chosen = sum(map(len, every.values())), {}
    for module, found in every.items():
        share = min(len(found), max(LEAST_EACH, round(count * len(found) / total)))
        drawn = sorted(random.Random(f"{seed} {module}").sample(found, share), key=lambda one: one.line)
        chosen[module] = [*planted(module), *drawn]
    return chosen


def main(words: Sequence[str]) -> int:
    """Run a sample of mutants and print the survivors. Exit code 1 when fewer than 95 % are killed, or a list is outdated."""
    parser = argparse.ArgumentParser(prog="python tests/tools/mutants.py")
    parser.add_argument("--count", type=int, default=COUNT, help="mutants of all modules together")
    parser.add_argument("--seed", type=int, default=SEED)
    parser.add_argument("--only", default="", help="modules with this text in their path; their sample stays the same")
    parser.add_argument("--workers", type=int, default=2)
    given = parser.parse_args(words)
    chosen = {module: found for module, found in sample(given.count, given.seed).items() if given.only in module}
    listed = sorted(module for module in {*(name for name, _ in EQUIVALENT), *NAMED} if given.only in module)
    if wrong := [f"{module}: {line}" for module in listed for line in outdated(module)]:
        print("\n".join(["no such mutants:", *wrong]))
        return 1
    with tempfile.TemporaryDirectory() as folder:
        trees: SimpleQueue[Path] = SimpleQueue()
        for index in range(given.workers):
            tree = Path(folder) / str(index)
            copy_of(tree)
            trees.put(tree)
        took = {}
        for tests in {path for module in chosen for path in TARGETS[module]}:
            began, tree = time.monotonic(), trees.get()
            if not survives(tree, (tests,), 600.0):
                print(f"{tests} fail without a mutation")
                return 1
            took[tests] = time.monotonic() - began
            trees.put(tree)

        def lives(mutant: Mutant) -> bool:
            tree, tests = trees.get(), TARGETS[mutant.module]
            try:
                put(tree, mutant.module, changed(mutant))
                return survives(tree, tests, 10.0 + 4.0 * sum(took[path] for path in tests))
            finally:
                put(tree, mutant.module, (ROOT / mutant.module).read_text())
                trees.put(tree)

        all_counted = all_survived = 0
        with ThreadPoolExecutor(given.workers) as pool:
            for module, found in chosen.items():
                counted = [mutant for mutant in found if not _equivalent(mutant)]
                lived = [mutant for mutant, alive in zip(counted, pool.map(lives, counted), strict=True) if alive]
                for mutant in lived:
                    old, new = _lines(mutant)
                    print(f"survived: {module}:{mutant.line}: {old}  ->  {new}")
                left_out = f", {len(found) - len(counted)} equivalent" if len(counted) < len(found) else ""
                print(f"{module}: {len(counted) - len(lived)} of {len(counted)} killed{left_out}", flush=True)
                all_counted, all_survived = all_counted + len(counted), all_survived + len(lived)
    score = 1.0 - all_survived / max(1, all_counted)
    print(f"{all_counted} mutants, {all_survived} survived, {100 * score:.1f} % killed (at least {100 * LEAST:.0f} %)")
    return int(score < LEAST)


def _lines(mutant: Mutant) -> tuple[str, str]:
    """Return the line before and after the mutation; for a planted one its two texts."""
    if not mutant.operator:
        _, wrong, text, _ = PLANTED[mutant.occurrence]
        return text, wrong
    old = (ROOT / mutant.module).read_text().split("\n")[mutant.line - 1].strip()
    return old, changed(mutant).split("\n")[mutant.line - 1].strip()


def _equivalent(mutant: Mutant) -> bool:
    """Return True if no test can notice the mutant: it is listed, with the reason."""
    old, new = _lines(mutant)
    return old in NAMED.get(mutant.module, ()) or (mutant.module, new) in EQUIVALENT


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
