"""Whisper of transformers, saved by it and loaded here: the encoder of log-mel features, logits,
caches, the search for a text; wrong variants must be far.
"""

from __future__ import annotations

import copy
from collections.abc import Callable
from pathlib import Path
from typing import Any, cast

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor, nn

import regard
from regard.configs.reader import read_sizes
from regard.errors import ArgumentError, ArgumentTypeError, FileError
from regard.inspect import Recorder, explain
from regard.models import SpeechToText
from regard.models.families import family
from regard.models.seq2seq import Seq2Seq
from regard.nn import PostNorm
from regard.positions import sinusoidal
from tests.parity.families.changes import put, zeros
from tests.parity.families.harness import (
    assert_far,
    assert_near,
    assert_refused,
    saved,
    theirs,
    transformers,
    without,
)
from tests.parity.families.sequence_pairs import saved_twice

whisper = family("whisper")

FRAMES, TARGET = 24, 20
SMALL: dict[str, Any] = {
    "vocab_size": 96,
    "d_model": 36,
    "num_mel_bins": 10,
    "encoder_layers": 2,
    "encoder_attention_heads": 6,
    "encoder_ffn_dim": 48,
    "decoder_layers": 3,
    "decoder_attention_heads": 4,
    "decoder_ffn_dim": 40,
    "max_source_positions": FRAMES // 2,
    "max_target_positions": TARGET,
    "pad_token_id": 1,
    "bos_token_id": 1,
    "eos_token_id": 1,
    "decoder_start_token_id": 2,
    "begin_suppress_tokens": None,
}


class Pair:
    """A model of theirs, ours with its weights, features and targets."""

    def __init__(self, folder: Path, **change: Any) -> None:
        self.theirs = theirs("Whisper", SMALL | change, head="ForConditionalGeneration")
        self.mine = regard.load(saved(self.theirs, folder), kind=SpeechToText)
        make = torch.Generator().manual_seed(7)
        self.features = torch.randn(3, 10, FRAMES, generator=make)
        self.target = torch.randint(3, 95, (3, TARGET), generator=make)

    def exact(self) -> Tensor:
        found: Tensor = self.theirs(
            input_features=self.features, decoder_input_ids=self.target, use_cache=False
        ).logits
        return found


@pytest.fixture(scope="module")
def pair(tmp_path_factory: pytest.TempPathFactory) -> Pair:
    return Pair(tmp_path_factory.mktemp("whisper"))


@pytest.mark.full(keep=1)
@pytest.mark.parametrize(
    "change", [{"activation_function": "relu"}, {"decoder_layers": 1}], ids=["relu", "distilled"]
)
def test_other_sizes(change: dict[str, Any], tmp_path: Path) -> None:
    pair = Pair(tmp_path, **change)
    assert_near(pair.mine(pair.features, pair.target), pair.exact())


def test_states_and_logits(pair: Pair) -> None:
    """The encoder, then the decoder whole, in any chunks, token by token, and in rows alone."""
    mine, exact = pair.mine, pair.exact()
    network = mine.network
    assert network.head.weight is network.embed.embedding.weight
    memory = network.run_encoder(pair.features)
    assert_near(memory, pair.theirs.model.encoder(pair.features).last_hidden_state)
    assert_near(mine(pair.features, pair.target), exact)
    assert_near(mine(pair.features[1:2], pair.target[1:2]), exact[1:2])
    for sizes in ([7, 1, 9, 3], [1] * TARGET):
        caches, found, at = network.new_caches(), [], 0
        for size in sizes:
            given = {} if at else {"memory": memory}
            found.append(network.run_decoder(pair.target[:, at : at + size], caches, **given))
            at += size
        assert_near(torch.cat(found, 1), exact)


@pytest.mark.parametrize("left", [False, True])
def test_padding_of_the_target_changes_nothing(pair: Pair, left: bool) -> None:
    sizes = (TARGET, 9, 1)
    target, to = torch.full_like(pair.target, 10_000), torch.full_like(pair.target, -1)
    for i, n in enumerate(sizes):
        at = slice(TARGET - n, TARGET) if left else slice(0, n)
        target[i, at], to[i, at] = pair.target[i, :n], torch.arange(n)
    found, exact = pair.mine(pair.features, target, None, to), pair.exact()
    for i, n in enumerate(sizes):
        assert_near(found[i][to[i] >= 0], exact[i, :n])


def test_the_search_is_theirs(pair: Pair) -> None:
    """Greedy, behind ids that every text begins with."""
    found = pair.mine.beam_search(pair.features, max_tokens=9, target_prefix=[7, 9])
    before = torch.tensor([[2, 7, 9]])
    for i in range(3):
        ids = before
        for _ in range(9):
            logits = pair.theirs(
                input_features=pair.features[i : i + 1], decoder_input_ids=ids, use_cache=False
            ).logits
            ids = torch.cat([ids, logits[:, -1].argmax(-1, keepdim=True)], 1)
        exact = ids[0, 3:].tolist()
        exact = exact[: exact.index(1)] if 1 in exact else exact
        assert list(found[i][0].ids) == exact
    without = pair.mine.beam_search(pair.features, max_tokens=9)
    assert [row[0].ids for row in without] != [row[0].ids for row in found]
    with pytest.raises(ArgumentError, match="96"):
        pair.mine.beam_search(pair.features, target_prefix=[96])


def test_saving_gives_the_same_file_again_and_transformers_reads_it(
    pair: Pair, tmp_path: Path
) -> None:
    model, first = saved_twice(pair.mine, tmp_path)
    kind = transformers.WhisperForConditionalGeneration
    again = kind.from_pretrained(first, attn_implementation="eager").eval()
    exact = again(input_features=pair.features, decoder_input_ids=pair.target).logits.detach()
    assert_near(model(pair.features, pair.target), exact)


def test_loading_is_strict(tmp_path: Path) -> None:
    pair = Pair(tmp_path)
    file = tmp_path / "model.safetensors"
    stored = load_file(file)
    base = {name.removeprefix("model."): x for name, x in stored.items()}
    save_file(base, file)
    again = regard.load(tmp_path, kind=SpeechToText)
    assert again(pair.features, pair.target).equal(pair.mine(pair.features, pair.target))
    # a map to keys has no bias
    name = "model.decoder.layers.0.self_attn.k_proj.bias"
    assert_refused(tmp_path, r"self_attn\.k_proj\.bias", stored | {name: torch.zeros(36)})
    assert_refused(tmp_path, r"model\.encoder\.conv2\.weight", without(stored, "conv2.weight"))
    save_file(stored, file)
    with pytest.raises(FileError, match="which loads as a SpeechToText"):
        regard.load(tmp_path, kind=Seq2Seq)
    assert_refused(tmp_path, "scale_embedding is True; only False", scale_embedding=True)


def test_other_sources_are_refused(pair: Pair) -> None:
    model, target = pair.mine, pair.target
    with pytest.raises(ArgumentTypeError, match="takes log-mel features"):
        model.generate("to be")
    with pytest.raises(ArgumentError, match=r"it must be log-mel features \[batch, 10, frames\]"):
        model(pair.target, target)
    with pytest.raises(ArgumentError, match=r"it must be log-mel features \[batch, 10, frames\]"):
        model(pair.features[:, :9], target)
    with pytest.raises(ArgumentError, match="position 12 has no vector"):
        model(torch.zeros(3, 10, FRAMES + 1), target)
    encoder = cast("Any", model.network.encoder)
    with pytest.raises(ArgumentError, match="segments are given"):
        encoder(pair.features, None, target)
    embed = encoder.embed
    with pytest.raises(ArgumentTypeError, match="they must be floating-point"):
        embed(target)
    with pytest.raises(ArgumentError, match="with at least one frame"):
        embed(torch.zeros(1, 10, 0))


def test_a_recording_is_explained(pair: Pair) -> None:
    with Recorder() as recorder, torch.no_grad():
        pair.mine(pair.features[:1], pair.target[:1])
    found = recorder.recording()
    assert found.sound
    assert len(found.places) == 2 + 2 * 3
    for place in found.places:
        assert explain(found, place=place, head=1).check < 1e-3
    assert "decoder.layers.0.cross.q" in pair.mine.taps(patterns=False)


def test_texts_are_generated() -> None:
    tokenizer = regard.load("tiny").tokenizer
    sizes = (tokenizer.vocab_size, 16, 1, 2, 24, 1, 2, 24)
    config = whisper.config(*sizes, num_mel_bins=4, max_source_positions=6)
    torch.manual_seed(0)
    model = SpeechToText(whisper.build(config).eval(), tokenizer, config, start=2, eos_ids=[1])
    answers = model.generate(torch.randn(2, 4, 12), max_tokens=3)
    assert len(answers) == 2
    table = cast("Any", model.network.encoder).embed.positional.weight
    assert table.allclose(sinusoidal(6, 16, layout="tensor2tensor"))


def test_published_sizes() -> None:
    """whisper-tiny and whisper-large-v3, of which transformers counts 37,760,640 and
    1,543,490,560 parameters.
    """
    tiny = {
        "model_type": "whisper",
        "vocab_size": 51865,
        "d_model": 384,
        "encoder_layers": 4,
        "encoder_attention_heads": 6,
        "encoder_ffn_dim": 1536,
        "decoder_layers": 4,
        "decoder_attention_heads": 6,
        "decoder_ffn_dim": 1536,
        "is_encoder_decoder": True,
    }
    heads = {f"{x}_attention_heads": 20 for x in ("encoder", "decoder")}
    layers = {f"{x}_layers": 32 for x in ("encoder", "decoder")}
    width = {f"{x}_ffn_dim": 5120 for x in ("encoder", "decoder")}
    more = {"vocab_size": 51866, "d_model": 1280, "num_mel_bins": 128}
    assert read_sizes(tiny, "tiny").parameters == 37_760_640
    assert read_sizes(tiny | heads | layers | width | more, "large").parameters == 1_543_490_560


# Negative controls: what must be told apart.


def convolution_reversed(network: Any) -> None:
    weight = network.encoder.embed.conv2.weight
    weight.data = weight.data.flip(-1)


def post_norm(network: Any) -> None:
    for layer in (*network.encoder.layers, *network.layers):
        layer.attention_residual = PostNorm(layer.attention_residual.norm)


def shifted(network: Any) -> None:
    network.embed.positional.weight.data = network.embed.positional.weight.data.roll(1, 0)


WRONG: list[Callable[[Any], None]] = [
    put("layers.*.attention.project.v.linear", bias=None),
    convolution_reversed,
    zeros("encoder.embed.positional.weight"),
    post_norm,
    put("encoder", norm=nn.Identity()),
    put("layers.*.attention", mask=None),
    shifted,
]


@pytest.mark.full(keep=3)
@pytest.mark.parametrize("change", WRONG, ids=lambda x: x.__name__)
def test_a_wrong_variant_is_far(pair: Pair, change: Callable[[Any], None]) -> None:
    network = copy.deepcopy(pair.mine.network)
    assert_near(network(pair.features, pair.target), pair.exact())
    change(network)
    assert_far(cast("Tensor", network(pair.features, pair.target)), pair.exact())
