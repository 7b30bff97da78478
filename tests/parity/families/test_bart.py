"""BART and Marian of transformers, saved by it and loaded here: logits, caches, padding of both
sides, the search for a text; wrong variants of each must be far.
"""

from __future__ import annotations

import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import nn

import regard
from regard.errors import ArgumentTypeError
from regard.inspect import explain, record
from regard.models.families import family
from regard.models.seq2seq import Seq2Seq
from regard.nn import PreNorm
from regard.nn.blocks.embedding import SinusoidalPositions
from tests.parity.families.changes import put, swap, zeros
from tests.parity.families.harness import assert_near, assert_refused, theirs, without
from tests.parity.families.sequence_pairs import (
    Pair,
    assert_logits,
    assert_padded,
    assert_saved_again,
    assert_search,
    assert_wrong,
)

bart = family("bart")
marian = family("marian")

SOURCE, TARGET = 18, 24
SMALL: dict[str, Any] = {
    "vocab_size": 96,
    "d_model": 36,
    "encoder_layers": 2,
    "encoder_attention_heads": 6,
    "encoder_ffn_dim": 48,
    "decoder_layers": 3,
    "decoder_attention_heads": 4,
    "decoder_ffn_dim": 40,
    "max_position_embeddings": 64,
}
BART = SMALL | {"pad_token_id": 1, "bos_token_id": 0, "eos_token_id": 2}
MARIAN = SMALL | {"pad_token_id": 95, "eos_token_id": 0, "decoder_start_token_id": 95}
CASES: dict[str, tuple[str, str, dict[str, Any]]] = {
    "bart": ("Bart", "ForConditionalGeneration", BART),
    "bart, scaled": (
        "Bart",
        "ForConditionalGeneration",
        BART | {"scale_embedding": True, "activation_function": "relu"},
    ),
    "marian": ("Marian", "MTModel", MARIAN | {"scale_embedding": True}),
    "marian, silu": ("Marian", "MTModel", MARIAN | {"activation_function": "swish"}),
}


def made(folder: Path, case: str, **change: Any) -> Pair:
    name, head, sizes = CASES[case]
    model = theirs(name, sizes | change, head=head)
    make = torch.Generator().manual_seed(9)
    # this bias is a buffer, which is 0 in a new model and not in the released ones
    model.final_logits_bias.normal_(generator=make)
    if name == "Marian":  # sinusoids that are parameters, and were drawn
        for stack in (model.model.encoder, model.model.decoder):
            table = stack.embed_positions
            table.weight.data = table.create_weight()
    return Pair(model, folder, (SOURCE, TARGET))


@pytest.mark.full(keep=["bart", "marian"])
@pytest.mark.parametrize("case", CASES)
def test_logits(case: str, tmp_path: Path) -> None:
    pair = made(tmp_path, case)
    assert pair.mine.network.head.weight is pair.mine.network.embed.embedding.weight
    assert_logits(pair, [7, 1, 11, 5], [3] + [1] * (TARGET - 3))


@pytest.mark.full(keep=1)
@pytest.mark.parametrize(("case", "left"), [("bart", True), ("marian", False)])
def test_padding_of_source_and_target_changes_nothing(
    case: str, left: bool, tmp_path: Path
) -> None:
    assert_padded(made(tmp_path, case), (SOURCE, TARGET), (13, 9), (1, 1), left=left)


@pytest.mark.full(keep=1)
@pytest.mark.parametrize(("case", "beams"), [("bart", 4), ("bart", 1), ("marian", 1)])
def test_the_search_is_theirs(case: str, beams: int, tmp_path: Path) -> None:
    # as many layers on both sides: theirs makes a cache of encoder_layers for its decoder
    pair = made(tmp_path, case, decoder_layers=2)
    # theirs ends a text of the largest length by force, and ours does not
    pair.theirs.generation_config.forced_eos_token_id = None
    assert_search(pair, (SOURCE, 11, 5), beams)


@pytest.mark.full(keep=1)
@pytest.mark.parametrize("case", ["bart", "marian"])
def test_saving_gives_the_same_file_again_and_transformers_reads_it(
    case: str, tmp_path: Path
) -> None:
    assert_saved_again(made(tmp_path / "a", case), tmp_path)


@pytest.mark.full(keep=1)
@pytest.mark.parametrize("case", ["bart", "marian"])
def test_base_models_and_older_files(case: str, tmp_path: Path) -> None:
    """A base model has no bias for its logits; a twin of the embedding that differs is refused."""
    pair = made(tmp_path, case)
    before = pair.mine(pair.source, pair.target)
    file = tmp_path / "model.safetensors"
    stored = load_file(file)
    bias = stored.pop("final_logits_bias")
    assert float(bias.abs().max()) > 1
    base = {name.removeprefix("model."): x for name, x in stored.items()}
    save_file(base, file)
    assert_near(regard.load(tmp_path, kind=Seq2Seq)(pair.source, pair.target) + bias, before)
    twins = ("encoder.embed_tokens.weight", "decoder.embed_tokens.weight", "shared.weight")
    matrix = next(base[name] for name in twins if name in base)
    whole = stored | {f"model.{name}": matrix.clone() for name in twins}
    whole |= {"lm_head.weight": matrix.clone(), "final_logits_bias": bias}
    if case == "marian":  # tables of sinusoids
        table = torch.zeros(64, 36)
        whole |= {
            f"model.{x}.embed_positions.weight": table.clone() for x in ("encoder", "decoder")
        }
    save_file(whole, file)
    assert regard.load(tmp_path, kind=Seq2Seq)(pair.source, pair.target).equal(before)
    other, lacking = matrix + 1, "model.decoder.layers.1.encoder_attn.k_proj.bias"
    assert_refused(tmp_path, "are tied by the config", whole | {"lm_head.weight": other})
    assert_refused(tmp_path, re.escape(lacking), without(whole, lacking))
    unknown = "classification_head.dense.weight"
    assert_refused(tmp_path, re.escape(unknown), whole | {unknown: torch.zeros(2, 2)})


@pytest.mark.parametrize(
    ("case", "change", "message"),
    [
        ("bart", {"normalize_before": True}, "normalize_before is True; only False"),
        ("bart", {"encoder_attention_heads": 5}, "36"),
        ("bart", {"num_hidden_layers": 3}, "num_hidden_layers is 3 and encoder_layers is 2"),
        ("marian", {"decoder_vocab_size": 97}, "decoder_vocab_size is 97 and vocab_size is 96"),
        ("marian", {"share_encoder_decoder_embeddings": False}, "only True is supported"),
    ],
)
def test_what_cannot_be_represented_is_refused(
    case: str, change: dict[str, Any], message: str, tmp_path: Path
) -> None:
    made(tmp_path, case)
    assert_refused(tmp_path, message, **change)


def test_a_sequence_longer_than_the_table_is_refused(tmp_path: Path) -> None:
    pair = made(tmp_path, "bart")
    ids = torch.full((1, 65), 5)
    with pytest.raises(regard.ArgumentError, match="position 64 has no vector"):
        pair.mine(ids, pair.target[:1])


@pytest.mark.parametrize("kind", [bart, marian])
def test_generating_recording_and_explaining(kind: Any) -> None:
    """`explain` compares every number with the recorded run."""
    tokenizer = regard.load("tiny").tokenizer
    config = kind.config(tokenizer.vocab_size, 16, 1, 4, 24, 2, 2, 24, logits_bias=True)
    network = kind.build(config).eval().requires_grad_(False)
    make = torch.Generator().manual_seed(5)
    for parameter in network.parameters():
        parameter.data.normal_(generator=make)
    model = Seq2Seq(network, tokenizer, config, start=2, eos_ids=[2])
    text, answer = "to be or not", "be to"
    assert model.generate([text, "be"], max_tokens=4)[0] == model.generate(text, max_tokens=4)
    found = record(model, text, answer)
    assert list(found.places) == [
        "encoder.layers.0",
        *(f"decoder.layers.{i}.{x}" for i in range(2) for x in ("attention", "cross")),
    ]
    assert found.sound
    for place in found.places:
        shown = explain(model, text, target=answer, place=place)
        assert shown.place == place
        assert shown.check < 1e-3


def test_a_target_begins_with_ids_that_are_given(tmp_path: Path) -> None:
    """Theirs has forced_bos_token_id."""
    pair = made(tmp_path, "bart", decoder_layers=2)
    pair.theirs.generation_config.forced_eos_token_id = None
    for first in (5, 7):
        found = pair.mine.beam_search(pair.source[:1], max_tokens=6, target_prefix=[first])
        exact = pair.theirs.generate(
            pair.source[:1], max_new_tokens=7, do_sample=False, forced_bos_token_id=first
        )[0].tolist()
        exact = exact[2:]
        assert list(found[0][0].ids) == (exact[: exact.index(2)] if 2 in exact else exact)
    with pytest.raises(ArgumentTypeError, match="texts is a tensor"):
        pair.mine.generate(torch.zeros(1, 2, 3))


# Negative controls: what must be told apart.


def layers(network: Any) -> list[Any]:
    return [*network.encoder.layers, *network.layers]


def shifted(network: Any) -> None:
    for embed in (network.encoder.embed, network.embed):
        embed.positional.offset -= 1


def norm_in_front(network: Any) -> None:
    for layer in layers(network):
        layer.attention_residual = PreNorm(layer.attention_residual.norm)


def scaled(network: Any) -> None:
    for embed in (network.encoder.embed, network.embed):
        embed.scale = 1.0 if embed.scale != 1 else 6.0


def other_sinusoids(layout: Any) -> Callable[[Any], None]:
    def change(network: Any) -> None:
        for embed in (network.encoder.embed, network.embed):
            embed.positional = SinusoidalPositions(36, layout=layout)

    return change


BOTH = {
    "norms swapped": swap("layers.*", "attention_residual.norm", "cross_residual.norm"),
    "norm in front": norm_in_front,
    "sees ahead": put("layers.*.attention", mask=None),
    "heads of the encoder": put("layers.*.cross.project.[qkv]", heads=6, head_dim=6),
    "no cross-attention": zeros("layers.*.cross.output.weight"),
    "no bias of logits": zeros("head.bias"),
    "scaled": scaled,
}
WRONG: dict[tuple[str, str], Callable[[Any], None]] = {
    **{(case, name): change for case in ("bart", "marian") for name, change in BOTH.items()},
    ("bart", "shifted"): shifted,
    ("bart", "tables swapped"): swap("", "encoder.embed.positional", "embed.positional"),
    ("bart", "no norm behind the embedding"): put("embed", norm=nn.Identity()),
    ("marian", "interleaved"): other_sinusoids("interleaved"),
    ("marian", "tensor2tensor"): other_sinusoids("tensor2tensor"),
}


@pytest.fixture(scope="module")
def right(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Pair]:
    return {case: made(tmp_path_factory.mktemp(case), case) for case in ("bart", "marian")}


@pytest.mark.full(keep=6)
@pytest.mark.parametrize(("case", "name"), WRONG)
def test_a_wrong_variant_is_far(right: dict[str, Pair], case: str, name: str) -> None:
    assert_wrong(right[case], WRONG[case, name])
