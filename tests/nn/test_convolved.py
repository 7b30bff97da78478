"""Recurrences whose queries, keys and values pass through a short convolution, and recurrences over
packed text.
"""

from __future__ import annotations

from itertools import pairwise
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import regard
from regard.masks import Document
from regard.nn import CausalConvolution, ConvolvedQKV, HeadProjection, RMSNorm
from regard.nn.blocks.norms import L2Norm
from regard.nn.recurrence.decays import GatedLinearRule, LinearAttentionRule
from regard.nn.recurrence.delta import DeltaRule, LogDecay
from regard.nn.recurrence.recurrent import Recurrent
from regard.nn.variants.projections import separate_qkv
from regard.span import Span
from tests.nn.catalogue import in_chunks, randomize
from tests.oracles.convolution import convolution

M, H, N, D, E, n = 8, 2, 4, 3, 2, 4


def delta(kernel: int = n) -> Any:
    steps = (L2Norm(),)
    q, k = (HeadProjection(M, H, D, *steps) for _ in "qk")
    v = HeadProjection(M, N, E)
    channels = CausalConvolution(2 * H * D + N * E, kernel)
    rule = DeltaRule(M, N, decay=LogDecay(M, N))
    mixer = Recurrent(ConvolvedQKV(q, k, v, channels), rule, nn.Linear(N * E, M), norm=RMSNorm(E))
    return randomize(mixer.double(), 3).requires_grad_(False)


def plain(rule: Any) -> Any:
    mixer = Recurrent(separate_qkv(M, 2, 2, 3), rule, nn.Linear(6, M))
    return randomize(mixer.double(), 4).requires_grad_(False)


RULES: dict[str, Any] = {
    "convolved": delta,
    "normalized": lambda: plain(LinearAttentionRule()),
    "gated": lambda: plain(GatedLinearRule(M, 2, 3, rank=2)),
}


def tokens(T: int, B: int = 2) -> Tensor:
    return torch.randn(B, T, M, generator=torch.Generator().manual_seed(T), dtype=torch.float64)


def test_queries_keys_and_values_are_convolved_before_they_are_split() -> None:
    mixer, x = delta(), tokens(9)
    project = mixer.project
    with regard.Trace("q", "k", "v") as seen:
        mixer(x)
    joined = torch.cat([x @ part.linear.weight.T for part in (project.q, project.k, project.v)], -1)
    right = convolution(joined, project.convolution.weight, silu=True)
    q, k, v = right.split([H * D, H * D, N * E], -1)
    for name, made, heads in (("q", q, H), ("k", k, H), ("v", v, N)):
        each = torch.stack(made.split(made.shape[-1] // heads, -1), 1)
        if name != "v":
            each = each / (each.square().sum(-1, keepdim=True) + 1e-6).sqrt()
        assert float((seen[name] - each).abs().max()) < 1e-12, name


@pytest.mark.parametrize("name", RULES)
def test_packed_documents_are_the_documents_alone(name: str) -> None:
    mixer, x = RULES[name](), tokens(13)
    bounds = (0, 3, 4, 9, 13)
    alone = torch.cat([mixer(x[:, a:b]) for a, b in pairwise(bounds)], 1)
    leaked = mixer(x)
    assert float((leaked - alone)[:, 3:].abs().max()) > 1e-3, "the documents matter"
    mixer.documents = Document(bounds)
    for positions in (None, Span(0, 13), torch.arange(13)[None], torch.arange(13).repeat(2, 1)):
        assert float((mixer(x, positions) - alone).abs().max()) < 1e-12
    for sizes in ([1] * 13, [4, 0, 6, 3], [3, 10], [2, 11], [9, 4]):
        cache = mixer.new_cache()
        assert float((in_chunks(mixer, x, sizes, cache) - alone).abs().max()) < 1e-12
    mixer.documents = Document(((0, 13), bounds))  # another packing for each row
    cache, rows = mixer.new_cache(), torch.cat([leaked[:1], alone[1:]])
    assert float((in_chunks(mixer, x, [4, 5, 1, 3], cache) - rows).abs().max()) < 1e-12
    positions = torch.tensor([[-1, -1, *range(13)], [*range(4), -1, -1, *range(4, 13)]])
    padded = torch.full((2, 15, M), float("nan"), dtype=torch.float64)
    padded[positions >= 0] = x.flatten(0, 1)
    out = mixer(padded, positions)[positions >= 0].unflatten(0, (2, 13))
    assert float((out - rows).abs().max()) < 1e-12
    with pytest.raises(regard.ArgumentError, match="Document holds 2 batch rows, but the call has"):
        mixer(tokens(4, B=3))


def test_a_gradient_stays_in_its_document() -> None:
    mixer, x = delta(), tokens(8, B=1).requires_grad_()
    mixer.documents = Document((0, 3, 8))
    found = torch.autograd.grad(mixer(x)[:, 3:].sum(), x)[0]
    assert bool(found[:, :3].eq(0).all())
    assert bool(found[:, 3:].ne(0).any())


@pytest.mark.full
def test_packed_text_compiles_without_a_break() -> None:
    torch._dynamo.reset()
    mixer, x = delta(), tokens(8)
    mixer.documents = Document((0, 3, 8))
    compiled = torch.compile(mixer, fullgraph=True, backend="eager")
    assert float((compiled(x) - mixer(x)).abs().max()) < 1e-12


def test_refusals() -> None:
    q, k, v = (HeadProjection(8, heads, 2) for heads in (2, 2, 4))
    with pytest.raises(regard.ArgumentError, match="has 15 channels; q, k and v have 16 together"):
        ConvolvedQKV(q, k, v, CausalConvolution(15, 4))
    flat = HeadProjection(8, 2, 2, flat=RMSNorm(4))
    with pytest.raises(regard.ArgumentError, match="k has a RMSNorm before its split into heads"):
        ConvolvedQKV(q, flat, v, CausalConvolution(16, 4))
    with pytest.raises(regard.ArgumentError, match=r"kernel=0, dilation=1\): each must be at leas"):
        CausalConvolution(3, 0)
    with pytest.raises(regard.ArgumentError, match="activation is 'gelu'; it must be one of silu"):
        CausalConvolution(3, 2, activation="gelu")  # type: ignore[arg-type]
    convolution = CausalConvolution(3, 2, bias=True, activation=None)
    assert convolution.extra_repr() == "3 channels, kernel=2, activation=None"
    assert convolution.cost.past == 3
