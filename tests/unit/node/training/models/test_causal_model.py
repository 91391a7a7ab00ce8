"""Calls of causal language models that return logits in different forms."""

from __future__ import annotations

from types import SimpleNamespace

import pytest
import torch
from thinwire.node.training.models.causal_model import cross_entropy, generate, logits_of, loss_of, written
from thinwire.node.training.models.tokenizer import Bytes
from torch import Tensor, nn


class Plain(nn.Module):
    """A model that returns logits."""

    def __init__(self) -> None:
        super().__init__()
        self.table = nn.Parameter(torch.randn(7, 7, generator=torch.Generator().manual_seed(0)))

    def forward(self, tokens: Tensor) -> object:
        return self.table[tokens]


class Named(Plain):
    """A model that returns them as an attribute, with a loss that it did not compute."""

    def forward(self, input_ids: Tensor, labels: Tensor | None = None) -> object:
        return SimpleNamespace(logits=self.table[input_ids], loss=None)


class Pair(Plain):
    """A model that computes its loss if it gets targets, else the logits of the last position."""

    def forward(self, tokens: Tensor, targets: Tensor | None = None) -> object:
        logits = self.table[tokens]
        return (logits[:, -1:], None) if targets is None else (logits, 2 * cross_entropy(logits, targets))


TOKENS = torch.arange(7)[None]


@pytest.mark.parametrize(("kind", "factor"), [(Plain, 1), (Named, 1), (Pair, 2)])
def test_loss_of_a_model_of_any_form_is_its_cross_entropy_or_its_own(kind: type[Plain], factor: int) -> None:
    model = kind()
    inputs, targets = TOKENS[:, :-1], TOKENS[:, 1:]
    expected = -torch.log_softmax(model.table, -1)[torch.arange(6), torch.arange(1, 7)].mean()
    assert loss_of(model)(inputs, targets).item() == pytest.approx(factor * expected.item(), rel=1e-6)


@pytest.mark.parametrize("kind", [Plain, Named, Pair])
def test_generate_continues_with_a_model_of_any_form(kind: type[Plain]) -> None:
    model = kind()
    best = model.table.argmax(-1)
    assert logits_of(model, TOKENS)[0, -1].tolist() == model.table[6].tolist()
    assert generate(model, TOKENS, 2, 3, temperature=0)[0, 7:].tolist() == [int(best[6]), int(best[best[6]])]


class Letters(nn.Module):
    """A model that continues with the bytes of a text in a circle; its last token id is no byte."""

    def __init__(self, text: bytes) -> None:
        super().__init__()
        follows = torch.full((257, 257), -9.0)
        follows[:, 256] = 5.0
        for this, following in zip(text, text[1:] + text[:1], strict=True):
            follows[this, following] = 4.0
        self.table = nn.Parameter(follows)

    def forward(self, tokens: Tensor) -> object:
        return self.table[tokens]


@pytest.mark.parametrize(("n", "parts"), [(4, ["", "¢", "a", "\ufffd"]), (5, ["", "¢", "a", "", "é"])])
def test_written_text_comes_in_whole_characters_of_the_tokenizer(n: int, parts: list[str]) -> None:
    model = Letters("x¢aé".encode())
    found = written(model, Bytes(), b"x", n, context=8, temperature=0.0, top_k=0, seed=1)
    assert list(found) == parts
