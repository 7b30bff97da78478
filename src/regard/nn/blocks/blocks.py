"""Transformer blocks and the residual connections, with their norms, around their sublayers."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable
from contextlib import nullcontext
from functools import partial
from typing import Any, NamedTuple, TypeAlias

from jaxtyping import Float, Int
from torch import Tensor, nn

from regard.argument_checks import check_number
from regard.caches import Cache, rollback_on_error
from regard.nn.attention.attention import Attention
from regard.nn.attention.cross import CrossAttention
from regard.nn.mixer import Mixer
from regard.process_state import is_compiling
from regard.span import Positions
from regard.tracing import is_tracing, named_scope, parent_scope, tap

Sublayer: TypeAlias = Callable[[Tensor], Tensor]
"""A function [B,T,M] -> [B,T,M] around which a residual connection leads."""


class Residual(nn.Module, ABC):
    """Base class of residual connections: a path around a sublayer, with a norm and dropout.

    Args:
        norm: a module [B,T,M] -> [B,T,M].
        dropout: the dropout probability on the sublayer's output, in training only.

    Raises:
        ArgumentError: dropout is out of range.
    """

    def __init__(self, norm: nn.Module, dropout: float = 0.0) -> None:
        super().__init__()
        check_number("dropout", dropout, -1e-300, 1, "at least 0 and less than 1")
        self.norm, self.dropout = norm, nn.Dropout(dropout)

    def apply_dropout(self, x: Tensor) -> Tensor:
        """Apply dropout to the sublayer's output in training.

        Args:
            x: the sublayer's output [B,T,M].

        Returns:
            The output with dropout, or unchanged in evaluation.
        """
        return self.dropout(x) if self.training else x

    @abstractmethod
    def forward(self, x: Float[Tensor, "B T M"], sublayer: Sublayer) -> Float[Tensor, "B T M"]:
        """Apply the sublayer with its residual connection.

        Args:
            x: hidden states [B,T,M].
            sublayer: a function [B,T,M] -> [B,T,M].

        Returns:
            The new hidden states [B,T,M].
        """


class PreNorm(Residual):
    """Pre-norm residual connection: the input of the sublayer is normalized, x + sublayer(norm(x)).

    The arguments are those of `Residual`.

    >>> import torch
    >>> PreNorm(nn.LayerNorm(2))(torch.tensor([[[2.0, 4.0]]]), lambda x: x.round())
    tensor([[[1., 5.]]], grad_fn=<AddBackward0>)

    Source: Xiong et al. 2020 (arXiv 2002.04745), figure 1b.
    """

    def forward(self, x: Float[Tensor, "B T M"], sublayer: Sublayer) -> Float[Tensor, "B T M"]:
        """Compute x + sublayer(norm(x)) for hidden states [B,T,M]."""
        norm: Any = self._modules["norm"]
        y = sublayer(tap("norm", norm(x)))
        return x + (self.dropout(y) if self.training else y)


class ScaledPreNorm(PreNorm):
    """Pre-norm residual connection with a factor: x + scale sublayer(norm(x)).

    Args:
        scale: the factor.

    Raises:
        ArgumentError: scale is not finite.

    >>> import torch
    >>> ScaledPreNorm(nn.LayerNorm(2), 0.5)(torch.tensor([[[2.0, 4.0]]]), lambda x: 2 * x.round())
    tensor([[[1., 5.]]], grad_fn=<AddBackward0>)

    Source: IBM 2024, Granite 3.0 (`residual_multiplier` of its released code).
    """

    def __init__(self, norm: nn.Module, scale: float, dropout: float = 0.0) -> None:
        super().__init__(norm, dropout)
        check_number("scale", scale, float("-inf"), float("inf"), "finite")
        self.scale = scale

    def forward(self, x: Float[Tensor, "B T M"], sublayer: Sublayer) -> Float[Tensor, "B T M"]:
        """Compute x + scale sublayer(norm(x)) for hidden states [B,T,M]."""
        y = sublayer(tap("norm", self.norm(x)))
        return x + self.apply_dropout(y * self.scale)

    def extra_repr(self) -> str:
        """Return the factor on the sublayer's output."""
        return f"scale={self.scale:g}"


class PostNorm(Residual):
    """Post-norm residual connection: the sum is normalized, norm(x + sublayer(x)).

    The arguments are those of `Residual`.

    >>> import torch
    >>> PostNorm(nn.LayerNorm(2))(torch.tensor([[[2.0, 4.0]]]), torch.zeros_like).round()
    tensor([[[-1., 1.]]], grad_fn=<RoundBackward0>)

    Source: Vaswani et al. 2017 (arXiv 1706.03762), section 3.1.
    """

    def forward(self, x: Float[Tensor, "B T M"], sublayer: Sublayer) -> Float[Tensor, "B T M"]:
        """Compute norm(x + sublayer(x)) for hidden states [B,T,M]."""
        result: Float[Tensor, "B T M"] = self.norm(x + self.apply_dropout(sublayer(x)))
        return tap("norm", result)


class NormedResidual(Residual):
    """Residual connection of the normalized x: alpha n + beta sublayer(n), n = norm(x).

    Args:
        alpha: the factor on the normalized x.
        beta: the factor on the sublayer's output.

    Raises:
        ArgumentError: a factor is not finite.

    >>> import torch
    >>> NormedResidual(nn.LayerNorm(2))(torch.tensor([[[2.0, 4.0]]]), lambda x: 3 * x).round()
    tensor([[[-4., 4.]]], grad_fn=<RoundBackward0>)

    Source: Shoeybi et al. 2019 (arXiv 1909.08053), an option of its released code
    (`apply_residual_connection_post_layernorm`), which checkpoints of BLOOM use; the factors:
    MiniMax 2025 (arXiv 2501.08313), section 2.
    """

    def __init__(
        self, norm: nn.Module, dropout: float = 0.0, *, alpha: float = 1.0, beta: float = 1.0
    ) -> None:
        super().__init__(norm, dropout)
        for name, value in (("alpha", alpha), ("beta", beta)):
            check_number(name, value, float("-inf"), float("inf"), "finite")
        self.alpha, self.beta = alpha, beta

    def forward(self, x: Float[Tensor, "B T M"], sublayer: Sublayer) -> Float[Tensor, "B T M"]:
        """Compute alpha norm(x) + beta sublayer(norm(x)) for hidden states [B,T,M]."""
        normed = tap("norm", self.norm(x))
        added = self.apply_dropout(sublayer(normed))
        result: Float[Tensor, "B T M"] = self.alpha * normed + self.beta * added
        return result

    def extra_repr(self) -> str:
        """Return the factors on the normalized state and on what is added."""
        return f"alpha={self.alpha:g}, beta={self.beta:g}"


class OutputNorm(Residual):
    """Residual connection in which only the sublayer's output is normalized: x + norm(sublayer(x)).

    The arguments are those of `Residual`.

    >>> import torch
    >>> OutputNorm(nn.LayerNorm(2))(torch.tensor([[[2.0, 4.0]]]), lambda x: 3 * x).round()
    tensor([[[1., 5.]]], grad_fn=<RoundBackward0>)

    Source: OLMo 2, 2025 (arXiv 2501.00656), section 2.1.
    """

    def forward(self, x: Float[Tensor, "B T M"], sublayer: Sublayer) -> Float[Tensor, "B T M"]:
        """Compute x + norm(sublayer(x)) for hidden states [B,T,M]."""
        return x + self.apply_dropout(tap("norm", self.norm(sublayer(x))))


class SandwichNorm(Residual):
    """Residual connection with two norms: x + after(sublayer(norm(x))).

    Args:
        norm: the norm before the sublayer.
        after: the norm on the sublayer's output.

    >>> import torch
    >>> path = SandwichNorm(nn.LayerNorm(2), nn.LayerNorm(2))
    >>> path(torch.tensor([[[2.0, 4.0]]]), lambda x: 3 * x).round()
    tensor([[[1., 5.]]], grad_fn=<RoundBackward0>)

    Source: Ding et al. 2021 (arXiv 2105.13290), section 2.4; as in Gemma 2 (arXiv 2408.00118),
    section 2.
    """

    def __init__(self, norm: nn.Module, after: nn.Module, dropout: float = 0.0) -> None:
        super().__init__(norm, dropout)
        self.after = after

    def forward(self, x: Float[Tensor, "B T M"], sublayer: Sublayer) -> Float[Tensor, "B T M"]:
        """Compute x + after(sublayer(norm(x))) for hidden states [B,T,M]."""
        y = self.after(sublayer(tap("norm", self.norm(x))))
        with named_scope("after"):
            y = tap("norm", y)
        return x + self.apply_dropout(y)


class Block(nn.Module):
    """A Transformer block: attention, then a feed-forward layer, each with a residual connection.

    x = attention_residual(x, attention);  x = feed_forward_residual(x, feed_forward)

    With a causal mask in its attention it is a decoder block, without a mask an encoder block.

    Args:
        attention: an `Attention`, or any other `Mixer` [B,T,M] -> [B,T,M].
        feed_forward: a module [B,T,M] -> [B,T,M].
        attention_residual, feed_forward_residual: the residual connections, such as `PreNorm`.

    >>> import torch
    >>> from regard.nn.blocks.blocks import PreNorm
    >>> from regard.nn.variants import mha
    >>> residuals = (PreNorm(nn.LayerNorm(8)) for _ in range(2))
    >>> block = Block(mha(8, 2), nn.Linear(8, 8), *residuals)
    >>> block(torch.zeros(1, 3, 8)).shape
    torch.Size([1, 3, 8])

    Source: Vaswani et al. 2017 (arXiv 1706.03762), section 3.1; pre-norm: Xiong et al. 2020 (arXiv
    2002.04745), figure 1b.
    """

    def __init__(
        self,
        attention: Mixer,
        feed_forward: nn.Module,
        attention_residual: Residual,
        feed_forward_residual: Residual,
    ) -> None:
        super().__init__()
        self.attention_residual, self.attention = attention_residual, attention
        self.feed_forward_residual, self.feed_forward = feed_forward_residual, feed_forward

    def forward(
        self,
        x: Float[Tensor, "B T M"],
        positions: Positions | None = None,
        cache: Cache | None = None,
        backend: str = "auto",
    ) -> Float[Tensor, "B T M"]:
        """Apply the block to hidden states [B,T,M].

        Args:
            x: hidden states [B,T,M].
            positions: positions of their tokens; by default they continue the cache.
            cache: the cache of this block's attention, or None.
            backend: the name of a kernel; "auto" selects one.

        Returns:
            The new hidden states [B,T,M].
        """
        if is_tracing():
            return self._traced_forward(x, positions, cache, backend)
        return self._plain_forward(x, positions, cache, backend)

    def _plain_forward(
        self, x: Tensor, positions: Positions | None, cache: Cache | None, backend: str
    ) -> Tensor:
        """Apply both sublayers to hidden states [B,T,M], one after the other, without taps."""
        parts: dict[str, Any] = self._modules  # much faster than nn.Module's attribute access
        attention = parts["attention"]
        x = parts["attention_residual"](
            x, lambda normed: attention(normed, positions, cache, backend=backend)
        )
        result: Float[Tensor, "B T M"] = parts["feed_forward_residual"](x, parts["feed_forward"])
        return result

    def _traced_forward(
        self, x: Tensor, positions: Positions | None, cache: Cache | None, backend: str
    ) -> Tensor:
        """Compute `forward`, with the taps of the norms, the feed-forward layer and the block."""
        return tap("residual", self._traced_sublayers(x, positions, cache, backend))

    def _traced_sublayers(
        self,
        x: Tensor,
        positions: Positions | None,
        cache: Cache | None,
        backend: str,
        **options: Tensor,
    ) -> Tensor:
        """Apply both sublayers, with their taps; the feed-forward layer gets the options."""
        with named_scope("attention"):
            x = self.attention_residual(x, self._tapped_attention(positions, cache, backend))
        with named_scope("mlp"):
            x = self.feed_forward_residual(x, partial(self._tapped_feed_forward, **options))
        return x

    def _tapped_attention(
        self, positions: Positions | None, cache: Cache | None, backend: str
    ) -> Callable[[Tensor], Tensor]:
        """Return the attention of the normed states, with its taps in the scope of the block."""

        def attend(normed: Tensor) -> Tensor:
            with parent_scope():
                mixed: Tensor = self.attention(normed, positions, cache, backend=backend)
                return mixed

        return attend

    def _tapped_feed_forward(self, normed: Tensor, **options: Tensor) -> Tensor:
        """Apply the feed-forward layer, with its tap in the scope of the block."""
        with parent_scope():
            return tap("mlp", self.feed_forward(normed, **options))

    def new_cache(self) -> Cache:
        """Return an empty cache that suits the attention.

        Returns:
            The cache of `attention.new_cache()`.
        """
        return self.attention.new_cache()


class TokenIdBlock(Block):
    """A block whose feed-forward layer also reads the token ids, such as an `MoE` with a
    `HashRouter`. A `Decoder` passes them.
    """

    def forward(
        self,
        x: Float[Tensor, "B T M"],
        positions: Positions | None = None,
        cache: Cache | None = None,
        backend: str = "auto",
        ids: Int[Tensor, "B T"] | None = None,
    ) -> Float[Tensor, "B T M"]:
        """Apply the block to hidden states [B,T,M] of token ids [B,T], as in `Block.forward`."""
        options = {} if ids is None else {"ids": ids}
        return tap("residual", self._traced_sublayers(x, positions, cache, backend, **options))


class ParallelBlock(Block):
    """A Transformer block whose attention and feed-forward layer have the same input x:
    x + attention(norm_1(x)) + feed_forward(norm_2(x)).

    The arguments are those of `Block`. Only the norm and the dropout of each `PreNorm` are used.

    >>> import torch
    >>> from regard.nn.blocks.blocks import PreNorm
    >>> from regard.nn.variants import mha
    >>> residuals = (PreNorm(nn.LayerNorm(8)) for _ in range(2))
    >>> ParallelBlock(mha(8, 2), nn.Linear(8, 8), *residuals)(torch.zeros(1, 3, 8)).shape
    torch.Size([1, 3, 8])

    Source: Wang and Komatsuzaki 2021 (GPT-J); Black et al. 2022 (arXiv 2204.06745), section 2.1,
    equation 2.
    """

    def _plain_forward(
        self, x: Tensor, positions: Positions | None, cache: Cache | None, backend: str
    ) -> Tensor:
        """Apply both sublayers to hidden states [B,T,M] and add their outputs."""
        mixed = self.attention_residual(
            x, lambda normed: self.attention(normed, positions, cache, backend=backend)
        )
        path = self.feed_forward_residual
        out: Tensor = mixed + path.dropout(self.feed_forward(path.norm(x)))
        return out

    def _traced_forward(
        self, x: Tensor, positions: Positions | None, cache: Cache | None, backend: str
    ) -> Tensor:
        path = self.feed_forward_residual
        with named_scope("attention"):
            mixed = self.attention_residual(x, self._tapped_attention(positions, cache, backend))
        with named_scope("mlp"):
            y = self._tapped_feed_forward(tap("norm", path.norm(x)))
        return tap("residual", mixed + path.dropout(y))


class SharedNormBlock(ParallelBlock):
    """A parallel block with one norm, whose result both sublayers read:
    x + attention(n) + feed_forward(n), n = norm(x).

    Args:
        residual: a `PreNorm` with the norm and the dropout of both sublayers.

    >>> import torch
    >>> from regard.nn.blocks.blocks import PreNorm
    >>> from regard.nn.variants import mha
    >>> block = SharedNormBlock(mha(8, 2), nn.Linear(8, 8), PreNorm(nn.LayerNorm(8)))
    >>> block(torch.zeros(1, 3, 8)).shape
    torch.Size([1, 3, 8])

    Source: Wang and Komatsuzaki 2021 (GPT-J), whose released code has one norm per block.
    """

    def __init__(self, attention: Mixer, feed_forward: nn.Module, residual: PreNorm) -> None:
        super().__init__(attention, feed_forward, residual, PreNorm(nn.Identity()))

    def _plain_forward(
        self, x: Tensor, positions: Positions | None, cache: Cache | None, backend: str
    ) -> Tensor:
        """Apply both sublayers to the normed hidden states [B,T,M] and add their outputs."""
        path = self.attention_residual
        normed = path.norm(x)
        mixed = path.apply_dropout(self.attention(normed, positions, cache, backend=backend))
        out: Tensor = x + mixed + path.apply_dropout(self.feed_forward(normed))
        return out

    def _traced_forward(
        self, x: Tensor, positions: Positions | None, cache: Cache | None, backend: str
    ) -> Tensor:
        path = self.attention_residual
        with named_scope("attention"):
            normed = tap("norm", path.norm(x))
            mixed = path.apply_dropout(self._tapped_attention(positions, cache, backend)(normed))
        with named_scope("mlp"):
            y = path.apply_dropout(self._tapped_feed_forward(normed))
        return tap("residual", x + mixed + y)


class BlockCaches(NamedTuple):
    """The two caches of a `DecoderBlock`.

    Args:
        self_attention: the cache of the target tokens so far.
        cross: the cache of the source's keys and values, which is written once.
    """

    self_attention: Cache
    cross: Cache


class DecoderBlock(nn.Module):
    """A decoder block: self-attention, attention to an encoder's memory, a feed-forward layer.

    A `regard.Trace` records the two attention layers under the names `attention` and `cross`.

    Args:
        attention: an `Attention` with a causal mask.
        cross: a `CrossAttention`.
        attention_residual, cross_residual, feed_forward_residual: as in `Block`.

    Raises:
        ArgumentError: a call passes no memory, and the cache holds none, or both do.

    >>> import torch
    >>> from regard.nn.blocks.blocks import PreNorm
    >>> from regard.nn.variants import cross_attention, mha
    >>> residuals = [PreNorm(nn.LayerNorm(8)) for _ in range(3)]
    >>> block = DecoderBlock(mha(8, 2), cross_attention(8, 2), nn.Linear(8, 8), *residuals)
    >>> block(torch.zeros(1, 3, 8), memory=torch.zeros(1, 5, 8)).shape
    torch.Size([1, 3, 8])

    Source: Vaswani et al. 2017 (arXiv 1706.03762), section 3.1.
    """

    def __init__(
        self,
        attention: Attention,
        cross: CrossAttention,
        feed_forward: nn.Module,
        attention_residual: Residual,
        cross_residual: Residual,
        feed_forward_residual: Residual,
    ) -> None:
        super().__init__()
        self.attention, self.attention_residual = attention, attention_residual
        self.cross, self.cross_residual = cross, cross_residual
        self.feed_forward, self.feed_forward_residual = feed_forward, feed_forward_residual

    def forward(
        self,
        x: Float[Tensor, "B T M"],
        positions: Positions | None = None,
        caches: BlockCaches | None = None,
        *,
        memory: Float[Tensor, "B S M3"] | None = None,
        memory_positions: Positions | None = None,
        backend: str = "auto",
    ) -> Float[Tensor, "B T M"]:
        """Apply the block to target states [B,T,M].

        Args:
            x: hidden states of the target [B,T,M].
            positions: positions of the target tokens; by default they continue the cache.
            caches: the caches of this block, or None.
            memory: states of the source [B,S,M3], unless the caches hold them.
            memory_positions: positions of the source tokens; -1 marks padding.
            backend: the name of a kernel; "auto" selects one.

        Returns:
            The new hidden states [B,T,M].
        """
        self_cache, cross_cache = caches if caches is not None else (None, None)
        if positions is None and self_cache is not None:
            positions = self_cache.next(x.shape[1])

        def attend(x: Tensor) -> Tensor:
            y: Tensor = self.attention(x, positions, self_cache, backend=backend)
            return y

        def attend_to_memory(x: Tensor) -> Tensor:
            own = {"memory": memory, "memory_positions": memory_positions}
            y: Tensor = self.cross(x, positions, cross_cache, backend, **own)
            return y

        # Both caches are restored: the cross-attention may raise after the self-attention has
        # already stored its tokens.
        restored = rollback_on_error(self_cache, cross_cache, layers=True)
        with nullcontext() if is_compiling() else restored:
            with named_scope("attention"):
                x = self.attention_residual(x, attend)
            with named_scope("cross"):
                x = self.cross_residual(x, attend_to_memory)
            with named_scope("mlp"):
                x = self.feed_forward_residual(x, self._tapped_feed_forward)
            return tap("residual", x)

    def _tapped_feed_forward(self, normed: Tensor) -> Tensor:
        """Apply the feed-forward layer, with its tap in the scope of the block."""
        with parent_scope():
            return tap("mlp", self.feed_forward(normed))

    def new_caches(self) -> BlockCaches:
        """Return empty caches for a target and its source.

        Returns:
            The two caches as `BlockCaches`.
        """
        return BlockCaches(self.attention.new_cache(), self.cross.new_cache())
