"""How each kind of model is run on a text."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from typing import Any, TypeAlias

import torch
from torch import Tensor, nn

from regard.errors import ArgumentError, ArgumentTypeError
from regard.inspect.reading import Ends, Reading, Site, Tokens, Words, spoken
from regard.models.encoder_decoder import EncoderDecoder
from regard.models.model import Model
from regard.models.seq2seq import Seq2Seq
from regard.models.text_encoder import TextEncoder

Source: TypeAlias = Model | TextEncoder | Seq2Seq | Words
"""What can be read."""


def reading(model: Source, text: str | None = None, target: str | None = None) -> Reading:
    """What to run for a model and a text.

    Args:
        model: a decoder, a text encoder, an encoder-decoder (of which `target` is read too: its own
            answer if None), or `Words`, which are their own text.
        text, target: as a person writes them.

    Raises:
        ArgumentError: a text has no tokens, or belongs to no such model.
        ArgumentTypeError: the text is no str.

    >>> import regard
    >>> len(reading(regard.load("tiny"), "to be").sites)
    4
    """
    if isinstance(model, Words):
        return _row(model) if model.target is None else _pair(model, model.target)
    if not isinstance(text, str):
        raise ArgumentTypeError(f"text is {type(text).__name__}; it must be str")
    if isinstance(model, Seq2Seq):
        return _seq2seq(model, text, target)
    if target is not None:
        kind = type(model).__name__
        raise ArgumentError(f"target is given, and a {kind} reads one text; leave it out")
    return _encoder(model, text) if isinstance(model, TextEncoder) else _decoder(model, text)


def _decoder(model: Model, text: str) -> Reading:
    ids, decoder = model.encode(text), model.decoder
    head, run = decoder.head, decoder if model.has_head else decoder.hidden
    predict = None if head is None else lambda x: head(decoder.norm(x))
    return Reading(
        _family(model),
        text,
        decoder,
        {"text": tokens(model, ids, text)},
        tuple(_own(decoder.layers, "", "text")),
        lambda: run(ids, last=1),
        decoder.embed,
        decoder.layers[-1],
        predict,
        "text",
        model.tokenizer.pieces,
        getattr(model.config, "max_position_embeddings", None),
    )


def _encoder(model: TextEncoder, text: str) -> Reading:
    ids, positions, segments = model.encode(text)
    network, encoder = model.network, model.network.encoder
    head = network.head
    predict = None if head is None else lambda x: head(encoder.norm(x))
    return Reading(
        _family(model),
        text,
        network,
        {"text": tokens(model, ids)},
        tuple(_own(encoder.layers, "", "text")),
        lambda: network(ids, positions, segments),
        encoder.embed,
        encoder.layers[-1],
        predict,
        "text",
        model.tokenizer.pieces,
        model.longest,
    )


def _seq2seq(model: Seq2Seq, text: str, target: str | None) -> Reading:
    ids, positions = model.encode(text)
    if target is None:
        said = list(model.search(ids, positions, max_tokens=64)[0][0].ids)
        said = said[:-1] if said and said[-1] in model.ends else said
    else:
        said = model.tokenizer.encode(target)
    given = torch.tensor([[model.start, *said]], device=ids.device)
    network = model.network
    sides = {"source": tokens(model, ids), "target": tokens(model, given)}
    return Reading(
        _family(model),
        text,
        network,
        sides,
        tuple(_sites(network)),
        lambda: network(ids, given, positions),
        network.embed,
        network.layers[-1],
        lambda x: network.head(network.norm(x)),
        "target",
        model.tokenizer.pieces,
    )


def _row(row: Words) -> Reading:
    network: Any = row.network
    ids = _ids(network, row.source[0])
    tokens = spoken(*row.source)
    sites = tuple(_own(getattr(network, "layers", []), "", "text"))
    if not sites:
        raise ArgumentError(f"{row.name} has no attention; there is nothing to explain")
    return Reading(
        row.name,
        tokens.text,
        network,
        {"text": tokens},
        sites,
        lambda: network(ids),
        network.embed,
        network.layers[-1],
        lambda x: network.head(network.norm(x)),
        "text",
        row.names,
    )


def _pair(pair: Words, said: tuple[Sequence[int], Sequence[str]]) -> Reading:
    network: Any = pair.network
    source, target = (_ids(network, ids) for ids in (pair.source[0], said[0]))
    sides = {"source": spoken(*pair.source), "target": spoken(*said)}
    if isinstance(network, EncoderDecoder):
        sites, embed, last = tuple(_sites(network)), network.embed, network.layers[-1]
        own = network

        def predict(x: Tensor) -> Tensor:
            found: Tensor = own.head(own.norm(x))
            return found
    else:
        attention, embed, last, predict = (
            network.decoder.attention,
            None,
            network.decoder,
            network.head,
        )
        if attention is None:
            raise ArgumentError(f"{pair.name} has no attention; there is nothing to explain")
        sites = (Site("decoder", 0, attention, None, "target", "source"),)
    return Reading(
        pair.name,
        sides["source"].text,
        network,
        sides,
        sites,
        lambda: network(source, target),
        embed,
        last,
        predict,
        "target",
        pair.names,
    )


def _ids(network: nn.Module, ids: Sequence[int]) -> Tensor:
    return torch.tensor([list(ids)], device=next(network.parameters()).device)


def _own(layers: Iterable[nn.Module], before: str, side: str) -> Iterator[Site]:
    """Self-attentions of a stack of blocks."""
    for i, block in enumerate(layers):
        attention = getattr(block, "attention", None)
        if attention is not None:
            around = getattr(block, "around_attention", None)
            yield Site(f"{before}layers.{i}", i, attention, around, side, side)


def _sites(network: EncoderDecoder) -> Iterator[Site]:
    """Attentions of an encoder-decoder."""
    yield from _own(network.encoder.layers, "encoder.", "source")
    for i, module in enumerate(network.layers):
        block: Any = module
        place = f"decoder.layers.{i}"
        yield Site(
            f"{place}.attention", i, block.attention, block.around_attention, "target", "target"
        )
        yield Site(f"{place}.cross", i, block.cross, block.around_cross, "target", "source")


def tokens(model: Model | TextEncoder | Seq2Seq, ids: Tensor, text: str | None = None) -> Tokens:
    """Ids [1,T] with their pieces, and where each ends in the text that they decode to."""
    row, tokenizer = tuple(ids[0].tolist()), model.tokenizer
    whole = tokenizer.decode(row) if text is None else text
    return Tokens(row, tuple(tokenizer.pieces(row)), whole, Ends(row, tokenizer.decode))


def _family(model: Model | TextEncoder | Seq2Seq) -> str:
    return type(model.config).__module__.rpartition(".")[2]
