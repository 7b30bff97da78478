"""Embeddings of the last tokens of a text, which a block adds to its residual streams: hashed
n-grams of Qwen4-Exp.
"""

from __future__ import annotations

import math
from collections.abc import Sequence

import torch
from jaxtyping import Float, Int
from torch import Tensor, nn

from regard.argument_checks import check_positive_sizes
from regard.caches import Cache, Parts, State
from regard.caches.joined import Joined
from regard.cost.ngrams import LARGEST_ID, NGramSizes, NGramSpec
from regard.cost.spec import ParameterCounts
from regard.errors import ArgumentError, ArgumentTypeError
from regard.nn.blocks.blocks import Block, Residual, TokenIdBlock
from regard.nn.blocks.residual_streams import StreamNorm
from regard.nn.mixer import Mixer, count_weights
from regard.nn.recurrence.projections import CausalConvolution
from regard.nn.weights import Linear
from regard.ops.linear.short_convolution import short_convolution
from regard.process_state import is_compiling
from regard.span import Positions, Span, find_empty_slots
from regard.units import plural


class EmbeddingInParts(nn.Module):
    """An embedding whose rows stand in several tensors, as files have it.

    A table of 95 GiB is never joined: the parts stay mapped from the file, and rows are read.
    """

    def __init__(self, rows: Sequence[int], dim: int) -> None:
        super().__init__()
        self.size, self.dim = max(rows), dim
        self.parts = nn.ModuleList(nn.Embedding(count, dim) for count in rows)

    def forward(self, rows: Int[Tensor, "*L"]) -> Float[Tensor, "*L P"]:
        """Return the embeddings of rows, which are numbered through all parts."""
        if len(self.parts) == 1:
            whole: Tensor = self.parts[0](rows)
            return whole
        numbers = rows.div(self.size, rounding_mode="floor")
        embedded: Tensor | None = None
        for number in numbers.unique().tolist():
            here = numbers == number
            part = self.parts[number](rows[here] - number * self.size)
            embedded = part.new_empty(*rows.shape, self.dim) if embedded is None else embedded
            embedded = embedded.masked_scatter(here[..., None], part)
        assert embedded is not None, "there is at least one row"
        return embedded


class HashedNGrams(nn.Module):
    """Embeddings of the n-grams that end at each token, in tables whose numbers of rows are primes.

    e_t = concat_h E_h[(id_t m_0 xor id_(t-1) m_1 xor ... xor id_(t-n+1) m_(n-1)) mod rows_h]

    Each n from 2 to the largest has some tables h. Before the text, and before the last `end` in
    front of token t, every id is `end`.

    Args:
        sizes: the sizes, with the number of the layer and the seed.

    Raises:
        ArgumentError: a size is below 1, the tables do not divide the width, n is below 2, or ids
            are too large for the cache.

    >>> sizes = NGramSizes(4, 3, 1, 10, 8, vocabulary=50, end=0, order=0, seed=1)
    >>> grams = HashedNGrams(sizes)
    >>> embedded, past = grams(torch.tensor([[5, 6, 0, 7]]), None, None)
    >>> embedded.shape, sizes.table_rows()
    (torch.Size([1, 4, 4]), (11, 13))

    Source: the code of Qwen4-Exp in transformers, `Qwen4ExpTextNGramEmbedding`.
    """

    def __init__(self, sizes: NGramSizes) -> None:
        super().__init__()
        named = sizes._asdict()
        checked = ("dim", "heads", "rows", "multiple", "vocabulary", "parts")
        check_positive_sizes("HashedNGrams", **{name: named[name] for name in checked})
        if sizes.length < 2 or sizes.dim % sizes.tables:
            raise ArgumentError(
                f"dim is {sizes.dim}, and length {sizes.length} with heads {sizes.heads} gives "
                f"{sizes.tables} tables; length must be at least 2, and the tables must divide dim"
            )
        if max(sizes.vocabulary, sizes.end) >= LARGEST_ID:
            raise ArgumentError(
                f"vocabulary is {sizes.vocabulary} and end {sizes.end}; both must be below "
                f"{LARGEST_ID}, because a cache keeps ids as fp32"
            )
        rows = sizes.table_rows()
        self.sizes = sizes
        self.embedding = EmbeddingInParts(sizes.part_rows(), sizes.dim // sizes.tables)
        self.multipliers = _numbers(sizes.multipliers())
        self.table_rows = _numbers(rows)
        self.first_rows = _numbers([sum(rows[:i]) for i in range(len(rows))])

    def forward(
        self, ids: Int[Tensor, "B T"], state: Parts | None, positions: Positions | None
    ) -> tuple[Float[Tensor, "B T P"], Parts]:
        """Return the embeddings [B,T,P] of the n-grams of a call, and its last ids [B, n - 1, n],
        which are the state of the next call.
        """
        n, end = self.sizes.length, self.sizes.end
        # filter i of the convolution reads the id i tokens back; 0 stands for `end`
        if not is_compiling():
            self._check_numbers()
        channels = (ids - end).to(torch.float32)[..., None].expand(-1, -1, n)  # [B,T] -> [B,T,n]
        readers = torch.eye(n, dtype=torch.float32, device=ids.device).flip(1)
        last, past = short_convolution(channels, readers, state=state, positions=positions)
        reached = torch.cat([torch.ones_like(last[..., :1]), last[..., 1:] != 0], -1).cumprod(-1)
        tokens = (last * reached).long() + end
        mixed, grams = tokens[..., 0] * self.multipliers[0], []
        for i in range(1, n):
            mixed = mixed ^ tokens[..., i] * self.multipliers[i]
            grams.append(mixed)
        hashes = torch.stack(grams, -1).repeat_interleave(self.sizes.heads, -1)  # [B,T,tables]
        rows = hashes.remainder(self.table_rows) + self.first_rows
        embedded: Tensor = self.embedding(rows).flatten(-2)
        return embedded, past

    def _check_numbers(self) -> None:
        """Check that the tables lie within the rows, because a file may say where they are."""
        ranges = torch.stack([self.first_rows, self.table_rows], 1).tolist()
        total = self.sizes.all_rows()
        if wrong := [x for x in ranges if x[0] < 0 or x[1] < 1 or sum(x) > total]:
            raise ArgumentError(
                f"a table of n-grams begins at row {wrong[0][0]} and has "
                f"{plural(wrong[0][1], 'row')}, of {total} in all; ngram_heads_offsets or "
                "ngram_heads_vocab_sizes of the checkpoint are damaged"
            )

    def extra_repr(self) -> str:
        """Return all sizes, each with its name."""
        return ", ".join(f"{name}={value}" for name, value in self.sizes._asdict().items())


def _numbers(values: Sequence[int]) -> nn.Parameter:
    """Return whole numbers that files hold beside the weights."""
    return nn.Parameter(torch.tensor(values, dtype=torch.int64), requires_grad=False)


class NGramInput(nn.Module):
    """What a block adds to its n streams for the last tokens of the text.

    e = grams(ids);  g_i = sigmoid(root(norm(W_k e)_i . norm(x)_i / sqrt(M)));  u_i = g_i W_v e
    y = u + silu(conv(norm(u))), where root(a) = sign(a) sqrt(|a|)

    Args:
        grams: the embeddings of n-grams, of width P.
        dim: the model dim M.
        streams: the number of streams.
        kernel: how many tokens a filter reads.
        dilation: how many tokens lie from one of them to the next.
        eps: the epsilon of the norms.

    Source: the code of Qwen4-Exp in transformers, `Qwen4ExpTextPLELayer`.
    """

    def __init__(
        self,
        grams: HashedNGrams,
        dim: int,
        streams: int,
        *,
        kernel: int,
        dilation: int,
        eps: float = 1e-6,
    ) -> None:
        super().__init__()
        self.grams, self.streams = grams, streams
        self.key = Linear(grams.sizes.dim, streams * dim, bias=False)
        self.value = Linear(grams.sizes.dim, dim, bias=False)
        self.key_norm, self.query_norm, self.value_norm = (
            StreamNorm(dim, streams, eps=eps) for _ in range(3)
        )
        self.convolution = CausalConvolution(streams * dim, kernel, dilation=dilation)

    def forward(
        self,
        x: Float[Tensor, "B T W"],
        ids: Int[Tensor, "B T"],
        state: Parts | None,
        positions: Positions | None,
    ) -> tuple[Float[Tensor, "B T W"], Parts]:
        """Return the addition to the streams x [B, T, n M], and the state after the last token."""
        past_ids, past = (None, None) if state is None else (state[:1], state[1:])
        e, past_ids = self.grams(ids, past_ids, positions)
        keys, queries = self.key_norm(self.key(e)), self.query_norm(x)
        products = (keys * queries).unflatten(-1, (self.streams, -1))  # [B,T,n M] -> [B,T,n,M]
        scores = products.sum(-1, keepdim=True) / math.sqrt(products.shape[-1])
        gates = (scores.abs().clamp(min=1e-6).sqrt() * scores.sign()).sigmoid()
        u = (gates * self.value(e)[..., None, :]).flatten(-2)
        y, past = self.convolution(self.value_norm(u), past, positions)
        return u + y, (*past_ids, *past)

    @property
    def spec(self) -> NGramSpec:
        """The cost of the addition, without the tables, of which a token reads some rows."""
        parts = (part for part in self.children() if part is not self.grams)
        numbers = sum(x.numel() for x in self.grams.parameters(recurse=False))
        weights = sum(map(count_weights, parts), ParameterCounts(biases=numbers))
        return NGramSpec(weights, (), self.convolution.cost, self.grams.sizes.length)


class NGramBlock(TokenIdBlock):
    """A block that first adds an `NGramInput` to its streams.

    Its cache is a `Joined` of that of the attention and a `State` of the last tokens.

    Source: the code of Qwen4-Exp in transformers, `Qwen4ExpTextDecoderLayer`.
    """

    def __init__(
        self,
        grams: NGramInput,
        attention: Mixer,
        feed_forward: nn.Module,
        attention_residual: Residual,
        feed_forward_residual: Residual,
    ) -> None:
        super().__init__(attention, feed_forward, attention_residual, feed_forward_residual)
        self.grams = grams

    def forward(
        self,
        x: Float[Tensor, "B T W"],
        positions: Positions | None = None,
        cache: Cache | None = None,
        backend: str = "auto",
        ids: Int[Tensor, "B T"] | None = None,
    ) -> Float[Tensor, "B T W"]:
        """Apply the block to streams [B, T, n M] of token ids [B,T], as in `Block.forward`."""
        if ids is None:
            raise ArgumentError(
                "this block reads token ids, and got none; call the whole decoder, or give a layer "
                "ids=..."
            )
        own: Cache | None = None
        state: State | None = None
        if cache is not None:
            own, state = self._parts(cache)
        if positions is None:
            positions = Span(0, x.shape[1]) if cache is None else cache.next(x.shape[1])
        empty = find_empty_slots(positions, ids.device)
        ids = ids if empty is None else ids.masked_fill(empty, self.grams.grams.sizes.end)
        added, after = self.grams(x, ids, None if state is None else state.state, positions)
        if state is not None:
            state.store(after, positions)
        y: Tensor = Block.forward(self, x + added, positions, own, backend)
        return y

    @staticmethod
    def _parts(cache: Cache) -> tuple[Cache, State]:
        """Return the cache of the attention and that of the last tokens."""
        if isinstance(cache, Joined) and len(cache.parts) == 2:
            own, state = cache.parts
            if isinstance(state, State):
                return own, state
        raise ArgumentTypeError(
            f"the cache is {type(cache).__name__}; a block with n-grams needs a Joined of the "
            "cache of its attention and a State: use new_cache()"
        )

    def new_cache(self) -> Joined:
        """Return an empty cache of the attention and of the last tokens."""
        return Joined([self.attention.new_cache(), State()])
