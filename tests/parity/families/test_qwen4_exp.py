"""Qwen4-Exp of transformers, saved by it and loaded here: gated streams, hashed n-grams, attention
to chosen blocks. Wrong variants must be far.
"""

from __future__ import annotations

import math
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor, nn

import regard
from regard.configs.qwen import Qwen4ExpConfig
from regard.configs.reader import parse
from regard.cost.ngrams import NGramSizes
from regard.models.families import family
from regard.nn.blocks.ngrams import EmbeddingInParts, HashedNGrams, NGramInput
from regard.nn.blocks.norms import OffsetRMSNorm
from regard.nn.blocks.residual_streams import GatedStreams, StreamGate, StreamNorm
from tests.parity.families import changes, test_gated_delta_hybrids
from tests.parity.families.cases import Case, parity_tests
from tests.parity.families.changes import drop, named, put, swap, zeros
from tests.parity.families.harness import (
    assert_generates,
    assert_near,
    assert_refused,
    ids_of,
    saved,
    without,
)

SIZES: dict[str, Any] = {
    **test_gated_delta_hybrids.SIZES,
    **test_gated_delta_hybrids.EXPERTS,
    "layer_types": ["linear_attention", "indexed_attention"] * 2,
    "rope_parameters": {
        "rope_type": "default",
        "rope_theta": 1e4,
        "partial_rotary_factor": 0.5,
        "mrope_section": [2, 1, 1],
    },
    "hc_count": 3,
    "hc_lowrank": 5,
    "ple_layer_ids": [3, 1],
    "ple_embed_dim": 24,
    "ngram_size": 3,
    "heads_per_ngram": 2,
    "ngram_vocab_size_base": 50,
    "make_ngram_vocab_size_divisible_by": 8,
    "split_ngram_parts": 2,
    "indexer_n_heads": 16,  # with few heads, many scores are 0, and the order of equal ones is open
    "indexer_kv_heads": 1,
    "indexer_head_dim": 8,
    "indexer_budget": 9,
    "indexer_compress_ratio": 3,
}
del SIZES["intermediate_size"]


def filters_without_gaps(network: Any) -> None:
    """The tokens right before, not every third one."""
    for module in network.modules():
        if isinstance(module, NGramInput):
            module.convolution.dilation = 1


def rows_moved(network: Any) -> None:
    """Each table but the first begins one row earlier."""
    for module in network.modules():
        if isinstance(module, HashedNGrams):
            module.first_rows.data[1:] -= 1


def pooled_then_turned_elsewhere(network: Any) -> None:
    """A pooled key has the position of the last token of its block."""
    for attention in changes.attentions(network)[1::2]:
        pooling = attention.selector.pooling
        turned = pooling.steps[-1]
        pooling.steps[-1] = _Later(turned, pooling.block - 1)


class _Later(nn.Module):
    def __init__(self, step: nn.Module, by: int) -> None:
        super().__init__()
        self.step, self.by = step, by

    def forward(self, x: Tensor, positions: Any) -> Tensor:
        moved: Tensor = self.step(x, positions + self.by)
        return moved


def written_once(network: Any) -> None:
    """What a sublayer computes is added to the streams with shares of at most 1, not of 2."""
    for module in network.modules():
        if isinstance(module, GatedStreams):
            module.apply_dropout = lambda y: y / 2  # type: ignore[method-assign]


def summed(network: Any) -> None:
    """A sublayer reads the sum of the streams, not their mean."""

    class Summed(StreamGate):
        def read(self, x: Tensor) -> tuple[Tensor, Tensor]:
            y, normed = super().read(x)
            return y * self.streams, normed

    network.norm.__class__ = Summed


GRAMS = "layers.*.grams"
CASES = {
    "n-grams, streams and chosen blocks": Case(
        "Qwen4Exp",
        SIZES,
        (
            filters_without_gaps,
            rows_moved,
            pooled_then_turned_elsewhere,
            written_once,
            summed,
            zeros(f"{GRAMS}.key.weight"),
            zeros(f"{GRAMS}.value_norm.weight"),
            zeros(f"{GRAMS}.convolution.weight"),
            swap(GRAMS, "key_norm", "value_norm"),
            zeros("layers.*.attention_residual.write.weight"),
            zeros("layers.*.feed_forward_residual.norm.up.weight"),
            zeros("norm.norm.weight"),
            put("layers.*.attention.selector", topk=2),
            drop("layers.*.attention.selector.q", OffsetRMSNorm),
            *test_gated_delta_hybrids.OF_EXPERTS[-4:],
            named("multipliers exchanged", lambda network: _exchange(network)),
        ),
        kind="TextConfig",
    ),
    "a sigmoid gate, longer n-grams, no two parts": Case(
        "Qwen4Exp",
        SIZES
        | {
            "output_gate_type": "sigmoid",
            "ngram_size": 4,
            "heads_per_ngram": 1,
            "split_ngram_parts": 1,
            "norm_topk_prob": False,
            "ple_layer_ids": [1],
            "ple_conv_kernel_size": 2,
        },
        (put("layers.*.attention", gate_activation="silu"),),
        kind="TextConfig",
    ),
    "no n-grams": Case("Qwen4Exp", SIZES | {"ple_layer_ids": None}, kind="TextConfig"),
}


def _exchange(network: Any) -> None:
    for module in network.modules():
        if isinstance(module, HashedNGrams):
            module.multipliers.data = module.multipliers.data.flip(0)


test_qwen4_exp, test_wrong_variants_are_far = parity_tests(CASES, keep=1, keep_wrong=0)


def test_no_n_gram_reaches_over_the_end_of_a_text(tmp_path: Path) -> None:
    """In one pass, in chunks that cut before and behind the end, and token by token."""
    model, mine = CASES["n-grams, streams and chosen blocks"].load(tmp_path)
    ids = ids_of(model, length=21)
    ids[0, [4, 9, 10]], ids[1, [0, 20]] = 1, 1
    exact = model(input_ids=ids, use_cache=False).logits
    assert_near(mine(ids), exact)
    for sizes in ([4, 1, 16], [5, 5, 1, 10], [1] * 21):
        caches = mine.new_caches()
        found = torch.cat([mine(part, caches=caches) for part in ids.split(sizes, 1)], 1)
        assert_near(found, exact)
    ids[0, 4] = 5  # the token behind it reads another n-gram
    other = model(input_ids=ids, use_cache=False).logits
    assert (other - exact)[0, 5].abs().max() > 1e-2
    assert_near(mine(ids), other)


@pytest.mark.full
def test_generation(tmp_path: Path) -> None:
    assert_generates(CASES["n-grams, streams and chosen blocks"].model(vocab_size=1024), tmp_path)


def by_loops(sizes: NGramSizes, ids: list[int], table: Tensor) -> Tensor:
    """The definition: one token after another, in Python's whole numbers."""
    primes = [n for n in range(2, 400) if all(n % d for d in range(2, n))]
    primes = [n for n in primes if n >= sizes.rows]
    word, golden = 1 << 64, 0x9E3779B97F4A7C15

    def mixed(x: int) -> int:
        x = (x + golden) % word
        x = (x ^ (x >> 30)) * 0xBF58476D1CE4E5B9 % word
        x = (x ^ (x >> 27)) * 0x94D049BB133111EB % word
        return x ^ (x >> 31)

    half = (2**63 - 1) // sizes.vocabulary // 2
    start = sizes.seed + 10007 * sizes.order
    odd = [2 * (mixed((start + golden * (i + 1)) % word) % half) + 1 for i in range(sizes.length)]
    rows = []
    for t in range(len(ids)):
        last = [ids[t]]
        for back in range(1, sizes.length):
            over = t - back < 0 or sizes.end in ids[t - back : t]
            last.append(sizes.end if over else ids[t - back])
        for n in range(2, sizes.length + 1):
            number = 0
            for token, factor in zip(last[:n], odd, strict=False):
                number ^= token * factor
            for head in range(sizes.heads):
                h = (n - 2) * sizes.heads + head
                own = primes[sizes.order * sizes.tables :]
                rows.append(sum(own[:h]) + number % own[h])
    return table[rows].view(len(ids), -1)


@pytest.mark.parametrize("parts", [1, 3])
def test_hashed_n_grams_are_the_loop(parts: int) -> None:
    sizes = NGramSizes(12, 4, 2, 30, 16, 90, 7, 1, 77, parts)
    grams = HashedNGrams(sizes)
    assert len(grams.embedding.parts) == parts
    table = torch.cat([part.weight.detach() for part in grams.embedding.parts])
    assert len(table) == math.ceil(sum(sizes.table_rows()) / 16) * 16
    ids = torch.randint(90, (40,), generator=torch.Generator().manual_seed(1))
    ids[[3, 11, 12, 39]] = 7
    wanted = by_loops(sizes, ids.tolist(), table)
    found, _ = grams(ids[None], None, None)
    assert torch.equal(found[0], wanted)
    state, steps = None, []
    for one in ids.split([3, 1, 1, 20, 15]):
        embedded, state = grams(one[None], state, None)
        steps.append(embedded[0])
    assert torch.equal(torch.cat(steps), wanted)


def test_gradients_reach_tables_and_streams() -> None:
    """Of a whole addition in fp64, by finite differences; rows that no n-gram hits have none."""
    torch.manual_seed(0)
    sizes = NGramSizes(4, 3, 1, 5, 2, 20, 0, 0, 1, 2)
    added = NGramInput(HashedNGrams(sizes), 3, 2, kernel=2, dilation=2).double()
    ids = torch.tensor([[3, 0, 4, 5]])
    x = torch.randn(1, 4, 6, dtype=torch.float64, requires_grad=True)
    weights = [p for p in added.parameters() if p.requires_grad]
    assert torch.autograd.gradcheck(lambda x, *_: added(x, ids, None, None)[0], (x, *weights))
    streams = GatedStreams(3, 2, 2).double()
    assert torch.autograd.gradcheck(
        lambda x, *_: streams(x, torch.sin), (x, *(p for p in streams.parameters()))
    )


def test_each_stream_has_its_own_norm() -> None:
    norm, plain = StreamNorm(4, 3, eps=1e-3), OffsetRMSNorm(4, eps=1e-3)
    norm.weight.data.normal_()
    x = torch.randn(2, 5, 12)
    for i in range(3):
        plain.weight.data.copy_(norm.weight[4 * i : 4 * i + 4])
        part = slice(4 * i, 4 * i + 4)
        assert torch.allclose(norm(x)[..., part], plain(x[..., part]), atol=1e-6)


def test_a_table_in_parts_is_one_table() -> None:
    table = EmbeddingInParts([3, 3, 2], 2)
    joined = torch.cat([part.weight for part in table.parts])
    rows = torch.tensor([[0, 7, 3], [2, 6, 5]])
    assert torch.equal(table(rows), joined[rows])


def test_files(tmp_path: Path) -> None:
    """A missing part of a table, and a number that another seed makes, are not silent."""
    model = CASES["n-grams, streams and chosen blocks"].model()
    folder = saved(model, tmp_path)
    expected = regard.load(folder)(ids_of(model))
    file = folder / "model.safetensors"
    tensors = load_file(file)
    grams = "model.layers.0.ple.ple_embedding."
    part, name = grams + "ngram_embedding.shard_1.weight", grams + "layer_multipliers"
    assert {part, name} <= set(tensors)
    assert_refused(folder, r"1 missing .*shard_1", without(tensors, part))
    save_file(tensors | {name: tensors[name] + 2}, file)
    assert (regard.load(folder)(ids_of(model)) - expected).abs().max() > 1e-3, "files say it"
    name = grams + "ngram_heads_offsets"
    save_file(tensors | {name: tensors[name] + 1000}, file)
    with pytest.raises(regard.ArgumentError, match="begins at row 1000 and has 53 rows, of 240"):
        regard.load(folder)(ids_of(model))


@pytest.mark.parametrize(
    ("keys", "message"),
    [
        ({"ple_layer_ids": [2]}, "ple_layer_ids has 2; it must have .* from 1 to 4"),
        ({"ple_layer_ids": [5]}, "ple_layer_ids has 5"),
        ({"eos_token_id": None}, "eos_token_id is missing"),
        ({"heads_per_ngram": 5}, "10 tables; .* must divide ple_embed_dim, 24"),
        ({"ngram_size": 1}, "ngram_size must be from 2"),
        ({"ngram_vocab_size_base": 1 << 40}, "for at most 4096 tables"),
        ({"indexer_budget": 10}, "must be a multiple of indexer_compress_ratio, 3"),
        ({"indexer_head_dim": 4}, "at least the number of rotated dims of a head, 8"),
        ({"indexer_kv_heads": 2}, "indexer_kv_heads"),
        ({"output_gate_type": "relu"}, "output_gate_type"),
    ],
)
def test_what_is_refused(keys: dict[str, Any], message: str) -> None:
    raw = {"model_type": "qwen4_exp_text", **SIZES, **keys}
    with pytest.raises(regard.ArgumentError, match=message):
        family("qwen4_exp_text").check(parse(Qwen4ExpConfig, raw))


def test_a_block_alone_needs_token_ids_and_its_cache(tmp_path: Path) -> None:
    block = CASES["n-grams, streams and chosen blocks"].load(tmp_path)[1].decoder.layers[0]
    x, ids = torch.zeros(1, 3, 108), torch.tensor([[4, 5, 6]])
    with pytest.raises(regard.ArgumentError, match="reads token ids, and got none"):
        block(x)
    with pytest.raises(regard.ArgumentTypeError, match="a block with n-grams needs a Joined"):
        block(x, cache=regard.caches.State(), ids=ids)
    assert block(x, ids=ids).shape == x.shape
