"""Any mechanism of the catalogue in a small network with random weights, to be looked at."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from functools import cache
from importlib import resources
from pathlib import Path
from typing import Any

from torch import nn

from regard.inspect.explain.reading import Reading, Words, reading
from regard.models.assembly.catalogue_mixer import decoder_variants
from regard.models.encoder import Encoder, HeadedEncoder
from regard.models.encoder_decoder import transformer
from regard.models.families import bert
from regard.models.families import regard as own
from regard.models.model import Model
from regard.models.rnn import recurrent
from regard.models.seq2seq import Seq2Seq
from regard.models.text_encoder import TextEncoder
from regard.models.tokenizer import Tokenizer
from regard.nn import Block, Embed, PreNorm, RMSNorm, SwiGLU
from regard.nn.variants.registry import Variant, checked, find, names
from regard.process import seeded

DIM, HEADS, LAYERS = 32, 4, 2
"""Sizes of the network: those of the catalogue's examples."""

SHARP = 1.5
"""Times 1/sqrt(inputs): the deviation of the mechanism's weights, so that its patterns are not
uniform.
"""


def random_model(
    name: str,
    text: str,
    *,
    options: Mapping[str, Any] | None = None,
    seed: int = 0,
    target: str | None = None,
) -> Reading:
    """A reading of a text by a network of this mechanism: a decoder where it can be one, else an
    encoder or a pair.

    The tokens are those of "tiny". The weights are random, drawn from the seed; the global random
    state stays as it is.

    Args:
        name: of a mechanism in the catalogue.
        text: at least one token. target: of mechanisms that read a second sequence: what is said;
            None is the text again.
        options: its constructor's; those of its small example where they are not given.
        seed: of the weights.

    Raises:
        ArgumentError: no mechanism has this name, or an option does not fit.

    >>> [site.place for site in random_model("mqa", "to be").sites]
    ['layers.0', 'layers.1']
    """
    entry = find(name)
    chosen = {**{k: v for k, v in entry.sizes.items() if k in names(entry)}, **(options or {})}
    with seeded(seed):
        made = _made(entry, chosen, text, target)
        _sharpen(made)
    read = reading(made) if isinstance(made, Words) else reading(made, text, target)
    note = (
        f"the weights are random, from seed {seed}: the arithmetic is real, what it looks at "
        "means nothing"
    )
    return replace(read, name=f"{name} (random)", notes=(*read.notes, note), trained=None)


def _made(entry: Variant, options: dict[str, Any], text: str, target: str | None) -> Any:
    tokenizer = _tokenizer()
    V = tokenizer.vocab_size
    if entry.name in decoder_variants():
        config = own.Config(
            V, DIM, 2 * DIM, LAYERS, HEADS, attention=entry.name, attention_options=options
        )
        return Model(_frozen(own.build(config)), tokenizer, config)
    if entry.family == "cross":
        network = transformer(V, DIM, HEADS, LAYERS, residual=PreNorm)
        for layer in network.layers:
            layer.cross = entry.build(DIM, HEADS, **checked(entry, options))
        made = Seq2Seq(_frozen(network), tokenizer, _config(V), start=0, eos_ids=[0])
        return made if target is not None else _again(made, text)
    if entry.family == "additive":
        return _recurrent(
            entry, options, tokenizer.encode(text), tokenizer.encode(target or text), tokenizer
        )
    mixers = [entry.build(DIM, HEADS, **checked(entry, options)) for _ in range(LAYERS)]
    blocks = [
        Block(m, SwiGLU(DIM, 2 * DIM), PreNorm(RMSNorm(DIM)), PreNorm(RMSNorm(DIM)))  # type: ignore[arg-type]
        for m in mixers
    ]
    embed = Embed(nn.Embedding(V, DIM), segments=nn.Embedding(2, DIM))
    encoder = Encoder(embed, blocks, RMSNorm(DIM))
    return TextEncoder(_frozen(HeadedEncoder(encoder)), tokenizer, _config(V))


@cache
def _tokenizer() -> Tokenizer:
    """That of the model which comes with the package."""
    file = resources.files("regard") / "assets" / "tiny" / "tokenizer.json"
    return Tokenizer.load(Path(str(file)))


def _recurrent(
    entry: Variant, options: dict[str, Any], source: list[int], target: list[int], tokenizer: Any
) -> Words:
    """An encoder and a decoder of one layer, with this attention between them."""
    network = recurrent(tokenizer.vocab_size, DIM, DIM, attention=entry.name)
    states = 2 * DIM if entry.name == "bahdanau" else DIM
    decoder: Any = network.decoder
    decoder.attention = entry.build(DIM, 1, **{"memory_dim": states, **checked(entry, options)})
    said = [0, *target]
    return Words(
        _frozen(network),
        (source, tokenizer.pieces(source)),
        (said, tokenizer.pieces(said)),
        names=tokenizer.pieces,
    )


def _again(model: Seq2Seq, text: str) -> Words:
    """The text as source and as target: what random weights would say by themselves is noise."""
    source = model.encode(text)[0][0].tolist()
    said = [model.start, *model.tokenizer.encode(text)]
    pieces = model.tokenizer.pieces
    return Words(model.network, (source, pieces(source)), (said, pieces(said)), names=pieces)


def _sharpen(made: Any) -> None:
    """Larger weights in the maps of the mechanisms."""
    network = getattr(made, "decoder", None) or made.network
    for module in network.modules():
        inner = getattr(module, "cross", None) or getattr(module, "attention", None)
        for linear in inner.modules() if isinstance(inner, nn.Module) else ():
            if isinstance(linear, nn.Linear):
                linear.weight.data.normal_(std=SHARP * linear.in_features**-0.5)


def _frozen(network: Any) -> Any:
    return network.eval().requires_grad_(requires_grad=False)


def _config(vocabulary: int) -> bert.Config:
    return bert.Config(vocabulary, DIM, LAYERS, HEADS, 2 * DIM, 2048)
