"""Every entry of the corpus: what it is, how it is audited, and the fault that it has (None: it is
right).
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

import torch
from torch import nn

from tests.audit.corpus import more, right, wrong_caches, wrong_functions, wrong_modules


class Entry(NamedTuple):
    style: str
    what: str
    target: Callable[..., Any]
    fault: str | None
    given: dict[str, Any]


def entry(
    style: str, what: str, target: Callable[..., Any], fault: str | None = None, **given: Any
) -> Entry:
    return Entry(style, what, target, fault, given)


F, M, C, R, X = wrong_functions, wrong_modules, wrong_caches, right, more
SIZES = {"dim": 32, "heads": 4}
GROUPED = {**SIZES, "kv_heads": 2}


def set_(**options: Any) -> dict[str, Any]:
    """As --set name=value on the command line."""
    return {"options": options}


WRONG = [
    entry("function", "k and v exchanged", F.keys_for_values, "keys-values-exchanged"),
    entry("function", "q and k exchanged", F.keys_ask, "queries-keys-exchanged"),
    entry("function, einsum", "a fixed / 8.0", F.over_eight, "scale-wrong"),
    entry("function", "sqrt(d) + 0.5", F.sqrt_plus_half, "scale-wrong"),
    entry("function, einsum", "no scale", F.no_scale, "scale-missing"),
    entry("function, SDPA", "scaled before SDPA", F.scaled_before_sdpa, "scale-twice"),
    entry("function", "scaled by the length", F.sequence_scale, "scale-wrong-dim"),
    entry("function", "a mean instead of a softmax", F.uniform, "weights-uniform"),
    entry("function", "softmax over the heads", F.softmax_over_heads, "softmax-axis"),
    entry("function", "scores / sum instead of a softmax", F.linear_weights, "softmax-missing"),
    entry("function, ALiBi", "the bias grows with the distance", F.alibi_grows, "bias-sign"),
    entry("function", "strict diagonal, row 0 kept", F.strict_but_first, "own-key-hidden"),
    entry("function", "strict diagonal, nan_to_num", F.strict_repaired, "own-key-hidden"),
    entry("function", "softmax over half of the keys", F.half_of_the_keys, "keys-ignored"),
    entry("flash, blocks of 16", "no rescale", F.flash_16_unscaled, "softmax-not-rescaled"),
    entry("flash, blocks of 64", "no rescale", F.flash_64_unscaled, "softmax-not-rescaled"),
    entry(
        "flash, blocks of 64",
        "the accumulator is not rescaled",
        F.flash_output_unscaled,
        "softmax-not-rescaled",
    ),
    entry(
        "flash, blocks of 32",
        "the last block of keys is dropped",
        F.flash_without_tail,
        "keys-ignored",
    ),
    entry("function, SDPA", "keys beyond 64 are ignored", F.first_64_keys, "keys-ignored"),
    entry(
        "blocks of queries",
        "the last queries are dropped",
        F.queries_without_tail,
        "queries-dropped",
    ),
    entry("function", "anti-causal", F.anti_causal, "mask-polarity"),
    entry("function", "fills where the mask is 1", F.fills_what_is_kept, "mask-polarity"),
    entry("function", "masked behind the softmax", F.masked_late, "mask-after-softmax"),
    entry("function", "scores times the mask", F.multiplied, "mask-zeroed"),
    entry(
        "function, sinks", "the sink's share is given back", F.sink_shared_out, "sink-renormalized"
    ),
    entry(
        "function, GQA",
        "repeat for repeat_interleave",
        F.groups_repeated,
        "gqa-head-order",
        heads=4,
        kv_heads=2,
    ),
    entry("function, SDPA", "dropout_p by default", F.always_drops, "dropout-in-eval"),
    entry("function", "softmax in float16", F.half_softmax, "precision-lost"),
    entry(
        "function",
        "-1e9 in float16",
        F.minus_1e9_in_half,
        "mask-value-overflow",
        dtype=torch.float16,
    ),
    entry("function, T5 bias", "the bias is subtracted", F.bias_subtracted, "bias-sign"),
    entry("function", "a causal mask from the top left", F.top_left, "cache-differs"),
    entry(
        "function, softcap",
        "capped behind the mask",
        F.capped_after_mask,
        "future-leak",
        causal=True,
    ),
    entry(
        "function, window", "one key too many", F.one_key_too_many, "window-off-by-one", window=4
    ),
    entry("function", "the first mask serves every call", F.first_mask_of_all, "mask-kept"),
    entry("function", "exp2 for exp", F.base_two, "scale-wrong"),
    entry("function", "weights are not normalized", F.not_normalized, "softmax-missing"),
    entry("function, SDPA", "q and v exchanged", F.queries_for_values, "queries-values-exchanged"),
    entry(
        "function, sinks", "the sink is left out of the sum", F.sinks_forgotten, "sink-renormalized"
    ),
    entry("function", "strict diagonal, row 0 is NaN", F.first_row_empty, "output-not-finite"),
    entry(
        "module, SDPA",
        "k_proj makes values",
        M.SwappedProjections,
        "keys-values-exchanged",
        **set_(d_model=32, num_heads=4),
    ),
    entry(
        "GPT-NeoX",
        "no scale",
        M.NeoX,
        "scale-missing",
        **set_(hidden_size=32, num_attention_heads=4),
    ),
    entry(
        "parameters, einsum",
        "the scale of the model dim",
        M.Einsums,
        "scale-wrong-dim",
        **set_(d_model=32, n_heads=4, d_head=8),
    ),
    entry(
        "MLA", "the scale of a part of the head", M.MLA, "scale-wrong", **set_(dim=32, n_heads=4)
    ),
    entry(
        "QK-norm",
        "scaled before SDPA",
        M.QKNorm,
        "scale-twice",
        **set_(dim=32, n_heads=4, n_kv_heads=2),
    ),
    entry(
        "nanoGPT",
        "heads merged without transpose",
        M.NotTransposed,
        "heads-joined",
        **set_(n_embd=32, n_head=4),
    ),
    entry(
        "nanoGPT",
        "the output projection is forgotten",
        M.NoOutputProjection,
        "output-missing",
        **set_(n_embd=32, n_head=4),
    ),
    entry(
        "nanoGPT",
        "F.dropout without training",
        M.DropsInEvaluation,
        "dropout-in-eval",
        **set_(n_embd=32, n_head=4),
    ),
    entry(
        "Llama, rotary",
        "values are rotated",
        M.RotatedValues,
        "rotary-values",
        **set_(hidden_size=32, num_heads=4, num_kv_heads=2),
    ),
    entry(
        "Llama, rotary",
        "layouts mixed",
        M.MixedLayouts,
        "rotary-mixed",
        **set_(hidden_size=32, num_heads=4, num_kv_heads=2),
    ),
    entry(
        "Llama, rotary",
        "a layout for q, another for k",
        M.OneLayoutEach,
        "rotary-mixed",
        **set_(hidden_size=32, num_heads=4, num_kv_heads=2),
    ),
    entry(
        "Llama, GQA",
        "groups the wrong way round",
        M.GroupsByReshape,
        "gqa-head-order",
        **set_(hidden_size=32, num_heads=4, num_kv_heads=2),
    ),
    entry("Llama, complex rotary", "rotary by head", M.RotaryByHead, "rotary-axis", **SIZES),
    entry("BERT, self and output", "no scale", M.bert_unscaled, "scale-missing"),
    entry("to_q, to_kv", "padding along the queries", M.PadsQueries, "padding-on-queries", **SIZES),
    entry("fused qkv", "the first mask serves every call", M.KeepsFirstMask, "mask-kept", **SIZES),
    entry(
        "fused qkv",
        "the first triangle serves every text",
        M.KeepsFirstCausal,
        "mask-kept",
        **SIZES,
    ),
    entry("T5", "the bias is subtracted", M.T5, "bias-sign", **set_(d_model=32, num_heads=4)),
    entry("BLOOM, baddbmm", "ALiBi's sign", M.ALiBi, "bias-sign", **set_(hidden_size=32, n_head=4)),
    entry(
        "Wqkv, window",
        "one key too many",
        M.Windowed,
        "window-off-by-one",
        **set_(d_model=32, n_heads=4, window=5),
    ),
    entry(
        "module, mask", "0 and 1 are added", M.AddsZerosAndOnes, "mask-added", **SIZES, mask="keep"
    ),
    entry(
        "sinks, as gpt-oss",
        "the sink's share is given back",
        M.Sinks,
        "sink-renormalized",
        **set_(hidden_size=32, num_heads=4),
    ),
    entry(
        "wrapped MultiheadAttention",
        "the input is changed",
        M.NormalisesInPlace,
        "input-changed",
        **SIZES,
    ),
    entry("nn.Parameter", "all weights are equal", M.AverageOfAll, "weights-uniform", **SIZES),
    entry(
        "blocks in a module",
        "the last block of keys is dropped",
        M.BlockedWithoutTail,
        "keys-ignored",
        **SIZES,
    ),
    entry(
        "a module for each head",
        "q and k exchanged",
        M.ManyHeads,
        "queries-keys-exchanged",
        **set_(n_embd=32, num_heads=4),
    ),
    entry(
        "additive, one query",
        "softmax over the query axis",
        M.Bahdanau,
        "softmax-axis",
        **set_(hidden_size=32),
    ),
    entry("additive", "softmax over the query axis", M.AdditiveSelf, "softmax-axis", dim=16),
    entry(
        "fused qkv",
        "-1e9 in float16",
        M.FillsMinus1e9,
        "mask-value-overflow",
        **SIZES,
        dtype=torch.float16,
    ),
    entry("cache appended", "positions begin again", C.Appended, "cache-differs", **SIZES),
    entry("cache by start_pos", "written one slot late", C.WritesLate, "cache-differs", **SIZES),
    entry("cache by start_pos", "the newest key is left out", C.OneShort, "cache-differs", **SIZES),
    entry("cache by start_pos", "stale keys", C.StaleKeys, "cache-differs", **SIZES),
    entry("cache of a window", "cut too short", C.Rolling, "cache-differs", **SIZES, window=6),
    entry(
        "joined heads, a number of heads",
        "the scale of the model dim",
        X.merged_wrong,
        "scale-wrong-dim",
    ),
    entry(
        "the Annotated Transformer",
        "no scale",
        X.MultiHeadedAttention,
        "scale-missing",
        **set_(h=4, d_model=32, fault="scale"),
    ),
    entry(
        "the Annotated Transformer",
        "heads merged without transpose",
        X.MultiHeadedAttention,
        "heads-joined",
        **set_(h=4, d_model=32, fault="join"),
    ),
    entry(
        "a loop over heads",
        "the scale of the model dim",
        X.HeadByHead,
        "scale-wrong-dim",
        **set_(embed_size=32, heads=4, fault="scale"),
    ),
    entry(
        "a loop over heads",
        "softmax over the queries",
        X.HeadByHead,
        "softmax-axis",
        **set_(embed_size=32, heads=4, fault="axis"),
    ),
    entry(
        "a loop over queries",
        "strict diagonal, row 0 kept",
        X.RowByRow,
        "own-key-hidden",
        **SIZES,
        **set_(fault="strict"),
    ),
    entry(
        "cosines, a learned temperature",
        "softmax over the queries",
        X.Cosine,
        "softmax-axis",
        **SIZES,
        **set_(fault="axis"),
    ),
    entry(
        "an output gate",
        "no scale",
        X.Gated,
        "scale-missing",
        **set_(hidden_size=32, num_heads=4, fault="scale"),
    ),
    entry(
        "Falcon, multi-query",
        "scaled twice",
        X.Falcon,
        "scale-twice",
        **set_(hidden_size=32, num_heads=4, fault="scale"),
    ),
    entry(
        "MLA, absorbed", "no scale", X.AbsorbedMLA, "scale-missing", **SIZES, **set_(fault="scale")
    ),
    entry(
        "MLA, absorbed",
        "q_pe alone is rotated",
        X.AbsorbedMLA,
        "rotary-one-sided",
        **SIZES,
        **set_(fault="one-sided"),
    ),
    entry("module, softcap", "capped after the mask", X.CapAfterMask, "future-leak", **SIZES),
    entry("module, mask", "masked_fill(mask == 0, 1e-9)", X.MaskToZero, "mask-zeroed", **SIZES),
    entry(
        "module, padding", "masked_fill(mask == 0, 1e-9)", X.PaddingToZero, "mask-zeroed", **SIZES
    ),
    entry(
        "module, mask", "padding along the queries", X.MaskOfQueries, "padding-on-queries", **SIZES
    ),
    entry(
        "cache in buffers ck and cv", "the mask begins at 0", X.ShortNames, "cache-differs", **SIZES
    ),
    entry(
        "minGPT with rotary",
        "values are one place late",
        X.MinGPT,
        "definition-differs",
        **set_(n_embd=32, n_head=4, fault="roll"),
    ),
    entry(
        "minGPT with rotary",
        "scaled before SDPA",
        X.MinGPT,
        "scale-twice",
        **set_(n_embd=32, n_head=4, fault="double"),
    ),
    entry(
        "gpt-fast, input_pos",
        "one key of the future",
        X.GptFast,
        "future-leak",
        **set_(dim=32, n_head=4, fault="ahead"),
        causal=True,
    ),
    entry(
        "GPT-2's layer_past",
        "the past behind what is new",
        X.TupleCache,
        "cache-differs",
        **set_(n_embd=32, n_head=4, fault="behind"),
    ),
    entry(
        "chunks of queries",
        "keys before the last chunk are lost",
        X.Chunked,
        "keys-ignored",
        **SIZES,
    ),
    entry(
        "Luong, one state",
        "softmax over the batch",
        X.Luong,
        "softmax-axis",
        **set_(hidden_dim=32, axis=0),
    ),
    entry(
        "Bahdanau, repeated state",
        "softmax over an axis of size 1",
        X.Pool,
        "softmax-axis",
        **set_(hidden_dim=32, axis=2),
    ),
    entry("products by sums", "a mean over the features", X.manual_wrong, "scale-twice"),
    entry(
        "flash_attn's layout",
        "one key of the future",
        X.bshd_late,
        "future-leak",
        layout="BTHD",
        causal=True,
    ),
    entry("split keys", "halves are averaged", X.split_softmax, "definition-differs"),
    entry(
        "function, SDPA",
        "the last head gives the first one's",
        X.dropped_head,
        "definition-differs",
    ),
    entry("function, SDPA", "the output is scaled", X.value_scaled, "definition-differs"),
]

RIGHT = [
    entry("function", "masked_fill(-1e9), weights returned", R.annotated),
    entry("function, einsum", "masked_fill(-inf)", R.minus_infinity),
    entry("function", "torch's documented equivalent", R.torch_s_own),
    entry("flash, blocks of 16", "rescaled", R.flash_16),
    entry("flash, blocks of 32", "causal", R.flash_causal),
    entry("function, ALiBi", "causal", R.alibi),
    entry("function, sinks", "in the denominator only", R.with_sinks),
    entry("function, bias", "added", R.with_bias),
    entry("function, GQA", "grouped by reshape", R.grouped_by_reshape, heads=4, kv_heads=2),
    entry("function, softcap", "capped before the mask", R.softcapped),
    entry("function, window", "4 keys", R.windowed, window=4),
    entry(
        "GPT-NeoX",
        "[H, 3, D], a partial rotary",
        R.NeoX,
        **set_(hidden_size=32, num_attention_heads=4),
    ),
    entry("parameters, einsum", "[H, M, D]", R.Einsums, **set_(d_model=32, n_heads=4, d_head=8)),
    entry("MLA", "the scale of the whole head", R.MLA, **set_(dim=32, n_heads=4)),
    entry("QK-norm", "Qwen 3's", R.QKNorm, **set_(dim=32, n_heads=4, n_kv_heads=2)),
    entry("nanoGPT", "[3, H, D]", M.NanoGPT, **set_(n_embd=32, n_head=4)),
    entry(
        "Llama, rotary",
        "halves, grouped",
        M.Llama,
        **set_(hidden_size=32, num_heads=4, num_kv_heads=2),
    ),
    entry("Llama, complex rotary", "neighbours", R.Complex, **SIZES),
    entry("Llama, rotary", "neighbours, positions given", R.Interleaved, **GROUPED),
    entry("BERT, self and output", "an additive mask", R.bert),
    entry("T5", "a learned bias", R.T5, **set_(d_model=32, num_heads=4)),
    entry("BLOOM, baddbmm", "ALiBi", R.ALiBi, **set_(hidden_size=32, n_head=4)),
    entry(
        "sinks, as gpt-oss", "in the denominator only", R.Sinks, **set_(hidden_size=32, num_heads=4)
    ),
    entry(
        "a book's",
        "a buffer for a mask",
        R.Raschka,
        **set_(d_in=32, d_out=32, context_length=512, dropout=0.1, num_heads=4),
    ),
    entry(
        "to_q, to_kv", "to_out in a Sequential", R.Lucidrains, **set_(dim=32, heads=4, dim_head=8)
    ),
    entry("a module for each head", "concatenated", R.ManyHeads, **set_(n_embd=32, num_heads=4)),
    entry("cache appended", "rotary", R.Appended, **SIZES),
    entry("cache by start_pos", "preallocated", C.Preallocated, **SIZES),
    entry("cache of a window", "cut to the window", R.Rolling, **SIZES, window=6),
    entry("additive, one query", "softmax over the keys", R.Bahdanau, **set_(hidden_size=32)),
    entry("additive", "softmax over the keys", R.AdditiveSelf, dim=16),
    entry("causal, padding told", "-inf", R.PaddedCausal, **SIZES),
    entry(
        "torch",
        "nn.MultiheadAttention(batch_first=True)",
        nn.MultiheadAttention,
        **SIZES,
        options={"batch_first": True},
    ),
    entry("transformers", "Bert's module", R.transformers_bert),
    entry("transformers", "GPT-2's module", R.transformers_gpt2),
    entry("transformers", "Llama's module", R.transformers_llama, **GROUPED, adapter=R.feed_llama),
    entry("joined heads, a number of heads", "[B, T, H * D]", X.merged),
    entry(
        "the Annotated Transformer",
        "four maps in a list",
        X.MultiHeadedAttention,
        **set_(h=4, d_model=32),
    ),
    entry("a loop over heads", "slices of one map", X.HeadByHead, **set_(embed_size=32, heads=4)),
    entry("a loop over queries", "causal", X.RowByRow, **SIZES),
    entry("cosines, a learned temperature", "Swin 2's", X.Cosine, **SIZES),
    entry("an output gate", "Qwen 3 Next's", X.Gated, **set_(hidden_size=32, num_heads=4)),
    entry("Falcon, multi-query", "[H + 2, D]", X.Falcon, **set_(hidden_size=32, num_heads=4)),
    entry("MLA, absorbed", "latents attended to", X.AbsorbedMLA, **SIZES),
    entry("module, softcap", "capped before the mask", X.CapBeforeMask, **SIZES),
    entry("module, mask", "masked_fill(mask == 0, -1e9)", X.MaskFilled, **SIZES),
    entry("module", "the scores are returned beside the output", X.ScoresReturned, **SIZES),
    entry("module", "buffers named mask and cache are saved", X.SavedNumbers, **SIZES),
    entry("module", "forward(*, query, key, value)", X.ByNameOnly, **SIZES),
    entry("function", "attend(k, q, v)", X.key_first),
    entry("cache in buffers ck and cv", "by start_pos", X.ShortNamesRight, **SIZES),
    entry("minGPT with rotary", "another base", X.MinGPT, **set_(n_embd=32, n_head=4)),
    entry("gpt-fast, input_pos", "a cache module", X.GptFast, **set_(dim=32, n_head=4)),
    entry("GPT-2's layer_past", "presents", X.TupleCache, **set_(n_embd=32, n_head=4)),
    entry("chunks of queries", "against all keys", X.Chunked, **SIZES, **set_(fault=False)),
    entry("Luong, one state", "general", X.Luong, **set_(hidden_dim=32)),
    entry("Bahdanau, repeated state", "as tutorials write it", X.Pool, **set_(hidden_dim=32)),
    entry("products by sums", "exp by hand", X.manual),
    entry("flash_attn's layout", "[B, T, H, D]", X.bshd, layout="BTHD"),
    entry("split keys", "merged by logsumexp", X.lse_merged),
]
