"""Published config.json files of BERT and T5: how large the models are, what their tensors are
called, what is refused.
"""

from __future__ import annotations

import re
from typing import Any

import pytest
import torch

from regard.configs.reader import parse
from regard.errors import ArgumentError
from regard.models.checkpoint.family import bind_names
from regard.models.families import family
from tests.parity.families.published import build, count, layer, placed

bert = family("bert")
t5 = family("t5")

BERT: dict[str, Any] = {
    "architectures": ["BertForMaskedLM"],
    "attention_probs_dropout_prob": 0.1,
    "gradient_checkpointing": False,
    "hidden_act": "gelu",
    "hidden_dropout_prob": 0.1,
    "hidden_size": 768,
    "initializer_range": 0.02,
    "intermediate_size": 3072,
    "layer_norm_eps": 1e-12,
    "max_position_embeddings": 512,
    "model_type": "bert",
    "num_attention_heads": 12,
    "num_hidden_layers": 12,
    "pad_token_id": 0,
    "position_embedding_type": "absolute",
    "transformers_version": "4.6.0.dev0",
    "type_vocab_size": 2,
    "use_cache": True,
    "vocab_size": 30522,
}
BERT_LARGE = BERT | {
    "hidden_size": 1024,
    "intermediate_size": 4096,
    "num_attention_heads": 16,
    "num_hidden_layers": 24,
}
BERT_CHINESE = {
    k: v for k, v in BERT.items() if k not in ("gradient_checkpointing", "use_cache")
} | {
    "directionality": "bidi",
    "pooler_fc_size": 768,
    "pooler_num_attention_heads": 12,
    "pooler_num_fc_layers": 3,
    "pooler_size_per_head": 128,
    "pooler_type": "first_token_transform",
    "vocab_size": 21128,
}
MINILM = BERT | {
    "_name_or_path": "nreimers/MiniLM-L6-H384-uncased",
    "architectures": ["BertModel"],
    "hidden_size": 384,
    "intermediate_size": 1536,
    "num_hidden_layers": 6,
    "transformers_version": "4.8.2",
}
T5_SMALL: dict[str, Any] = {
    "architectures": ["T5ForConditionalGeneration"],
    "d_ff": 2048,
    "d_kv": 64,
    "d_model": 512,
    "decoder_start_token_id": 0,
    "dropout_rate": 0.1,
    "eos_token_id": 1,
    "initializer_factor": 1.0,
    "is_encoder_decoder": True,
    "layer_norm_epsilon": 1e-06,
    "model_type": "t5",
    "n_positions": 512,
    "num_heads": 8,
    "num_layers": 6,
    "output_past": True,
    "pad_token_id": 0,
    "relative_attention_num_buckets": 32,
    "task_specific_params": {
        "summarization": {"early_stopping": True, "num_beams": 4, "prefix": "summarize: "}
    },
    "vocab_size": 32128,
}
T5_BASE = T5_SMALL | {"d_ff": 3072, "d_model": 768, "num_heads": 12, "num_layers": 12}
FLAN_SMALL: dict[str, Any] = {
    "architectures": ["T5ForConditionalGeneration"],
    "d_ff": 1024,
    "d_kv": 64,
    "d_model": 512,
    "decoder_start_token_id": 0,
    "dropout_rate": 0.1,
    "eos_token_id": 1,
    "feed_forward_proj": "gated-gelu",
    "initializer_factor": 1.0,
    "is_encoder_decoder": True,
    "layer_norm_epsilon": 1e-06,
    "model_type": "t5",
    "n_positions": 512,
    "num_decoder_layers": 8,
    "num_heads": 6,
    "num_layers": 8,
    "output_past": True,
    "pad_token_id": 0,
    "relative_attention_max_distance": 128,
    "relative_attention_num_buckets": 32,
    "tie_word_embeddings": False,
    "transformers_version": "4.23.1",
    "use_cache": True,
    "vocab_size": 32128,
}
FLAN_BASE = FLAN_SMALL | {
    "d_ff": 2048,
    "d_model": 768,
    "num_heads": 12,
    "num_layers": 12,
    "num_decoder_layers": 12,
}


@pytest.mark.parametrize(
    ("raw", "size"),
    [
        (BERT, 109_482_240),
        (BERT_LARGE, 335_141_888),
        (BERT_CHINESE, 102_267_648),
        (MINILM, 22_713_216),
        (T5_SMALL, 60_506_624),
        (T5_BASE, 222_903_552),
        (FLAN_SMALL, 76_961_152),
        (FLAN_BASE, 247_577_856),
    ],
    ids=[
        "bert-base-uncased",
        "bert-large",
        "bert-base-chinese",
        "MiniLM-L6",
        "t5-small",
        "t5-base",
        "flan-t5-small",
        "flan-t5-base",
    ],
)
def test_published_sizes(raw: dict[str, Any], size: int) -> None:
    assert count(build(raw)[1]) == size


def test_the_head_for_hidden_words_is_what_is_stored() -> None:
    """bert-base-uncased with the head, without the pooler: 109,514,298."""
    config = parse(bert.config, BERT)
    stored = ["bert.embeddings.word_embeddings.weight", "cls.predictions.bias"]
    settled = bert.complete_config(config, BERT, stored)
    assert (settled.pooler, settled.masked_words) == (False, True)
    with torch.device("meta"):
        assert count(bert.build(settled)) == 109_514_298
    both = bert.complete_config(config, BERT, [*stored, "bert.pooler.dense.weight"])
    assert (both.pooler, both.masked_words) == (True, True)


def test_stored_names_of_a_bert_layer() -> None:
    shapes = layer(BERT, build(BERT)[1], 3)
    assert shapes == {
        **{f"attention.self.{x}.weight": (768, 768) for x in ("query", "key", "value")},
        **{f"attention.self.{x}.bias": (768,) for x in ("query", "key", "value")},
        "attention.output.dense.weight": (768, 768),
        "attention.output.dense.bias": (768,),
        "attention.output.LayerNorm.weight": (768,),
        "attention.output.LayerNorm.bias": (768,),
        "intermediate.dense.weight": (3072, 768),
        "intermediate.dense.bias": (3072,),
        "output.dense.weight": (768, 3072),
        "output.dense.bias": (768,),
        "output.LayerNorm.weight": (768,),
        "output.LayerNorm.bias": (768,),
    }
    whole = "bert.embeddings.LayerNorm.weight"
    for name in (
        whole,
        "embeddings.LayerNorm.weight",
        "bert.embeddings.LayerNorm.gamma",
        "embeddings.LayerNorm.gamma",
    ):
        assert placed(BERT, build(BERT)[1], name) == [whole]
    for name in (
        "bert.embeddings.position_ids",
        "embeddings.position_ids",
        "cls.seq_relationship.bias",
    ):
        assert any(re.fullmatch(pattern, name) for pattern in bert.buffers)


def test_stored_names_of_t5() -> None:
    config, network = build(FLAN_SMALL)
    names = {
        f"decoder.block.0.{rest}": shape for rest, shape in _block(FLAN_SMALL, "decoder").items()
    }
    assert names == {
        **{
            f"decoder.block.0.layer.{i}.{a}.{x}.weight": (384, 512)
            for i, a in enumerate(("SelfAttention", "EncDecAttention"))
            for x in "qkv"
        },
        "decoder.block.0.layer.0.SelfAttention.o.weight": (512, 384),
        "decoder.block.0.layer.1.EncDecAttention.o.weight": (512, 384),
        "decoder.block.0.layer.0.SelfAttention.relative_attention_bias.weight": (32, 6),
        **{f"decoder.block.0.layer.{i}.layer_norm.weight": (512,) for i in range(3)},
        "decoder.block.0.layer.2.DenseReluDense.wi_0.weight": (1024, 512),
        "decoder.block.0.layer.2.DenseReluDense.wi_1.weight": (1024, 512),
        "decoder.block.0.layer.2.DenseReluDense.wo.weight": (512, 1024),
    }
    assert not config.tie_word_embeddings
    assert not config.scale_decoder_outputs
    assert network.head.weight is not network.embed.embedding.weight
    plain = _block(T5_SMALL, "encoder")
    assert plain["layer.1.DenseReluDense.wi.weight"] == (2048, 512)
    assert not any("wi_" in name for name in plain)
    config, network = build(T5_SMALL)
    assert config.scale_decoder_outputs
    assert network.head.weight is network.embed.embedding.weight
    assert network.head.scale == 512**-0.5


def _block(raw: dict[str, Any], stack: str) -> dict[str, tuple[int, ...]]:
    """The tensors that a file must have for the first block of a stack: those that fill a parameter
    first.
    """
    network = build(raw)[1]
    parameters = dict(network.named_parameters(remove_duplicate=False))
    found, seen, front = {}, set(), f"{stack}.block.0."
    for name, binding in bind_names(network, t5.names).items():
        parameter = parameters[binding.parameters[0]]
        if name.startswith(front) and id(parameter) not in seen:
            found[name.removeprefix(front)] = tuple(parameter.shape)
        seen.add(id(parameter))
    return found


def test_a_stored_output_that_is_not_scaled_is_its_own() -> None:
    """transformers 5 writes tie_word_embeddings true into every T5, and keeps
    scale_decoder_outputs.
    """
    raw = FLAN_SMALL | {
        "tie_word_embeddings": True,
        "scale_decoder_outputs": False,
        "dense_act_fn": "gelu_new",
        "is_gated_act": True,
    }
    config = parse(t5.config, raw)
    assert config.tie_word_embeddings
    assert not t5.complete_config(config, raw, ["lm_head.weight"]).tie_word_embeddings
    assert t5.complete_config(config, raw, ["shared.weight"]).tie_word_embeddings
    tied = parse(t5.config, T5_SMALL)
    assert t5.complete_config(tied, T5_SMALL, ["lm_head.weight"]) == tied


def test_fresh_weights_are_as_the_released_codes() -> None:
    """T5's queries are smaller by sqrt(d_kv), in place of a scale on scores; BERT's matrices have
    0.02.
    """
    torch.manual_seed(0)
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


REFUSED: list[tuple[dict[str, Any], str]] = [
    (
        BERT | {"position_embedding_type": "relative_key"},
        "position_embedding_type is 'relative_key'; only 'absolute' is supported for bert",
    ),
    (
        BERT | {"tie_word_embeddings": False},
        "tie_word_embeddings is False; only True is supported for bert",
    ),
    (BERT | {"is_decoder": True}, "is_decoder is True; only False is supported for bert"),
    (
        BERT | {"add_cross_attention": True},
        "add_cross_attention is True; only False is supported for bert",
    ),
    (BERT | {"num_attention_heads": 7}, "dim 768 is not divisible by 7 heads"),
    (BERT | {"num_hidden_layers": 0}, "num_hidden_layers is 0; it must be at least 1"),
    (BERT | {"hidden_act": "gelo"}, "hidden_act is 'gelo'"),
    (
        BERT | {"layer_norm_epsilon": 1e-5},
        "unknown key 'layer_norm_epsilon'; did you mean 'layer_norm_eps'?",
    ),
    ({k: v for k, v in BERT.items() if k != "hidden_size"}, "it lacks hidden_size"),
    (
        T5_SMALL | {"is_encoder_decoder": False},
        "is_encoder_decoder is False; only True is supported for t5",
    ),
    (T5_SMALL | {"feed_forward_proj": "gated-geglu"}, "feed_forward_proj is 'geglu'"),
    (T5_SMALL | {"feed_forward_proj": 3}, "feed_forward_proj is 3; it must be str"),
    (
        T5_SMALL | {"dense_act_fn": "gelu_new"},
        "dense_act_fn is 'gelu_new', and feed_forward_proj 'relu' means 'relu'; keep one",
    ),
    (
        FLAN_SMALL | {"is_gated_act": False},
        "is_gated_act is False, and feed_forward_proj 'gated-gelu' means True; keep one",
    ),
    (
        T5_SMALL | {"relative_attention_num_buckets": 31},
        "buckets is 31; with bidirectional it must be even and at least 4",
    ),
    (T5_SMALL | {"relative_attention_max_distance": 16}, "max_distance is 16; it must be above 16"),
    (T5_SMALL | {"num_decoder_layers": 0}, "num_decoder_layers is 0; it must be at least 1"),
    (
        T5_SMALL | {"decoder_start_token_id": -1},
        "decoder_start_token_id is -1; it must be at least 0",
    ),
    (T5_SMALL | {"d_model": 512.5}, "d_model is 512.5; it must be int"),
]


@pytest.mark.parametrize(("raw", "message"), REFUSED, ids=[message[:40] for _, message in REFUSED])
def test_refused(raw: dict[str, Any], message: str) -> None:
    found = family(raw["model_type"])
    with pytest.raises(ArgumentError, match=re.escape(message)):
        found.check(parse(found.config, raw))
