"""Published config.json files: what they mean, how large the models are, what their tensors are
called, what is refused.
"""

from __future__ import annotations

import functools
import math
import re
from typing import Any

import pytest
import torch

from regard.biases.distance import alibi_slopes
from regard.configs.base import ACTIVATIONS, rename_keys
from regard.configs.reader import parse, read_sizes
from regard.errors import ArgumentError
from regard.models.assembly.building_blocks import activation
from regard.models.families import family
from regard.nn.projections.fused import ClippedQKV
from tests.parity.families.published import PUBLISHED, build, count, placed, published


@functools.cache
def built(name: str) -> tuple[Any, Any]:
    return build(published(name))


@pytest.mark.full(keep=5)
@pytest.mark.parametrize("name", [x for x in PUBLISHED if "parameters" in PUBLISHED[x]])
def test_parameters_are_as_many_as_published(name: str) -> None:
    assert count(built(name)[1]) == PUBLISHED[name]["parameters"]
    assert read_sizes(published(name), "it").parameters == PUBLISHED[name]["parameters"]


def test_gemmas() -> None:
    config, network = built("gemma-2b")
    assert network.embed.scale == 2048**0.5
    assert config.tie_word_embeddings
    config, network = built("gemma-2-2b")
    assert config.windows() == (4096, None) * 13
    attention = network.layers[0].attention
    assert (attention.scale, attention.softcap, network.head.cap) == (1 / 16, 50.0, 30.0)
    config, network = built("gemma-3-1b")
    assert [i for i, window in enumerate(config.windows()) if window is None] == [5, 11, 17, 23]
    assert config.windows()[0] == 512
    bases = [block.attention.project.q.steps[-1].base for block in network.layers]
    assert bases[:6] == [1e4] * 5 + [1e6]
    config, network = built("gemma-3-4b")
    assert (config.num_attention_heads, config.num_key_value_heads, config.head_dim) == (8, 4, 256)
    scalings = [block.attention.project.q.steps[-1].scaling for block in network.layers]
    assert [i for i, scaling in enumerate(scalings) if scaling is not None] == [5, 11, 17, 23, 29]
    assert scalings[5].factor == 8.0
    raw = published("gemma-4-26B-A4B")
    config = parse(family("gemma4").config, raw)
    assert config.experts == (128, 8, 704)
    text = {**raw["text_config"], "hidden_size_per_layer_input": None}  # as other files say 0
    assert parse(family("gemma4").config, {**raw, "text_config": text}) == config
    text["num_experts"] = None
    with pytest.raises(ArgumentError, match="enable_moe_block is true, with num_experts None"):
        parse(family("gemma4").config, {**raw, "text_config": text})


def test_the_others() -> None:
    _, network = built("gpt2")
    assert network.layers[3].attention.scale == 64**-0.5
    assert network.embed.positional.max_len == 1024
    _, network = built("pythia-70m")
    assert network.layers[0].attention.project.steps[0].rotary_dim == 16
    assert network.head.weight is not network.embed.embedding.weight
    _, network = built("gpt-neox-20b")
    assert network.layers[0].feed_forward.activation.approximate == "tanh"
    _, network = built("bloom")
    assert network.layers[0].attention.bias.heads == 112
    _, network = built("mpt-7b")
    assert list(network.layers[0].attention.bias.slopes) == list(alibi_slopes(32))
    _, network = built("mpt-7b-storywriter")
    attention = network.layers[0].attention
    assert isinstance(attention.project, ClippedQKV)
    assert attention.project.limit == 6
    expected = [2.0 ** (-16 * (h + 1) / 32) for h in range(32)]
    assert all(
        math.isclose(a, b, rel_tol=1e-15)
        for a, b in zip(attention.bias.slopes, expected, strict=True)
    )


def test_heads_are_what_is_stored() -> None:
    """bert-base-uncased with the head for hidden words, without the pooler, and ModernBERT with its
    head, as the released files have them.
    """
    bert, raw = family("bert"), published("bert-base-uncased")
    config = parse(bert.config, raw)
    stored = ["bert.embeddings.word_embeddings.weight", "cls.predictions.bias"]
    settled = bert.complete_config(config, raw, stored)
    assert (settled.pooler, settled.masked_words) == (False, True)
    assert count(bert.build_empty(settled)) == 109_514_298
    both = bert.complete_config(config, raw, [*stored, "bert.pooler.dense.weight"])
    assert (both.pooler, both.masked_words) == (True, True)
    modernbert, raw = family("modernbert"), published("ModernBERT-base")
    stored = ["model.final_norm.weight", "head.dense.weight"]
    whole = modernbert.complete_config(parse(modernbert.config, raw), raw, stored)
    assert count(modernbert.build_empty(whole)) == 149_655_232


# stored names, and the place of the family that they fill; None: ignored
PLACES: dict[tuple[str, str | None], list[str]] = {
    ("gpt2", "transformer.h.0.attn.c_attn.weight"): ["h.0.attn.c_attn.weight"],
    ("gpt2", "transformer.wte.weight"): ["wte.weight"],
    ("gpt2", "transformer.wpe.weight"): ["wpe.weight"],
    ("gpt2", "lm_head.weight"): [],
    ("gpt2", None): ["transformer.h.12.ln_1.weight"],
    ("pythia-70m", "gpt_neox.layers.0.attention.query_key_value.weight"): [
        "layers.0.attention.query_key_value.weight"
    ],
    ("pythia-70m", "embed_out.weight"): ["lm_head.weight"],
    ("bloom-560m", "transformer.h.0.self_attention.query_key_value.weight"): [
        "h.0.self_attention.query_key_value.weight"
    ],
    ("bloom-560m", "transformer.word_embeddings_layernorm.bias"): [
        "word_embeddings_layernorm.bias"
    ],
    ("mpt-7b", "transformer.blocks.0.attn.Wqkv.weight"): ["blocks.0.attn.Wqkv.weight"],
    ("gemma-2b", "model.layers.0.self_attn.q_proj.weight"): [],
    ("gemma-2-2b", "model.layers.0.pre_feedforward_layernorm.weight"): [],
    ("gemma-3-1b", "model.layers.0.self_attn.q_norm.weight"): [],
    ("gemma-3-4b", "model.layers.7.mlp.up_proj.weight"): [
        "language_model.model.layers.7.mlp.up_proj.weight",
        "model.language_model.layers.7.mlp.up_proj.weight",
    ],
    ("gemma-3-4b", "lm_head.weight"): ["language_model.lm_head.weight"],
    ("gemma-3-4b", None): ["vision_tower.vision_model.encoder.layers.0.mlp.fc1.weight"],
    ("bert-base-uncased", "bert.embeddings.LayerNorm.weight"): [
        "embeddings.LayerNorm.weight",
        "bert.embeddings.LayerNorm.gamma",
        "embeddings.LayerNorm.gamma",
    ],
}


@pytest.mark.parametrize("name, place", PLACES)
def test_where_stored_names_go(name: str, place: str | None) -> None:
    raw, network = published(name), built(name)[1]
    for stored in PLACES[name, place] + ([place] if place else []):
        assert placed(raw, network, stored) == [place]


def test_what_bert_stores_besides() -> None:
    beside = [
        "bert.embeddings.position_ids",
        "embeddings.position_ids",
        "cls.seq_relationship.bias",
    ]
    for name in beside:
        assert any(re.fullmatch(pattern, name) for pattern in family("bert").buffers)


def test_a_stored_output_that_is_not_scaled_is_its_own() -> None:
    """transformers 5 writes tie_word_embeddings true into every T5, and keeps
    scale_decoder_outputs.
    """
    t5, plain = family("t5"), published("t5-small")
    tied = {"tie_word_embeddings": True, "scale_decoder_outputs": False}
    raw = published("flan-t5-small") | tied | {"dense_act_fn": "gelu_new", "is_gated_act": True}
    config = parse(t5.config, raw)
    assert config.tie_word_embeddings
    assert not t5.complete_config(config, raw, ["lm_head.weight"]).tie_word_embeddings
    assert t5.complete_config(config, raw, ["shared.weight"]).tie_word_embeddings
    config = parse(t5.config, plain)
    assert t5.complete_config(config, plain, ["lm_head.weight"]) == config


def test_fresh_weights_are_as_the_released_codes() -> None:
    """T5's queries are smaller by sqrt(d_kv), in place of a scale on scores; BERT's matrices have
    0.02.
    """
    torch.manual_seed(0)
    bert, t5 = family("bert"), family("t5")
    config = t5.config(500, 64, 16, 256, 1, 8)
    network = t5.build(config)
    attention = network.layers[0].attention
    wanted = {
        attention.project.q.linear.weight: (64 * 16) ** -0.5,
        attention.project.k.linear.weight: 64**-0.5,
        attention.output.weight: 128**-0.5,
        network.layers[0].feed_forward.down.weight: 256**-0.5,
        network.embed.embedding.weight: 1.0,
        attention.bias_tensors[0]: 64**-0.5,
    }
    for weight, std in wanted.items():
        # the deviation of n normal numbers is off by less than 4 of its own, std / sqrt(2 n)
        assert abs(float(weight.detach().std()) / std - 1) < 4 * (2 * weight.numel()) ** -0.5
    small = bert.build(bert.config(500, 64, 1, 4, 256, 32))
    weight = small.encoder.layers[0].feed_forward.up.weight.detach()
    assert abs(float(weight.std()) / 0.02 - 1) < 4 * (2 * weight.numel()) ** -0.5
    assert not small.encoder.layers[0].feed_forward.up.bias.any()


REFUSED: list[tuple[str, dict[str, Any], str]] = [
    ("gpt2", {"n_heads": 12}, "unknown key 'n_heads'; did you mean 'n_head'?"),
    ("gpt2", {"hidden_size": 512}, "hidden_size is 512 and n_embd is 768; they mean the same"),
    ("gpt2", {"activation_function": "gelu_neu"}, "did you mean 'gelu_new'"),
    ("gpt2", {"n_head": 7}, "dim 768 is not divisible by 7 heads"),
    ("gpt2", {"layer_norm_epsilon": -1.0}, "layer_norm_epsilon is -1.0; it must be above 0"),
    ("bloom", {"layer_norm_epsilon": 0.0}, "layer_norm_epsilon is 0.0"),
    ("mpt-7b", {"layer_norm_epsilon": math.inf}, "layer_norm_epsilon is inf"),
    ("pythia-70m", {"layer_norm_eps": -1.0}, "layer_norm_eps is -1.0"),
    ("gemma-2b", {"rms_norm_eps": -1.0}, "rms_norm_eps is -1.0"),
    ("gpt2", {"n_inner": 0}, "n_inner is 0; it must be at least 1"),
    ("gpt2", {"add_cross_attention": True}, "add_cross_attention is True"),
    ("gpt2", {"n_layer": ...}, "it lacks n_layer"),
    ("bloom-560m", {"hidden_size": 64}, "n_embed is 1024 and hidden_size is 64"),
    ("bloom-560m", {"n_inner": 4096}, "n_inner is 4096; only None"),
    ("pythia-70m", {"hidden_act": "gelu_neu"}, "hidden_act is 'gelu_neu'"),
    ("pythia-70m", {"rotary_pct": 1.5}, "partial_rotary_factor is 1.5"),
    ("pythia-70m", {"rope_scaling": {"rope_type": "yarm"}}, "did you mean 'yarn'"),
    ("gemma-2b", {"hidden_act": "silu"}, "only 'gelu' or 'gelu_pytorch_tanh'"),
    ("gemma-2b", {"hidden_activation": "gelu"}, "only None or 'gelu_pytorch_tanh'"),
    ("gemma-2b", {"use_bidirectional_attention": True}, "use_bidirectional_attention is True"),
    ("gemma-2b", {"num_key_value_heads": ...}, "not divisible by 16 key/value heads"),
    ("gemma-2-2b", {"sliding_window": None}, "sliding_window is null"),
    ("gemma-2-2b", {"attn_logit_softcapping": -5.0}, "attn_logit_softcapping is -5.0"),
    ("gemma-3-4b", {"mm_token_per_image": 256}, "unknown key 'mm_token_per_image'"),
    ("mpt-7b", {"auto_map": {"AutoConfig": "evil.Other"}}, "auto_map names 'evil.Other'"),
    ("mpt-7b", {"attn_config": {"attn_type": "grouped_query_attention"}}, "attn_type is 'grouped"),
    ("bert-large", {"position_embedding_type": "relative_key"}, "only 'absolute' is supported"),
    ("bert-large", {"tie_word_embeddings": False}, "tie_word_embeddings is False; only True"),
    ("bert-large", {"is_decoder": True}, "is_decoder is True; only False"),
    ("bert-large", {"add_cross_attention": True}, "add_cross_attention is True; only False"),
    ("bert-large", {"num_attention_heads": 7}, "dim 1024 is not divisible by 7 heads"),
    ("bert-large", {"num_hidden_layers": 0}, "num_hidden_layers is 0; it must be at least 1"),
    ("bert-large", {"hidden_act": "gelo"}, "hidden_act is 'gelo'"),
    ("bert-large", {"layer_norm_epsilon": 1e-5}, "did you mean 'layer_norm_eps'?"),
    ("bert-large", {"hidden_size": ...}, "it lacks hidden_size"),
    ("t5-small", {"is_encoder_decoder": False}, "is_encoder_decoder is False; only True"),
    ("t5-small", {"feed_forward_proj": "gated-geglu"}, "feed_forward_proj is 'geglu'"),
    ("t5-small", {"feed_forward_proj": 3}, "feed_forward_proj is 3; it must be str"),
    ("t5-small", {"dense_act_fn": "gelu_new"}, "and feed_forward_proj 'relu' means 'relu'"),
    ("flan-t5-small", {"is_gated_act": False}, "feed_forward_proj 'gated-gelu' means True"),
    ("t5-small", {"relative_attention_num_buckets": 31}, "buckets is 31; with bidirectional"),
    ("t5-small", {"relative_attention_max_distance": 16}, "max_distance is 16"),
    ("t5-small", {"num_decoder_layers": 0}, "num_decoder_layers is 0; it must be at least 1"),
    ("t5-small", {"decoder_start_token_id": -1}, "decoder_start_token_id is -1"),
    ("t5-small", {"d_model": 512.5}, "d_model is 512.5; it must be int"),
]


@pytest.mark.parametrize("name, change, message", REFUSED)
def test_what_is_refused(name: str, change: dict[str, Any], message: str) -> None:
    changed = {k: v for k, v in (published(name) | change).items() if v is not ...}
    found = family(changed["model_type"])
    with pytest.raises(ArgumentError, match=re.escape(message)):
        found.check(parse(found.config, changed))


def test_a_null_says_nothing() -> None:
    assert rename_keys({"a": None, "b": 1}, {"a": "b"}) == {"b": 1}
    assert rename_keys({"a": 1, "b": 1}, {"a": "b"}) == {"b": 1}
    assert rename_keys({"a": 1, "b": None}, {"a": "b"}) == {"b": 1}


def test_activations_are_those_of_their_names() -> None:
    from transformers.activations import ACT2FN, XIELUActivation

    x = torch.linspace(-6, 6, 1001, dtype=torch.float64)
    for name in ACTIVATIONS:
        # its parameters are bfloat16 otherwise
        theirs = XIELUActivation(dtype=x.dtype) if name == "xielu" else ACT2FN[name]
        assert float((activation(name)(x) - theirs(x)).detach().abs().max()) < 1e-6, name
    assert float((activation("gelu")(x) - ACT2FN["gelu_new"](x)).abs().max()) > 1e-4
