"""Cosine transform of whole blocks: by the kernels of sections, and its inverse in torch."""

from __future__ import annotations

import numpy as np
import torch
from numpy.typing import NDArray
from thinwire.compression.kernels import block_dct
from thinwire.compression.kernels.dct import matrix, transposed


def forward(blocks: NDArray[np.float32]) -> NDArray[np.float32]:
    """Return DᵀBD of each block by the kernel. Shape (blocks, side, side)."""
    count, side = blocks.shape[:2]
    out = np.empty_like(blocks)
    block_dct.analyse(blocks.reshape(-1), side, 0, count, transposed(side), out)
    return out


def inverse(blocks: NDArray[np.float32]) -> NDArray[np.float32]:
    """Return DQDᵀ of each block by the kernel, with the sign of zero lost."""
    count, side = blocks.shape[:2]
    out = np.zeros_like(blocks)
    block_dct.synthesise(blocks, side, 0, count, matrix(side), np.float32(1.0), out.reshape(-1))
    return out


def inverse_torch(blocks: torch.Tensor) -> torch.Tensor:
    """Return the same as `inverse`, by the same operations in the same order."""
    d = torch.from_numpy(matrix(blocks.shape[1]).copy()).to(blocks.device)
    return _synthesise(_synthesise(blocks, d).mT, d).mT.contiguous()


def _synthesise(q: torch.Tensor, d: torch.Tensor) -> torch.Tensor:
    """Return DQ for each block."""
    side = q.shape[1]
    step = side // 2
    x = d[0, 0] * q[:, :1]
    while step > 0:
        half = x.shape[1]
        odd = d[:half, step, None] * q[:, step, None, :]
        for j in range(3 * step, side, 2 * step):
            odd = odd + d[:half, j, None] * q[:, j, None, :]
        x = torch.cat((x + odd, (x - odd).flip(1)), dim=1)
        step //= 2
    return x
