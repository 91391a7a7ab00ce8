"""Invariants of committed rounds of pairs or groups (NoLoCo), for any codec.

The checker keeps its own state of every honest replica. From this and from the trained parameters it computes what each
replica has sent, and from that the next state of each.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace

import blake3
import numpy as np
from thinwire.collectives.aggregation.screening import NORM_LIMIT
from thinwire.compression.core.types import Floats
from thinwire.sims.invariants.gossip_contributions import OfferHistory, ReplicaState
from thinwire.sims.invariants.gossip_steps import Group, OuterSteps, Step
from thinwire.swarm.manifest.manifest import Manifest
from thinwire.swarm.messages.registry import Commit, PeerId
from thinwire.swarm.method_specs.noloco import NoLoCo

MADE = 1000
"""Number of stored states of each peer: far more than the rounds since its oldest checkpoint."""

STEPS = 2
"""Number of stored steps for each honest peer, of groups that have not reported in full yet."""

ROUNDING = 16.0
"""Tolerance of a sum of two values, in ULPs of the larger one; larger for a group."""


class GossipInvariants:
    """Checker of gossip rounds. `honest`: peer id -> index. `on_violation`: reports oracle, peer, detail.

    `met`: number of checked states that several peers have made.
    """

    def __init__(
        self, manifest: Manifest, honest: Mapping[PeerId, int], on_violation: Callable[[str, int, str], None]
    ) -> None:
        self._outer = OuterSteps(manifest)
        self._honest, self._on_violation = honest, on_violation
        self._at: dict[int, ReplicaState] = {}
        self._history = OfferHistory(self._outer.how, manifest.method(NoLoCo).residual_decay)
        self._made: dict[int, dict[bytes, bytes]] = {}
        """By peer: hash of each state that it has made -> hash of the residual.

        A restart may return to any of the latest MADE.
        """
        self._longest: dict[int, float] = {}
        self._steps: dict[Group, list[Step]] = {}
        """Steps of groups of which not all members have reported yet."""
        self.met = 0

    def encoded(self, peer: PeerId, attempt: int, theta: Floats) -> None:
        """Record that a peer is about to announce its contribution, trained to `theta`.

        The array does not change any more. A peer whose parameters are not finite contributes its slow weights instead.
        """
        index = self._honest.get(peer, -1)
        state = self._at.get(index)
        if state is not None:
            self._history.announce(index, attempt, state, theta if np.isfinite(theta).all() else state.phi)

    def installed(self, index: int, round: int, state: Floats, residual: Floats, *, lost: bool) -> None:
        """Check the residual of a state that a process did not compute.

        A state that the peer has made before is from a checkpoint, which has the residual; any other state has the residual 0.
        `lost`: the residual may be lost, because another peer sent the state or a fault may have damaged the disk.
        """
        if index not in self._honest.values():
            return
        phi, delta = _halved(state)
        left, at, name = self._whole(residual, phi), self._at.get(index), _hash(phi, delta)
        if at is not None and _hash(at.phi, at.delta) == name:
            return  # A state that was fetched at first is reported again when the peer is ready.
        expected = self._made.get(index, {}).get(name, _hash(np.zeros_like(left)))
        if _hash(left) != expected and not (lost and not residual.size):
            self._on_violation("aggregate", index, f"round {round}: the state has the residual of another one")
        self._begin(index, ReplicaState(round, phi, delta, left))

    def ended(self, index: int) -> None:
        """Record that a process ended."""
        self._at.pop(index, None)
        self._longest.pop(index, None)

    def committed(self, index: int, round: int, state: Floats, residual: Floats, commit: Commit) -> None:
        """Check a round that an honest peer has made with others, or alone."""
        proposal, old, outer = commit.proposal, self._at.get(index), self._outer
        group = Group(round, proposal.contributors, frozenset(one.peer for one in proposal.excluded))
        phi, delta = _halved(state)
        new = ReplicaState(round, phi, delta, self._whole(residual, phi))
        offers = {
            entry.peer: self._history.find(self._honest.get(entry.peer), round, entry.attempt)
            for entry in group.entries
        }
        me = next((peer for peer in offers if self._honest.get(peer) == index), b"")
        mine = offers.pop(me, None)
        if old is None or mine is None or mine.replica is not old:
            return self._made_by(index, new)
        left = outer.left(me, mine, new.left, group)
        if left.tobytes() != new.left.tobytes():
            away = float(np.abs(left - new.left).max())
            self._on_violation("aggregate", index, f"round {round}: the residual is off by up to {away:.3g}")
        step = Step(me, old, replace(new, left=left), mine)
        self._made_by(index, step.new)
        known = [offer for offer in offers.values() if offer is not None]
        owned = outer.owned and bool(offers or group.absent)
        if len(known) < len(offers) or (owned and group.absent):
            self._bound(step, group)
        if len(known) < len(offers):
            return
        if owned:
            self._check_owned(self._complete(step, group), group)
        elif not offers:
            self._equal(step, outer.alone(mine), 2)
        else:
            self.met += 1
            self._equal(step, outer.together(mine, known, round), len(group.entries))
            self._mean(self._complete(step, replace(group, absent=frozenset())))

    def _whole(self, residual: Floats, phi: Floats) -> Floats:
        """Return a copy of a residual; zeros if a lossy codec has not left out anything yet."""
        return residual.copy() if residual.size or self._outer.how.exact else np.zeros_like(phi)

    def _begin(self, index: int, state: ReplicaState) -> None:
        self._at[index] = state
        self._history.begin(index, state)

    def _made_by(self, index: int, state: ReplicaState) -> None:
        """Record a state that a peer has made, to which a restart may return."""
        made = self._made.setdefault(index, {})
        made[_hash(state.phi, state.delta)] = _hash(state.left)
        if len(made) > MADE:
            del made[next(iter(made))]
        self._begin(index, state)

    def _complete(self, step: Step, group: Group) -> list[Step]:
        """Store a step; return those of all members once each of them has reported this group.

        A pair that failed on one side shows in a report, so such a group is never complete.
        """
        steps = self._steps.setdefault(group, [])
        steps.append(step)
        if len(steps) == len(group.entries):
            return self._steps.pop(group)
        while sum(map(len, self._steps.values())) > STEPS * len(self._honest):
            del self._steps[next(iter(self._steps))]
        return []

    # Checks

    def _check_owned(self, steps: Sequence[Step], group: Group) -> None:
        """Check all members of a group whose chunks have owners, unless absent members may have sent anything."""
        absent = [self._history.vectors(self._honest.get(peer), group.round) for peer in sorted(group.absent)]
        known = [vectors for vectors in absent if vectors is not None]
        wanted = self._outer.with_owners(steps, group, known) if steps and len(known) == len(absent) else None
        if wanted is not None:
            self.met += len(steps) if len(steps) > 1 else 0
            for step, delta in zip(steps, wanted, strict=True):
                self._equal(step, delta, len(steps) + len(absent))

    def _equal(self, step: Step, delta: Floats, size: int) -> None:
        """Check that the new state is δ and φ + δ, up to rounding."""
        phi, new = step.old.phi + delta, step.new
        away = float(max(np.abs(new.delta - delta).max(), np.abs(new.phi - phi).max()))
        if not away <= _unit(delta, phi) * size / 2:
            self._on_violation("aggregate", self._honest[step.peer], f"round {new.round}: off by up to {away:.3g}")

    def _mean(self, steps: Sequence[Step]) -> None:
        """Check that pulls of all members cancel out: a group makes the step of DiLoCo, or of SparseLoCo."""
        if not steps:
            return
        outer, last = self._outer, steps[-1]
        mean = outer.mean([step.offer for step in steps])
        wanted = np.sum([outer.alpha * step.old.delta + outer.beta * mean for step in steps], axis=0)
        away = float(np.abs(np.sum([step.new.delta for step in steps], axis=0) - wanted).max())
        if not away <= len(steps) * _unit(*(step.new.phi for step in steps), wanted):
            detail = f"round {last.new.round}: {len(steps)} have moved their mean by {away:.3g} too much"
            self._on_violation("mean", self._honest[last.peer], detail)

    def _bound(self, step: Step, group: Group) -> None:
        """Check a step with members that may have sent anything.

        The screening limits their effect on our own step. The usual norm is at most our own longest norm, because the
        smaller of two counts. A vector within the limit of φ has two parts, which move δ by β and γ. Chunks that the peer owns
        itself are exempt: their limit is the median of the group, and a peer whose own vectors are zero uses those means, too.
        """
        outer, old, sent, index = self._outer, step.old, step.offer.sent, self._honest[step.peer]
        size = len(group.entries) + (len(group.absent) if outer.owned else 0)
        moved = step.new.delta - outer.alpha * old.delta - outer.beta * np.float32(1 / size) * sent[0]
        for slow in (False, True) if outer.owned else ():
            for part, owner in outer.chunks(group, old.phi.size, slow=slow):
                if owner == step.peer:
                    moved[part] = 0
        away = float(np.linalg.norm(moved))
        own = float(np.hypot(np.linalg.norm(sent[0]), np.linalg.norm(sent[1] - old.phi)))
        own = own or float(np.linalg.norm(old.delta))  # A peer that has not trained compares others with its momentum.
        longest = self._longest[index] = max(self._longest.get(index, 0.0), own)
        # A value of a sparse Δ that no other member has sent may count in full.
        share = outer.beta / (1 if step.offer.marks is not None else size) + outer.gamma / size
        limit = float(share) * (size - 1) * (1 + NORM_LIMIT) * longest
        if not away <= limit:
            detail = f"round {group.round}: {away:.3g} from the step alone, the limit is {limit:.3g}"
            self._on_violation("bound", index, detail)


def _halved(state: Floats) -> tuple[Floats, Floats]:
    """Return copies of φ and δ of a replica's state."""
    half = state.size // 2
    return state[:half].copy(), state[half:].copy()


def _hash(*vectors: Floats) -> bytes:
    """Return a hash of these vectors."""
    return blake3.blake3(b"".join(vector.tobytes() for vector in vectors)).digest(16)


def _unit(*values: Floats) -> float:
    """Return the rounding error of a sum with these terms and results."""
    return ROUNDING * float(np.finfo(np.float32).eps) * max(1e-3, *(float(np.abs(one).max()) for one in values))
