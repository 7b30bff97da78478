"""Any attention mechanism of the catalogue, in a small network with random weights."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from functools import cache
from importlib import resources
from pathlib import Path
from typing import Any, TypeVar

from torch import nn

from regard.configs.bert import BertConfig
from regard.inspect.model_run import ModelRun, PretokenizedInput, prepare_run
from regard.language import Phrase
from regard.models.assembly.catalogue_mixer import decoder_variants
from regard.models.encoder import Encoder, HeadedEncoder
from regard.models.encoder_decoder import transformer
from regard.models.families import regard as own
from regard.models.model import Model
from regard.models.rnn import recurrent
from regard.models.seq2seq import Seq2Seq
from regard.models.text_encoder import TextEncoder
from regard.models.tokenizer import Tokenizer
from regard.nn import Block, InputEmbedding, PreNorm, RMSNorm, SwiGLU
from regard.nn.variants.registry import Variant, check_options, find_variant, option_names
from regard.process_state import seeded

DIM, HEADS, LAYERS = 32, 4, 2
"""Sizes of the network, equal to those of the catalogue's examples."""

Network = TypeVar("Network", bound=nn.Module)

WEIGHT_STD = 1.5
"""Standard deviation of the mechanism's weights, times 1/sqrt(inputs): large enough that
patterns are not uniform.
"""


def random_model(
    name: str,
    text: str,
    *,
    options: Mapping[str, object] | None = None,
    seed: int = 0,
    target: str | None = None,
) -> ModelRun:
    """Prepare a small network with random weights that uses one mechanism of the catalogue.

    The network is a decoder if the mechanism can be causal, else an encoder or an encoder-decoder.
    Its tokens are those of the model "tiny". The global random state is unchanged.

    Args:
        text: the text; at least one token.
        options: options of the mechanism's constructor; by default those of its small example.
        target: output text, for mechanisms with a second sequence; None is the text itself.

    Returns:
        A prepared run, which `explain` accepts.

    Raises:
        ArgumentError: no mechanism has this name, or an option does not fit.

    >>> [site.place for site in random_model("mqa", "to be").sites]
    ['layers.0', 'layers.1']
    """
    entry = find_variant(name)
    all_options = {
        **{k: v for k, v in entry.example_options.items() if k in option_names(entry)},
        **(options or {}),
    }
    with seeded(seed):
        model = _build(entry, all_options, text, target)
        _sharpen(model)
    is_made = isinstance(model, PretokenizedInput)
    prepared = prepare_run(model) if is_made else prepare_run(model, text, target, last=1)
    note = Phrase(
        "the weights are random, from seed {seed}: the computation is exact, but the attention "
        "pattern has no meaning",
        seed=seed,
    )
    return replace(
        prepared, name=f"{name} (random)", notes=(*prepared.notes, note), max_trained_tokens=None
    )


def _build(
    entry: Variant, options: dict[str, object], text: str, target: str | None
) -> Model | Seq2Seq | TextEncoder | PretokenizedInput:
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
            layer.cross = entry.build(DIM, HEADS, **check_options(entry, options))
        seq2seq = Seq2Seq(_frozen(network), tokenizer, _config(V), start=0, eos_ids=[0])
        if target is not None:
            return seq2seq
        # the text is the target as well, since the answer of random weights would be noise
        return _pair(network, tokenizer, seq2seq.encode(text)[0][0].tolist(), text)
    if entry.family == "additive":
        recurrence = _recurrent_network(entry, options, V)
        return _pair(recurrence, tokenizer, tokenizer.encode(text), target or text)
    mixers = [entry.build(DIM, HEADS, **check_options(entry, options)) for _ in range(LAYERS)]
    blocks = [
        Block(m, SwiGLU(DIM, 2 * DIM), PreNorm(RMSNorm(DIM)), PreNorm(RMSNorm(DIM)))  # type: ignore[arg-type]
        for m in mixers
    ]
    embed = InputEmbedding(nn.Embedding(V, DIM), segments=nn.Embedding(2, DIM))
    encoder = Encoder(embed, blocks, RMSNorm(DIM))
    return TextEncoder(_frozen(HeadedEncoder(encoder)), tokenizer, _config(V))


@cache
def _tokenizer() -> Tokenizer:
    """Load the tokenizer of the model "tiny", which is part of the package."""
    file = resources.files("regard") / "assets" / "tiny" / "tokenizer.json"
    return Tokenizer.load(Path(str(file)))


def _recurrent_network(entry: Variant, options: dict[str, object], V: int) -> nn.Module:
    """Build a recurrent encoder and decoder of one layer, with this attention between them."""
    network = recurrent(V, DIM, DIM, attention=entry.name)
    states = 2 * DIM if entry.name == "bahdanau" else DIM
    decoder: Any = network.decoder
    own = {"memory_dim": states, **check_options(entry, options)}
    decoder.attention = entry.build(DIM, 1, **own)
    return network


def _pair(
    network: nn.Module, tokenizer: Tokenizer, source: list[int], target: str
) -> PretokenizedInput:
    """Return a network with the ids of a source, and a target behind the start token 0."""
    ids, pieces = [0, *tokenizer.encode(target)], tokenizer.pieces
    read, written = (source, pieces(source)), (ids, pieces(ids))
    return PretokenizedInput(_frozen(network), read, written, names=pieces)


def _sharpen(model: Any) -> None:
    """Draw larger weights for the linear maps of the attention modules."""
    network = getattr(model, "decoder", None) or model.network
    for module in network.modules():
        inner = getattr(module, "cross", None) or getattr(module, "attention", None)
        for linear in inner.modules() if isinstance(inner, nn.Module) else ():
            if isinstance(linear, nn.Linear):
                linear.weight.data.normal_(std=WEIGHT_STD * linear.in_features**-0.5)


def _frozen(network: Network) -> Network:
    return network.eval().requires_grad_(requires_grad=False)


def _config(vocabulary: int) -> BertConfig:
    return BertConfig(vocabulary, DIM, LAYERS, HEADS, 2 * DIM, 2048)
