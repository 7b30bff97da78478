"""Recurrent encoders, and recurrent decoders without attention, with Bahdanau's and with Luong's
attention.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from typing import NamedTuple, TypeAlias, TypeVar

import torch
from jaxtyping import Float
from torch import Tensor, nn
from torch.nn.utils.rnn import PackedSequence, pack_padded_sequence, pad_packed_sequence

from regard.caches import Cross
from regard.errors import ArgumentError
from regard.nn.cross_attention import AdditiveAttention, CrossAttention, project_memory
from regard.span import Positions, Span, as_tensor, part

X = TypeVar("X", Tensor, PackedSequence)

HiddenState: TypeAlias = tuple[Tensor, ...]
"""What a recurrent network carries, each part [layers * directions, B, R]: h, and the cell c of an
LSTM.
"""


def run_rnn(
    rnn: nn.RNNBase,
    x: Float[Tensor, "B L M"],
    positions: Positions | None = None,
    hidden: HiddenState | None = None,
) -> tuple[Float[Tensor, "B L R"], HiddenState]:
    """Run a recurrent network over the tokens of each row, in the order of their positions.

    h_t = f(h_{t-1}, x_t) over the slots at positions >= 0; other slots are passed over, wherever
    they stand, and get 0.

    Args:
        rnn: an `nn.RNN`, `nn.GRU` or `nn.LSTM` with batch_first=True.
        x: [B,L,M].
        positions: a `Span`, or [B or 1, L] with -1 where a slot holds nothing; None: every slot
            holds a token.
        hidden: to start from; None is zeros.

    Returns:
        The states at each slot [B,L,R], R counting both directions, and what is carried behind the
        last token.

    >>> rnn = nn.GRU(2, 3, batch_first=True)
    >>> x = torch.randn(1, 2, 2)
    >>> padded = torch.cat([torch.full((1, 1, 2), torch.nan), x], 1)
    >>> torch.allclose(run_rnn(rnn, padded, torch.tensor([[-1, 0, 1]]))[0][:, 1:], rnn(x)[0])
    True

    Source: Elman 1990, "Finding structure in time"; Hochreiter and Schmidhuber 1997, "Long
    short-term memory"; Cho et al. 2014 (arXiv 1406.1078), section 2.3.
    """
    B, L, _ = x.shape
    before = _initial_hidden(rnn, x) if hidden is None else hidden
    if not L:
        size = (rnn.proj_size or rnn.hidden_size) * (2 if rnn.bidirectional else 1)
        return x.new_zeros(B, 0, size), before
    if positions is None or (isinstance(positions, Span) and positions.start >= 0):
        return _call_rnn(rnn, x, before)
    where = as_tensor(positions, x.device).expand(B, L)
    used = where >= 0
    # tokens to the front in the order of their positions; a stable sort leaves empty slots behind
    # them
    order = where.masked_fill(~used, torch.iinfo(where.dtype).max).argsort(dim=1, stable=True)
    lengths = used.sum(1)
    x = x.masked_fill(~used[..., None], 0).gather(1, order[..., None].expand_as(x))
    packed = pack_padded_sequence(
        x, lengths.clamp(min=1).cpu(), batch_first=True, enforce_sorted=False
    )
    made, after = _call_rnn(rnn, packed, before)
    out, _ = pad_packed_sequence(made, batch_first=True, total_length=L)
    back = order.argsort(1)[..., None].expand_as(out)
    out = out.gather(1, back).masked_fill(~used[..., None], 0)
    # a row without tokens was run over one slot of zeros, because torch takes no empty row
    blind = (lengths == 0)[None, :, None]
    return out, tuple(torch.where(blind, old, new) for old, new in zip(before, after, strict=True))


def check_rnn(rnn: nn.RNNBase, *, directions: int | None = None) -> None:
    """A network takes [B,L,M], and has as many directions as it must."""
    if not rnn.batch_first:
        raise ArgumentError(f"{rnn} takes [length, batch, dim]; make it with batch_first=True")
    if directions == 1 and rnn.bidirectional:
        raise ArgumentError(
            f"{rnn} is bidirectional, and a decoder cannot read what it has yet to write; "
            "make it with bidirectional=False"
        )


def _call_rnn(rnn: nn.RNNBase, x: X, hidden: HiddenState) -> tuple[X, HiddenState]:
    """torch gives and takes (h, c) for an LSTM, and h alone for the others."""
    given = hidden if isinstance(rnn, nn.LSTM) else hidden[0]
    out, after = rnn(x, given)
    return out, after if isinstance(rnn, nn.LSTM) else (after,)


def _initial_hidden(rnn: nn.RNNBase, x: Tensor) -> HiddenState:
    """What a network carries in front of the first token."""
    n = rnn.num_layers * (2 if rnn.bidirectional else 1)
    sizes = [rnn.proj_size or rnn.hidden_size, rnn.hidden_size][: 1 + isinstance(rnn, nn.LSTM)]
    return tuple(x.new_zeros(n, x.shape[0], size) for size in sizes)


class EncodedSource(NamedTuple):
    """What an encoder gives to a decoder.

    states: [B,S,R], one per slot of the source.
    positions: [B or 1, S] or a `Span`; -1 is padding.
    """

    states: Tensor
    positions: Positions


class DecoderState(NamedTuple):
    """What a recurrent decoder carries from one step to the next; the step makes a new one, and
    changes nothing in it.

    hidden: of the network.
    cross: the source as its attention remembers it, or None where there is no attention.
    """

    hidden: HiddenState
    cross: Cross | None


class RecurrentDecoder(nn.Module, ABC):
    """From embedded target tokens to features, one per token; what it does with the source is the
    kind's matter.

    Args:
        rnn: the network, batch_first=True, one direction.
        attention: from its states to the encoder's, or None.

    Raises:
        ArgumentError: the network is bidirectional, or not batch_first.
    """

    def __init__(
        self, rnn: nn.RNNBase, attention: CrossAttention | AdditiveAttention | None = None
    ) -> None:
        super().__init__()
        check_rnn(rnn, directions=1)
        self.rnn, self.attention = rnn, attention

    def begin(self, hidden: HiddenState, source: EncodedSource) -> DecoderState:
        """In front of the first token: the state in which the encoder ended, and its states as
        attention remembers them.
        """
        if self.attention is None:
            return DecoderState(hidden, None)
        cache = self.attention.new_cache()  # keys are computed once for all steps
        project_memory(self.attention.project, source.states, source.positions, cache)
        return DecoderState(hidden, cache)

    def look(self, s: Float[Tensor, "B T R"], carried: DecoderState) -> Float[Tensor, "B T R2"]:
        """The contexts that states find in the source."""
        assert self.attention is not None, "a decoder without attention looked at its source"
        context: Tensor = self.attention(s, None, carried.cross)
        return context

    @abstractmethod
    def forward(
        self, y: Float[Tensor, "B T M"], carried: DecoderState, positions: Positions | None = None
    ) -> tuple[Float[Tensor, "B T F"], DecoderState]:
        """y [B,T,M] -> features [B,T,F], and what is carried behind the last token."""


class PlainDecoder(RecurrentDecoder):
    """Without attention: all that the decoder knows of the source is the state in which the encoder
    ended.

    s_0 = encoder's last state;  s_t = f(s_{t-1}, y_{t-1});  features s_t

    Args:
        rnn: the network, batch_first=True, one direction.

    Raises:
        ArgumentError: the network is bidirectional, or not batch_first.

    >>> from regard.span import Span
    >>> decoder = PlainDecoder(nn.GRU(3, 4, batch_first=True))
    >>> source = EncodedSource(torch.zeros(1, 5, 4), Span(0, 5))
    >>> begun = decoder.begin((torch.zeros(1, 1, 4),), source)
    >>> features, carried = decoder(torch.zeros(1, 2, 3), begun)
    >>> features.shape
    torch.Size([1, 2, 4])

    Source: Sutskever et al. 2014 (arXiv 1409.3215), section 2.
    """

    def forward(
        self, y: Float[Tensor, "B T M"], carried: DecoderState, positions: Positions | None = None
    ) -> tuple[Float[Tensor, "B T F"], DecoderState]:
        """y [B,T,M] -> the states [B,T,R]."""
        s, hidden = run_rnn(self.rnn, y, positions, carried.hidden)
        return s, DecoderState(hidden, carried.cross)


class LuongDecoder(RecurrentDecoder):
    """Attention from the present state, behind the network: all steps of a given target are one
    call.

    s_t = f(s_{t-1}, y_{t-1});  c_t = attention(s_t, h);  features tanh(W_c [c_t; s_t])

    Without input feeding (section 3.3 of the paper), which would make each step wait for the one
    before.

    Args:
        rnn: the network, batch_first=True, one direction.
        attention: from its states to the encoder's, such as `luong(...)`.
        states: the size of a context c_t.
        features: the size of what is given out; None is that of s_t.

    Raises:
        ArgumentError: the network is bidirectional, or not batch_first.

    >>> from regard.nn.variants import luong
    >>> from regard.span import Span
    >>> decoder = LuongDecoder(nn.GRU(3, 4, batch_first=True), luong(4, memory_dim=6), 6)
    >>> source = EncodedSource(torch.zeros(1, 5, 6), Span(0, 5))
    >>> begun = decoder.begin((torch.zeros(1, 1, 4),), source)
    >>> features, carried = decoder(torch.zeros(1, 2, 3), begun)
    >>> features.shape, len(carried.cross)
    (torch.Size([1, 2, 4]), 5)

    Source: Luong et al. 2015 (arXiv 1508.04025), equations 5 to 8.
    """

    def __init__(
        self,
        rnn: nn.RNNBase,
        attention: CrossAttention | AdditiveAttention,
        states: int,
        features: int | None = None,
    ) -> None:
        super().__init__(rnn, attention)
        R = rnn.hidden_size
        self.combine = nn.Linear(states + R, R if features is None else features, bias=False)

    def forward(
        self, y: Float[Tensor, "B T M"], carried: DecoderState, positions: Positions | None = None
    ) -> tuple[Float[Tensor, "B T F"], DecoderState]:
        """y [B,T,M] -> attentional states [B,T,F]."""
        s, hidden = run_rnn(self.rnn, y, positions, carried.hidden)
        c = self.look(s, carried)
        return torch.tanh(self.combine(torch.cat([c, s], -1))), DecoderState(hidden, carried.cross)


class BahdanauDecoder(RecurrentDecoder):
    """Attention from the previous state, in front of the network: what was found takes part in the
    next state.

    c_t = attention(s_{t-1}, h);  s_t = f(s_{t-1}, [y_{t-1}; c_t]);
    features maxout(U s_t + V y_{t-1} + C c_t + b)

    Args:
        rnn: the network over [y; c], batch_first=True, one direction.
        attention: from its states to the encoder's, such as `bahdanau(...)`.
        states: the size of a context c_t.
        features: the size of what is given out; None is that of s_t.

    Raises:
        ArgumentError: the network is bidirectional, or not batch_first.

    >>> from regard.nn.variants import bahdanau
    >>> from regard.span import Span
    >>> decoder = BahdanauDecoder(nn.GRU(9, 4, batch_first=True), bahdanau(4, memory_dim=6), 6)
    >>> source = EncodedSource(torch.zeros(1, 5, 6), Span(0, 5))
    >>> begun = decoder.begin((torch.zeros(1, 1, 4),), source)
    >>> features, carried = decoder(torch.zeros(1, 2, 3), begun)
    >>> features.shape, len(carried.cross)
    (torch.Size([1, 2, 4]), 5)

    Source: Bahdanau et al. 2015 (arXiv 1409.0473), equation 4, appendix A.2.2.
    """

    def __init__(
        self,
        rnn: nn.RNNBase,
        attention: CrossAttention | AdditiveAttention,
        states: int,
        features: int | None = None,
    ) -> None:
        super().__init__(rnn, attention)
        R = rnn.hidden_size
        self.read = nn.Linear(R + rnn.input_size, 2 * (R if features is None else features))

    def forward(
        self, y: Float[Tensor, "B T M"], carried: DecoderState, positions: Positions | None = None
    ) -> tuple[Float[Tensor, "B T F"], DecoderState]:
        """y [B,T,M] -> features [B,T,F], step by step."""
        hidden, found = carried.hidden, []
        for t in range(y.shape[1]):
            before = hidden[0][-1][:, None]  # of the top layer, [B,1,R]
            seen = torch.cat([y[:, t : t + 1], self.look(before, carried)], -1)
            where = None if positions is None else part(positions, slice(t, t + 1))
            s, hidden = run_rnn(self.rnn, seen, where, hidden)
            found.append(torch.cat([s, seen], -1))
        joined = torch.cat(found, 1) if found else y.new_zeros(y.shape[0], 0, self.read.in_features)
        return torch.unflatten(self.read(joined), -1, (-1, 2)).amax(-1), DecoderState(
            hidden, carried.cross
        )
