"""The mechanisms under test, each with its definition: linear attention, retention, gated linear
attention.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any, NamedTuple

import torch
from torch import Tensor

from regard.linear import gated_linear, linear_attention, retention
from tests.oracles.linear import Answer, linear

FORMS = ("recurrent", "chunk", "parallel", "auto")


class Case(NamedTuple):
    q: Tensor
    k: Tensor
    v: Tensor
    g: Tensor

    def to(self, dtype: torch.dtype) -> Case:
        return Case(*(x.to(dtype) for x in self))

    def upto(self, first: int, stop: int) -> Case:
        return Case(*(x[:, :, first:stop] for x in self))


def case(
    B: int = 2, H: int = 4, G: int = 2, T: int = 7, D: int = 4, E: int = 3, scale: float = 1.0
) -> Case:
    """Queries, keys and values at a scale, decays from none to strong; in float64."""
    draw: Any = {"dtype": torch.float64}
    return Case(
        torch.randn(B, H, T, D, **draw) * scale,
        torch.randn(B, G, T, D, **draw) * scale,
        torch.randn(B, G, T, E, **draw) * scale,
        -torch.randn(B, G, T, D, **draw).mul(2).exp(),
    )


class Mechanism(NamedTuple):
    """run(case, **options) -> (out, state);  exact(case, S=, z=, real=) -> Answer.

    parts: how many tensors the state has.
    """

    run: Callable[..., tuple[Tensor, tuple[Tensor, ...]]]
    exact: Callable[..., Answer]
    parts: int = 1
    gated: str = ""


def gammas(c: Case) -> Tensor:
    """[B,G,T,D]: the logarithms of the paper's decays, by the formula."""
    G = c.k.shape[1]
    logs = torch.tensor([math.log(1 - 2.0 ** (-5 - g)) for g in range(G)], dtype=torch.float64)
    return logs[None, :, None, None].expand_as(c.g)


def root(c: Case) -> float:
    return 1 / math.sqrt(c.q.shape[3])


def features(name: str, *, normalize: bool) -> Mechanism:
    given: Any = {"feature_map": name, "normalize": normalize}
    return Mechanism(
        lambda c, **o: linear_attention(*c[:3], **given, **o),
        lambda c, **o: linear(*c[:3], **given, **o),
        1 + normalize,
    )


MECHANISMS = {
    "elu+1": features("elu+1", normalize=True),
    "elu+1, sums": features("elu+1", normalize=False),
    "relu": features("relu", normalize=True),
    "relu^2": features("relu^2", normalize=False),
    "exp": features("exp", normalize=True),
    "softmax": features("softmax", normalize=True),
    "identity": features("identity", normalize=False),
    "retention": Mechanism(
        lambda c, **o: retention(*c[:3], **o),
        lambda c, **o: linear(*c[:3], log_decay=gammas(c), scale=root(c), **o),
    ),
    "gated": Mechanism(
        lambda c, **o: gated_linear(*c, **o),
        lambda c, **o: linear(*c[:3], log_decay=c.g, scale=root(c), **o),
        gated="channel",
    ),
    "gated by head": Mechanism(
        lambda c, **o: gated_linear(*c[:3], c.g[..., :1], **o),
        lambda c, **o: linear(*c[:3], log_decay=c.g[..., :1].expand_as(c.g), scale=root(c), **o),
        gated="head",
    ),
}


def states(answer: Answer, parts: int) -> tuple[Tensor, ...]:
    return answer[1 : 1 + parts]


def assert_same(x: Tensor, y: Tensor, bound: float = 1e-12) -> None:
    """fp64 against fp64: sums of a few dozen products of order 1, a bound of thousands of
    roundings.
    """
    assert x.shape == y.shape
    assert x.dtype == y.dtype == torch.float64
    if x.numel():
        assert float((x - y).detach().abs().max()) <= bound * (1 + float(y.detach().abs().max()))
