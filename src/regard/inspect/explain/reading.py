"""What is explained: a network on its tokens, the attentions that it consists of, and how each kind
of model is run.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple, TypeAlias

import torch
from torch import Tensor, nn

from regard.errors import ArgumentError, ArgumentTypeError
from regard.foreign import shown
from regard.models.encoder_decoder import EncoderDecoder
from regard.models.model import Model
from regard.models.seq2seq import Seq2Seq
from regard.models.text_encoder import TextEncoder


def check_index(name: str, index: int, length: int, one: str, many: str) -> int:
    """The index, counted from the front; ArgumentError with the allowed range if there is none
    such.
    """
    if isinstance(index, bool) or not isinstance(index, int):
        raise ArgumentTypeError(f"{name} is {type(index).__name__}; it must be an integer")
    if not -length <= index < length:
        some = f"{length} {many if length != 1 else one}"
        raise ArgumentError(
            f"{name} is {index}; there are {some}: it must be 0 to {length - 1}, or {-length} to "
            "-1 from the end"
        )
    return index % length


class Tokens(NamedTuple):
    """One sequence. text: as a person wrote it, or as its tokens decode; ends: for each token,
    where it ends in the text.
    """

    ids: tuple[int, ...]
    pieces: tuple[str, ...]
    text: str
    ends: Sequence[int]


class Site(NamedTuple):
    """One attention of a network.

    place: where its taps stand. rows, columns: the names of the sequences of its queries and of its
        keys.
    around: its residual path, or None.
    """

    place: str
    layer: int
    attention: nn.Module
    around: nn.Module | None
    rows: str
    columns: str


@dataclass(frozen=True, eq=False)
class Words:
    """Words as tokens, for a network without a tokenizer, such as `regard train --task` makes: a
    row, or a source and a target.

    network: a `Decoder` of a row; or an `EncoderDecoder` or a `RecurrentEncoderDecoder`.
    source: ids and words; target: the same of what is said, beginning with the token that starts
        every target; None of a row.
    names: ids -> words, for predictions.

    >>> from regard.inspect.explain.reading import reading
    >>> from regard.models.rnn import recurrent
    >>> network = recurrent(9, 8, 8, attention="luong")
    >>> pair = Words(network, ((3, 4), ("one", "two")), ((1, 5), ("<bos>", "uno")))
    >>> [site.place for site in reading(pair).sites]
    ['decoder']
    """

    network: nn.Module
    source: tuple[Sequence[int], Sequence[str]]
    target: tuple[Sequence[int], Sequence[str]] | None = None
    name: str = "words"
    names: Callable[[Sequence[int]], Sequence[str]] = lambda ids: [str(i) for i in ids]


@dataclass(frozen=True, eq=False)
class Reading:
    """A network, its tokens, and how to run it.

    Attributes:
        name, text: what was asked for.
        network: the whole.
        sides: its sequences by name: "text", or "source" and "target".
        sites: its attentions, in the order of the run.
        run: runs it once; gives states or logits, for a comparison of two runs.
        embed: the module whose output is the embedded tokens, or None.
        last: the module behind whose output `predict` makes logits of a row [M], of the side
            `predicts`.
        names: ids -> what each is called.
        trained: the most tokens that it was trained on, or None. notes: what a reader should know.
    """

    name: str
    text: str
    network: nn.Module
    sides: Mapping[str, Tokens]
    sites: tuple[Site, ...]
    run: Callable[[], Tensor]
    embed: nn.Module | None
    last: nn.Module
    predict: Callable[[Tensor], Tensor] | None
    predicts: str
    names: Callable[[Sequence[int]], Sequence[str]]
    trained: int | None = None
    notes: tuple[str, ...] = ()

    def site(self, layer: int | None = None, place: str | None = None) -> Site:
        """An attention by its place, or by its layer: of an encoder-decoder the one that reads the
        source.

        Raises:
            ArgumentError: there is none such.
        """
        if place is not None:
            for site in self.sites:
                if site.place == place:
                    return site
            known = ", ".join(site.place for site in self.sites)
            raise ArgumentError(
                f"place is {shown(place)}, where no attention is; there are {known}"
            )
        sites = self.main
        if layer is None:
            return sites[0]

        return sites[check_index("layer", layer, len(sites), "layer", "layers")]

    @property
    def main(self) -> tuple[Site, ...]:
        """The attentions that `layer` counts: those to the source, if there are any, else all."""
        return tuple(s for s in self.sites if s.rows != s.columns) or self.sites


class Ends(Sequence[int]):
    """Where each token ends in the decoded text; decoded when asked for, since each costs a
    decoding of all before it.
    """

    def __init__(self, ids: Sequence[int], decode: Callable[[Sequence[int]], str]) -> None:
        self._ids, self._decode = ids, decode

    def __len__(self) -> int:
        return len(self._ids)

    def __getitem__(self, i: Any) -> Any:
        return len(self._decode(self._ids[: i + 1]).rstrip("�"))


def spoken(ids: Sequence[int], words: Sequence[str]) -> Tokens:
    """Words as tokens; the text has a space between them."""
    ends, at = [], -1
    for word in words:
        at += len(word) + 1
        ends.append(at)
    return Tokens(tuple(ids), tuple(words), " ".join(words), tuple(ends))


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
        model.max_seq_length,
    )


def _seq2seq(model: Seq2Seq, text: str, target: str | None) -> Reading:
    ids, positions = model.encode(text)
    if target is None:
        said = list(model.beam_search(ids, positions, max_tokens=64)[0][0].ids)
        said = said[:-1] if said and said[-1] in model.eos_ids else said
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
    types = getattr(type(model.config), "model_types", None)
    return types[0] if types else type(model.config).__module__.rpartition(".")[2]
