"""A network prepared to be run and explained: its tokens, its attentions, and how it is run.

`prepare_run` builds a `PreparedRun` for each kind of model.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any, NamedTuple, TypeAlias

import torch
from torch import Tensor, nn

from regard.errors import ArgumentError, ArgumentTypeError
from regard.models.decoder import Decoder
from regard.models.encoder_decoder import EncoderDecoder
from regard.models.model import Model
from regard.models.prompts import Prompt, encode_prompt
from regard.models.seq2seq import Seq2Seq
from regard.models.text_encoder import TextEncoder
from regard.nn.weights.stored import device_of
from regard.units import plural
from regard.untrusted_text import short_repr


def check_index(name: str, index: int, length: int, one: str, many: str) -> int:
    """Return an index counted from the start.

    Args:
        name: name of the argument, for errors.
        index: the index; negative counts from the end.
        one: what one item is called, for errors.
        many: what several items are called.

    Returns:
        The index, from 0 to length - 1.

    Raises:
        ArgumentError: the index is out of range; the error states the range.
        ArgumentTypeError: `index` is not an int.
    """
    if isinstance(index, bool) or not isinstance(index, int):
        raise ArgumentTypeError(
            f"{name} is {type(index).__name__}; it must be an integer", argument=name
        )
    if not -length <= index < length:
        some = f"{'is' if length == 1 else 'are'} {plural(length, one, many)}"
        raise ArgumentError(
            f"{name} is {index}; there {some}: it must be 0 to {length - 1}, or {-length} to "
            "-1 from the end",
            argument=name,
            value=index,
        )
    return index % length


class TokenSequence(NamedTuple):
    """The tokens of one sequence, and its text as it was written or decoded."""

    ids: tuple[int, ...]
    pieces: tuple[str, ...]
    text: str
    end_offsets: Sequence[int]


class AttentionSite(NamedTuple):
    """One attention module of a network.

    Args:
        place: its dotted name, such as "layers.3"; its taps have this prefix.
        residual_path: the module that adds its output to the residual stream, or None.
    """

    place: str
    layer: int
    attention: nn.Module
    residual_path: nn.Module | None
    query_sequence: str
    key_sequence: str


def _ids_as_text(ids: Sequence[int]) -> Sequence[str]:
    """Return ids as their decimal texts.

    Args:
        ids: token ids.

    Returns:
        A text for each id.
    """
    return [str(i) for i in ids]


@dataclass(frozen=True, eq=False)
class PretokenizedInput:
    """A network without a tokenizer, with its input as ids and words.

    `regard train --task` trains such networks.

    Args:
        network: a `Decoder` for one sequence; an `EncoderDecoder` or a `RecurrentEncoderDecoder`
            for a source and a target.
        source: ids and words of the sequence, or of the source.
        target: ids and words of the target, which begins with the start token; None for one
            sequence.
        name: what the network is called on pages.
        names: maps ids to words, for predictions.

    >>> from regard.inspect.explain.prepared_run import prepare_run
    >>> from regard.models.rnn import recurrent
    >>> network = recurrent(9, 8, 8, attention="luong")
    >>> pair = PretokenizedInput(network, ((3, 4), ("one", "two")), ((1, 5), ("<bos>", "uno")))
    >>> [site.place for site in prepare_run(pair).sites]
    ['decoder']
    """

    network: nn.Module
    source: tuple[Sequence[int], Sequence[str]]
    target: tuple[Sequence[int], Sequence[str]] | None = None
    name: str = "words"
    names: Callable[[Sequence[int]], Sequence[str]] = _ids_as_text


@dataclass(frozen=True, eq=False)
class PreparedRun:
    """A network, its tokens, and how to run it.

    Args:
        sequences: its token sequences by name: "text", or "source" and "target".
        sites: its attention modules, in the order of the run.
        run: function that runs the network once; it returns states or logits, so that two runs can
            be compared.
        embed: the module whose output is the embedded tokens, or None.
        last: the module to whose output `predict` is applied.
        predict: maps rows of that output to logits, or None.
    """

    name: str
    text: str
    network: nn.Module
    sequences: Mapping[str, TokenSequence]
    sites: tuple[AttentionSite, ...]
    run: Callable[[], Tensor]
    embed: nn.Module | None
    last: nn.Module
    predict: Callable[[Tensor], Tensor] | None
    predicted_sequence: str
    names: Callable[[Sequence[int]], Sequence[str]]
    max_trained_tokens: int | None = None
    notes: tuple[str, ...] = ()

    def site(self, layer: int | None = None, place: str | None = None) -> AttentionSite:
        """Return an attention by place or layer (of an encoder-decoder, its cross-attention)."""
        if place is not None:
            for site in self.sites:
                if site.place == place:
                    return site
            known = ", ".join(site.place for site in self.sites)
            raise ArgumentError(
                f"place is {short_repr(place)}, which is not the name of an attention; the names "
                "are "
                f"{known}",
                argument="place",
            )
        sites = self.main_sites
        if layer is None:
            return sites[0]

        return sites[check_index("layer", layer, len(sites), "layer", "layers")]

    @property
    def main_sites(self) -> tuple[AttentionSite, ...]:
        """Return the attentions that `layer` counts: the cross-attentions if any, else all."""
        return tuple(s for s in self.sites if s.query_sequence != s.key_sequence) or self.sites


class TokenEnds(Sequence[int]):
    """The offset of each token's end in the decoded text, each at the cost of one decoding."""

    def __init__(self, ids: Sequence[int], decode: Callable[[Sequence[int]], str]) -> None:
        self._ids, self._decode = ids, decode

    def __len__(self) -> int:
        return len(self._ids)

    def __getitem__(self, i: Any) -> Any:
        return len(self._decode(self._ids[: i + 1]).rstrip("�"))


def pretokenized(ids: Sequence[int], words: Sequence[str]) -> TokenSequence:
    """Build a token sequence from ids and words; its text has a space between words."""
    end_offsets, offset = [], -1
    for word in words:
        offset += len(word) + 1
        end_offsets.append(offset)
    return TokenSequence(tuple(ids), tuple(words), " ".join(words), tuple(end_offsets))


ModelInput: TypeAlias = Model | TextEncoder | Seq2Seq | PretokenizedInput
"""What `prepare_run` and `explain` accept as a model."""


def prepare_run(
    model: ModelInput, text: Prompt | None = None, target: str | None = None
) -> PreparedRun:
    """Prepare a model and a text to be run and explained."""
    if isinstance(model, PretokenizedInput):
        return (
            _prepare_pretokenized_decoder(model)
            if model.target is None
            else _prepare_pretokenized_pair(model, model.target)
        )
    if isinstance(model, TextEncoder) and target is None and isinstance(text, (str, Tensor)):
        return _prepare_text_encoder(model, text)
    if text is None or not (isinstance(text, str) or isinstance(model, Model)):
        raise ArgumentTypeError(f"text is {type(text).__name__}; it must be str", argument="text")
    if isinstance(model, Seq2Seq):
        assert isinstance(text, str), "refused above"
        return _prepare_seq2seq(model, text, target)
    if target is not None:
        kind = type(model).__name__
        raise ArgumentError(
            f"target is given, but a {kind} takes no target; leave it out", argument="target"
        )
    assert isinstance(model, Model), "an encoder is served above"
    return _prepare_decoder(model, text)


def _prepare_decoder(model: Model, prompt: Prompt) -> PreparedRun:
    ids, decoder = torch.tensor([encode_prompt(model, prompt)], device=model.device), model.decoder
    tokens = token_sequence(model, ids, prompt if isinstance(prompt, str) else None)
    head, run = decoder.head, decoder if model.has_head else decoder.hidden
    predict = None if head is None else lambda x: head(decoder.norm(x))
    return PreparedRun(
        _model_type(model),
        tokens.text,
        decoder,
        {"text": tokens},
        tuple(_self_attentions(decoder.layers, "", "text")),
        lambda: run(ids, last=1),
        decoder.embed,
        decoder.layers[-1],
        predict,
        "text",
        model.tokenizer.pieces,
        getattr(model.config, "max_position_embeddings", None),
    )


def _prepare_text_encoder(model: TextEncoder, text: str | Tensor) -> PreparedRun:
    ids, positions, segments = model.encode(text) if isinstance(text, str) else (text, None, None)
    tokens = token_sequence(model, ids)
    network = model.network
    encoder = network if isinstance(network, Decoder) else network.encoder
    head = network.head
    predict = None if head is None else lambda x: head(encoder.norm(x))
    return PreparedRun(
        _model_type(model),
        text if isinstance(text, str) else tokens.text,
        network,
        {"text": tokens},
        tuple(_self_attentions(encoder.layers, "", "text")),
        lambda: model.hidden(ids, positions, segments),
        encoder.embed,
        encoder.layers[-1],
        predict,
        "text",
        model.tokenizer.pieces,
        model.max_seq_length,
    )


def _prepare_seq2seq(model: Seq2Seq, text: str, target: str | None) -> PreparedRun:
    ids, positions = model.encode(text)
    if target is None:
        answer = list(model.beam_search(ids, positions, max_tokens=64)[0][0].ids)
        answer = answer[:-1] if answer and answer[-1] in model.eos_ids else answer
    else:
        answer = model.tokenizer.encode(target)
    target_ids = torch.tensor([[model.start, *answer]], device=ids.device)
    network = model.network
    sequences = {"source": token_sequence(model, ids), "target": token_sequence(model, target_ids)}
    return PreparedRun(
        _model_type(model),
        text,
        network,
        sequences,
        tuple(_encoder_decoder_sites(network)),
        lambda: network(ids, target_ids, positions),
        network.embed,
        network.layers[-1],
        lambda x: network.head(network.norm(x)),
        "target",
        model.tokenizer.pieces,
    )


def _prepare_pretokenized_decoder(row: PretokenizedInput) -> PreparedRun:
    network: Any = row.network
    ids = _ids_tensor(network, row.source[0])
    token_sequence = pretokenized(*row.source)
    sites = tuple(_self_attentions(getattr(network, "layers", []), "", "text"))
    if not sites:
        raise ArgumentError(f"{row.name} has no attention; there is nothing to explain")
    return PreparedRun(
        row.name,
        token_sequence.text,
        network,
        {"text": token_sequence},
        sites,
        lambda: network(ids),
        network.embed,
        network.layers[-1],
        lambda x: network.head(network.norm(x)),
        "text",
        row.names,
    )


def _prepare_pretokenized_pair(
    pair: PretokenizedInput, target_words: tuple[Sequence[int], Sequence[str]]
) -> PreparedRun:
    network: Any = pair.network
    source, target = (_ids_tensor(network, ids) for ids in (pair.source[0], target_words[0]))
    sequences = {"source": pretokenized(*pair.source), "target": pretokenized(*target_words)}
    if isinstance(network, EncoderDecoder):
        sites, embed, last = (
            tuple(_encoder_decoder_sites(network)),
            network.embed,
            network.layers[-1],
        )
        decoder = network

        def predict(x: Tensor) -> Tensor:
            logits: Tensor = decoder.head(decoder.norm(x))
            return logits
    else:
        attention, embed, last, predict = (
            network.decoder.attention,
            None,
            network.decoder,
            network.head,
        )
        if attention is None:
            raise ArgumentError(f"{pair.name} has no attention; there is nothing to explain")
        sites = (AttentionSite("decoder", 0, attention, None, "target", "source"),)
    return PreparedRun(
        pair.name,
        sequences["source"].text,
        network,
        sequences,
        sites,
        lambda: network(source, target),
        embed,
        last,
        predict,
        "target",
        pair.names,
    )


def _ids_tensor(network: nn.Module, ids: Sequence[int]) -> Tensor:
    return torch.tensor([list(ids)], device=device_of(network))


def _self_attentions(
    layers: Iterable[nn.Module], before: str, side: str
) -> Iterator[AttentionSite]:
    """Generate the self-attentions of a stack of blocks."""
    for i, block in enumerate(layers):
        attention = getattr(block, "attention", None)
        if attention is not None:
            around = getattr(block, "attention_residual", None)
            yield AttentionSite(f"{before}layers.{i}", i, attention, around, side, side)


def _encoder_decoder_sites(network: EncoderDecoder) -> Iterator[AttentionSite]:
    """Generate the attentions of an encoder-decoder, in the order of the run."""
    yield from _self_attentions(network.encoder.layers, "encoder.", "source")
    for i, module in enumerate(network.layers):
        block: Any = module
        place = f"decoder.layers.{i}"
        yield AttentionSite(
            f"{place}.attention", i, block.attention, block.attention_residual, "target", "target"
        )
        yield AttentionSite(
            f"{place}.cross", i, block.cross, block.cross_residual, "target", "source"
        )


def token_sequence(
    model: Model | TextEncoder | Seq2Seq, ids: Tensor, text: str | None = None
) -> TokenSequence:
    """Build a token sequence from ids `[1, T]`, with the text that they decode to by default."""
    row, tokenizer = tuple(ids[0].tolist()), model.tokenizer
    # the user's text has no special tokens, which the tokenizer adds around it
    decode = partial(tokenizer.decode, skip_special=text is not None)
    whole = decode(row) if text is None else text
    return TokenSequence(row, tuple(tokenizer.pieces(row)), whole, TokenEnds(row, decode))


def _model_type(model: Model | TextEncoder | Seq2Seq) -> str:
    types = getattr(type(model.config), "model_types", None)
    return types[0] if types else type(model.config).__module__.rpartition(".")[2]
