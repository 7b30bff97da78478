"""The catalogue of named mechanisms: constructors that assemble parts, and `VARIANTS`, which tells what there is."""

from regard.nn.variants.additive import bahdanau, luong
from regard.nn.variants.cross import cross_attention
from regard.nn.variants.delta import delta_net, gated_delta_net
from regard.nn.variants.finish import differential, gated
from regard.nn.variants.latent import mla
from regard.nn.variants.linear import gated_linear, linear_attention, retention
from regard.nn.variants.local import chunked, local_global, packed, prefix_lm, sliding_window
from regard.nn.variants.memory import infini, infini_delta, streaming
from regard.nn.variants.normed import qk_norm, qk_norm_after_rotary, qk_norm_flat
from regard.nn.variants.plain import (
    causal,
    gpt,
    mha,
    mha_per_head,
    single_head,
    stacked,
    weightless,
)
from regard.nn.variants.registry import VARIANTS, Variant, build
from regard.nn.variants.scores import alibi, learned_sink, softcap, t5
from regard.nn.variants.selected import dsa, moba, nsa
from regard.nn.variants.softmax import gqa, mqa
from regard.nn.variants.sparse import bigbird, dilated, longformer, sparse_fixed, sparse_strided

__all__ = [
    "VARIANTS",
    "Variant",
    "alibi",
    "bahdanau",
    "bigbird",
    "build",
    "causal",
    "chunked",
    "cross_attention",
    "delta_net",
    "differential",
    "dilated",
    "dsa",
    "gated",
    "gated_delta_net",
    "gated_linear",
    "gpt",
    "gqa",
    "infini",
    "infini_delta",
    "learned_sink",
    "linear_attention",
    "local_global",
    "longformer",
    "luong",
    "mha",
    "mha_per_head",
    "mla",
    "moba",
    "mqa",
    "nsa",
    "packed",
    "prefix_lm",
    "qk_norm",
    "qk_norm_after_rotary",
    "qk_norm_flat",
    "retention",
    "single_head",
    "sliding_window",
    "softcap",
    "sparse_fixed",
    "sparse_strided",
    "stacked",
    "streaming",
    "t5",
    "weightless",
]
