"""Choice of the source from which a stage without holders is restored."""

from __future__ import annotations

from collections.abc import Collection
from dataclasses import dataclass
from typing import Literal, TypeAlias

SourceKind: TypeAlias = Literal["holder", "copy", "checkpoint", "average", "old copy", "old checkpoint", "nothing"]
"""Where the state of a stage comes from; a copy is the one of a `NeighbourBackup`."""

FASTER = 1.1
"""Factor of the learning rate of a reconstructed stage; its optimizer restarts."""


@dataclass(frozen=True, slots=True)
class StageSource:
    """Source of the lost stage, and the two stages whose mean it becomes, if any."""

    source: SourceKind
    stages: tuple[int, ...] = ()

    @property
    def reconstructed(self) -> bool:
        """True if the parameters are not those of any peer: new optimizer, learning rate times `FASTER`."""
        return self.source in ("average", "nothing")


def rescue(
    stage: int,
    stages: int,
    *,
    lost: Collection[int],
    holders: int = 0,
    copy: int | None = None,
    checkpoint: int | None = None,
    recent: int,
) -> StageSource:
    """Return the best source of a lost stage.

    In this order: another holder; the newer of copy and checkpoint if at most `recent` rounds old; a reconstruction;
    the newer of the two at any age; "nothing": the stage restarts from its first values. `lost`: all stages without a
    holder, including this one; `holders`: peers that train it, including full replicas; `copy` and `checkpoint`: ages
    of the newest ones in rounds, None for none.
    """
    if not 0 <= stage < stages:
        raise ValueError(f"stage {stage} of {stages}")
    if holders > 0:
        return StageSource("holder")
    newer: SourceKind | None = None if copy is None else "copy"
    if checkpoint is not None and (copy is None or checkpoint < copy):
        newer = "checkpoint"
    age = min(found for found in (copy, checkpoint, recent + 1) if found is not None)
    if newer is not None and age <= recent:
        return StageSource(newer)
    if 0 < stage < stages - 1 and stage - 1 not in lost and stage + 1 not in lost:
        return StageSource("average", (stage - 1, stage + 1))
    return StageSource("nothing" if newer is None else "old copy" if newer == "copy" else "old checkpoint")
