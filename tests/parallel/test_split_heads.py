"""Layers whose heads lie on several ranks equal the layer in one process."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from regard.parallel import spawn
from tests.parallel import sequence_ranks
from tests.parallel.sequence_ranks import SPLIT, hidden_states, split_layer
from tests.rules import GRADIENT, assert_close_rule


def one_process(name: str, dtype: torch.dtype) -> tuple[Tensor, Tensor, dict[str, Tensor]]:
    """Output, gradient of x and gradients of the parameters, with all heads in one process."""
    layer = split_layer(name, dtype)
    x = hidden_states().to(dtype).requires_grad_()
    z = layer(x)
    (z * hidden_states(1).to(dtype)).sum().backward()
    return z.detach(), x.grad, {key: p.grad for key, p in layer.named_parameters()}


def whole_gradient(key: str, parts: list[Tensor], like: Tensor, copies: int) -> Tensor:
    """The gradient of a whole parameter from what the ranks have of it."""
    if key in ("sink", "bias_tensors.0"):
        return torch.cat(parts, -1)
    if copies > 1 and (".k.linear" in key or ".v.linear" in key):
        heads = parts[0].unflatten(0, (len(parts), -1))
        assert torch.equal(heads[0], heads[1])  # the copies of a head stay equal
        return heads[::copies].flatten(0, 1)
    for part in parts:
        assert torch.equal(part, parts[0]), f"{key} differs between ranks"
    assert parts[0].shape == like.shape
    return parts[0]


@pytest.mark.full(keep=1)
@pytest.mark.parametrize("W, copies", [(2, 1), (4, 2)], ids=["two ranks", "repeated keys"])
def test_split_layers(W: int, copies: int) -> None:
    results = spawn(sequence_ranks.heads_over_ranks, W, copies > 1)
    for n, name in enumerate(SPLIT):
        usual = one_process(name, torch.float32)
        exact = one_process(name, torch.float64)
        repeated = copies if "groups" in SPLIT[name] else 1
        for z, dx, _ in (rank[n] for rank in results):
            assert_close_rule(z, usual[0], exact[0], what=name)
            assert_close_rule(dx, usual[1], exact[1], factor=GRADIENT, what=f"{name}, dx")
        for key, like in usual[2].items():
            parts = [rank[n][2][key] for rank in results]
            whole = whole_gradient(key, parts, like, repeated)
            assert_close_rule(whole, like, exact[2][key], factor=GRADIENT, what=f"{name}, {key}")


def test_layers_that_cannot_be_split_are_refused_by_name() -> None:
    expected = [
        "split_heads got Attention with",
        "3 ranks cannot share 4 query heads evenly",
        "pass repeat_keys=True",
        "only if their number divides that of the ranks",
        "a map or norm over all heads at once",
    ]
    for texts in spawn(sequence_ranks.unsplittable, 3):
        for text, words in zip(texts, expected, strict=True):
            assert words in text
