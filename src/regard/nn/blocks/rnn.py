"""Recurrent networks over padded batches, and recurrent decoders with and without attention."""

from __future__ import annotations

from abc import ABC, abstractmethod
from typing import NamedTuple, TypeAlias, TypeVar

import torch
from jaxtyping import Float
from torch import Tensor, nn
from torch.nn.utils.rnn import PackedSequence, pack_padded_sequence, pad_packed_sequence

from regard.caches import Cross
from regard.errors import ArgumentError
from regard.nn.attention.cross import AdditiveAttention, CrossAttention, project_memory
from regard.span import Positions, Span, as_tensor, slice_positions

X = TypeVar("X", Tensor, PackedSequence)

HiddenState: TypeAlias = tuple[Tensor, ...]
"""The hidden state, parts [layers * directions, B, R]: h, and the cell state c of an LSTM."""


def run_rnn(
    rnn: nn.RNNBase,
    x: Float[Tensor, "B L M"],
    positions: Positions | None = None,
    hidden: HiddenState | None = None,
) -> tuple[Float[Tensor, "B L R"], HiddenState]:
    """Run a recurrent network over the tokens of each row, in the order of their positions.

    h_t = f(h_{t-1}, x_t) at positions >= 0. Empty slots are skipped; their states are 0.

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
    slot_positions = as_tensor(positions, x.device).expand(B, L)
    used = slot_positions >= 0
    # Sort tokens to the front by position; empty slots sort behind them.
    largest = torch.iinfo(slot_positions.dtype).max
    order = slot_positions.masked_fill(~used, largest).argsort(dim=1, stable=True)
    lengths = used.sum(1)
    x = x.masked_fill(~used[..., None], 0).gather(1, order[..., None].expand_as(x))
    packed = pack_padded_sequence(
        x, lengths.clamp(min=1).cpu(), batch_first=True, enforce_sorted=False
    )
    packed_out, after = _call_rnn(rnn, packed, before)
    out, _ = pad_packed_sequence(packed_out, batch_first=True, total_length=L)
    back = order.argsort(1)[..., None].expand_as(out)
    out = out.gather(1, back).masked_fill(~used[..., None], 0)
    # torch accepts no empty row, so a row without tokens was run over one slot of zeros: it keeps
    # the initial hidden state.
    is_empty = (lengths == 0)[None, :, None]
    return out, tuple(
        torch.where(is_empty, old, new) for old, new in zip(before, after, strict=True)
    )


def check_rnn(rnn: nn.RNNBase, *, directions: int | None = None) -> None:
    """Check that a network takes inputs [B,L,M] and has an allowed number of directions."""
    if not rnn.batch_first:
        raise ArgumentError(f"{rnn} takes [length, batch, dim]; construct it with batch_first=True")
    if directions == 1 and rnn.bidirectional:
        raise ArgumentError(
            f"{rnn} is bidirectional, but a decoder cannot read later tokens; construct it with "
            "bidirectional=False"
        )


def _call_rnn(rnn: nn.RNNBase, x: X, hidden: HiddenState) -> tuple[X, HiddenState]:
    """Call the network with its state in torch's form: (h, c) for an LSTM, otherwise h."""
    state = hidden if isinstance(rnn, nn.LSTM) else hidden[0]
    out, after = rnn(x, state)
    return out, after if isinstance(rnn, nn.LSTM) else (after,)


def _initial_hidden(rnn: nn.RNNBase, x: Tensor) -> HiddenState:
    """Return the hidden state of zeros before the first token."""
    n = rnn.num_layers * (2 if rnn.bidirectional else 1)
    sizes = [rnn.proj_size or rnn.hidden_size, rnn.hidden_size][: 1 + isinstance(rnn, nn.LSTM)]
    return tuple(x.new_zeros(n, x.shape[0], size) for size in sizes)


class EncodedSource(NamedTuple):
    """The states [B,S,R] of an encoder and their positions, which a decoder attends to."""

    states: Tensor
    positions: Positions


class DecoderState(NamedTuple):
    """The state of a recurrent decoder between two steps, which no step changes."""

    hidden: HiddenState
    cross: Cross | None


class RecurrentDecoder(nn.Module, ABC):
    """Base class of recurrent decoders from embedded target tokens to feature vectors."""

    def __init__(
        self, rnn: nn.RNNBase, attention: CrossAttention | AdditiveAttention | None = None
    ) -> None:
        super().__init__()
        check_rnn(rnn, directions=1)
        self.rnn, self.attention = rnn, attention

    def begin(self, hidden: HiddenState, source: EncodedSource) -> DecoderState:
        """Return the state before the first token."""
        if self.attention is None:
            return DecoderState(hidden, None)
        cache = self.attention.new_cache()  # keys are computed once for all steps
        project_memory(self.attention.project, source.states, source.positions, cache)
        return DecoderState(hidden, cache)

    def attend_to_source(
        self, s: Float[Tensor, "B T R"], state: DecoderState
    ) -> Float[Tensor, "B T R2"]:
        """Attend from decoder states to the source."""
        assert self.attention is not None, "this decoder has no attention"
        context: Tensor = self.attention(s, None, state.cross)
        return context

    @abstractmethod
    def forward(
        self, y: Float[Tensor, "B T M"], state: DecoderState, positions: Positions | None = None
    ) -> tuple[Float[Tensor, "B T F"], DecoderState]:
        """Run the decoder over some target tokens."""


class PlainDecoder(RecurrentDecoder):
    """A recurrent decoder without attention, which uses only the last hidden state of the encoder.

    s_0 = encoder's last state;  s_t = f(s_{t-1}, y_{t-1});  features s_t

    Source: Sutskever et al. 2014 (arXiv 1409.3215), section 2.
    """

    def forward(
        self, y: Float[Tensor, "B T M"], state: DecoderState, positions: Positions | None = None
    ) -> tuple[Float[Tensor, "B T F"], DecoderState]:
        """Map target embeddings y [B,T,M] to the network's states [B,T,R]."""
        s, hidden = run_rnn(self.rnn, y, positions, state.hidden)
        return s, DecoderState(hidden, state.cross)


class LuongDecoder(RecurrentDecoder):
    """A recurrent decoder whose query of step t is the current state s_t: all steps in one call.

    s_t = f(s_{t-1}, y_{t-1});  c_t = attention(s_t, h);  features tanh(W_c [c_t; s_t])

    Input feeding (section 3.3) is left out: it would make each step depend on the last.

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
        self, y: Float[Tensor, "B T M"], state: DecoderState, positions: Positions | None = None
    ) -> tuple[Float[Tensor, "B T F"], DecoderState]:
        """Map target embeddings y [B,T,M] to attentional states [B,T,F]."""
        s, hidden = run_rnn(self.rnn, y, positions, state.hidden)
        c = self.attend_to_source(s, state)
        return torch.tanh(self.combine(torch.cat([c, s], -1))), DecoderState(hidden, state.cross)


class BahdanauDecoder(RecurrentDecoder):
    """A recurrent decoder whose query is the previous state, and whose input is the context.

    c_t = attention(s_{t-1}, h);  s_t = f(s_{t-1}, [y_{t-1}; c_t]);
    features maxout(U s_t + V y_{t-1} + C c_t + b)

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
        self, y: Float[Tensor, "B T M"], state: DecoderState, positions: Positions | None = None
    ) -> tuple[Float[Tensor, "B T F"], DecoderState]:
        """Map target embeddings y [B,T,M] to features [B,T,F], step by step."""
        hidden, outputs = state.hidden, []
        for t in range(y.shape[1]):
            before = hidden[0][-1][:, None]  # the state of the top layer, [B,1,R]

            step_input = torch.cat([y[:, t : t + 1], self.attend_to_source(before, state)], -1)
            position = None if positions is None else slice_positions(positions, slice(t, t + 1))
            s, hidden = run_rnn(self.rnn, step_input, position, hidden)
            outputs.append(torch.cat([s, step_input], -1))
        joined = (
            torch.cat(outputs, 1) if outputs else y.new_zeros(y.shape[0], 0, self.read.in_features)
        )
        return torch.unflatten(self.read(joined), -1, (-1, 2)).amax(-1), DecoderState(
            hidden, state.cross
        )
