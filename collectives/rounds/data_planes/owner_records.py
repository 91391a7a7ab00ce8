"""Records in which the owners of a round sign for their results, and claim to have computed them."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

import blake3
import msgspec
from thinwire.collectives.consensus.paxos import Agreement
from thinwire.collectives.rounds.data_planes.result_store import Results
from thinwire.swarm.messages.registry import (
    Contribution,
    Digest,
    PeerId,
    Proposal,
    ResultClaim,
    ResultRecord,
)


class OwnerRecords:
    """Records in which the owners of a round sign for their results.

    If the round is `audited`, an owner has to state that it has computed them, and from which contributions: its claim.
    Claims are stored by contributors, chunk and hash of the result: for those of the ballot in progress, and for those of our
    last vote, which a later ballot may adopt.
    """

    def __init__(self, agreement: Agreement, results: Results, *, audited: bool) -> None:
        self.contradicted: set[PeerId] = set()
        """Owners that have signed for another result than the settled one."""
        self._agreement, self._results, self._audited = agreement, results, audited
        self._proposal: Proposal | None = None
        self._owners: Sequence[PeerId] = ()
        self._basis = b""
        self._made: dict[int, Digest] = {}  # hashes of the results that were computed here
        self._claims: dict[bytes, dict[int, dict[Digest, ResultClaim]]] = {}
        self._trusted: set[PeerId] = set()  # owners in the ballots that we have followed and that adopt no results

    def clear(self) -> None:
        """Forget the results: the contributors have changed."""
        self.contradicted.clear()
        self._made.clear()

    def open(self, proposal: Proposal, owners: Sequence[PeerId]) -> None:
        """Begin a ballot. owners: of each chunk in it."""
        self._proposal, self._owners, self._basis = proposal, owners, basis_of(proposal.contributors)
        voted = self._agreement.acceptor.voted
        kept = {self._basis, basis_of(voted.contributors) if voted is not None else self._basis}
        self._claims = {one: claims for one, claims in self._claims.items() if one in kept}
        if proposal.adopted is None:
            self._trusted.update(owners)

    def note_computed(self, index: int) -> None:
        """Note that the result of a chunk was computed here."""
        self._made[index] = self._results.joined_hashes((index,))

    def computed(self, indices: Sequence[int]) -> bool:
        """Return True if the results of these chunks are those that were computed here."""
        return all(self._made.get(index) == self._results.joined_hashes((index,)) for index in indices)

    @property
    def computes(self) -> bool:
        """True if the owners compute the results of the ballot, and audits compute them again."""
        free = self._proposal is not None and self._proposal.adopted is None and self._agreement.commit is None
        return self._audited and free

    def sign(self, proposal: Proposal, indices: tuple[int, ...]) -> ResultRecord:
        """Return our record of these results in a ballot, and store our claim if we have computed them."""
        claims = self._audited and self.computed(indices)
        place, hashes = (proposal.round, proposal.fragment, proposal.ballot), self._results.joined_hashes(indices)
        record = ResultRecord(*place, indices, hashes, proposal.lineage, self._basis if claims else b"")
        if claims:
            self._note(ResultClaim(self._agreement.me, record, self._agreement.sign(record)), indices)
        return record

    def sound(self, record: ResultRecord) -> bool:
        """Return True if a record has one hash for each of its chunks, which are in the grid."""
        count, indices = len(self._results), record.indices
        return len(record.hashes) == 32 * len(indices) == 32 * len({*indices}) and all(i < count for i in indices)

    def take(self, sender: PeerId, record: ResultRecord, signature: bytes) -> bool:
        """Take a sound record of a peer; return True if it has the hashes of all results, which are settled."""
        results, proposal, owners = self._results, self._proposal, self._owners
        # Any peer may send the hashes of all results if they match the settled digest.
        everything = record.indices == tuple(range(len(results)))
        whole = everything and blake3.blake3(record.hashes).digest() == results.wanted
        claims = self._audited and record.basis == self._basis
        if self.computes and not claims:
            # An owner that does not state that it has computed its results could not be convicted.
            if record.basis and proposal is not None and record.ballot == proposal.ballot:
                self._agreement.send_proposal(sender)
            return False
        for index, found in chunk_hashes(record).items():
            if whole and results.denies(index, found):
                self.contradicted.add(owners[index])
            # Only an owner's first record counts: otherwise it could seem busy for ever by sending new ones.
            if whole or (owners[index] == sender and not results.signed(index)):
                results.sign(index, found)
        if claims and sender in self._claimants():
            known = [index for index, found in chunk_hashes(record).items() if results.expected_hash(index) == found]
            self._note(ResultClaim(sender, record, signature), known)
        return whole

    # --- signatures that are still missing

    def unsigned(self, index: int) -> bool:
        """Return True if another peer still has to sign for the result of a chunk."""
        return (
            self._results.wanted is None
            and self._owners[index] != self._agreement.me
            and not self._results.signed(index)
        )

    @property
    def all_signed(self) -> bool:
        """True if no other peer still has to sign for a result."""
        return not any(map(self.unsigned, range(len(self._owners))))

    def unfinished(self) -> list[int]:
        """Return the chunks whose results are missing or not signed for."""
        return [index for index, chunk in enumerate(self._results.chunks) if chunk is None or self.unsigned(index)]

    # --- claims

    def _claimants(self) -> set[PeerId]:
        """Return the peers that may claim results. A claim of others is worth nothing: identities are free."""
        return {*self._agreement.terms.members, *self._trusted}

    def _note(self, claim: ResultClaim, indices: Iterable[int]) -> None:
        """Store the claim to the results of these chunks, unless another owner has claimed the same."""
        found, known = chunk_hashes(claim.record), self._claims.setdefault(claim.record.basis, {})
        for index in indices:
            known.setdefault(index, {}).setdefault(found[index], claim)

    def take_claim(self, claim: ResultClaim) -> None:
        """Store a claim that another peer shows, if it is valid and concerns results that are here or settled."""
        record, results = claim.record, self._results
        if not self._audited or self._proposal is None or self._agreement.commit is not None:
            return
        if record.basis != self._basis or claim.owner not in self._claimants() or not self.sound(record):
            return
        here = self._claims.get(record.basis, {})
        new = [(i, found) for i, found in chunk_hashes(record).items() if found not in here.get(i, ())]
        known = [i for i, found in new if found == (results.joined_hashes((i,)) or results.expected_hash(i))]
        if known and self._agreement.verify(claim.owner, record, claim.signature):
            self._note(claim, known)

    def _by_chunk(self) -> list[ResultClaim | None]:
        """Return the claim to each result in grid order."""
        claims = self._claims.get(self._basis, {})
        return [claims.get(index, {}).get(one) for index, one in enumerate(self._results.all_hashes())]

    def claims(self) -> list[ResultClaim]:
        """Return the claims to the results, each of them once."""
        return list({claim.signature: claim for claim in self._by_chunk() if claim is not None}.values())

    @property
    def unclaimed(self) -> bool:
        """True if all results that the ballot adopts are here, and not all that an audit of them needs.

        A ballot that adopts results may be that of a liar, which has made them up. With claims to them and the announcements
        of the contributors, an audit names it.
        """
        proposal = self._proposal
        if proposal is None or not self._audited or proposal.adopted is None or self._results.missing:
            return False
        known = all(self._agreement.announcements.find(entry) is not None for entry in proposal.contributors)
        return not known or None in self._by_chunk()

    def take_claims(self) -> dict[int, tuple[PeerId, Digest]]:
        """Return owner and hash of each result that is claimed, and forget all claims."""
        found = enumerate(zip(self._by_chunk(), self._results.all_hashes(), strict=True))
        claimed = {index: (claim.owner, one) for index, (claim, one) in found if claim is not None}
        self._claims.clear()
        return claimed


def chunk_hashes(record: ResultRecord) -> dict[int, Digest]:
    """Return the hash of each chunk's result in a sound record."""
    return {index: record.hashes[32 * at : 32 * at + 32] for at, index in enumerate(record.indices)}


def basis_of(contributors: Sequence[Contribution]) -> Digest:
    """Return the name of contributors (`ResultRecord.basis`)."""
    return blake3.blake3(msgspec.msgpack.encode(contributors)).digest()
