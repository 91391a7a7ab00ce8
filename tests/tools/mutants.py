"""Mutation run: change the code in small ways, and check that the unit tests notice.

    make mutants                                    # 240 mutants; exit code 1 below 95 % killed
    python tests/tools/mutants.py --count 40 --only error_feedback

Mutants come from cosmic-ray's operators (comparisons, numbers, negations, and/or, +/-), drawn at random with a fixed seed
from the modules of TARGETS. Each mutant runs the unit tests of its module in a copy of the working tree; a failure or a
time-out kills it. Mutants that change nothing observable are listed in EQUIVALENT with the reason, and are not run.
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

ROOT = Path(__file__).parents[2]
FOLDERS = ("swarm", "compression", "collectives", "node", "sims")
CONSENSUS = "tests/unit/collectives/consensus"
ROUNDS = "tests/unit/collectives/rounds"
ANNOUNCEMENTS = "tests/unit/collectives/test_announcements.py"
SESSION = tuple(f"tests/unit/node/outer/test_{name}.py" for name in ("round_session", "round_starter", "frame_router"))
TARGETS = {
    "collectives/consensus/acceptor.py": (f"{CONSENSUS}/test_acceptor.py", CONSENSUS),
    "collectives/consensus/blame.py": (f"{CONSENSUS}/test_blame.py", ANNOUNCEMENTS, CONSENSUS),
    "collectives/consensus/certificates.py": (f"{CONSENSUS}/test_certificates.py", CONSENSUS),
    "collectives/consensus/chain.py": (f"{CONSENSUS}/test_chain.py",),
    "collectives/consensus/electorate.py": (f"{CONSENSUS}/test_electorate.py", CONSENSUS),
    "collectives/consensus/justification.py": (f"{CONSENSUS}/test_proposal.py", CONSENSUS),
    "collectives/consensus/proposal.py": (f"{CONSENSUS}/test_proposal.py", CONSENSUS),
    "collectives/consensus/announcements.py": (ANNOUNCEMENTS, CONSENSUS),
    "collectives/consensus/proposal_check.py": (f"{CONSENSUS}/test_liars.py", ANNOUNCEMENTS, CONSENSUS),
    "collectives/consensus/proposer.py": (f"{CONSENSUS}/test_proposer.py", CONSENSUS),
    "collectives/consensus/members/quorum.py": (f"{CONSENSUS}/test_quorum.py", CONSENSUS),
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

CAPPED = "the power is capped far below"
KINDS = "the other kinds of events that get there are on one side in the order of letters"
SHARED = "no chain is shorter than the part that it shares with another one"
EQUIVALENT: dict[tuple[str, str], str] = {
    (
        "collectives/consensus/acceptor.py",
        "return min(REST, 0.125 * 2.0 ** min(ballots - BALLOTS, 15)) if ballots > BALLOTS else 0.0",
    ): CAPPED,
    (
        "collectives/consensus/acceptor.py",
        "return min(REST, 0.125 * 2.0 ** min(ballots - BALLOTS, 17)) if ballots > BALLOTS else 0.0",
    ): CAPPED,
    (
        "collectives/consensus/acceptor.py",
        "if self.abstains or proposal.ballot < self.promised or (voted is not None and voted.ballot >= proposal.ballot):",
    ): "no vote is above the promise",
    (
        "collectives/consensus/acceptor.py",
        "count, until = self._heeded.get(ballot.leader, (0, 1.0))",
    ): "the first ballots do not wait",
    (
        "collectives/consensus/acceptor.py",
        "count, until = self._heeded.get(ballot.leader, (0, -1.0))",
    ): "the first ballots do not wait",
    (
        "collectives/consensus/acceptor.py",
        "return self._heeded.get(peer, (0, 1.0))[0] <= BALLOTS",
    ): "only the number is used",
    (
        "collectives/consensus/acceptor.py",
        "return self._heeded.get(peer, (0, -1.0))[0] <= BALLOTS",
    ): "only the number is used",
    (
        "collectives/consensus/blame.py",
        "if proposal.adopted is None and (accuser == proposal.ballot.leader or len(accusers) != 1 or not others):",
    ): "there is at least one",
    (
        "collectives/consensus/blame.py",
        "self.idle |= {peer for peer, accusers in self._unserved.items() if len(accusers) >= most}",
    ): "most is the largest",
    (
        "collectives/consensus/chain.py",
        "if not gaps and fork.round > (0 if here is None else here.round):",
    ): "earlier rounds were refused above",
    (
        "collectives/consensus/chain.py",
        "if len(set(members)) < len(members) or len(certificate.lives) != LIFE * len(members):",
    ): "a set has no more",
    (
        "collectives/consensus/electorate.py",
        "elif against[peer] != 1 and 2 * against[peer] > others:",
    ): "none is no majority",
    (
        "collectives/consensus/members/quorum.py",
        "return max( 1, count - 1) // 3 if fraction >= TWO_THIRDS else 0",
    ): "a third of one is none",
    (
        "collectives/consensus/members/quorum.py",
        "if fraction <= 0.5 and base and 2 * have == len(base):",
    ): "no run has a fraction below a half",
    (
        "collectives/consensus/proposer.py",
        "peer for peer, ready in self._ready.items() if ready.weight != 0 and peer not in self.blame_book.rejected",
    ): "no weight is negative",
    (
        "collectives/consensus/acceptor.py",
        "ballot, first = message.ballot, message.ballot.term <= 1",
    ): "terms below 1 are refused",
    (
        "collectives/consensus/acceptor.py",
        "if ballot.term > min(self.promised.term + LEAP, LAST_TERM) or (count > BALLOTS and now < until):",
    ): "the ballots before have no pause",
    (
        "collectives/consensus/acceptor.py",
        "if ballot.term > min(self.promised.term + LEAP, LAST_TERM) or (count != BALLOTS and now < until):",
    ): "the ballots before have no pause",
    (
        "collectives/consensus/acceptor.py",
        "abstains |= record.lineage == terms.lineage and record.round >= terms.round",
    ): "a record of this lineage and round is not seen here",
    (
        "collectives/consensus/acceptor.py",
        "if not (first or ballot <= self.promised or self._heeds(ballot, now)):",
    ): "lower ballots were refused above",
    (
        "collectives/consensus/acceptor.py",
        "return self._heeded.get(peer, ( -1, 0.0))[0] <= BALLOTS",
    ): "0 and -1 are both below BALLOTS",
    (
        "collectives/consensus/acceptor.py",
        "return self._heeded.get(peer, ( 1, 0.0))[0] <= BALLOTS",
    ): "0 and 1 are both below BALLOTS",
    ("collectives/consensus/blame.py", "return self.idle > before"): "the set only grows",
    (
        "collectives/consensus/chain.py",
        "while at != len(entry.certificates) and not _follows(certificate, here, agreed):",
    ): "it counts up in steps of one",
    (
        "collectives/consensus/proposal.py",
        "doubted = [peer for peer in willing if peer in distrusted][: max( -1, len(willing) - terms.min_peers)]",
    ): "too few peers are willing anyway",
    (
        "collectives/consensus/proposal.py",
        "and all(len(one.announced) >= 32 or not (one.announced or terms.lineage) for one in proposal.contributors)",
    ): "the wire form bounds it",
    (
        "collectives/consensus/proposal.py",
        "and (not terms.lineage or len(lives_of(proposal.members, proposal.lives)) >= len(proposal.members))",
    ): "there are no more lives than members",
    (
        "collectives/consensus/proposal.py",
        "return terms.weights.get(peer, -1) if ready.weight else 0",
    ): "only weights above 0 contribute",
    (
        "collectives/consensus/proposal.py",
        "return terms.weights.get(peer, 0) if ready.weight else -1",
    ): "only weights above 0 contribute",
    ("collectives/consensus/proposal.py", "if len(able) >= MAX_GROUP:"): "a smaller group is cut and sorted to itself",
    (
        "collectives/consensus/proposal.py",
        "if len(willing) >= terms.room:",
    ): "a smaller group is cut and sorted to itself",
    (
        "collectives/consensus/proposal.py",
        "if len(willing) != terms.room:",
    ): "a smaller group is cut and sorted to itself",
    (
        "collectives/consensus/proposal.py",
        "willing = [peer for peer in alive if _weight(ready[peer], peer, terms) != 0 and peer not in rejected]",
    ): "no weight is negative",
    ("collectives/consensus/proposal.py", "if len(able) != MAX_GROUP:"): "a smaller group is cut and sorted to itself",
    (
        "collectives/consensus/proposer.py",
        "trial = {peer for peer, why in uncounted.items() if why >= ON_TRIAL}",
    ): "there are two reasons",
    (
        "collectives/consensus/proposer.py",
        "distrusted=[peer for peer, why in uncounted.items() if why <= DISTRUSTED],",
    ): "there are two reasons",
    (
        "collectives/consensus/proposer.py",
        "distrusted=[peer for peer, why in uncounted.items() if why >= DISTRUSTED],",
    ): "peers on trial are left out above",
    (
        "collectives/consensus/proposer.py",
        "found = proposal if proposal is None or ballot.term <= 1 else justify(proposal, promises, left.values())",
    ): "no ballot has a term below 1",
    (
        "collectives/consensus/proposer.py",
        "assert ballot is not None or promises is not None",
    ): "it is for the type checker",
    (
        "collectives/consensus/proposer.py",
        "if len(same) != 1 and choice.digest not in self._tried:",
    ): "the choice is one of them",
    (
        "collectives/consensus/proposer.py",
        "if ballot.term != 1:  # Others may know other endorsements, and defer a proposal with a newcomer on trial.",
    ): "no ballot has a term below 1",
    ("collectives/consensus/proposer.py", "self._since = 1.0"): "prepare() sets it before its first use",
    ("collectives/consensus/proposer.py", "self._since = -1.0"): "prepare() sets it before its first use",
    ("collectives/consensus/proposer.py", "self._rested = -1.0"): "no clock begins below 0",
    (
        "collectives/consensus/proposer.py",
        "return min(GROWTH, 2.0 ** max(0, min(self._ballots - BALLOTS, 15)))",
    ): CAPPED,
    (
        "collectives/consensus/proposer.py",
        "return min(GROWTH, 2.0 ** max(0, min(self._ballots - BALLOTS, 17)))",
    ): CAPPED,
    ("collectives/consensus/proposer.py", "if ballot.term != 1:"): "no ballot has a term below 1",
    (
        "collectives/rounds/data_planes/butterfly.py",
        "return message.index != len(self.grid) and size <= self._reducer.nbytes(self.grid.size(message.index))",
    ): "a chunk beyond the grid has a negative size",
    ("collectives/topology/owner_pace.py", "self._began = 1.0"): "open() sets it before its first use",
    ("collectives/topology/owner_pace.py", "self._began = -1.0"): "open() sets it before its first use",
    (
        "collectives/rounds/data_planes/butterfly.py",
        "if message.attempt < ready.attempt or message.index >= len(self.grid) or self.agreement.commit is not None:",
    ): "chunks above the announced attempt wait elsewhere",
    (
        "collectives/topology/shards.py",
        "while largest != 1 << 19 and codec.nbytes(2 * largest) <= CHUNK_BYTES + CHUNK_BYTES // 16:",
    ): "largest is doubled from a power of two",
    (
        "collectives/rounds/data_planes/ring_schedule.py",
        "for added, before in zip(path.adds, path.before, strict=False):",
    ): "both have one entry for each member",
    (
        "collectives/rounds/data_planes/contributions.py",
        "return whole if len(whole) >= len(found) else None",
    ): "a part is never longer than all",
    (
        "collectives/rounds/data_planes/contributions.py",
        "for key, norm, limit in zip(known, norms, limits(norms, [weights[key] for key in known]), strict=False):",
    ): "all three have one entry for each key",
    ("node/membership/presence.py", 'self._lose(event.peer, gone=event.kind >= "left")'): KINDS,
    ("node/membership/presence.py", 'if event.kind <= "joined":'): KINDS,
    (
        "node/membership/presence.py",
        'elif event.kind <= "banned" and event.peer == self.transport.peer_id:',
    ): KINDS,
    ("node/membership/presence.py", 'if event.kind <= "banned":'): KINDS,
    ("node/membership/presence.py", 'if event.kind <= "duplicate":'): KINDS,
    ("node/outer/frame_router.py", "elif number <= current:"): "the round in progress was handled above",
    ("node/outer/frame_router.py", "if number != current.round + 1:"): "earlier rounds go elsewhere",
    (
        "node/outer/round_starter.py",
        'by_bandwidth = exchange.chunk_assignment <= "bandwidth"',
    ): "the only other value is greater",
    (
        "node/outer/round_starter.py",
        'max_contributors=max_contributors(replica.grid) if exchange.collective <= "all-gather" else MAX_GROUP,',
    ): "all other values are greater",
    ("swarm/lineage.py", "if not chain or len(chain) <= len(over) == common:"): SHARED,
    ("swarm/lineage.py", "if not chain or len(chain) == len(over) <= common:"): SHARED,
    ("swarm/lineage.py", "if len(chain) <= common:  # `over` was founded in it"): SHARED,
    ("swarm/lineage.py", "if len(over) <= common:"): SHARED,
    (
        "swarm/lineage.py",
        "return _rank(chain[common]) >= _rank(over[common])",
    ): "the ranks of two lineages differ at least in their names",
    (
        "swarm/lineage.py",
        "return 0 != fork.round == newest_round(parent) and set(fork.members).isdisjoint(fork.before)",
    ): "no round is negative",
    (
        "swarm/lineage.py",
        "for (peer, life), signature in zip(founders_of(fork), fork.signatures, strict=False)",
    ): "their numbers were compared above",
}
"""Module and the line after the mutation -> reason why no test can notice."""

NAMED = {
    "collectives/consensus/proposal.py": (
        *("min_peers: int = 1", "max_weight: int = 2**53 - 1", "grace: float = 10.0", "limit: float = 0.0"),
        *("patience: float = 2.0",),
    ),
}
"""Module -> lines with defaults that only tests use: every run names another value."""

LEAST = 0.95
SEED = 16
COUNT = 240
LEAST_EACH = 10


@dataclass(frozen=True, slots=True)
class Mutant:
    """One small change of a module: `occurrence` counts the places where the operator applies."""

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


def changed(mutant: Mutant) -> str:
    """Return the module's text with the mutation."""
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
    command = [
        sys.executable,
        "-m",
        "pytest",
        "-x",
        "-q",
        "-p",
        "no:cacheprovider",
        "-p",
        "no:xdist",
        "-m",
        "not soak",
        *tests,
    ]
    environment = {**os.environ, "PYTHONPATH": str(tree / "build" / "links"), "PYTHONDONTWRITEBYTECODE": ""}
    try:
        run = subprocess.run(command, cwd=tree, env=environment, capture_output=True, timeout=limit)
    except subprocess.TimeoutExpired:
        return False
    return run.returncode == 0


def sample(count: int, seed: int) -> dict[str, list[Mutant]]:
    """Return about `count` mutants by module, in proportion to those that a module has, and at least LEAST_EACH of each.

    The sample of a module depends on nothing else, so that a run of one module repeats a part of the whole run.
    """
    every = {module: list(mutants([module])) for module in TARGETS}
    total, chosen = sum(map(len, every.values())), {}
    for module, found in every.items():
        share = min(len(found), max(LEAST_EACH, round(count * len(found) / total)))
        chosen[module] = sorted(random.Random(f"{seed} {module}").sample(found, share), key=lambda one: one.line)
    return chosen


def main(words: Sequence[str]) -> int:
    """Run a sample of mutants and print the survivors. Exit code 1 when fewer than 95 % are killed."""
    parser = argparse.ArgumentParser(prog="python tests/tools/mutants.py")
    parser.add_argument("--count", type=int, default=COUNT, help="mutants of all modules together")
    parser.add_argument("--seed", type=int, default=SEED)
    parser.add_argument("--only", default="", help="modules with this text in their path; their sample stays the same")
    parser.add_argument("--workers", type=int, default=2)
    given = parser.parse_args(words)
    chosen = {module: found for module, found in sample(given.count, given.seed).items() if given.only in module}
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
    """Return the line before and after the mutation."""
    old = (ROOT / mutant.module).read_text().split("\n")[mutant.line - 1].strip()
    return old, changed(mutant).split("\n")[mutant.line - 1].strip()


def _equivalent(mutant: Mutant) -> bool:
    """Return True if no test can notice the mutant: it is listed, with the reason."""
    old, new = _lines(mutant)
    return old in NAMED.get(mutant.module, ()) or (mutant.module, new) in EQUIVALENT


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
