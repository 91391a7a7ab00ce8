"""Inner steps of many models at once: the product's Transformer with a further dimension, for a GPU.

A GPU needs about the same time for a step of one small model as for a step of dozens. Each lane of a stack is the model
of one peer with its own samples; a step makes the same numbers as a step of the product's Trainer on each of them.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass

import numpy as np
import torch
import torch.nn.functional as F
from thinwire.compression.core.types import Floats
from thinwire.node.state.layout import layout_of
from thinwire.node.state.replica_buffers import ParameterWrite, Read
from thinwire.node.training.batches import Batches
from thinwire.node.training.inner_optimizer import InnerConfig, learning_rate
from thinwire.node.training.models.transformer import rotate
from thinwire.node.training.muon import NEWTON_SCHULZ, matrices
from torch import Tensor

from benchmarks.training.toy import Toy

EVALUATED = 1 << 18
"""Most tokens of one forward pass of an evaluation."""

COEFFICIENTS, LEAST = (3.4445, -4.7750, 2.0315), 1e-7
"""Newton-Schulz iteration of torch's Muon: coefficients, and the smallest norm to divide by."""


@dataclass(frozen=True)
class Lane:
    """Place of one model in a stack. Consecutive lanes with the same `together` step on the mean of their gradients."""

    toy: Toy
    peer: bytes
    together: str = ""


@dataclass(frozen=True)
class Together:
    """Lanes [first, end) whose gradients are averaged in groups.

    `share` [groups, end - first] has the weight of each lane in each group's mean; `group` is each lane's.
    """

    first: int
    end: int
    share: Tensor
    group: Tensor

    @classmethod
    def of(cls, lanes: Sequence[Lane], device: torch.device | str) -> Together | None:
        """Return the groups of lanes; None if there are none. Raises ValueError if other lanes lie between them."""
        places = [index for index, lane in enumerate(lanes) if lane.together]
        if not places:
            return None
        first, end = places[0], places[-1] + 1
        if len(places) != end - first:
            raise ValueError("lanes that step together must be neighbours")
        names = [lane.together for lane in lanes[first:end]]
        numbers = {name: number for number, name in enumerate(dict.fromkeys(names))}
        group = torch.tensor([numbers[name] for name in names], device=device)
        member = F.one_hot(group, len(numbers)).T.float()
        return cls(first, end, member / member.sum(1, keepdim=True), group)

    def average(self, gradient: Tensor) -> None:
        """Replace each lane's gradient by the mean of its group, with the same bits in all lanes of a group."""
        part = gradient[self.first : self.end]
        part.copy_((self.share @ part.flatten(1)).index_select(0, self.group).view_as(part))


class StackedTrainers:
    """Trains one model for each lane, all with the same sizes and the same inner optimizer (AdamW or Muon).

    All corpora are the same one, which has one part. `autocast`: element type of matrix products. Between two calls of
    `run_steps`, `download` copies lanes to host memory, where `reader` and `writer` see them; `upload` copies them back.
    """

    def __init__(
        self,
        lanes: Sequence[Lane],
        config: InnerConfig,
        device: torch.device | str = "cpu",
        autocast: torch.dtype | None = None,
    ) -> None:
        self.lanes, self.config, self.step = list(lanes), config, 0
        self._device, self._autocast = torch.device(device), autocast
        model = lanes[0].toy.model()
        self.layout, self._size = layout_of(model), model.config
        self._cos, self._sin = (table.to(device) for table in (model.cos, model.sin))
        gpu = self._device.type == "cuda"
        self._host = torch.empty(len(lanes), self.layout.total, pin_memory=gpu)
        first = {lane.toy.seed: lane.toy for lane in lanes}
        vectors = {seed: torch.from_numpy(self.layout.first(toy.model())) for seed, toy in first.items()}
        for row, lane in zip(self._host, lanes, strict=True):
            row.copy_(vectors[lane.toy.seed])
        self._awake, self._written = set(range(len(lanes))), set(range(len(lanes)))
        self.weights = {
            piece.name: torch.empty(len(lanes), *piece.shape, device=device).requires_grad_()
            for piece in self.layout.pieces
        }
        self.upload()
        self._optimizers = self._make_optimizers(
            {id(p): name for name, p in model.named_parameters()}, matrices(model)[0]
        )
        self._batches: list[Batches] = [lane.toy.batches(lane.peer) for lane in lanes]
        self._tokens = token_array(lanes[0].toy, device)
        self._offsets = torch.arange(model.config.context + 1, device=device)
        self._together = Together.of(lanes, device)
        self._compiled: Callable[[Mapping[str, Tensor], Tensor, Tensor], Tensor] | None = None

    @property
    def step_tokens(self) -> int:
        """Tokens of one lane in one inner step."""
        return self.lanes[0].toy.batch * self._size.context

    def compile(self) -> str:
        """Compile the model for inner steps, which takes up to minutes; return the error that prevents it, if any."""
        compiled = torch.compile(self._losses, dynamic=False)
        shape = len(self.lanes), self.lanes[0].toy.batch, self._size.context + 1
        rows = torch.zeros(shape, dtype=torch.int64, device=self._device)
        try:
            compiled(self.weights, rows[..., :-1], rows[..., 1:]).sum().backward()
        except Exception as error:  # compilers raise many kinds
            return f"{type(error).__name__}: {error}"
        self._compiled = compiled
        return ""

    def run_steps(self, n: int) -> None:
        """Make n inner steps of every lane."""
        batch = self.lanes[0].toy.batch
        # A batch of n times the size has the same samples in the same order as n batches.
        drawn = np.stack([batches.next_samples(n * batch).reshape(n, batch) for batches in self._batches])
        places = torch.from_numpy(drawn).to(self._device) * (self._size.context + 1)
        for index in range(n):
            rows = self._tokens[places[:, index, :, None] + self._offsets].long()
            self._train(rows[..., :-1], rows[..., 1:])

    def _train(self, inputs: Tensor, targets: Tensor) -> None:
        for optimizer in self._optimizers:
            for group in optimizer.param_groups:
                group["lr"] = learning_rate(self.config, self.step) * group.get("share", 1.0)
            optimizer.zero_grad(set_to_none=True)
        (self._compiled or self._losses)(self.weights, inputs, targets).sum().backward()
        gradients = [weight.grad for weight in self.weights.values() if weight.grad is not None]
        if self._together is not None:
            for gradient in gradients:
                self._together.average(gradient)
        if self.config.clip > 0:
            _clip(gradients, self.config.clip)
        for optimizer in self._optimizers:
            optimizer.step()
        self.step += 1

    @torch.no_grad()
    def evaluate(self, vectors: Tensor, samples: Sequence[tuple[Tensor, Tensor]]) -> list[float]:
        """Return the mean loss of parameters [models, elements] on inputs and targets of each, all of one shape."""
        inputs, targets = (torch.stack(each).to(self._device) for each in zip(*samples, strict=True))
        at_once, losses = max(1, EVALUATED // inputs[0].numel()), list[Tensor]()
        for start in range(0, len(vectors), at_once):
            part = slice(start, start + at_once)
            weights = {
                piece.name: vectors[part, piece.start : piece.stop].reshape(-1, *piece.shape)
                for piece in self.layout.pieces
            }
            losses.append(self._losses(weights, inputs[part], targets[part]))
        return [float(loss) for loss in torch.cat(losses).cpu()]

    @torch.no_grad()
    def vectors(self, lanes: Sequence[int]) -> Tensor:
        """Return the parameters of some lanes in the layout's order: [lanes, elements], on the device."""
        chosen = torch.tensor(lanes, device=self._device)
        return torch.cat([weight.index_select(0, chosen).flatten(1) for weight in self.weights.values()], dim=1)

    def placed(self, vectors: Sequence[Floats]) -> Tensor:
        """Return vectors of parameters as one tensor [vectors, elements] on the device."""
        return torch.from_numpy(np.stack(vectors)).to(self._device)

    # --- parameters in host memory

    @torch.no_grad()
    def download(self, lanes: Collection[int]) -> None:
        """Copy lanes to host memory, where they can be read and written until `upload`."""
        if lanes:
            first, end = min(lanes), max(lanes) + 1
            flat = torch.cat([weight[first:end].flatten(1) for weight in self.weights.values()], dim=1)
            self._host[first:end].copy_(flat)
            self._awake = set(range(first, end))

    @torch.no_grad()
    def upload(self) -> None:
        """Copy lanes that were written back to the device."""
        if self._written:
            first, end = min(self._written), max(self._written) + 1
            flat = self._host[first:end].to(self._device)
            for piece in self.layout.pieces:
                self.weights[piece.name][first:end].flatten(1).copy_(flat[:, piece.start : piece.stop])
        self._awake, self._written = set(), set()

    def reader(self, lane: int) -> Read:
        """Return the function by which a replica reads a lane."""

        def read(start: int, stop: int, out: Floats) -> None:
            out[:] = self._row(lane)[start:stop].numpy()

        return read

    def writer(self, lane: int) -> ParameterWrite:
        """Return the function by which a replica writes a lane."""

        def write(theta: Floats, start: int = 0, keep: float = 0.0) -> None:
            place, values = self._row(lane)[start : start + theta.size], torch.from_numpy(np.ascontiguousarray(theta))
            place.copy_(torch.lerp(values, place, keep) if keep else values)
            self._written.add(lane)

        return write

    def _row(self, lane: int) -> Tensor:
        if lane not in self._awake:
            raise RuntimeError(f"lane {lane} is not in host memory: its inner steps are in progress")
        return self._host[lane]

    # --- model and optimizer

    def _losses(self, weights: Mapping[str, Tensor], inputs: Tensor, targets: Tensor) -> Tensor:
        """Return the mean loss of each lane [lanes], of token ids and targets [lanes, batch, context]."""
        with torch.autocast(self._device.type, self._autocast, enabled=self._autocast is not None):
            logits = self._logits(weights, inputs).float()
            losses = F.cross_entropy(logits.flatten(0, 1), targets.flatten(), reduction="none")
        return losses.view(len(inputs), -1).mean(1)

    def _logits(self, weights: Mapping[str, Tensor], tokens: Tensor) -> Tensor:
        """Return the logits [lanes, batch · context, vocab]; see Transformer.forward."""
        size = self._size
        lanes, batch, length = tokens.shape
        embedding = weights["embedding.weight"]
        first = torch.arange(lanes, device=tokens.device)[:, None] * size.vocab
        x = F.embedding(tokens.flatten(1) + first, embedding.flatten(0, 1))

        def norm(x: Tensor, name: str) -> Tensor:
            return F.rms_norm(x, (size.width,), None, 1e-5) * weights[name][:, None]

        def linear(x: Tensor, name: str) -> Tensor:
            return torch.bmm(x, weights[name].transpose(1, 2))

        for layer in range(size.layers):
            block = f"blocks.{layer}."
            qkv = linear(norm(x, block + "norm1.weight"), block + "attention.qkv.weight")
            qkv = qkv.view(lanes * batch, length, 3, size.heads, size.width // size.heads)
            q, k, v = qkv.permute(2, 0, 3, 1, 4)
            q, k = (rotate(each, self._cos[:length], self._sin[:length]) for each in (q, k))
            mixed = F.scaled_dot_product_attention(q, k, v, is_causal=True)
            mixed = mixed.transpose(1, 2).reshape(lanes, batch * length, size.width)
            x = x + linear(mixed, block + "attention.out.weight")
            gate, value = linear(norm(x, block + "norm2.weight"), block + "feedforward.gate.weight").chunk(2, dim=-1)
            x = x + linear(F.silu(gate) * value, block + "feedforward.out.weight")
        return linear(norm(x, "norm.weight"), "embedding.weight")

    def _make_optimizers(
        self, names: Mapping[int, str], hidden: Sequence[torch.nn.Parameter]
    ) -> list[torch.optim.Optimizer]:
        """Return optimizers like those of `make_optimizer`. `names`: name of each parameter of the model, by its id."""
        config = self.config
        chosen = {names[id(parameter)] for parameter in hidden} if config.optimizer == "muon" else set[str]()
        others = [weight for name, weight in self.weights.items() if name not in chosen]
        share = config.adam_lr / config.lr if chosen else 1.0
        # A lane's matrices have three dimensions, its vectors two.
        groups = [
            {"params": [p for p in others if p.ndim >= 3], "weight_decay": config.weight_decay, "share": share},
            {"params": [p for p in others if p.ndim < 3], "weight_decay": 0.0, "share": share},
        ]
        fused = self._device.type == "cuda"
        optimizers: list[torch.optim.Optimizer] = [
            torch.optim.AdamW(groups, lr=config.lr, betas=config.betas, fused=fused or None)
        ]
        if chosen:
            optimizers.append(StackedMuon([self.weights[name] for name in sorted(chosen)], config))
        return optimizers


class StackedMuon(torch.optim.Optimizer):
    """torch's Muon, which takes single matrices only, for stacks of matrices [lanes, rows, columns]."""

    def __init__(self, stacks: Sequence[Tensor], config: InnerConfig) -> None:
        super().__init__(list(stacks), {"lr": config.lr})
        self._momentum, self._decay = config.momentum, config.weight_decay

    @torch.no_grad()
    def step(self, closure: None = None) -> None:  # type: ignore[override]
        """Make one step: Nesterov momentum as a mean, Newton-Schulz iteration, decoupled weight decay."""
        for group in self.param_groups:
            for matrix in group["params"]:
                gradient = matrix.grad
                mean = self.state[matrix].setdefault("momentum_buffer", torch.zeros_like(gradient))
                mean.lerp_(gradient, 1 - self._momentum)
                update = orthogonal(gradient.lerp(mean, self._momentum))
                matrix.mul_(1 - group["lr"] * self._decay)
                matrix.add_(update, alpha=-group["lr"] * math.sqrt(max(1, matrix.shape[1] / matrix.shape[2])))


def orthogonal(stack: Tensor) -> Tensor:
    """Return nearly orthogonal matrices near those of a stack [lanes, rows, columns], in bfloat16."""
    a, b, c = COEFFICIENTS
    tall = stack.shape[1] > stack.shape[2]
    x = stack.bfloat16()
    x = x.transpose(1, 2) if tall else x
    x = x / torch.linalg.vector_norm(x, dim=(1, 2), keepdim=True).clamp(min=LEAST)
    for _ in range(NEWTON_SCHULZ):
        gram = x @ x.transpose(1, 2)
        x = torch.baddbmm(x, torch.baddbmm(gram, gram, gram, beta=b, alpha=c), x, beta=a)
    return x.transpose(1, 2) if tall else x


def token_array(toy: Toy, device: torch.device | str) -> Tensor:
    """Return the corpus of a toy on the device. Raises ValueError if it has several parts."""
    (part,) = toy.split.corpus.parts
    return torch.from_numpy(np.array(part)).to(device)


def _clip(gradients: Sequence[Tensor], limit: float) -> None:
    """Scale the gradients of each lane to a norm of at most `limit`, like clip_grad_norm_."""
    norms = torch.stack([torch.linalg.vector_norm(gradient.flatten(1), dim=1) for gradient in gradients])
    scale = (limit / (torch.linalg.vector_norm(norms, dim=0) + 1e-6)).clamp(max=1.0)
    for gradient in gradients:
        gradient.mul_(scale.view(-1, *(1,) * (gradient.ndim - 1)))
