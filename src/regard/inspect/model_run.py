"""One input of one model, ready to be run again and again: its tokens, its attentions, and a call
without arguments, during which tensors may be captured or replaced.

Explanation, ablation, patching and attribution need not know which kind of model they have.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence, Sized
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, field
from functools import partial
from typing import Any, NamedTuple, TypeAlias

import torch
from torch import Tensor, nn

from regard.did_you_mean import suggest
from regard.errors import ArgumentError, ArgumentTypeError
from regard.integrations.pytorch.watch import watch
from regard.language import Phrase
from regard.models.decoder import Decoder
from regard.models.encoder_decoder import EncoderDecoder
from regard.models.generation.decode_session import pad_left
from regard.models.model import Model
from regard.models.prompts import encode_rows
from regard.models.seq2seq import Seq2Seq
from regard.models.text_encoder import TextEncoder
from regard.models.text_model import TextModel
from regard.nn.weights import device_of
from regard.span import Positions
from regard.tracing import Trace, list_taps
from regard.units import plural
from regard.untrusted_text import short_repr

Edit: TypeAlias = Callable[[Tensor], Tensor]
"""A function from a tensor at a tap to its replacement."""

AnyModel: TypeAlias = Model | TextEncoder | Seq2Seq | nn.Module
"""A model of this package, or any module."""

Input: TypeAlias = Any
"""A text, ids, messages, several of them, or a mapping of a module's arguments."""


def check_index(name: str, index: int, length: int, one: str, many: str) -> int:
    """Return an index counted from the start; errors call the argument `name`, and items `one` or
    `many`.
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


def check_option(name: str, value: str, known: Sequence[str]) -> None:
    """Refuse a value that is not one of an option's.

    >>> check_option("method", "zero", ("zero", "mean"))
    """
    if value not in known:
        raise ArgumentError(
            f"{name} is {value!r}; it must be one of {', '.join(known)}{suggest(value, known)}",
            argument=name,
        )


class TokenSequence(NamedTuple):
    """The tokens of one sequence, and its text as it was written or decoded; without a tokenizer
    there are ids only.
    """

    ids: tuple[int, ...]
    pieces: tuple[str, ...] = ()
    text: str = ""
    end_offsets: Sequence[int] = ()

    @property
    def labels(self) -> tuple[str, ...]:
        """Return a text for each position: its index and the token, if it is known."""
        return label_positions(self.pieces, len(self.ids))


class Word(NamedTuple):
    """A word of a text: tokens `start` to `stop` - 1, and what they spell."""

    start: int
    stop: int
    text: str


MAX_WORD_TOKENS = 1 << 9
"""The tokens of longer texts are not joined to words: each would be decoded once more."""


def find_words(tokens: TokenSequence) -> tuple[Word, ...]:
    """Join the tokens of a sequence to words.

    Letters and digits of one alphabet belong together, and so do the parts of one character, and a
    space with what follows. Signs, special tokens, and tokens of a script without spaces stand
    alone.

    >>> from regard.inspect.model_run import pretokenized
    >>> find_words(pretokenized((5, 6), ("to", "be")))
    (Word(start=0, stop=1, text='to'), Word(start=1, stop=2, text='be'))
    """
    offsets, pieces = tokens.end_offsets, tokens.pieces
    if len(pieces) > MAX_WORD_TOKENS or not len(offsets) == len(pieces) == len(tokens.ids):
        return tuple(Word(i, i + 1, piece) for i, piece in enumerate(pieces))
    text = offsets.decoded if isinstance(offsets, TokenEnds) else tokens.text
    words: list[Word] = []
    begin, is_open = 0, False
    for i in range(len(pieces)):
        end = offsets[i]
        part, before = text[begin:end], text[max(begin - 1, 0) : begin]
        if is_open or (words and part and _joins(before) and _joins(part[0])):
            start, _, whole = words.pop()
        else:
            start, whole = i, ""
        # a token without a character is a special one, or a part of a character that follows
        is_open = part.isspace() if part else pieces[i].endswith("›")
        words.append(Word(start, i + 1, whole + part.strip() or ("" if is_open else pieces[i])))
        begin = end
    return tuple(words)


def _joins(letter: str) -> bool:
    """Return whether a character joins others to a word: a letter or digit below the scripts of
    East Asia, which put no spaces between words, or an apostrophe.
    """
    return bool(letter) and letter < "\u2e80" and (letter.isalnum() or letter in "'’")


def label_positions(pieces: Sequence[str], length: int) -> tuple[str, ...]:
    """Return a text for each of so many positions: its index and the token, if it is known.

    >>> label_positions(("a",), 1), label_positions((), 2)
    (('0 a',), ('0', '1'))
    """
    if len(pieces) == length:
        return tuple(f"{i} {piece}" for i, piece in enumerate(pieces))
    return tuple(map(str, range(length)))


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

    def __repr__(self) -> str:
        both = (self.source, self.target)
        texts = " and ".join(plural(len(x[0]), "token") for x in both if x is not None)
        return f"PretokenizedInput({self.name}, {type(self.network).__name__}, {texts})"


class RunResult(NamedTuple):
    """The logits `[B, T, V]` or hidden states `[B, T, M]` of one run, and its trace."""

    output: Tensor
    trace: Trace


@dataclass(frozen=True, eq=False)
class ModelRun:
    """A model with one prepared input.

    Args:
        model: a model of this package, or any module.
        call: runs the model without arguments and returns its output.
        sequences: the tokens of the first row: "text", or "source" and "target"; without those
            that have no ids.
        network: the network of the model.
        sites: its attention modules, in the order of the run; () for any other module.
        embed: the module whose output is the embedded tokens, or None.
        last: the module to whose output `predict` is applied, or None.
        predict: maps rows of that output to logits, or None.
        names: maps ids to the texts of tokens.
        decoder_inputs: ids and positions of a run that is no more than those through a decoder, so
            that several edited runs may share a batch; or None.

    >>> import regard
    >>> run = prepare_run(regard.load("tiny"), "to be or")
    >>> result = run.run(capture=["layers.*.z"])
    >>> tuple(result.output.shape)[::2], list(result.trace)[:2]
    ((1, 1920), ['layers.0.z', 'layers.1.z'])
    """

    model: AnyModel
    call: Callable[[], Any]
    sequences: Mapping[str, TokenSequence] = field(default_factory=dict)
    network: nn.Module = field(default_factory=nn.Identity)
    sites: tuple[AttentionSite, ...] = ()
    embed: nn.Module | None = None
    last: nn.Module | None = None
    predict: Callable[[Tensor], Tensor] | None = None
    names: Callable[[Sequence[int]], Sequence[str]] = _ids_as_text
    name: str = ""
    text: str = ""
    max_trained_tokens: int | None = None
    notes: tuple[str, ...] = ()
    decoder_inputs: tuple[Tensor, Positions | None] | None = None
    rows: Callable[[int], Callable[[], Any]] | None = None

    def run(
        self,
        edit: Mapping[str, Edit] | None = None,
        capture: Iterable[str] = (),
        *,
        gradients: bool = False,
        times: int = 1,
    ) -> RunResult:
        """Run the model once, with edits, and capture values; `times` repeats the input as rows."""
        assert times == 1 or self.rows is not None, "the caller asks first"
        trace = Trace(*capture, edit=edit, missing="ignore", gradients=gradients)
        with torch.enable_grad() if gradients else torch.no_grad(), self._watching(), trace:
            output = self.call() if times == 1 or self.rows is None else self.rows(times)()
        return RunResult(main_tensor(output), trace)

    def taps(self, *, patterns: bool = True) -> tuple[str, ...]:
        """Return the names of the taps that one run passes, in their order."""
        with self._watching():
            return list_taps(self.call, patterns=patterns)

    def _watching(self) -> AbstractContextManager[object]:
        """Return a context in which the taps of a foreign module are passed."""
        return watch(self.model) if isinstance(self.model, nn.Module) else nullcontext()

    @property
    def predicted(self) -> str:
        """Return the name of the sequence whose next tokens the model predicts."""
        return "target" if "target" in self.sequences else "text"

    @property
    def tokens(self) -> TokenSequence | None:
        """Return that sequence; None if the input has no token ids."""
        return self.sequences.get(self.predicted)

    def labels(self, length: int) -> tuple[str, ...]:
        """Return a text for each of so many positions: its index and the token, if it is known."""
        return label_positions(() if self.tokens is None else self.tokens.pieces, length)

    def key_labels(self) -> tuple[str, ...]:
        """Return the text of each key that the last token can read; the source comes first."""
        every = self._named_sequences()
        one = len(every) == 1
        return tuple(x if one else f"{n} {x}" for n, each in every.items() for x in each.labels)

    def key_ids(self) -> Tensor:
        """Return the ids of these keys in the first row of the batch, `[S]`."""
        return torch.tensor([i for each in self._named_sequences().values() for i in each.ids])

    def _named_sequences(self) -> Mapping[str, TokenSequence]:
        """Return the sequences, of which there must be some."""
        if not self.sequences:
            raise ArgumentError("the input has no token ids, so that keys cannot be named")
        return self.sequences

    @property
    def main_sites(self) -> tuple[AttentionSite, ...]:
        """Return the attentions that `layer` counts: the cross-attentions if any, else all."""
        return tuple(s for s in self.sites if s.query_sequence != s.key_sequence) or self.sites

    def site(self, layer: int | None = None, place: str | None = None) -> AttentionSite:
        """Return an attention by place or layer (of an encoder-decoder, its cross-attention)."""
        if place is not None:
            for site in self.sites:
                if site.place == place:
                    return site
            known = ", ".join(site.place for site in self.sites)
            raise ArgumentError(
                f"place is {short_repr(place)}, which is not the name of an attention; the names "
                f"are {known}",
                argument="place",
            )
        sites = self.main_sites
        return sites[check_index("layer", layer or 0, len(sites), "layer", "layers")]


class TokenEnds(Sequence[int]):
    """The offset of each token's end in the decoded text, each at the cost of one decoding."""

    def __init__(self, ids: Sequence[int], decode: Callable[[Sequence[int]], str]) -> None:
        self._ids, self._decode = ids, decode

    def __len__(self) -> int:
        return len(self._ids)

    @property
    def decoded(self) -> str:
        """Return the whole decoded text."""
        return self._decode(self._ids)

    def __getitem__(self, i: Any) -> Any:
        return len(self._decode(self._ids[: i + 1]).rstrip("�"))


def token_sequence(model: TextModel, ids: Tensor, text: str | None = None) -> TokenSequence:
    """Build the tokens of the first row of ids, with the text that they decode to by default."""
    row = tuple(ids[0].tolist())
    if not model.has_tokenizer:
        return TokenSequence(row)
    tokenizer = model.tokenizer
    # the user's text has no special tokens, which the tokenizer adds around it
    decode = partial(tokenizer.decode, skip_special=text is not None)
    whole = decode(row) if text is None else text
    return TokenSequence(row, tuple(tokenizer.pieces(row)), whole, TokenEnds(row, decode))


def pretokenized(ids: Sequence[int], words: Sequence[str]) -> TokenSequence:
    """Build a token sequence from ids and words; its text has a space between words."""
    end_offsets, offset = [], -1
    for word in words:
        offset += len(word) + 1
        end_offsets.append(offset)
    return TokenSequence(tuple(ids), tuple(words), " ".join(words), tuple(end_offsets))


def encode_ids(model: Model, text: Input) -> tuple[Tensor, Positions | None]:
    """Return the ids of one prompt, of several, padded on the left, or a tensor as it is."""
    if isinstance(text, Tensor):
        return text, None
    if not (isinstance(text, str) or (isinstance(text, (list, tuple)) and text)):
        raise ArgumentTypeError(
            f"text is {type(text).__name__}; it must be a str, messages, ids, or several of them",
            argument="text",
        )
    ids, positions = pad_left(encode_rows(model, text))
    return ids.to(model.device), positions


def prepare_run(
    model: AnyModel | PretokenizedInput,
    text: Input = None,
    target: str | None = None,
    *,
    last: int | None = None,
) -> ModelRun:
    """Prepare a model to run one input several times.

    Args:
        text: one text, several texts, or token ids `[B, T]`; for a decoder also messages; for a
            module ids, another tensor, or a mapping of its arguments; for a `Seq2Seq` also a pair
            (source, target).
        target: the output of a `Seq2Seq`; None uses its own answer.
        last: the number of last positions whose logits a decoder computes; None is all.
    """
    if isinstance(model, Seq2Seq):
        return _prepare_seq2seq(model, text, target)
    if target is not None:
        raise ArgumentError(
            f"target is given, but a {type(model).__name__} takes no target; leave it out",
            argument="target",
        )
    if isinstance(model, Model):
        return _prepare_decoder(model, text, last)
    if isinstance(model, TextEncoder):
        return _prepare_text_encoder(model, text)
    if isinstance(model, PretokenizedInput):
        return _prepare_pretokenized(model)
    if isinstance(model, nn.Module):
        return _prepare_module(model, text)
    raise ArgumentTypeError(
        f"model is {type(model).__name__}; it must be a Model, a TextEncoder, a Seq2Seq or an "
        "nn.Module",
        argument="model",
    )


def _prepare_decoder(model: Model, text: Input, last: int | None) -> ModelRun:
    ids, positions = encode_ids(model, text)
    tokens = token_sequence(model, ids, text if isinstance(text, str) else None)
    decoder = model.decoder
    run = model.forward if model.has_head else model.hidden
    if last is not None:
        run = partial(decoder if model.has_head else decoder.hidden, last=last)
    return ModelRun(
        model,
        lambda: run(ids, positions),
        {"text": tokens},
        network=decoder,
        sites=tuple(_self_attentions(decoder.layers, "", "text")),
        **_ends_of(decoder, model.decoder.head),
        max_trained_tokens=getattr(model.config, "max_position_embeddings", None),
        decoder_inputs=(ids, positions) if last is None else None,
        **_names_of(model, tokens.text),
    )


def _ends_of(stack: Any, head: nn.Module | None) -> dict[str, Any]:
    """Return the first and the last part of a stack of blocks, and how states become logits."""
    predict = None if head is None else lambda x: head(stack.norm(x))
    return {"embed": stack.embed, "last": stack.layers[-1], "predict": predict}


def _names_of(model: TextModel, text: str) -> dict[str, Any]:
    """Return the name of a model, its texts of tokens, and the text that it reads."""
    types = getattr(type(model.config), "model_types", None)
    name = types[0] if types else type(model.config).__module__.rpartition(".")[2]
    names = model.tokenizer.pieces if model.has_tokenizer else _ids_as_text
    return {"name": name, "names": names, "text": text}


def _prepare_text_encoder(model: TextEncoder, text: Input) -> ModelRun:
    arguments = (text,) if isinstance(text, Tensor) else tuple(model.encode(text))
    tokens = token_sequence(model, arguments[0])
    network = model.network
    body, head = (
        (network, None) if isinstance(network, Decoder) else (network.encoder, network.head)
    )
    return ModelRun(
        model,
        lambda: model.hidden(*arguments),
        {"text": tokens},
        network=network,
        sites=tuple(_self_attentions(body.layers, "", "text")),
        **_ends_of(body, head),
        max_trained_tokens=model.max_seq_length,
        **_names_of(model, text if isinstance(text, str) else tokens.text),
    )


def _prepare_seq2seq(model: Seq2Seq, text: Input, target: str | None) -> ModelRun:
    source: Any = text
    answer: Any = target
    if isinstance(text, (tuple, list)) and len(text) == 2 and target is None:
        source, answer = text
    positions: Positions | None = None
    if isinstance(source, Tensor):
        source_ids = source
    elif isinstance(source, str):
        source_ids, positions = model.encode(source)
    else:
        raise ArgumentTypeError(
            f"text is {type(text).__name__}; for a Seq2Seq it must be a text, or a pair (source, "
            "target)",
            argument="text",
        )
    ids = answer
    if not isinstance(answer, Tensor):
        if answer is None:
            row = list(model.beam_search(source_ids, positions, max_tokens=64)[0][0].ids)
            row = row[:-1] if row and row[-1] in model.eos_ids else row
        else:
            row = model.tokenizer.encode(answer)
        ids = torch.tensor([[model.start, *row]], device=model.device)
    network, sequences = model.network, {"target": token_sequence(model, ids)}
    if not source_ids.is_floating_point():  # speech has no tokens
        sequences = {"source": token_sequence(model, source_ids), **sequences}
    return ModelRun(
        model,
        lambda: model.forward(source_ids, ids, positions),
        sequences,
        network=network,
        sites=tuple(_encoder_decoder_sites(network)),
        **_ends_of(network, network.head),
        **_names_of(model, source if isinstance(source, str) else sequences["target"].text),
    )


def _prepare_pretokenized(example: PretokenizedInput) -> ModelRun:
    network: Any = example.network
    texts = [example.source] if example.target is None else [example.source, example.target]
    names = ["text"] if example.target is None else ["source", "target"]
    sequences = {name: pretokenized(*x) for name, x in zip(names, texts, strict=True)}
    ids = [torch.tensor([list(x.ids)], device=device_of(network)) for x in sequences.values()]
    if example.target is None:
        sites = tuple(_self_attentions(getattr(network, "layers", []), "", "text"))
    elif isinstance(network, EncoderDecoder):
        sites = tuple(_encoder_decoder_sites(network))
    else:
        attention = network.decoder.attention
        site = AttentionSite("decoder", 0, attention, None, "target", "source")
        sites = () if attention is None else (site,)
    if not sites:
        raise ArgumentError(f"{example.name} has no attention; there is nothing to explain")
    if hasattr(network, "layers"):
        outer = _ends_of(network, network.head)
    else:  # a recurrent decoder has no blocks and no last norm
        outer = {"last": network.decoder, "predict": network.head}
    return ModelRun(
        network,
        lambda: network(*ids),
        sequences,
        network=network,
        sites=sites,
        **outer,
        names=example.names,
        name=example.name,
        text=next(iter(sequences.values())).text,
    )


def _prepare_module(model: nn.Module, text: Input) -> ModelRun:
    named: dict[str, Any] = {}
    if isinstance(text, Mapping):
        named, ids = dict(text), text.get("input_ids")
    elif isinstance(text, Tensor):
        ids = None if text.is_floating_point() else text
        if is_transformers_model(model):
            named = {getattr(model, "main_input_name", "input_ids"): text}
    else:
        raise ArgumentTypeError(
            f"text is {type(text).__name__}; a {type(model).__name__} has no tokenizer of this "
            "package: give token ids, a tensor, or a mapping of its keyword arguments",
            argument="text",
        )
    inputs = () if named else (text,)
    if getattr(getattr(model, "config", None), "use_cache", None):
        named.setdefault("use_cache", False)
    sequences = {} if ids is None else {"text": TokenSequence(tuple(ids[0].tolist()))}
    rows = None
    repeatable = all(x is None or isinstance(x, (Tensor, bool)) for x in named.values())
    if ids is not None and not model.training and is_transformers_model(model) and repeatable:
        rows = partial(_repeated_call, model, named, len(ids))
    return ModelRun(model, lambda: model(*inputs, **named), sequences, rows=rows)


def is_transformers_model(model: nn.Module) -> bool:
    """Return whether a module has a config of transformers that names an implementation."""
    return getattr(getattr(model, "config", None), "_attn_implementation", None) is not None


def _repeated_call(
    model: nn.Module, named: Mapping[str, Any], B: int, times: int
) -> Callable[[], Any]:
    """Return the call of a module with the B rows of its arguments repeated."""
    arguments = {
        name: torch.cat([x] * times) if isinstance(x, Tensor) and x.ndim > 1 and len(x) == B else x
        for name, x in named.items()
    }
    return lambda: model(**arguments)


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
        place, own, cross = f"decoder.layers.{i}", block.attention_residual, block.cross_residual
        yield AttentionSite(f"{place}.attention", i, block.attention, own, "target", "target")
        yield AttentionSite(f"{place}.cross", i, block.cross, cross, "target", "source")


def passed_once(trace: Trace | Mapping[str, Tensor]) -> dict[str, Tensor]:
    """Return what a trace captured by name; refuse a tap that one run passed several times."""
    for name, count in _passed_often(trace).items():
        raise ArgumentError(
            f"the run passed {name} {count} times, because one module runs several times with the "
            "same weights, and has other values each time; ablate(method='zero') and knockout "
            "change all of them, and regard.inspect.record shows each"
        )
    return {name: trace[name] for name in trace}


def repeat_notes(trace: Trace) -> tuple[str, ...]:
    """Return a note for each tap that one run passed several times, and that edits change then."""
    return tuple(
        Phrase("one run passes {name} {count} times; each is changed", name=name, count=count)
        for name, count in _passed_often(trace).items()
    )


def _passed_often(trace: Trace | Mapping[str, Tensor]) -> dict[str, int]:
    """Return the taps that a trace captured more than once, and how often."""
    counts = {name: len(trace.every(name)) for name in trace} if isinstance(trace, Trace) else {}
    return {name: count for name, count in counts.items() if count > 1}


def check_passed(names: Sized, tap: str) -> None:
    """Refuse a run that passed no tap of a name.

    >>> check_passed(["layers.0.z"], "z")
    """
    if len(names):
        return
    reason = "its mechanism has no softmax weights, or " if tap == "pattern" else ""
    raise ArgumentError(
        f"the run passed no tap {tap!r}: {reason}its attention is written out, or is no attention "
        "at all; see regard.inspect.record, which says why"
    )


def main_tensor(output: Any) -> Tensor:
    """Return the tensor of a model's output that a metric reads: itself, its logits, its last
    hidden states (each an attribute or a key), or its first tensor.

    >>> main_tensor((torch.zeros(2), 1)).shape
    torch.Size([2])
    """
    if isinstance(output, Tensor):
        return output
    for name in ("logits", "last_hidden_state"):
        value = output.get(name) if isinstance(output, Mapping) else getattr(output, name, None)
        if isinstance(value, Tensor):
            return value
    if isinstance(output, (tuple, list)) and output and isinstance(output[0], Tensor):
        return output[0]
    raise ArgumentError(
        f"the model returned {type(output).__name__}, which has no logits, no last_hidden_state "
        "and no first tensor; wrap the model in a module that returns the tensor to measure"
    )


def taps(model: AnyModel, text: Input | None = None, *, patterns: bool = True) -> tuple[str, ...]:
    """List the taps of a model: the names that `regard.Trace` captures and edits.

    The model runs once. Open `watch(model)` as well to trace a module that is not of this package.

    Args:
        model: a model of this package, or any module.
        text: the input of the run; None is two token ids.
        patterns: whether `scores` and `pattern` are listed, which only the reference kernel passes.

    Returns:
        The full names, in the order of the computation.

    Raises:
        ArgumentTypeError: the model has an unsupported type.

    >>> layer = nn.TransformerEncoderLayer(8, 2, batch_first=True).eval()
    >>> taps(layer, torch.zeros(1, 3, 8), patterns=False)
    ('self_attn.q', 'self_attn.k', 'self_attn.v', 'self_attn.z', 'norm1.norm', 'norm2.norm')
    """
    if text is None and isinstance(model, TextModel):
        return model.taps(patterns=patterns)
    ids = torch.zeros(1, 2, dtype=torch.int64) if text is None else text
    return prepare_run(model, ids).taps(patterns=patterns)
