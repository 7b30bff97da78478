"""Recurrent networks over rows of different length."""

from __future__ import annotations

from typing import TypeAlias, TypeVar

import torch
from jaxtyping import Float
from torch import Tensor, nn
from torch.nn.utils.rnn import PackedSequence, pack_padded_sequence, pad_packed_sequence

from regard.errors import ArgumentError
from regard.span import Positions, Span, as_tensor

X = TypeVar("X", Tensor, PackedSequence)

Hidden: TypeAlias = tuple[Tensor, ...]
"""What a recurrent network carries, each part [layers * directions, B, R]: h, and the cell c of an LSTM."""


def scan(
    rnn: nn.RNNBase,
    x: Float[Tensor, "B L M"],
    positions: Positions | None = None,
    hidden: Hidden | None = None,
) -> tuple[Float[Tensor, "B L R"], Hidden]:
    """Run a recurrent network over the tokens of each row, in the order of their positions.

    h_t = f(h_{t-1}, x_t) over the slots at positions >= 0; other slots are passed over, wherever they stand, and get 0.

    Args:
        rnn: an `nn.RNN`, `nn.GRU` or `nn.LSTM` with batch_first=True.
        x: [B,L,M].
        positions: a `Span`, or [B or 1, L] with -1 where a slot holds nothing; None: every slot holds a token.
        hidden: to start from; None is zeros.

    Returns:
        The states at each slot [B,L,R], R counting both directions, and what is carried behind the last token.

    >>> rnn = nn.GRU(2, 3, batch_first=True)
    >>> x = torch.randn(1, 2, 2)
    >>> padded = torch.cat([torch.full((1, 1, 2), torch.nan), x], 1)
    >>> torch.allclose(scan(rnn, padded, torch.tensor([[-1, 0, 1]]))[0][:, 1:], rnn(x)[0])
    True

    Source: Elman 1990, "Finding structure in time"; Hochreiter and Schmidhuber 1997, "Long short-term memory"; Cho et al.
    2014 (arXiv 1406.1078), section 2.3.
    """
    B, L, _ = x.shape
    before = _zeros(rnn, x) if hidden is None else hidden
    if not L:
        size = (rnn.proj_size or rnn.hidden_size) * (2 if rnn.bidirectional else 1)
        return x.new_zeros(B, 0, size), before
    if positions is None or (isinstance(positions, Span) and positions.start >= 0):
        return _run(rnn, x, before)
    where = as_tensor(positions, x.device).expand(B, L)
    used = where >= 0
    # tokens to the front in the order of their positions; a stable sort leaves empty slots behind them
    order = where.masked_fill(~used, torch.iinfo(where.dtype).max).argsort(dim=1, stable=True)
    lengths = used.sum(1)
    x = x.masked_fill(~used[..., None], 0).gather(1, order[..., None].expand_as(x))
    packed = pack_padded_sequence(
        x, lengths.clamp(min=1).cpu(), batch_first=True, enforce_sorted=False
    )
    made, after = _run(rnn, packed, before)
    out, _ = pad_packed_sequence(made, batch_first=True, total_length=L)
    back = order.argsort(1)[..., None].expand_as(out)
    out = out.gather(1, back).masked_fill(~used[..., None], 0)
    # a row without tokens was run over one slot of zeros, because torch takes no empty row
    blind = (lengths == 0)[None, :, None]
    return out, tuple(torch.where(blind, old, new) for old, new in zip(before, after, strict=True))


def check_network(rnn: nn.RNNBase, *, directions: int | None = None) -> None:
    """A network takes [B,L,M], and has as many directions as it must."""
    if not rnn.batch_first:
        raise ArgumentError(f"{rnn} takes [length, batch, dim]; make it with batch_first=True")
    if directions == 1 and rnn.bidirectional:
        raise ArgumentError(
            f"{rnn} is bidirectional, and a decoder cannot read what it has yet to write; "
            "make it with bidirectional=False"
        )


def _run(rnn: nn.RNNBase, x: X, hidden: Hidden) -> tuple[X, Hidden]:
    """torch gives and takes (h, c) for an LSTM, and h alone for the others."""
    given = hidden if isinstance(rnn, nn.LSTM) else hidden[0]
    out, after = rnn(x, given)
    return out, after if isinstance(rnn, nn.LSTM) else (after,)


def _zeros(rnn: nn.RNNBase, x: Tensor) -> Hidden:
    """What a network carries in front of the first token."""
    n = rnn.num_layers * (2 if rnn.bidirectional else 1)
    sizes = [rnn.proj_size or rnn.hidden_size, rnn.hidden_size][: 1 + isinstance(rnn, nn.LSTM)]
    return tuple(x.new_zeros(n, x.shape[0], size) for size in sizes)
