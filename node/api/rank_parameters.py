"""Access of a peer to a module that several ranks train together.

Import it only where there are several: torch.distributed.tensor takes a second to load.
"""

from __future__ import annotations

import blake3
import numpy as np
import torch
from thinwire.compression.core.types import Floats
from thinwire.compression.device import HOST, Vector
from thinwire.node.api.model_access import ModelAccess
from thinwire.node.api.ranks import GroupError, Ranks
from thinwire.node.state.layout import Layout, Piece, check_unchanged
from torch import Tensor, nn
from torch.distributed.tensor import DTensor, Replicate


class GroupAccess(ModelAccess):
    """Parameters and buffers of a module on several ranks, replicated or sharded (DTensor).

    The peer of the first rank reads and writes `values`, a copy on the host. `collect` copies the module there, and
    `spread` sets the module on all ranks; all ranks call both.
    """

    def __init__(self, layout: Layout, module: nn.Module, ranks: Ranks) -> None:
        super().__init__(layout, module)
        self._ranks, self._written, self._buffers = ranks, False, np.empty(0, np.float32)
        self.devices = [HOST]
        self.values = np.empty(layout.total + layout.buffers.size if ranks.first else 0, np.float32)

    def first(self) -> Floats:
        self._gather()
        return self.values.copy()

    def read(self, start: int, stop: int, out: Vector) -> None:
        target = out if isinstance(out, Tensor) else torch.from_numpy(out)
        target.copy_(torch.from_numpy(self.values[start:stop]))

    def write(self, theta: Floats, start: int = 0, keep: float = 0.0) -> None:
        part = self.values[start : start + theta.size]
        # 0 · NaN is NaN: a model that has diverged must get the swarm's parameters whole.
        part[:] = np.float32(keep) * part + np.float32(1 - keep) * theta if keep else theta
        self._written = True

    @property
    def written(self) -> bool:
        """True if the peer has set parameters since the last `spread`."""
        return self._written

    def collect(self) -> None:
        """Copy the module's parameters and buffers to the first rank.

        Buffers are the mean of the ranks' where the swarm averages them, otherwise those of the first rank.

        Raises GroupError if the ranks have trained apart, so that the parameters of one rank are not those of all.
        """
        if len(set(self._gather())) > 1:
            raise GroupError(
                "the ranks of the group have different parameters: they train apart",
                "wrap the model in DistributedDataParallel, or shard it with fully_shard, before training",
            )

    @torch.no_grad()
    def _gather(self) -> list[bytes]:
        """Copy the module to the first rank; return the digests of the replicated parameters of all ranks."""
        digests = self._ranks.each(self._read_replicated)
        for piece in self.layout.pieces:
            parameter = self.module.get_parameter(piece.name).detach()
            if isinstance(parameter, DTensor):
                self._store(piece, parameter.full_tensor())
        if self._buffers.size:
            self._ranks.average_floats(self._buffers[: self.layout.buffers.block.averaged])
            if self._ranks.first:
                self.values[self.layout.total :] = self._buffers
        return digests

    def _read_replicated(self) -> bytes:
        digest = blake3.blake3()
        for piece in self.layout.pieces:
            parameter = self.module.get_parameter(piece.name).detach()
            check_unchanged(piece, parameter)
            if not isinstance(parameter, DTensor):
                digest.update(self._store(piece, parameter).view(np.uint8).data)
        if self.layout.buffers.size:
            self._buffers = self.layout.buffers.read(self.module)
        return digest.digest()

    def _store(self, piece: Piece, whole: Tensor) -> Floats:
        """Copy a parameter to `values` on the first rank; return it."""
        values: Floats = np.ascontiguousarray(whole.float().cpu().numpy()).reshape(-1)
        if self._ranks.first:
            self.values[piece.start : piece.stop] = values
        return values

    @torch.no_grad()
    def spread(self) -> None:
        """Set the module on all ranks to the values of the first one."""
        for piece in self.layout.pieces:
            self._set(self.module.get_parameter(piece.name).detach(), self._shared(piece.start, piece.stop), piece)
        if size := self.layout.buffers.size:
            self.layout.buffers.write(self.module, self._shared(self.layout.total, self.layout.total + size))
        self._written = False

    def _shared(self, start: int, stop: int) -> Floats:
        values = self.values[start:stop] if self._ranks.first else np.empty(stop - start, np.float32)
        self._ranks.broadcast_floats(values)
        return values

    @staticmethod
    def _set(parameter: Tensor, values: Floats, piece: Piece) -> None:
        whole = torch.from_numpy(values).reshape(piece.shape)
        if isinstance(parameter, DTensor):
            mesh = parameter.device_mesh
            local = whole.to(parameter.to_local().device, parameter.dtype)
            everywhere = DTensor.from_local(local, mesh, [Replicate()] * mesh.ndim, run_check=False)
            parameter.to_local().copy_(everywhere.redistribute(mesh, parameter.placements).to_local())
        else:
            parameter.copy_(whole)
