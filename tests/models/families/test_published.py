"""Published config.json files: what they mean, how large the models are, what their tensors are
called, what is refused.
"""

from __future__ import annotations

import functools
import json
import math
import re
from pathlib import Path
from typing import Any

import pytest
import torch

from regard.biases.distance import alibi_slopes
from regard.configs.base import ACTIVATIONS, rename_keys
from regard.configs.reader import parse, read_sizes
from regard.errors import ArgumentError
from regard.models.assembly.building_blocks import activation
from regard.models.checkpoint.family import bind_names
from regard.models.families import family
from regard.nn.projections.fused import ClippedQKV
from tests.parity.families.published import build, count, layer, placed

DATA = Path(__file__).parents[2] / "data" / "published_configs.json"
PUBLISHED: dict[str, dict[str, Any]] = json.loads(DATA.read_text("utf-8"))
"""Each file, or what differs from the file that it is like, and the parameters of the model.

Those of gemma-3-4b are the report's 3209M and the embedding's 262208 x 2560, without the 420M that
see; those of gemma-4-26B-A4B are transformers' on "meta" and its 30 numbers of layers; those of
opus-mt-en-de are the file's without two tables of sinusoids.
"""


def raw_of(name: str) -> dict[str, Any]:
    entry = PUBLISHED[name]
    return (raw_of(entry["like"]) if "like" in entry else {}) | entry["config"]


@functools.cache
def built(name: str) -> tuple[Any, Any]:
    return build(raw_of(name))


@pytest.mark.full(keep=5)
@pytest.mark.parametrize("name", PUBLISHED)
def test_parameters_are_as_many_as_published(name: str) -> None:
    assert count(built(name)[1]) == PUBLISHED[name]["parameters"]
    assert read_sizes(raw_of(name), "it").parameters == PUBLISHED[name]["parameters"]


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
    raw = raw_of("gemma-4-26B-A4B")
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
    bert, raw = family("bert"), raw_of("bert-base-uncased")
    config = parse(bert.config, raw)
    stored = ["bert.embeddings.word_embeddings.weight", "cls.predictions.bias"]
    settled = bert.complete_config(config, raw, stored)
    assert (settled.pooler, settled.masked_words) == (False, True)
    assert count(bert.build_empty(settled)) == 109_514_298
    both = bert.complete_config(config, raw, [*stored, "bert.pooler.dense.weight"])
    assert (both.pooler, both.masked_words) == (True, True)
    modernbert, raw = family("modernbert"), raw_of("ModernBERT-base")
    stored = ["model.final_norm.weight", "head.dense.weight"]
    whole = modernbert.complete_config(parse(modernbert.config, raw), raw, stored)
    assert count(modernbert.build_empty(whole)) == 149_655_232


def maps(shapes: dict[str, tuple[int, int]]) -> dict[str, tuple[int, ...]]:
    """The weights and biases of linear maps, whose files have outputs first."""
    weights = {f"{name}.weight": shape for name, shape in shapes.items()}
    return weights | {f"{name}.bias": shape[:1] for name, shape in shapes.items()}


def norms(size: int, *names: str, kinds: tuple[str, ...] = ("weight", "bias")) -> Any:
    return {f"{name}.{kind}": (size,) for name in names for kind in kinds}


def gated(width: int, inner: int, queries: int, keys: int) -> dict[str, tuple[int, ...]]:
    """The matrices of a layer of Gemma."""
    sizes = {"q_proj": queries, "k_proj": keys, "v_proj": keys}
    return {
        **{f"self_attn.{name}.weight": (size, width) for name, size in sizes.items()},
        "self_attn.o_proj.weight": (width, queries),
        **{f"mlp.{name}_proj.weight": (inner, width) for name in ("gate", "up")},
        "mlp.down_proj.weight": (width, inner),
    }


BEFORE_AND_AFTER = ("input_layernorm", "post_attention_layernorm")
AROUND = (*BEFORE_AND_AFTER, "pre_feedforward_layernorm", "post_feedforward_layernorm")
ONLY = ("weight",)
LAYERS: dict[str, dict[str, tuple[int, ...]]] = {
    "gpt2": {
        # inputs first: files of GPT-2 hold transposed matrices
        **norms(768, "ln_1", "ln_2", "attn.c_proj", "mlp.c_proj", kinds=("bias",)),
        **norms(768, "ln_1", "ln_2", kinds=ONLY),
        "attn.c_attn.weight": (768, 2304),
        "attn.c_attn.bias": (2304,),
        "attn.c_proj.weight": (768, 768),
        "mlp.c_fc.weight": (768, 3072),
        "mlp.c_fc.bias": (3072,),
        "mlp.c_proj.weight": (3072, 768),
    },
    "pythia-70m": norms(512, *BEFORE_AND_AFTER)
    | maps(
        {
            "attention.query_key_value": (1536, 512),
            "attention.dense": (512, 512),
            "mlp.dense_h_to_4h": (2048, 512),
            "mlp.dense_4h_to_h": (512, 2048),
        }
    ),
    "bloom-560m": norms(1024, *BEFORE_AND_AFTER)
    | maps(
        {
            "self_attention.query_key_value": (3072, 1024),
            "self_attention.dense": (1024, 1024),
            "mlp.dense_h_to_4h": (4096, 1024),
            "mlp.dense_4h_to_h": (1024, 4096),
        }
    ),
    "mpt-7b": {
        **norms(4096, "norm_1", "norm_2", kinds=ONLY),
        "attn.Wqkv.weight": (12288, 4096),
        "attn.out_proj.weight": (4096, 4096),
        "ffn.up_proj.weight": (16384, 4096),
        "ffn.down_proj.weight": (4096, 16384),
    },
    "gemma-2b": norms(2048, *BEFORE_AND_AFTER, kinds=ONLY) | gated(2048, 16384, 2048, 256),
    "gemma-2-2b": norms(2304, *AROUND, kinds=ONLY) | gated(2304, 9216, 2048, 1024),
    "gemma-3-1b": norms(1152, *AROUND, kinds=ONLY)
    | norms(256, "self_attn.q_norm", "self_attn.k_norm", kinds=ONLY)
    | gated(1152, 6912, 1024, 256),
    "bert-base-uncased": norms(768, "attention.output.LayerNorm", "output.LayerNorm")
    | maps(
        {
            **{f"attention.self.{x}": (768, 768) for x in ("query", "key", "value")},
            "attention.output.dense": (768, 768),
            "intermediate.dense": (3072, 768),
            "output.dense": (768, 3072),
        }
    ),
}


@pytest.mark.parametrize("name", LAYERS)
def test_names_and_shapes_of_a_layer(name: str) -> None:
    assert layer(raw_of(name), built(name)[1]) == LAYERS[name]


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
    raw, network = raw_of(name), built(name)[1]
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


def test_stored_names_of_t5() -> None:
    config, network = built("flan-t5-small")
    attention = ("layer.0.SelfAttention", "layer.1.EncDecAttention")
    assert _block("flan-t5-small", "decoder") == {
        **{f"{a}.{x}.weight": (384, 512) for a in attention for x in "qkv"},
        **{f"{a}.o.weight": (512, 384) for a in attention},
        "layer.0.SelfAttention.relative_attention_bias.weight": (32, 6),
        **{f"layer.{i}.layer_norm.weight": (512,) for i in range(3)},
        "layer.2.DenseReluDense.wi_0.weight": (1024, 512),
        "layer.2.DenseReluDense.wi_1.weight": (1024, 512),
        "layer.2.DenseReluDense.wo.weight": (512, 1024),
    }
    assert not config.tie_word_embeddings
    assert not config.scale_decoder_outputs
    assert network.head.weight is not network.embed.embedding.weight
    plain = _block("t5-small", "encoder")
    assert plain["layer.1.DenseReluDense.wi.weight"] == (2048, 512)
    assert not any("wi_" in name for name in plain)
    config, network = built("t5-small")
    assert config.scale_decoder_outputs
    assert network.head.weight is network.embed.embedding.weight
    assert network.head.scale == 512**-0.5


def _block(name: str, stack: str) -> dict[str, tuple[int, ...]]:
    """The tensors that a file must have for the first block of a stack: those that fill a parameter
    first.
    """
    network = built(name)[1]
    parameters = dict(network.named_parameters(remove_duplicate=False))
    found, seen, front = {}, set(), f"{stack}.block.0."
    for name, binding in bind_names(network, family("t5").names).items():
        parameter = parameters[binding.parameters[0]]
        if name.startswith(front) and id(parameter) not in seen:
            found[name.removeprefix(front)] = tuple(parameter.shape)
        seen.add(id(parameter))
    return found


def test_a_stored_output_that_is_not_scaled_is_its_own() -> None:
    """transformers 5 writes tie_word_embeddings true into every T5, and keeps
    scale_decoder_outputs.
    """
    t5, plain = family("t5"), raw_of("t5-small")
    tied = {"tie_word_embeddings": True, "scale_decoder_outputs": False}
    raw = raw_of("flan-t5-small") | tied | {"dense_act_fn": "gelu_new", "is_gated_act": True}
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
    changed = {k: v for k, v in (raw_of(name) | change).items() if v is not ...}
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
