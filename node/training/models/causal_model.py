"""Calls of causal language models of several forms: logits, loss, generated text.

A model maps token ids [B, T] to logits [B, T, vocab], or to an object that has them as `logits`, like models of the
transformers library. If its `forward` has a parameter `targets`, then model(tokens, targets) returns logits and loss.
"""

from __future__ import annotations

import inspect
import math
from collections.abc import Callable, Iterator
from typing import Any, TypeAlias

import numpy as np
import torch
import torch.nn.functional as F
from thinwire.node.training.models.tokenizer import Tokenizer
from thinwire.node.training.models.transformer import cross_entropy
from torch import Tensor, nn

Loss: TypeAlias = Callable[[Tensor, Tensor], Tensor]
"""Mean cross-entropy in nats per token, of token ids and targets (the next tokens), [B, T] each."""


def logits_of(model: Callable[..., Any], tokens: Tensor) -> Tensor:
    """Return the logits of token ids [B, T].

    Some models return only those of the last position, [B, 1, vocab]. Raises AttributeError for a result without logits.
    """
    found = model(tokens)
    logits: Tensor = found if isinstance(found, Tensor) else found[0] if isinstance(found, tuple) else found.logits
    return logits


def loss_of(model: nn.Module, call: Callable[..., Any] | None = None) -> Loss:
    """Return the loss of a model: its own if it takes targets, else the cross-entropy of its logits.

    call: what is called in place of the model, such as its compiled form.
    """
    call = model if call is None else call
    if "targets" in inspect.signature(model.forward).parameters:
        return lambda tokens, targets: call(tokens, targets)[1]
    return lambda tokens, targets: cross_entropy(logits_of(call, tokens), targets)


def generate(
    model: nn.Module,
    tokens: Tensor,
    n: int,
    context: int,
    temperature: float = 1.0,
    top_k: int = 0,
    generator: torch.Generator | None = None,
    vocab: int = 0,
) -> Tensor:
    """Continue token ids [B, T] (T ≥ 1) by n tokens: [B, T + n]. `continuation` describes the arguments."""
    return torch.cat((tokens, *continuation(model, tokens, n, context, temperature, top_k, generator, vocab)), dim=1)


COLDEST = 1e-4
"""Temperature below which the most likely token is taken: logits divided by less would overflow."""


def continuation(
    model: nn.Module,
    tokens: Tensor,
    n: int,
    context: int,
    temperature: float = 1.0,
    top_k: int = 0,
    generator: torch.Generator | None = None,
    vocab: int = 0,
) -> Iterator[Tensor]:
    """Yield n tokens [B, 1], one after the other, that continue token ids [B, T] (T ≥ 1).

    temperature 0 takes the most likely token; top_k > 0 draws among that many. The model sees only the last `context`
    tokens. Draws on the CPU, from `generator` (a CPU generator, or None for torch's global one). vocab: token ids that may
    be drawn, because a model may have more than its tokenizer; 0: all.
    """
    training = model.training
    model.eval()
    try:
        for _ in range(n):
            with torch.no_grad():
                logits = logits_of(model, tokens[:, -context:])[:, -1, : vocab or None].float().cpu()
            if temperature < COLDEST:
                drawn = logits.argmax(dim=-1, keepdim=True)
            else:
                if 0 < top_k < logits.shape[-1]:
                    least = logits.topk(top_k).values[:, -1:]
                    logits = logits.masked_fill(logits < least, -math.inf)
                drawn = torch.multinomial(F.softmax(logits / temperature, dim=-1), 1, generator=generator)
            drawn = drawn.to(tokens.device, tokens.dtype)
            tokens = torch.cat((tokens, drawn), dim=1)
            yield drawn
    finally:
        model.train(training)


def written(
    model: nn.Module,
    tokenizer: Tokenizer,
    prompt: bytes,
    n: int,
    *,
    context: int,
    temperature: float,
    top_k: int,
    seed: int,
) -> Iterator[str]:
    """Yield the text of n tokens that continue a prompt (UTF-8), in pieces of whole characters.

    An empty prompt stands for the beginning of a document. `continuation` describes the other arguments.
    """
    start = tokenizer.encode(prompt)
    if not start.size:
        start = tokenizer.separator
    device = next(model.parameters()).device
    tokens = torch.from_numpy(start.astype(np.int64))[None].to(device)
    generator = torch.Generator().manual_seed(seed)
    drawn, shown = [], len(tokenizer.decode(start.tolist()))
    for token in continuation(model, tokens, n, context, temperature, top_k, generator, tokenizer.vocab):
        drawn.append(int(token))
        text = tokenizer.decode([*start.tolist(), *drawn])
        # The end of the text may be the first bytes of a character.
        whole = text if len(drawn) == n else text.rstrip("\ufffd")
        yield whole[shown:]
        shown = max(shown, len(whole))
