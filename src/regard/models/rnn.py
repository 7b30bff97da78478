"""Recurrent encoder-decoders (RNN, GRU, LSTM), without attention or with Bahdanau's or Luong's."""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple

import torch
from jaxtyping import Float, Int
from torch import Tensor, nn

from regard.argument_checks import check_choice, check_positions
from regard.errors import ArgumentError
from regard.models.generation.beam_search import greedy
from regard.nn.blocks.rnn import (
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
from regard.tracing import named_scope, tap

CELLS: dict[str, Callable[..., nn.RNNBase]] = {"rnn": nn.RNN, "gru": nn.GRU, "lstm": nn.LSTM}
"""Name -> PyTorch class of the recurrent network."""


class EncoderOutput(NamedTuple):
    """The recurrent encoder's result: states, and the decoder's first one, parts [layers, B, R]."""

    source: EncodedSource
    hidden: HiddenState


class RecurrentEncoderDecoder(nn.Module):
    """A recurrent encoder-decoder network, with or without attention.

    source ids -> encoder -> states;  target ids, states -> decoder -> logits for the next token

    The decoder starts from the encoder's state after the last token, or, for a bidirectional one,
    after the first token, where its backward direction ends.

    Args:
        embedding: an `nn.Embedding` [V, M] for source and target.
        encoder: an `nn.RNN`, `nn.GRU` or `nn.LSTM` with batch_first=True.
        decoder: `PlainDecoder`, `BahdanauDecoder` or `LuongDecoder`, of the encoder's size.
        head: a module [B, T, F] -> [B, T, V].
        bridge: a linear map for the initial state s_0 = tanh(bridge(h)), or None for s_0 = h; the
            cell of an LSTM is passed on unchanged.

    Raises:
        ArgumentError: encoder and decoder differ; when called: ids or positions have another shape.

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
                    "equal, because the decoder starts from the encoder's last state"
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
        """Compute logits for the token after each given target token (teacher forcing).

        Args:
            source_ids: ids [B, S] of the source.
            target_ids: ids [B, T] of the target.
            source_positions, target_positions: their positions, -1 for padding; None counts from 0.

        Returns:
            Logits [B, T, V].
        """
        carried = self.begin(self.run_encoder(source_ids, source_positions))
        return self.step(target_ids, carried, target_positions)[0]

    def run_encoder(
        self, ids: Int[Tensor, "B S"], positions: Positions | None = None
    ) -> EncoderOutput:
        """Run the encoder on a source.

        Args:
            ids: ids [B, S] of the source.
            positions: positions [B, S], -1 for padding.

        Returns:
            The hidden states of the source, and the initial state of the decoder.
        """
        x, positions = self._embed(ids, positions)
        states, hidden = run_rnn(self.encoder, x, positions)
        directions = 2 if self.encoder.bidirectional else 1
        h, *cell = (torch.unflatten(part, 0, (-1, directions))[:, -1] for part in hidden)
        h = h if self.bridge is None else torch.tanh(self.bridge(h))
        return EncoderOutput(EncodedSource(states, positions), (h, *cell))

    def begin(self, encoded: EncoderOutput) -> DecoderState:
        """Return the state of the decoder before its first step.

        Args:
            encoded: the result of `run_encoder`.

        Returns:
            The state for the first call of `step`.
        """
        return self.decoder.begin(encoded.hidden, encoded.source)

    def step(
        self, ids: Int[Tensor, "B T"], carried: DecoderState, positions: Positions | None = None
    ) -> tuple[Float[Tensor, "B T V"], DecoderState]:
        """Compute logits for the token after each of the next ids.

        Args:
            ids: the next ids [B, T], any number of them.
            carried: the state of the decoder, from `begin` or from the last step.
            positions: positions [B, T], -1 for padding; None counts from 0.

        Returns:
            Logits [B, T, V], and the state after these ids.
        """
        y, positions = self._embed(ids, positions)
        with named_scope("decoder"):
            features, carried = self.decoder(y, carried, positions)
        return tap("logits", self.head(features)), carried

    def greedy(
        self,
        source_ids: Int[Tensor, "B S"],
        source_positions: Positions | None = None,
        *,
        start: int,
        end: int,
        limit: int,
    ) -> Int[Tensor, "B n"]:
        """Choose the most likely token at each step, until all rows have ended.

        Args:
            source_ids: ids [B, S] of the source.
            source_positions: their positions, -1 for padding; None counts from 0.
            start: the id with which each target begins.
            end: the id that ends a target.
            limit: the largest number of tokens.

        Returns:
            Ids [B, n], n <= limit, without `start`.
        """
        with torch.no_grad():
            carried = self.begin(self.run_encoder(source_ids, source_positions))

        def step(ids: Tensor) -> Tensor:
            nonlocal carried
            logits, carried = self.step(ids, carried)
            return logits

        first = source_ids.new_full((source_ids.shape[0],), start)
        return greedy(step, first, end=end, limit=limit)

    def _embed(self, ids: Tensor, positions: Positions | None) -> tuple[Tensor, Positions]:
        """Return vectors [B, L, M] and positions; padding is embedded as id 0."""
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
    """Build a recurrent encoder-decoder as in the papers.

    attention=None: the decoder receives only the encoder's last state. "bahdanau": the encoder has
    two directions, and s_0 = tanh(W h) from the last state of the backward one. "luong": the
    decoder's current state is the query.

    Args:
        vocabulary: the vocabulary size V, shared by source and target.
        dim: the size M of an embedding.
        hidden: the size R of a state.
        cell: "rnn", "gru" or "lstm".
        layers: the number of layers of the encoder, and of the decoder.
        attention: None, "bahdanau" or "luong".
        score: the score of Luong's attention: "dot", "general" or "concat"; None is "general".

    Returns:
        The network with initial weights.

    Raises:
        ArgumentError: a name is unknown, or a size is less than 1.

    >>> model = recurrent(11, 8, 16, cell="lstm", attention="bahdanau")
    >>> model.decoder.attention.project.shape.memory
    (16, 32)

    Source: Sutskever et al. 2014 (arXiv 1409.3215); Bahdanau et al. 2015 (arXiv 1409.0473); Luong
    et al. 2015 (arXiv 1508.04025).
    """
    sizes = {"vocabulary": vocabulary, "dim": dim, "hidden": hidden, "layers": layers}
    for name, size in sizes.items():
        if size < 1:
            raise ArgumentError(f"{name} is {size}; it must be at least 1")
    check_choice("cell", cell, CELLS)
    check_choice("attention", attention, (None, "bahdanau", "luong"))
    if score is not None and attention != "luong":
        raise ArgumentError(f'score is {score!r}, but only attention="luong" has several scores')
    make, bidirectional = CELLS[cell], attention == "bahdanau"
    encoder = make(dim, hidden, layers, batch_first=True, bidirectional=bidirectional)
    embedding, head = nn.Embedding(vocabulary, dim), nn.Linear(hidden, vocabulary)
    if bidirectional:
        bahdanau_attention = bahdanau(hidden, memory_dim=2 * hidden)
        network = make(dim + 2 * hidden, hidden, layers, batch_first=True)
        decoder: RecurrentDecoder = BahdanauDecoder(network, bahdanau_attention, 2 * hidden)
        return RecurrentEncoderDecoder(embedding, encoder, decoder, head, nn.Linear(hidden, hidden))
    network = make(dim, hidden, layers, batch_first=True)
    if attention is None:
        decoder = PlainDecoder(network)
    else:
        decoder = LuongDecoder(network, luong(hidden, score=score or "general"), hidden)
    return RecurrentEncoderDecoder(embedding, encoder, decoder, head)
