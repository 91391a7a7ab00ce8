"""Accuracy of a swarm with six liars of sixteen, with and without scores of members: a table of docs/security.md.

    python -m benchmarks.training.gauntlet                   # liars from the first round, and from the tenth one
    python -m benchmarks.training.gauntlet --attacks sign*1 labels

The peers, data and attacks are those of robustness.py, with the default rule `clip`. Each honest peer keeps the product's
score book and scores one other peer in a round; the product's electorate leaves out distrusted peers. The liars distrust all
honest peers.
"""

from __future__ import annotations

import argparse
from collections.abc import Sequence

import numpy as np
from thinwire.collectives.consensus.electorate import Electorate
from thinwire.collectives.consensus.members.terms import RoundTerms
from thinwire.compression.core.types import Floats
from thinwire.node.outer.verification.score_book import STEP, ScoreBook, equal_step
from thinwire.swarm.aggregation_spec import AggregationSpec
from thinwire.swarm.messages.registry import Ready

from benchmarks.training.robustness import ATTACKS, OUTER_RATE, Task, dense, run

LIARS = 6


class Gauntlet:
    """Score books of the honest peers, and who counts by their opinions and those of the liars.

    out: for each peer, the rounds in which its contribution did not count.
    """

    def __init__(self, task: Task, liars: int, seed: int = 0) -> None:
        self._task, self._rng = task, np.random.default_rng(seed)
        self._ids = [bytes([at]) * 32 for at in range(len(task.x))]
        self._honest, self._lying = self._ids[: len(self._ids) - liars], self._ids[len(self._ids) - liars :]
        self._books = {peer: ScoreBook(required=1) for peer in self._honest}
        self._electorate = Electorate(b"", RoundTerms(1, 0, tuple(self._ids), b"", b""), (), lambda *_: True)
        self.out: list[list[int]] = [[] for _ in self._ids]

    def counted(self, round: int) -> list[int]:
        """Return the peers whose contributions count in a round."""
        distrust = dict.fromkeys(self._lying, tuple(self._honest)) | {
            peer: tuple(filter(book.distrusts, self._ids)) for peer, book in self._books.items()
        }
        ready = {
            peer: Ready(1, 0, 1, b"", b"", 1, b"", True, 0.0, 0.0, distrusts=distrusts)
            for peer, distrusts in distrust.items()
        }
        out = self._electorate.uncounted(self._ids, ready)
        for at, peer in enumerate(self._ids):
            if peer in out:
                self.out[at].append(round)
        return [at for at, peer in enumerate(self._ids) if peer not in out]

    def score(self, theta: Floats, rows: Sequence[Floats]) -> None:
        """Let each honest peer score the contribution of another one to a round that began with `theta`."""
        steps = {peer: np.float32(STEP * OUTER_RATE) * row for peer, row in zip(self._ids, rows, strict=True)}
        for peer, book in self._books.items():
            others = [other for other in self._ids if other != peer]
            chosen = book.choose(self._rng.bytes(32), others, ())
            assert chosen is not None
            state = self._rng.bit_generator.state
            ours = self._task.falls(theta, steps[peer], self._rng)
            self._rng.bit_generator.state = state  # the same batches
            book.judge_member(chosen, self._task.falls(theta, equal_step(steps[chosen], steps[peer]), self._rng), ours)


def played(task: Task, attack: str, liars: int = LIARS, *, honest: int = 0, rounds: int = 60) -> tuple[float, Gauntlet]:
    """Return the accuracy with scores, and the scores. honest: rounds before the liars begin."""
    scores = Gauntlet(task, liars)
    rule = dense(AggregationSpec("clip"))
    return run(task, rule, attack, liars, scores=scores, honest=honest, rounds=rounds), scores


def main() -> None:
    """Print the table."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--attacks", nargs="+", default=[*ATTACKS])
    options, task, rule = parser.parse_args(), Task(), dense(AggregationSpec("clip"))
    for honest in (0, 10):
        print(f"{LIARS} liars from round {honest + 1} on, accuracy in per cent\n")
        print("| attack | no scores | scores | liars out at | honest peers out, rounds |\n|---|---|---|---|---|")
        for attack in options.attacks:
            plain, (accuracy, scores) = (
                run(task, rule, attack, LIARS, honest=honest),
                played(task, attack, honest=honest),
            )
            found = ", ".join(str(out[0] + 1) if out else "–" for out in scores.out[-LIARS:])
            wrong = sum(map(len, scores.out[:-LIARS]))
            print(f"| {attack} | {plain:.1f} | {accuracy:.1f} | {found} | {wrong} |", flush=True)
        print()


if __name__ == "__main__":
    main()
