"""DeepSeek-V3.2 and GLM-5 of transformers, saved by it and loaded here: latent attention to the
keys that an indexer selects; wrong ones must be far.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import nn

import regard
from regard.configs.deepseek import GlmMoeDsaConfig
from regard.configs.reader import parse
from regard.errors import ArgumentError
from regard.inspect import explain, record
from regard.models.families import family
from regard.models.model import Model
from regard.nn import LatentProjection
from regard.nn.attention.selected import IndexedLatentAttention, MoBA, indexer_losses
from regard.positions import Rotary
from tests.parity.families import changes
from tests.parity.families.cases import Case, parity_tests
from tests.parity.families.changes import put
from tests.parity.families.harness import assert_refused, saved, without
from tests.parity.families.test_deepseek import SMALL

deepseek_v32 = family("deepseek_v32")

TOPK, J, WIDTH = 7, 9, 8
SPARSE: dict[str, Any] = {
    **SMALL,
    "num_hidden_layers": 2,
    "index_topk": TOPK,  # a fifth of the keys of the last query
    "index_n_heads": J,
    "index_head_dim": WIDTH,
}


def selectors(network: Any) -> list[Any]:
    return [block.attention.selector for block in network.layers]


def neighbours(network: Any) -> None:
    """Rotary pairs of neighbours, as in the attention itself."""
    for selector in selectors(network):
        for part in (selector.q, selector.k):
            part.steps[-1] = Rotary(WIDTH, 1e4, rotary_dim=6, layout="interleaved")


def halves_in_the_indexer(network: Any) -> None:
    """Rotary pairs in two halves, as in DeepSeek-V3.2."""
    for selector in selectors(network):
        for part in (selector.q, selector.k):
            part.steps[-1] = Rotary(WIDTH, 1e4, rotary_dim=6)


def weights_of_other_heads(network: Any) -> None:
    for selector in selectors(network):
        selector.weight.weight.data = selector.weight.weight.data.roll(1, 0)


def an_indexer_in_each_layer(network: Any) -> None:
    """Index heads of the layer before, with another hidden state, in place of its choice."""
    for i in (1, 3):
        network.layers[i].attention.selector = network.layers[i - 1].attention.selector


def the_first_choice(network: Any) -> None:
    """The choice of the first layer in all layers."""
    network.layers[2].attention.selector = network.layers[1].attention.selector


CASES: dict[str, Case] = {
    "deepseek_v32": Case(
        "DeepseekV32",
        SPARSE,
        (
            put("layers.*.attention.selector", topk=TOPK - 1),
            put("layers.*.attention.selector", topk=10_000),
            neighbours,
            put("layers.*.attention.selector.[qk]", steps=nn.ModuleList()),
            weights_of_other_heads,
            put("layers.*.attention.selector.k", flat=nn.Identity()),
            changes.each("no mscale", scale=None),
        ),
        start=1000,
        corrections=8,
    ),
    "glm_moe_dsa": Case(
        "GlmMoeDsa",
        {k: v for k, v in SPARSE.items() if k != "rope_parameters"},
        (
            put("layers.*.attention.selector", topk=TOPK - 1),
            halves_in_the_indexer,
            changes.halves,
            weights_of_other_heads,
            put("layers.*.attention.selector.k", flat=nn.Identity()),
        ),
        start=1000,
        corrections=8,
    ),
    "glm_moe_dsa, shared choices": Case(
        "GlmMoeDsa",
        {k: v for k, v in SPARSE.items() if k != "rope_parameters"}
        | {"num_hidden_layers": 4, "indexer_types": ["full", "shared", "full", "shared"]},
        (
            an_indexer_in_each_layer,
            the_first_choice,
            put("layers.2.attention.selector", topk=TOPK - 1),
        ),
        start=1000,
        corrections=8,
    ),
    "biases, no dense layer, no scaling": Case(
        "DeepseekV32",
        SPARSE
        | {
            "attention_bias": True,
            "first_k_dense_replace": 0,
            "rope_parameters": {"rope_type": "default", "rope_theta": 500.0},
        },
        corrections=8,
    ),
    "more keys than there are": Case(
        "DeepseekV32", SPARSE | {"index_topk": 64, "n_group": 1, "topk_group": 1}, corrections=8
    ),
}


test_every_family, test_wrong_variants_are_far = parity_tests(
    CASES, keep=["deepseek_v32", "glm_moe_dsa"], keep_wrong=1
)


def test_loading_is_strict(tmp_path: Path) -> None:
    saved(CASES["deepseek_v32"].model(), tmp_path)
    file = tmp_path / "model.safetensors"
    stored = load_file(file)
    name = "model.layers.1.self_attn.indexer.weights_proj.weight"
    assert_refused(tmp_path, r"indexer\.weights_proj\.weight", without(stored, name))
    save_file(stored, file)
    for change, message in (
        ({"layer_types": ["full_attention"] * 2}, "only 'indexed_attention' is supported"),
        ({"mlp_layer_types": ["sparse", "dense"]}, "'dense' for the first ones, then 'sparse'"),
        ({"mlp_layer_types": ["dense", "dense"]}, "begins with 2 dense,"),
        ({"q_lora_rank": None}, "q_lora_rank is null"),
    ):
        assert_refused(tmp_path, message, **change)
    # in half precision, what decides which keys and experts are chosen stays in fp32
    half = regard.load(tmp_path, kind=Model, dtype=torch.bfloat16).decoder
    kept = {n for n, x in half.named_parameters() if x.dtype == torch.float32}
    assert kept == {
        "layers.0.attention.selector.weight.weight",
        "layers.1.attention.selector.weight.weight",
        "layers.1.feed_forward.router.correction",
    }
    assert half(torch.tensor([[3, 4, 5]])).dtype == torch.bfloat16


def test_recording_explaining_and_training_the_indexer() -> None:
    tokenizer = regard.load("tiny").tokenizer
    sizes = {k: v for k, v in SPARSE.items() if k not in ("vocab_size", "rope_parameters")}
    config = deepseek_v32.config(vocab_size=tokenizer.vocab_size, **sizes | {"index_topk": 3})
    network = deepseek_v32.build(config).eval()
    make = torch.Generator().manual_seed(5)
    for parameter in network.parameters():
        parameter.data.normal_(generator=make).mul_(parameter.shape[-1] ** -0.5)
    model = Model(network.requires_grad_(False), tokenizer, config, eos_ids=[0])
    text = "to be or not to be that is"
    found = record(model, text)
    assert found.sound
    rows = found.weights(1, 2)
    assert int((rows > 0).sum(-1).max()) == 3
    shown = explain(model, text, layer=1, head=2)
    assert shown.check < 1e-3
    layer: Any = network.layers[1].attention.requires_grad_(True)
    x = torch.randn(1, 9, config.hidden_size, generator=make)
    indexer_losses(layer, x).sum().backward()
    trained = {name for name, p in layer.named_parameters() if p.grad is not None}
    assert trained == {name for name, _ in layer.named_parameters() if "selector" in name}


def test_which_layers_share_a_choice() -> None:
    """By letters, and by every n-th layer behind an offset, as transformers counts them."""
    import transformers

    sizes = {k: v for k, v in SPARSE.items() if k != "rope_parameters"}
    sizes |= {"model_type": "glm_moe_dsa", "num_hidden_layers": 7}
    for keys in (
        {"index_topk_pattern": "FSSFSFS"},
        {"index_topk_freq": 3},
        {"index_topk_freq": 2, "index_skip_topk_offset": 3},
        {"index_topk_freq": 1},
    ):
        theirs = transformers.GlmMoeDsaConfig(**sizes | keys).indexer_types
        read: Any = parse(GlmMoeDsaConfig, sizes | keys)
        assert [read.shares_choice(i) for i in range(7)] == [x == "shared" for x in theirs]


def test_a_shared_choice_without_the_layer_that_chose() -> None:
    _, network = glm_network()
    with pytest.raises(ArgumentError, match="call the Decoder, whose first such layer must have"):
        network.layers[1].attention(torch.zeros(1, 3, network.embed.embedding.embedding_dim))


def test_a_recording_shows_the_choice_of_the_earlier_layer() -> None:
    tokenizer = regard.load("tiny").tokenizer
    config, network = glm_network(vocab_size=tokenizer.vocab_size, index_topk=3)
    make = torch.Generator().manual_seed(5)
    for parameter in network.parameters():
        parameter.data.normal_(generator=make).mul_(parameter.shape[-1] ** -0.5)
    model = Model(network.eval().requires_grad_(False), tokenizer, config, eos_ids=[0])
    text = "to be or not to be that is"
    first, second = (record(model, text).weights(layer, 1) > 0 for layer in (0, 1))
    assert first.equal(second)
    assert int(first.sum(-1).max()) == 3
    assert explain(model, text, layer=1, head=2).check < 1e-3


def glm_network(**changes: Any) -> tuple[Any, Any]:
    sizes = {k: v for k, v in SPARSE.items() if k != "rope_parameters"}
    config = family("glm_moe_dsa").config(**sizes | {"indexer_types": ("full", "shared")} | changes)
    return config, family("glm_moe_dsa").build(config)


def test_other_parts_are_refused() -> None:
    rotary = Rotary(2)
    project = LatentProjection(8, 2, rotary, kv_rank=4, nope_dim=2, value_dim=4)
    with pytest.raises(ArgumentError, match="must be a LatentProjection and an Indexer"):
        IndexedLatentAttention(project, MoBA(4, 2), nn.Linear(8, 8))  # type: ignore[arg-type]
