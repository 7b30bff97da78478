"""Recurrent encoder-decoders: without attention, with Bahdanau's, with Luong's."""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple

import torch
from jaxtyping import Float, Int
from torch import Tensor, nn

from regard.argument_checks import check_positions
from regard.errors import ArgumentError
from regard.models.generation.beam import greedy
from regard.nn.rnn import (
    BahdanauDecoder,
    DecoderState,
    EncodedSource,
    HiddenState,
    LuongDecoder,
    PlainDecoder,
    RecurrentDecoder,
    check_rnn,
    run_rnn,
)
from regard.nn.variants.cross import bahdanau, luong
from regard.span import Positions, Span
from regard.tracing import named_scope

CELLS: dict[str, Callable[..., nn.RNNBase]] = {"rnn": nn.RNN, "gru": nn.GRU, "lstm": nn.LSTM}
"""The networks by name: Elman's, the gated unit, and the long short-term memory."""


class Encoded(NamedTuple):
    """What a source became.

    source: its states, one per slot, and their positions.
    hidden: what the decoder starts from, each part [layers, B, R].
    """

    source: EncodedSource
    hidden: HiddenState


class RecurrentEncoderDecoder(nn.Module):
    """source ids -> encoder -> states;  target ids, states -> decoder -> logits.

    The decoder starts where the encoder ended: behind the last token, or, for a bidirectional
    encoder, behind the first, where its backward direction ends.

    Args:
        embedding: an `nn.Embedding` [V, M] for source and target.
        encoder: an `nn.RNN`, `nn.GRU` or `nn.LSTM` with batch_first=True.
        decoder: `PlainDecoder`, `BahdanauDecoder` or `LuongDecoder`, over a network of the
            encoder's layers and size.
        head: a module [B,T,F] -> [B,T,V].
        bridge: a linear map in s_0 = tanh(bridge(h)), or None: s_0 = h. An LSTM's cell goes over as
            it is.

    Raises:
        ArgumentError: encoder and decoder do not fit one another; when called, ids or positions do
            not fit.

    >>> model = recurrent(11, 8, 16, attention="luong")
    >>> model(torch.tensor([[3, 4, 5]]), torch.tensor([[1, 2]])).shape
    torch.Size([1, 2, 11])

    Source: Sutskever et al. 2014 (arXiv 1409.3215); Bahdanau et al. 2015 (arXiv 1409.0473),
    appendix A.2.
    """

    def __init__(
        self,
        embedding: nn.Embedding,
        encoder: nn.RNNBase,
        decoder: RecurrentDecoder,
        head: nn.Module,
        bridge: nn.Linear | None = None,
    ) -> None:
        super().__init__()
        check_rnn(encoder)
        for name in ("mode", "num_layers", "hidden_size", "proj_size"):
            ours, theirs = getattr(encoder, name), getattr(decoder.rnn, name)
            if ours != theirs:
                raise ArgumentError(
                    f"the encoder's {name} is {ours} and the decoder's {theirs}; they must be "
                    "equal, because the "
                    "decoder starts from the encoder's last state"
                )
        self.embedding, self.encoder, self.decoder = embedding, encoder, decoder
        self.head, self.bridge = head, bridge

    def forward(
        self,
        source_ids: Int[Tensor, "B S"],
        target_ids: Int[Tensor, "B T"],
        source_positions: Positions | None = None,
        target_positions: Positions | None = None,
    ) -> Float[Tensor, "B T V"]:
        """Logits [B,T,V] for the token after each of target_ids [B,T], which are given, not guessed
        (teacher forcing).
        """
        carried = self.begin(self.encode(source_ids, source_positions))
        return self.step(target_ids, carried, target_positions)[0]

    def encode(self, ids: Int[Tensor, "B S"], positions: Positions | None = None) -> Encoded:
        """The states of a source [B,S]; slots at position -1 are padding, wherever they stand, and
        change nothing.
        """
        x, positions = self._embed(ids, positions)
        states, hidden = run_rnn(self.encoder, x, positions)
        ways = 2 if self.encoder.bidirectional else 1
        h, *cell = (torch.unflatten(part, 0, (-1, ways))[:, -1] for part in hidden)
        h = h if self.bridge is None else torch.tanh(self.bridge(h))
        return Encoded(EncodedSource(states, positions), (h, *cell))

    def begin(self, encoded: Encoded) -> DecoderState:
        """What the decoder carries in front of the first token of the target."""
        return self.decoder.begin(encoded.hidden, encoded.source)

    def step(
        self, ids: Int[Tensor, "B T"], carried: DecoderState, positions: Positions | None = None
    ) -> tuple[Float[Tensor, "B T V"], DecoderState]:
        """Logits for the token after each of the next ids [B,T], any number of them, and what is
        carried behind them.
        """
        y, positions = self._embed(ids, positions)
        with named_scope("decoder"):
            features, carried = self.decoder(y, carried, positions)
        return self.head(features), carried

    def greedy(
        self,
        source_ids: Int[Tensor, "B S"],
        source_positions: Positions | None = None,
        *,
        start: int,
        end: int,
        limit: int,
    ) -> Int[Tensor, "B n"]:
        """The likeliest token at each step, from `start` until each row has said `end`, or `limit`
        tokens are there.
        """
        with torch.no_grad():
            carried = self.begin(self.encode(source_ids, source_positions))

        def step(ids: Tensor) -> Tensor:
            nonlocal carried
            logits, carried = self.step(ids, carried)
            return logits

        first = source_ids.new_full((source_ids.shape[0],), start)
        return greedy(step, first, end=end, limit=limit)

    def _embed(self, ids: Tensor, positions: Positions | None) -> tuple[Tensor, Positions]:
        """Vectors [B,L,M] and positions; the id of an empty slot means nothing, and is not looked
        up.
        """
        if ids.ndim != 2:
            raise ArgumentError(
                f"ids are {tuple(ids.shape)}; they must be [batch, length]: use ids[None]"
            )
        if positions is None:
            return self.embedding(ids), Span(0, ids.shape[1])
        check_positions("positions", positions, *ids.shape)
        if not isinstance(positions, Span):
            ids = ids.masked_fill(positions < 0, 0)
        return self.embedding(ids), positions


def recurrent(
    vocabulary: int,
    dim: int,
    hidden: int,
    *,
    cell: str = "gru",
    layers: int = 1,
    attention: str | None = None,
    score: str | None = None,
) -> RecurrentEncoderDecoder:
    """A recurrent encoder-decoder as in the papers.

    None: both directions are one, and the decoder has the encoder's last state only. "bahdanau":
        the encoder reads in both directions, and s_0 = tanh(W h) of the backward one. "luong": one
        direction, attention from the present state.

    Args:
        vocabulary: V, shared by source and target.
        dim: the size M of an embedding.
        hidden: the size R of a state.
        cell: "rnn", "gru" or "lstm".
        layers: of the encoder and of the decoder.
        attention: None, "bahdanau" or "luong".
        score: of Luong's: "dot", "general" or "concat"; None is "general".

    Raises:
        ArgumentError: a name is unknown, or a size is less than 1.

    >>> model = recurrent(11, 8, 16, cell="lstm", attention="bahdanau")
    >>> model.decoder.attention.project.shape.memory
    (16, 32)

    Source: Sutskever et al. 2014 (arXiv 1409.3215); Bahdanau et al. 2015 (arXiv 1409.0473); Luong
    et al. 2015 (arXiv 1508.04025).
    """
    for name, size in (
        ("vocabulary", vocabulary),
        ("dim", dim),
        ("hidden", hidden),
        ("layers", layers),
    ):
        if size < 1:
            raise ArgumentError(f"{name} is {size}; it must be at least 1")
    for name, given, known in (
        ("cell", cell, (*CELLS,)),
        ("attention", attention, (None, "bahdanau", "luong")),
    ):
        if given not in known:
            raise ArgumentError(
                f"{name} is {given!r}; it must be one of {', '.join(map(str, known))}"
            )
    if score is not None and attention != "luong":
        raise ArgumentError(
            f'score is {score!r}, but only attention="luong" has a choice of scores'
        )
    make, two = CELLS[cell], attention == "bahdanau"
    encoder = make(dim, hidden, layers, batch_first=True, bidirectional=two)
    embedding, head = nn.Embedding(vocabulary, dim), nn.Linear(hidden, vocabulary)
    if two:
        found = bahdanau(hidden, memory_dim=2 * hidden)
        network = make(dim + 2 * hidden, hidden, layers, batch_first=True)
        decoder: RecurrentDecoder = BahdanauDecoder(network, found, 2 * hidden)
        return RecurrentEncoderDecoder(embedding, encoder, decoder, head, nn.Linear(hidden, hidden))
    network = make(dim, hidden, layers, batch_first=True)
    if attention is None:
        decoder = PlainDecoder(network)
    else:
        decoder = LuongDecoder(network, luong(hidden, score=score or "general"), hidden)
    return RecurrentEncoderDecoder(embedding, encoder, decoder, head)
