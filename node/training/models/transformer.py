"""The built-in model: a decoder-only transformer in plain torch.

It has RMSNorm, rotary positions and SwiGLU.

It runs on CPU and CUDA, compiles with torch.compile, and starts from the same bits on every machine.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import overload

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

DEVIATION = 0.02
"""Standard deviation of the initial weights (GPT-2)."""

THETA = 10_000.0
"""Base of the rotary frequencies (Su et al., arXiv 2104.09864)."""


@dataclass(frozen=True, slots=True)
class ModelConfig:
    """Sizes of the model.

    vocab: token ids; context: longest sequence in tokens; mlp: hidden size of the feed-forward part as a multiple of
    width, rounded up to a multiple of 8; tied: the head shares the embedding's weights. width is a multiple of 2·heads.
    """

    vocab: int
    layers: int = 4
    width: int = 128
    heads: int = 4
    context: int = 128
    mlp: float = 8 / 3
    tied: bool = True

    def __post_init__(self) -> None:
        if min(self.vocab, self.layers, self.width, self.heads, self.context) < 1 or self.mlp <= 0:
            raise ValueError(f"all sizes of a model must be positive: {self}")
        if self.width % (2 * self.heads):
            raise ValueError(f"width {self.width} is not a multiple of 2 × heads ({2 * self.heads})")

    @property
    def hidden(self) -> int:
        """Hidden size of the feed-forward part."""
        return 8 * math.ceil(self.mlp * self.width / 8)


def matrix(columns: int, rows: int) -> nn.Linear:
    """Return a linear map without bias and with uninitialized values.

    Initial values from torch would be drawn from the global generator in vain.
    """
    return nn.Linear(columns, rows, bias=False, device="meta").to_empty(device="cpu")


class Attention(nn.Module):
    """Causal self-attention with rotary positions; [B, T, width] -> the same."""

    def __init__(self, config: ModelConfig) -> None:
        super().__init__()
        self.heads = config.heads
        self.qkv = matrix(config.width, 3 * config.width)
        self.out = matrix(config.width, config.width)

    def forward(self, x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
        batch, length, width = x.shape
        q, k, v = self.qkv(x).view(batch, length, 3, self.heads, width // self.heads).permute(2, 0, 3, 1, 4)
        mixed = F.scaled_dot_product_attention(rotate(q, cos, sin), rotate(k, cos, sin), v, is_causal=True)
        out: Tensor = self.out(mixed.transpose(1, 2).reshape(batch, length, width))
        return out


class FeedForward(nn.Module):
    """SwiGLU (Shazeer, arXiv 2002.05202); [B, T, width] -> the same."""

    def __init__(self, config: ModelConfig) -> None:
        super().__init__()
        self.gate = matrix(config.width, 2 * config.hidden)
        self.out = matrix(config.hidden, config.width)

    def forward(self, x: Tensor) -> Tensor:
        gate, value = self.gate(x).chunk(2, dim=-1)
        out: Tensor = self.out(F.silu(gate) * value)
        return out


class Block(nn.Module):
    """One layer: attention, then feed-forward, each after a norm and with a residual connection."""

    def __init__(self, config: ModelConfig) -> None:
        super().__init__()
        self.norm1 = nn.RMSNorm(config.width, eps=1e-5)
        self.attention = Attention(config)
        self.norm2 = nn.RMSNorm(config.width, eps=1e-5)
        self.feedforward = FeedForward(config)

    def forward(self, x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
        x = x + self.attention(self.norm1(x), cos, sin)
        out: Tensor = x + self.feedforward(self.norm2(x))
        return out


def everything(name: str) -> bool:
    """Accept all parameters."""
    return True


def nothing(name: str) -> bool:
    """Accept no parameter."""
    return False


class Transformer(nn.Module):
    """Maps token ids [B, T] to logits [B, T, vocab]. T is at most config.context.

    `held` selects by name the parameters whose values are initialized: the memory of the others is never touched.
    """

    cos: Tensor
    sin: Tensor

    def __init__(self, config: ModelConfig, seed: int = 0, held: Callable[[str], bool] = everything) -> None:
        super().__init__()
        self.config = config
        # nn.Embedding would draw normal numbers in vain; on the meta device that even loads torch's compiler.
        self.embedding = nn.Embedding.from_pretrained(torch.empty(config.vocab, config.width), freeze=False)
        self.blocks = nn.ModuleList(Block(config) for _ in range(config.layers))
        self.norm = nn.RMSNorm(config.width, eps=1e-5)
        self.head = matrix(config.width, config.vocab)
        if config.tied:
            self.head.weight = self.embedding.weight
        cos, sin = rotary_table(config.context, config.width // config.heads)
        self.register_buffer("cos", cos, persistent=False)
        self.register_buffer("sin", sin, persistent=False)
        self._recompute = False
        initialize(self, seed, held)

    def activation_checkpointing_enable(self) -> None:
        """Store only the inputs of the layers for the backward pass, and compute the rest again there."""
        self._recompute = True

    @overload
    def forward(self, tokens: Tensor, targets: None = None) -> Tensor: ...

    @overload
    def forward(self, tokens: Tensor, targets: Tensor) -> tuple[Tensor, Tensor]: ...

    def forward(self, tokens: Tensor, targets: Tensor | None = None) -> Tensor | tuple[Tensor, Tensor]:
        """Return logits, or with targets [B, T] the pair of logits and mean cross-entropy in nats per token."""
        logits = self.logits(self.through(self.blocks, self.embed(tokens)))
        if targets is None:
            return logits
        return logits, cross_entropy(logits, targets)

    def embed(self, tokens: Tensor) -> Tensor:
        """Return x [B, T, width] of token ids [B, T]."""
        x: Tensor = self.embedding(tokens)
        return x

    def through(self, blocks: Iterable[nn.Module], x: Tensor) -> Tensor:
        """Return x after these blocks. Raises ValueError for sequences longer than the context."""
        length = x.shape[1]
        if length > self.config.context:
            raise ValueError(f"{length} tokens do not fit a context of {self.config.context}")
        cos, sin = self.cos[:length], self.sin[:length]
        for block in blocks:
            x = checkpoint(block, x, cos, sin, use_reentrant=False) if self._recompute else block(x, cos, sin)
        return x

    def logits(self, x: Tensor) -> Tensor:
        """Return the logits [B, T, vocab] of the last block's output."""
        logits: Tensor = self.head(self.norm(x))
        return logits


def cross_entropy(logits: Tensor, targets: Tensor) -> Tensor:
    """Return the mean over all tokens in nats, of logits [B, T, vocab] and token ids [B, T]."""
    return F.cross_entropy(wide(logits.flatten(0, 1)), targets.flatten().long())


def wide(x: Tensor) -> Tensor:
    """Return x in float32, or in float64 if it is."""
    return x if x.dtype == torch.float64 else x.float()


def rotary_table(length: int, size: int) -> tuple[Tensor, Tensor]:
    """Return cosines and sines [length, size / 2] of position × frequency."""
    frequencies = THETA ** (-torch.arange(0, size, 2, dtype=torch.float64) / size)
    angles = torch.outer(torch.arange(length, dtype=torch.float64), frequencies)
    return angles.cos().float(), angles.sin().float()


def rotate(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """Turn each pair (i, i + size/2) of x [..., T, size] by its position's angle; keeps x's dtype."""
    a, b = wide(x).chunk(2, dim=-1)
    return torch.cat((a * cos - b * sin, b * cos + a * sin), dim=-1).to(x.dtype)


@torch.no_grad()
def initialize(model: Transformer, seed: int, held: Callable[[str], bool] = everything) -> None:
    """Set initial weights from the seed alone.

    The bits are the same on every machine, and the global generator is not used.

    Matrices: deviation 0.02, divided by √(2·layers) where they end a residual branch (GPT-2), so that the sum does not
    grow with depth. The distribution is the sum of four uniform integers, close enough to the normal one: torch's own
    normal numbers depend on the processor's vector unit, and peers of one swarm must start equal. Norms start at 1.
    Values of parameters that are not `held` are drawn and discarded, so that held ones do not depend on the selection;
    behind the last held one none are drawn.
    """
    generator = torch.Generator().manual_seed(seed)
    named = sorted(model.named_parameters())
    while named and not held(named[-1][0]):
        named.pop()
    for name, parameter in named:
        if parameter.ndim < 2:
            if held(name):
                parameter.fill_(1.0)
            continue
        deviation = DEVIATION / math.sqrt(2 * model.config.layers) if name.endswith(".out.weight") else DEVIATION
        total = torch.zeros(parameter.shape, dtype=torch.int32)
        for _ in range(4):
            total += torch.randint(0, 1 << 16, parameter.shape, dtype=torch.int32, generator=generator)
        if not held(name):
            continue
        # Four uniform integers below 2¹⁶ have mean 2·(2¹⁶ − 1) and variance 4·(2³² − 1)/12.
        spread = math.sqrt(((1 << 32) - 1) / 3)
        parameter.copy_((total - 2 * 0xFFFF).float() * (deviation / spread))
