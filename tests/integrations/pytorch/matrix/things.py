"""What the transforms of torch are tried on: the columns of the tables in docs/pytorch.md."""

from __future__ import annotations

import copy
from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor, nn

import regard
from regard.biases import ALiBi
from regard.integrations.pytorch import WithPast
from regard.masks import Causal, Mask, Window
from regard.models.decoder import Decoder
from regard.nn import Block, InputEmbedding, Linear, PreNorm, RMSNorm, SwiGLU
from regard.nn.variants import build
from tests.nn.catalogue import randomize


@dataclass(frozen=True)
class Thing:
    """A module and its inputs.

    Attributes:
        name: the heading of its column.
        make: the module in float32, in evaluation mode, with seeded weights.
        inputs: the inputs for a length.
        axes: for each input, the dimension that is a length, and the name of that length.
        layer: whether it has parameters; the others are calls of `attend`.
    """

    name: str
    make: Callable[[], nn.Module]
    inputs: Callable[[int], tuple[Tensor, ...]]
    axes: tuple[tuple[int, str], ...]
    layer: bool

    def plain(self, module: nn.Module, args: tuple[Tensor, ...]) -> tuple[Tensor, ...]:
        """What the definition gives in the dtype of the inputs: only it shows its weights."""
        with torch.no_grad(), regard.Trace("pattern"):
            return outputs(module(*args))

    def exact(self, module: nn.Module, args: tuple[Tensor, ...]) -> tuple[Tensor, ...]:
        """What the definition gives in float64."""
        return self.plain(copy.deepcopy(module).double(), wide(args))


def outputs(result: Tensor | tuple[Tensor, ...]) -> tuple[Tensor, ...]:
    """One output or several, as a tuple."""
    return (result,) if isinstance(result, Tensor) else result


def wide(args: tuple[Tensor, ...]) -> tuple[Tensor, ...]:
    """Inputs in float64; token ids stay."""
    return tuple(x.double() if x.is_floating_point() else x for x in args)


class Attend(nn.Module):
    """A call of `attend` as a module."""

    def __init__(self, mask: Mask | None = None, *, sink: bool = False, bias: bool = False) -> None:
        super().__init__()
        self.mask, self.bias = mask, ALiBi(4) if bias else None
        self.register_buffer("sink", torch.tensor([0.5, -1.0, 2.0, 0.0]) if sink else None)

    def forward(self, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        return regard.attend(q, k, v, mask=self.mask, bias=self.bias, sink=self.sink)


def randn(*size: int) -> Tensor:
    """Numbers that depend on the size only."""
    make = torch.Generator().manual_seed(sum(size))
    return torch.randn(size, generator=make, dtype=torch.float64).float()


def qkv(groups: int) -> Callable[[int], tuple[Tensor, ...]]:
    """q, k and v of a length; all differ."""
    return lambda n: tuple(
        (3 - i) * randn(2, heads, n, 8 + i)[..., i:].contiguous()
        for i, heads in enumerate((4, groups, groups))
    )


def call(name: str, groups: int = 4, **options: object) -> Thing:
    """A column of calls of `attend`."""
    make = Attend(**options)  # type: ignore[arg-type]
    return Thing(name, lambda: copy.deepcopy(make).eval(), qkv(groups), ((2, "T"),) * 3, False)


def layer() -> nn.Module:
    """Grouped-query attention with rotary positions."""
    return randomize(build("gqa", 32, 4, groups=2), 0).eval()


def decoder() -> nn.Module:
    """A language model of two blocks, the second with a window."""
    blocks = []
    for attention in (
        build("gqa", 32, 4, groups=2),
        build("sliding_window", 32, 4, groups=2, window=5),
    ):
        norms = PreNorm(RMSNorm(32)), PreNorm(RMSNorm(32))
        blocks.append(Block(attention, SwiGLU(32, 48), *norms))  # type: ignore[arg-type]
    embedding = InputEmbedding(nn.Embedding(19, 32))
    model = Decoder(embedding, blocks, RMSNorm(32), Linear(32, 19, bias=False))
    return randomize(model, 1).eval()


THINGS: tuple[Thing, ...] = (
    call("full"),
    call("causal", mask=Causal()),
    call("window", mask=Causal() & Window(5)),
    call("grouped heads", groups=2, mask=Causal()),
    call("sink", mask=Causal(), sink=True),
    call("bias", mask=Causal(), bias=True),
    Thing("nn.Attention", layer, lambda n: (randn(2, n, 32),), ((1, "T"),), True),
    Thing(
        "nn.Attention with a past",
        lambda: WithPast(layer()).eval(),
        lambda n: (randn(2, n, 32), randn(2, 2, n + 3, 8), -randn(2, 2, n + 3, 8)),
        ((1, "T"), (2, "S"), (2, "S")),
        True,
    ),
    Thing(
        "decoder",
        decoder,
        lambda n: (torch.arange(2 * n).reshape(2, n) * 7 % 19,),
        ((1, "T"),),
        True,
    ),
)
