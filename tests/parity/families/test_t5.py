"""T5 models of transformers, saved by it and loaded here: logits, caches, padding of both sides,
the search for a text.
"""

from __future__ import annotations

import copy
from collections.abc import Callable
from pathlib import Path
from typing import Any, cast

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import nn

import regard
from regard.biases import T5Relative
from regard.models.seq2seq import Seq2Seq
from tests.parity.families.changes import put, swap
from tests.parity.families.harness import assert_near, assert_refused, distance, theirs, without
from tests.parity.families.sequence_pairs import (
    Pair,
    assert_logits,
    assert_padded,
    assert_saved_again,
    assert_search,
    assert_wrong,
)

# D = 36, H d_kv = 50; behind 12 everything is one bucket
SMALL: dict[str, Any] = {
    "vocab_size": 96,
    "d_model": 36,
    "d_kv": 10,
    "d_ff": 48,
    "num_layers": 2,
    "num_decoder_layers": 3,
    "num_heads": 5,
    "relative_attention_num_buckets": 8,
    "relative_attention_max_distance": 12,
    "decoder_start_token_id": 0,
}
GATED = {"feed_forward_proj": "gated-gelu", "tie_word_embeddings": False}
SOURCE, TARGET = 30, 40


KINDS: dict[str, dict[str, Any]] = {
    "1.0": {},
    "1.1": GATED | {"own_head": True},
    "silu": {"feed_forward_proj": "gated-silu"},
    "gelu": {"feed_forward_proj": "gelu", "num_decoder_layers": 1},
}


def made(folder: Path, *, own_head: bool = False, **change: Any) -> Pair:
    model = theirs("T5", SMALL | change, head="ForConditionalGeneration")
    if own_head:
        make = torch.Generator().manual_seed(9)
        head = 0.2 * torch.randn(96, 36, generator=make)
        model.lm_head.weight = nn.Parameter(head, requires_grad=False)
        model.config.tie_word_embeddings = False
    # T5 scales no scores: with random weights, two runs in fp32 are a bound apart by rounding
    return Pair(model, folder, (SOURCE, TARGET), least=2, wide=True)


@pytest.mark.full(keep=1)
@pytest.mark.parametrize("kind", KINDS)
def test_logits(kind: str, tmp_path: Path) -> None:
    """At positions far from 0, too."""
    pair = made(tmp_path, **KINDS[kind])
    mine = pair.mine
    assert (mine.network.head.weight is mine.network.embed.embedding.weight) == (kind != "1.1")
    assert_logits(pair, [7, 1, 13, 19], [1] * TARGET)
    where = torch.arange(SOURCE) + 1000, torch.arange(TARGET) + 5000
    found = mine(pair.source, pair.target, *(x.expand(3, -1) for x in where))
    assert_near(found, pair.exact())


@pytest.mark.full(keep=1)
@pytest.mark.parametrize("left", [False, True])
def test_padding_of_source_and_target_changes_nothing(left: bool, tmp_path: Path) -> None:
    assert_padded(made(tmp_path), (SOURCE, TARGET), (13, 17), (1, 1), left=left)


def test_behind_the_longest_distance(tmp_path: Path) -> None:
    """With the released buckets: 32 up to 128, and texts of 150."""
    pair = made(tmp_path, relative_attention_num_buckets=32, relative_attention_max_distance=128)
    make = torch.Generator().manual_seed(8)
    source, target = (torch.randint(2, 96, (1, n), generator=make) for n in (150, 145))
    assert_near(pair.mine(source, target), pair.exact(source, target))


@pytest.mark.full(keep=1)
@pytest.mark.parametrize("beams", [1, 4])
def test_the_search_is_theirs(beams: int, tmp_path: Path) -> None:
    # as many layers on both sides: theirs makes a cache of num_layers for its decoder
    assert_search(made(tmp_path, num_decoder_layers=2), (SOURCE, 17, 5), beams)


@pytest.mark.parametrize("kind", ["1.0", "1.1"])
def test_saving_gives_the_same_file_again_and_transformers_reads_it(
    kind: str, tmp_path: Path
) -> None:
    assert_saved_again(made(tmp_path / "a", **KINDS[kind]), tmp_path)


def test_older_files(tmp_path: Path) -> None:
    """The embedding three times more, and a table of cross-attention that nobody uses; a twin that
    differs is refused.
    """
    pair = made(tmp_path)
    before = pair.mine(pair.source, pair.target)
    file = tmp_path / "model.safetensors"
    stored = load_file(file)
    for name in ("encoder.embed_tokens.weight", "decoder.embed_tokens.weight", "lm_head.weight"):
        assert name not in stored
        stored[name] = stored["shared.weight"].clone()
    unused = "decoder.block.0.layer.1.EncDecAttention.relative_attention_bias.weight"
    save_file(stored | {unused: torch.randn(8, 5)}, file)
    assert regard.load(tmp_path, kind=Seq2Seq)(pair.source, pair.target).equal(before)
    other = stored | {"lm_head.weight": stored["lm_head.weight"] + 1}
    assert_refused(tmp_path, "weight and lm_head.weight are tied by the config", other)
    message = r"5 missing \['encoder.block.0.layer.1.DenseReluDense.wo.weight'"
    assert_refused(tmp_path, message, without(other, "wo"))


# Negative controls: what must be told apart.


def layers(network: Any) -> list[Any]:
    return [*network.encoder.layers, *network.layers]


def bias_in_the_first_layer_only(network: Any) -> None:
    for stack in (network.encoder.layers, network.layers):
        for layer in stack[1:]:
            layer.attention.bias, layer.attention.bias_tensors = None, nn.ParameterList()


def encoder_in_one_direction(network: Any) -> None:
    for layer in network.encoder.layers:
        table = layer.attention.bias_tensors[0]
        layer.attention.bias = T5Relative(table, bidirectional=False, max_distance=12)


def tables_swapped(network: Any) -> None:
    a, b = (
        stack[0].attention.bias_tensors[0] for stack in (network.encoder.layers, network.layers)
    )
    a.data, b.data = b.data.clone(), a.data.clone()


def cross_with_bias(network: Any) -> None:
    for layer in network.layers:
        own = layer.attention
        layer.cross.bias, layer.cross.bias_tensors = own.bias, own.bias_tensors


def with_means(network: Any) -> None:
    """LayerNorm in place of a norm that subtracts no mean."""
    for layer in layers(network):
        for name in ("attention_residual", "feed_forward_residual"):
            old, made = getattr(layer, name).norm, nn.LayerNorm(36, eps=1e-6, bias=False)
            made.weight.data = old.weight.data
            getattr(layer, name).norm = made.requires_grad_(False)


WRONG: list[Callable[[Any], None]] = [
    put("(encoder.)?layers.*.attention", scale=None),
    put("layers.*.cross", scale=None),
    bias_in_the_first_layer_only,
    encoder_in_one_direction,
    tables_swapped,
    put("head", scale=1.0),
    cross_with_bias,
    with_means,
    put("encoder", norm=nn.Identity()),
    put("layers.*.attention", mask=None),
]


@pytest.fixture(scope="module")
def right(tmp_path_factory: pytest.TempPathFactory) -> Pair:
    return made(tmp_path_factory.mktemp("t5"))


@pytest.fixture(scope="module")
def gated(tmp_path_factory: pytest.TempPathFactory) -> Pair:
    return made(tmp_path_factory.mktemp("gated"), **KINDS["1.1"])


@pytest.mark.parametrize("change", WRONG, ids=lambda x: x.__name__)
def test_a_wrong_variant_is_far(right: Pair, change: Callable[[Any], None]) -> None:
    assert_wrong(right, change)


@pytest.mark.parametrize(
    "change",
    [
        swap("(encoder.)?layers.*.feed_forward", "gate", "up"),
        put("(encoder.)?layers.*.feed_forward", activation=nn.GELU()),
    ],
    ids=lambda x: x.__name__,
)
def test_a_wrong_gate_is_not_near(gated: Pair, change: Callable[[Any], None]) -> None:
    assert_near(gated.mine(gated.source, gated.target), gated.exact())
    assert distance(gated.wrong(change), gated.exact()) > 10


def test_a_layer_shares_the_table_of_its_stack(right: Pair) -> None:
    """Trained, it is counted once, and every layer sees the change."""
    network = copy.deepcopy(right.mine.network)
    tables = [name for name, _ in network.named_parameters() if "bias_tensors" in name]
    assert tables == [
        "encoder.layers.0.attention.bias_tensors.0",
        "layers.0.attention.bias_tensors.0",
    ]
    for stack in (network.encoder.layers, network.layers):
        held = {id(cast("Any", layer).attention.bias_tensors[0]) for layer in stack}
        assert len(held) == 1
