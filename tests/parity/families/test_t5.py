"""T5 models of transformers, saved by it and loaded here: logits, caches, padding of both sides,
the search for a text.
"""

from __future__ import annotations

import copy
import math
from collections.abc import Callable
from pathlib import Path
from typing import Any, cast

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor, nn

import regard
from regard.biases import T5Relative
from regard.errors import FileError
from regard.models.save import save
from regard.models.seq2seq import Seq2Seq
from tests.parity.families.harness import assert_far, assert_near, saved, theirs, transformers

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


class Pair:
    """A model of theirs, ours with its weights, sources and targets."""

    def __init__(self, folder: Path, *, own_head: bool = False, **change: Any) -> None:
        self.theirs = theirs("T5", SMALL | change, head="ForConditionalGeneration")
        if own_head:
            make = torch.Generator().manual_seed(9)
            head = 0.2 * torch.randn(96, 36, generator=make)
            self.theirs.lm_head.weight = nn.Parameter(head, requires_grad=False)
            self.theirs.config.tie_word_embeddings = False
        self.mine = regard.load(saved(self.theirs, folder), kind=Seq2Seq)
        # T5 scales no scores: with random weights, two runs in fp32 are a bound apart by rounding
        self.wide = copy.deepcopy(self.theirs).double()
        make = torch.Generator().manual_seed(7)
        self.source = torch.randint(2, 96, (3, SOURCE), generator=make)
        self.target = torch.randint(2, 96, (3, TARGET), generator=make)

    def exact(self, source: Tensor | None = None, target: Tensor | None = None) -> Tensor:
        source, target = (
            mine if given is None else given
            for mine, given in ((self.source, source), (self.target, target))
        )
        found: Tensor = self.wide(
            input_ids=source, decoder_input_ids=target, use_cache=False
        ).logits
        return found


KINDS: dict[str, dict[str, Any]] = {
    "1.0": {},
    "1.1": GATED | {"own_head": True},
    "silu": {"feed_forward_proj": "gated-silu"},
    "gelu": {"feed_forward_proj": "gelu", "num_decoder_layers": 1},
}


@pytest.mark.full(keep=1)
@pytest.mark.parametrize("kind", KINDS)
def test_logits(kind: str, tmp_path: Path) -> None:
    """Whole, in any chunks, token by token, in rows alone, and at positions far from 0."""
    pair = Pair(tmp_path, **KINDS[kind])
    mine, exact = pair.mine, pair.exact()
    assert (mine.network.head.weight is mine.network.embed.embedding.weight) == (kind != "1.1")
    assert_near(mine(pair.source, pair.target), exact)
    assert_near(mine(pair.source, pair.target, backend="reference"), exact)
    assert_near(mine(pair.source[1:2], pair.target[1:2]), exact[1:2])
    for sizes in ([7, 1, 13, 19], [1] * TARGET):
        caches, found, at = mine.network.new_caches(), [], 0
        memory = mine.network.run_encoder(pair.source)
        for size in sizes:
            given = {} if at else {"memory": memory}
            found.append(mine.network.run_decoder(pair.target[:, at : at + size], caches, **given))
            at += size
        assert_near(torch.cat(found, 1), exact)
    where = torch.arange(SOURCE) + 1000, torch.arange(TARGET) + 5000
    assert_near(mine(pair.source, pair.target, *(x.expand(3, -1) for x in where)), exact)


@pytest.mark.full(keep=1)
@pytest.mark.parametrize("left", [False, True])
def test_padding_of_source_and_target_changes_nothing(left: bool, tmp_path: Path) -> None:
    """Rows of all, 13 and 1 tokens, at once and with caches: each is what it is alone."""
    pair = Pair(tmp_path)
    sizes = ((SOURCE, TARGET), (13, 17), (1, 1))
    given = []
    for ids, side in ((pair.source, 0), (pair.target, 1)):
        length = ids.shape[1]
        padded, positions = torch.full_like(ids, 10_000), torch.full_like(ids, -1)
        for i, n in enumerate(size[side] for size in sizes):
            at = slice(length - n, length) if left else slice(0, n)
            padded[i, at], positions[i, at] = ids[i, :n], torch.arange(n)
        given.append((padded, positions))
    (source, at), (target, to) = given
    found = pair.mine(source, target, at, to)
    caches, memory = pair.mine.network.new_caches(), pair.mine.network.run_encoder(source, at)
    parts = []
    for t in range(TARGET):
        first = {} if t else {"memory": memory, "memory_positions": at}
        part = slice(t, t + 1)
        parts.append(
            pair.mine.network.run_decoder(target[:, part], caches, positions=to[:, part], **first)
        )
    for i, (n, m) in enumerate(sizes):
        alone = pair.exact(pair.source[i : i + 1, :n], pair.target[i : i + 1, :m])
        assert_near(found[i][to[i] >= 0], alone[0])
        assert_near(torch.cat(parts, 1)[i][to[i] >= 0], alone[0])


def test_behind_the_longest_distance(tmp_path: Path) -> None:
    """With the released buckets: 32 up to 128, and texts of 150."""
    pair = Pair(tmp_path, relative_attention_num_buckets=32, relative_attention_max_distance=128)
    make = torch.Generator().manual_seed(8)
    source, target = (torch.randint(2, 96, (1, n), generator=make) for n in (150, 145))
    assert_near(pair.mine(source, target), pair.exact(source, target))


@pytest.mark.full(keep=1)
@pytest.mark.parametrize("beams", [1, 4])
def test_the_search_is_theirs(beams: int, tmp_path: Path) -> None:
    """A batch of padded sources, on our side; theirs row by row. With beams, their
    early_stopping="never".
    """
    # as many layers on both sides: theirs makes a cache of num_layers for its decoder
    pair = Pair(tmp_path, num_decoder_layers=2)
    sizes = (SOURCE, 17, 5)
    at = torch.arange(SOURCE).expand(3, -1)
    at = at.where(at < torch.tensor(sizes)[:, None], -1)
    found = pair.mine.beam_search(pair.source, at, max_tokens=12, beams=beams)
    for i, n in enumerate(sizes):
        more = {"early_stopping": "never", "length_penalty": 1.0} if beams > 1 else {}
        exact = pair.theirs.generate(
            pair.source[i : i + 1, :n], max_new_tokens=12, num_beams=beams, do_sample=False, **more
        )[0].tolist()
        exact = exact[1:]
        exact = exact[: exact.index(1)] if 1 in exact else exact
        assert list(found[i][0].ids) == exact
        alone = pair.mine.beam_search(pair.source[i : i + 1, :n], max_tokens=12, beams=beams)[0]
        assert [x.ids for x in alone] == [x.ids for x in found[i]]
        assert math.isclose(alone[0].score, found[i][0].score, rel_tol=1e-5)


@pytest.mark.parametrize("kind", ["1.0", "1.1"])
def test_saving_gives_the_same_file_again_and_transformers_reads_it(
    kind: str, tmp_path: Path
) -> None:
    (tmp_path / "a").mkdir()
    pair = Pair(tmp_path / "a", **KINDS[kind])
    names = [tmp_path / name for name in ("b", "c")]
    model = pair.mine
    for folder in names:
        folder.mkdir()
        save(model.network, model.config, folder)
        model = regard.load(folder, kind=Seq2Seq)
    for file in ("model.safetensors", "config.json"):
        first, second = ((folder / file).read_bytes() for folder in names)
        assert first == second
    assert model(pair.source, pair.target).equal(pair.mine(pair.source, pair.target))
    again = transformers.T5ForConditionalGeneration.from_pretrained(
        names[0], attn_implementation="eager"
    )
    exact = again.requires_grad_(False)(input_ids=pair.source, decoder_input_ids=pair.target).logits
    assert_near(model(pair.source, pair.target), exact)


def test_older_files(tmp_path: Path) -> None:
    """The embedding three times more, and a table of cross-attention that nobody uses; a twin that
    differs is refused.
    """
    pair = Pair(tmp_path)
    before = pair.mine(pair.source, pair.target)
    file = tmp_path / "model.safetensors"
    stored = load_file(file)
    for name in ("encoder.embed_tokens.weight", "decoder.embed_tokens.weight", "lm_head.weight"):
        assert name not in stored
        stored[name] = stored["shared.weight"].clone()
    unused = "decoder.block.0.layer.1.EncDecAttention.relative_attention_bias.weight"
    save_file(stored | {unused: torch.randn(8, 5)}, file)
    assert regard.load(tmp_path, kind=Seq2Seq)(pair.source, pair.target).equal(before)
    save_file(stored | {"lm_head.weight": stored["lm_head.weight"] + 1}, file)
    with pytest.raises(FileError, match=r"weight and lm_head.weight are tied by the config"):
        regard.load(tmp_path)
    save_file({n: x for n, x in load_file(file).items() if "wo" not in n}, file)
    with pytest.raises(
        FileError, match=r"5 missing \['encoder.block.0.layer.1.DenseReluDense.wo.weight'"
    ):
        regard.load(tmp_path)


# Negative controls: what must be told apart.


def layers(network: Any) -> list[Any]:
    return [*network.encoder.layers, *network.layers]


def scaled(network: Any) -> None:
    for layer in layers(network):
        layer.attention.scale = None


def scaled_cross(network: Any) -> None:
    for layer in network.layers:
        layer.cross.scale = None


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


def output_not_scaled(network: Any) -> None:
    network.head.scale = 1.0


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


def no_last_norm(network: Any) -> None:
    network.encoder.norm = nn.Identity()


def sees_ahead(network: Any) -> None:
    for layer in network.layers:
        layer.attention.mask = None


def other_gelu(network: Any) -> None:
    for layer in layers(network):
        layer.feed_forward.activation = nn.GELU()


def gate_swapped(network: Any) -> None:
    for layer in layers(network):
        feed = layer.feed_forward
        feed.gate, feed.up = feed.up, feed.gate


WRONG: list[Callable[[Any], None]] = [
    scaled,
    scaled_cross,
    bias_in_the_first_layer_only,
    encoder_in_one_direction,
    tables_swapped,
    output_not_scaled,
    cross_with_bias,
    with_means,
    no_last_norm,
    sees_ahead,
]


@pytest.fixture(scope="module")
def right(tmp_path_factory: pytest.TempPathFactory) -> Pair:
    return Pair(tmp_path_factory.mktemp("t5"))


@pytest.fixture(scope="module")
def gated(tmp_path_factory: pytest.TempPathFactory) -> Pair:
    return Pair(tmp_path_factory.mktemp("gated"), **KINDS["1.1"])


@pytest.mark.parametrize("change", WRONG, ids=lambda x: x.__name__)
def test_a_wrong_variant_is_far(right: Pair, change: Callable[[Any], None]) -> None:
    assert_far(wrong(right, change), right.exact())


@pytest.mark.parametrize("change", [gate_swapped, other_gelu], ids=lambda x: x.__name__)
def test_a_wrong_gate_is_not_near(gated: Pair, change: Callable[[Any], None]) -> None:
    from tests.parity.families.harness import distance

    assert_near(gated.mine(gated.source, gated.target), gated.exact())
    assert distance(wrong(gated, change), gated.exact()) > 10


def wrong(pair: Pair, change: Callable[[Any], None]) -> Tensor:
    network = copy.deepcopy(pair.mine.network)
    change(network)
    return cast("Tensor", network(pair.source, pair.target))


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
