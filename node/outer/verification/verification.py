"""Verification of what peers contribute and compute: the parts of one peer that take part in it."""

from __future__ import annotations

from thinwire.collectives.topology.peer_backoff import PeerBackoff
from thinwire.node.membership.presence import Presence
from thinwire.node.outer.verification.own_contributions import OwnContributions
from thinwire.node.outer.verification.owner_audits import Audits
from thinwire.node.outer.verification.trials import Trials
from thinwire.node.runtime.event_log import Emit
from thinwire.node.state.replica import Replica
from thinwire.swarm.frame import Frame
from thinwire.swarm.identity.identity import Identity
from thinwire.swarm.manifest.manifest import Manifest
from thinwire.swarm.messages.registry import PeerId


class Verification:
    """Scores of contributions and audits of owners in one `fragment`, if the manifest asks for them.

    `backoff`: pauses of the peers that refuse audits.
    """

    def __init__(
        self,
        identity: Identity,
        manifest: Manifest,
        run_id: bytes,
        *,
        replica: Replica,
        presence: Presence,
        fragment: int,
        backoff: PeerBackoff,
        emit: Emit,
    ) -> None:
        required = manifest.admission.trial
        self.own_contributions = OwnContributions(
            replica, presence.send_queue, fragment, needed=bool(required) or manifest.audited
        )
        """Our contributions, for members that score them or audit an owner."""
        self.trials = Trials(
            identity,
            replica,
            presence,
            fragment,
            required=required,
            own_contributions=self.own_contributions,
            emit=emit,
        )
        """Scores of other peers."""
        self.audits = Audits(
            identity,
            manifest,
            run_id,
            replica=replica,
            presence=presence,
            own_contributions=self.own_contributions,
            fragment=fragment,
            backoff=backoff,
            emit=emit,
        )
        """Audits of past rounds."""

    def takes(self, peer: PeerId, frame: Frame) -> bool:
        """Handle a frame that belongs to one of the parts; return False if none takes it."""
        return any(part.takes(peer, frame) for part in (self.own_contributions, self.trials, self.audits))
