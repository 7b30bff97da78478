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


F, M, C, R, X = wrong_functions, wrong_modules, wrong_caches, right, more
SIZES = {"dim": 32, "heads": 4}
GROUPED = {**SIZES, "kv_heads": 2}


def set_(**options: Any) -> dict[str, Any]:
    """As --set name=value on the command line."""
    return {"options": options}


WRONG = [
    Entry("function", "k and v exchanged", F.keys_for_values, "keys-values-exchanged", {}),
    Entry("function", "q and k exchanged", F.keys_ask, "queries-keys-exchanged", {}),
    Entry("function, einsum", "a fixed / 8.0", F.over_eight, "scale-wrong", {}),
    Entry("function", "sqrt(d) + 0.5", F.sqrt_plus_half, "scale-wrong", {}),
    Entry("function, einsum", "no scale", F.no_scale, "scale-missing", {}),
    Entry("function, SDPA", "scaled before SDPA", F.scaled_before_sdpa, "scale-twice", {}),
    Entry("function", "scaled by the length", F.sequence_scale, "scale-wrong-dim", {}),
    Entry("function", "a mean instead of a softmax", F.uniform, "weights-uniform", {}),
    Entry("function", "softmax over the heads", F.softmax_over_heads, "softmax-axis", {}),
    Entry("function", "scores / sum instead of a softmax", F.linear_weights, "softmax-missing", {}),
    Entry("function, ALiBi", "the bias grows with the distance", F.alibi_grows, "bias-sign", {}),
    Entry("function", "strict diagonal, row 0 kept", F.strict_but_first, "own-key-hidden", {}),
    Entry("function", "strict diagonal, nan_to_num", F.strict_repaired, "own-key-hidden", {}),
    Entry("function", "softmax over half of the keys", F.half_of_the_keys, "keys-ignored", {}),
    Entry("flash, blocks of 16", "no rescale", F.flash_16_unscaled, "softmax-not-rescaled", {}),
    Entry("flash, blocks of 64", "no rescale", F.flash_64_unscaled, "softmax-not-rescaled", {}),
    Entry(
        "flash, blocks of 64",
        "the accumulator is not rescaled",
        F.flash_output_unscaled,
        "softmax-not-rescaled",
        {},
    ),
    Entry(
        "flash, blocks of 32",
        "the last block of keys is dropped",
        F.flash_without_tail,
        "keys-ignored",
        {},
    ),
    Entry("function, SDPA", "keys beyond 64 are ignored", F.first_64_keys, "keys-ignored", {}),
    Entry(
        "blocks of queries",
        "the last queries are dropped",
        F.queries_without_tail,
        "queries-dropped",
        {},
    ),
    Entry("function", "anti-causal", F.anti_causal, "mask-polarity", {}),
    Entry("function", "fills where the mask is 1", F.fills_what_is_kept, "mask-polarity", {}),
    Entry("function", "masked behind the softmax", F.masked_late, "mask-after-softmax", {}),
    Entry("function", "scores times the mask", F.multiplied, "mask-zeroed", {}),
    Entry(
        "function, sinks",
        "the sink's share is given back",
        F.sink_shared_out,
        "sink-renormalized",
        {},
    ),
    Entry(
        "function, GQA",
        "repeat for repeat_interleave",
        F.groups_repeated,
        "gqa-head-order",
        {"heads": 4, "kv_heads": 2},
    ),
    Entry("function, SDPA", "dropout_p by default", F.always_drops, "dropout-in-eval", {}),
    Entry("function", "softmax in float16", F.half_softmax, "precision-lost", {}),
    Entry(
        "function",
        "-1e9 in float16",
        F.minus_1e9_in_half,
        "mask-value-overflow",
        {"dtype": torch.float16},
    ),
    Entry("function, T5 bias", "the bias is subtracted", F.bias_subtracted, "bias-sign", {}),
    Entry("function", "a causal mask from the top left", F.top_left, "cache-differs", {}),
    Entry(
        "function, softcap",
        "capped behind the mask",
        F.capped_after_mask,
        "future-leak",
        {"causal": True},
    ),
    Entry(
        "function, window",
        "one key too many",
        F.one_key_too_many,
        "window-off-by-one",
        {"window": 4},
    ),
    Entry("function", "the first mask serves every call", F.first_mask_of_all, "mask-kept", {}),
    Entry("function", "exp2 for exp", F.base_two, "scale-wrong", {}),
    Entry("function", "weights are not normalized", F.not_normalized, "softmax-missing", {}),
    Entry(
        "function, SDPA", "q and v exchanged", F.queries_for_values, "queries-values-exchanged", {}
    ),
    Entry(
        "function, sinks",
        "the sink is left out of the sum",
        F.sinks_forgotten,
        "sink-renormalized",
        {},
    ),
    Entry("function", "strict diagonal, row 0 is NaN", F.first_row_empty, "output-not-finite", {}),
    Entry(
        "module, SDPA",
        "k_proj makes values",
        M.SwappedProjections,
        "keys-values-exchanged",
        set_(d_model=32, num_heads=4),
    ),
    Entry(
        "GPT-NeoX", "no scale", M.NeoX, "scale-missing", set_(hidden_size=32, num_attention_heads=4)
    ),
    Entry(
        "parameters, einsum",
        "the scale of the model dim",
        M.Einsums,
        "scale-wrong-dim",
        set_(d_model=32, n_heads=4, d_head=8),
    ),
    Entry("MLA", "the scale of a part of the head", M.MLA, "scale-wrong", set_(dim=32, n_heads=4)),
    Entry(
        "QK-norm",
        "scaled before SDPA",
        M.QKNorm,
        "scale-twice",
        set_(dim=32, n_heads=4, n_kv_heads=2),
    ),
    Entry(
        "nanoGPT",
        "heads merged without transpose",
        M.NotTransposed,
        "heads-joined",
        set_(n_embd=32, n_head=4),
    ),
    Entry(
        "nanoGPT",
        "the output projection is forgotten",
        M.NoOutputProjection,
        "output-missing",
        set_(n_embd=32, n_head=4),
    ),
    Entry(
        "nanoGPT",
        "F.dropout without training",
        M.DropsInEvaluation,
        "dropout-in-eval",
        set_(n_embd=32, n_head=4),
    ),
    Entry(
        "Llama, rotary",
        "values are rotated",
        M.RotatedValues,
        "rotary-values",
        set_(hidden_size=32, num_heads=4, num_kv_heads=2),
    ),
    Entry(
        "Llama, rotary",
        "layouts mixed",
        M.MixedLayouts,
        "rotary-mixed",
        set_(hidden_size=32, num_heads=4, num_kv_heads=2),
    ),
    Entry(
        "Llama, rotary",
        "a layout for q, another for k",
        M.OneLayoutEach,
        "rotary-mixed",
        set_(hidden_size=32, num_heads=4, num_kv_heads=2),
    ),
    Entry(
        "Llama, GQA",
        "groups the wrong way round",
        M.GroupsByReshape,
        "gqa-head-order",
        set_(hidden_size=32, num_heads=4, num_kv_heads=2),
    ),
    Entry("Llama, complex rotary", "rotary by head", M.RotaryByHead, "rotary-axis", SIZES),
    Entry("BERT, self and output", "no scale", M.bert_unscaled, "scale-missing", {}),
    Entry("to_q, to_kv", "padding along the queries", M.PadsQueries, "padding-on-queries", SIZES),
    Entry("fused qkv", "the first mask serves every call", M.KeepsFirstMask, "mask-kept", SIZES),
    Entry(
        "fused qkv", "the first triangle serves every text", M.KeepsFirstCausal, "mask-kept", SIZES
    ),
    Entry("T5", "the bias is subtracted", M.T5, "bias-sign", set_(d_model=32, num_heads=4)),
    Entry("BLOOM, baddbmm", "ALiBi's sign", M.ALiBi, "bias-sign", set_(hidden_size=32, n_head=4)),
    Entry(
        "Wqkv, window",
        "one key too many",
        M.Windowed,
        "window-off-by-one",
        set_(d_model=32, n_heads=4, window=5),
    ),
    Entry(
        "module, mask",
        "0 and 1 are added",
        M.AddsZerosAndOnes,
        "mask-added",
        {**SIZES, "mask": "keep"},
    ),
    Entry(
        "sinks, as gpt-oss",
        "the sink's share is given back",
        M.Sinks,
        "sink-renormalized",
        set_(hidden_size=32, num_heads=4),
    ),
    Entry(
        "wrapped MultiheadAttention",
        "the input is changed",
        M.NormalisesInPlace,
        "input-changed",
        SIZES,
    ),
    Entry("nn.Parameter", "all weights are equal", M.AverageOfAll, "weights-uniform", SIZES),
    Entry(
        "blocks in a module",
        "the last block of keys is dropped",
        M.BlockedWithoutTail,
        "keys-ignored",
        SIZES,
    ),
    Entry(
        "a module for each head",
        "q and k exchanged",
        M.ManyHeads,
        "queries-keys-exchanged",
        set_(n_embd=32, num_heads=4),
    ),
    Entry(
        "additive, one query",
        "softmax over the query axis",
        M.Bahdanau,
        "softmax-axis",
        set_(hidden_size=32),
    ),
    Entry("additive", "softmax over the query axis", M.AdditiveSelf, "softmax-axis", {"dim": 16}),
    Entry(
        "fused qkv",
        "-1e9 in float16",
        M.FillsMinus1e9,
        "mask-value-overflow",
        {**SIZES, "dtype": torch.float16},
    ),
    Entry("cache appended", "positions begin again", C.Appended, "cache-differs", SIZES),
    Entry("cache by start_pos", "written one slot late", C.WritesLate, "cache-differs", SIZES),
    Entry("cache by start_pos", "the newest key is left out", C.OneShort, "cache-differs", SIZES),
    Entry("cache by start_pos", "stale keys", C.StaleKeys, "cache-differs", SIZES),
    Entry("cache of a window", "cut too short", C.Rolling, "cache-differs", {**SIZES, "window": 6}),
    Entry(
        "joined heads, a number of heads",
        "the scale of the model dim",
        X.merged_wrong,
        "scale-wrong-dim",
        {},
    ),
    Entry(
        "the Annotated Transformer", "no scale", X.Unscaled, "scale-missing", set_(h=4, d_model=32)
    ),
    Entry(
        "the Annotated Transformer",
        "heads merged without transpose",
        X.Joined,
        "heads-joined",
        set_(h=4, d_model=32),
    ),
    Entry(
        "a loop over heads",
        "the scale of the model dim",
        X.HeadByHeadEmbed,
        "scale-wrong-dim",
        set_(embed_size=32, heads=4),
    ),
    Entry(
        "a loop over heads",
        "softmax over the queries",
        X.HeadByHeadAxis,
        "softmax-axis",
        set_(embed_size=32, heads=4),
    ),
    Entry(
        "a loop over queries",
        "strict diagonal, row 0 kept",
        X.RowByRowStrict,
        "own-key-hidden",
        SIZES,
    ),
    Entry(
        "cosines, a learned temperature",
        "softmax over the queries",
        X.CosineAxis,
        "softmax-axis",
        SIZES,
    ),
    Entry(
        "an output gate",
        "no scale",
        X.GatedUnscaled,
        "scale-missing",
        set_(hidden_size=32, num_heads=4),
    ),
    Entry(
        "Falcon, multi-query",
        "scaled twice",
        X.FalconTwice,
        "scale-twice",
        set_(hidden_size=32, num_heads=4),
    ),
    Entry("MLA, absorbed", "no scale", X.AbsorbedUnscaled, "scale-missing", SIZES),
    Entry("MLA, absorbed", "q_pe alone is rotated", X.AbsorbedOneSided, "rotary-one-sided", SIZES),
    Entry("module, softcap", "capped after the mask", X.CapAfterMask, "future-leak", SIZES),
    Entry("module, mask", "masked_fill(mask == 0, 1e-9)", X.MaskToZero, "mask-zeroed", SIZES),
    Entry("module, padding", "masked_fill(mask == 0, 1e-9)", X.PaddingToZero, "mask-zeroed", SIZES),
    Entry(
        "module, mask", "padding along the queries", X.MaskOfQueries, "padding-on-queries", SIZES
    ),
    Entry(
        "cache in buffers ck and cv", "the mask begins at 0", X.ShortNames, "cache-differs", SIZES
    ),
    Entry(
        "minGPT with rotary",
        "values are one place late",
        X.MinGPTRolled,
        "definition-differs",
        set_(n_embd=32, n_head=4),
    ),
    Entry(
        "minGPT with rotary",
        "scaled before SDPA",
        X.MinGPTTwice,
        "scale-twice",
        set_(n_embd=32, n_head=4),
    ),
    Entry(
        "gpt-fast, input_pos",
        "one key of the future",
        X.GptFastAhead,
        "future-leak",
        {**set_(dim=32, n_head=4), "causal": True},
    ),
    Entry(
        "GPT-2's layer_past",
        "the past behind what is new",
        X.TupleCacheBehind,
        "cache-differs",
        set_(n_embd=32, n_head=4),
    ),
    Entry(
        "chunks of queries", "keys before the last chunk are lost", X.Chunked, "keys-ignored", SIZES
    ),
    Entry(
        "Luong, one state",
        "softmax over the batch",
        X.LuongOverBatch,
        "softmax-axis",
        set_(hidden_dim=32),
    ),
    Entry(
        "Bahdanau, repeated state",
        "softmax over an axis of size 1",
        X.PoolOverFeatures,
        "softmax-axis",
        set_(hidden_dim=32),
    ),
    Entry("products by sums", "a mean over the features", X.manual_wrong, "scale-twice", {}),
    Entry(
        "flash_attn's layout",
        "one key of the future",
        X.bshd_late,
        "future-leak",
        {"layout": "BTHD", "causal": True},
    ),
    Entry("split keys", "halves are averaged", X.split_softmax, "definition-differs", {}),
    Entry(
        "function, SDPA",
        "the last head gives the first one's",
        X.dropped_head,
        "definition-differs",
        {},
    ),
    Entry("function, SDPA", "the output is scaled", X.value_scaled, "definition-differs", {}),
]

RIGHT = [
    Entry("function", "masked_fill(-1e9), weights returned", R.annotated, None, {}),
    Entry("function, einsum", "masked_fill(-inf)", R.minus_infinity, None, {}),
    Entry("function", "torch's documented equivalent", R.torch_s_own, None, {}),
    Entry("flash, blocks of 16", "rescaled", R.flash_16, None, {}),
    Entry("flash, blocks of 32", "causal", R.flash_causal, None, {}),
    Entry("function, ALiBi", "causal", R.alibi, None, {}),
    Entry("function, sinks", "in the denominator only", R.with_sinks, None, {}),
    Entry("function, bias", "added", R.with_bias, None, {}),
    Entry(
        "function, GQA",
        "grouped by reshape",
        R.grouped_by_reshape,
        None,
        {"heads": 4, "kv_heads": 2},
    ),
    Entry("function, softcap", "capped before the mask", R.softcapped, None, {}),
    Entry("function, window", "4 keys", R.windowed, None, {"window": 4}),
    Entry(
        "GPT-NeoX",
        "[H, 3, D], a partial rotary",
        R.NeoX,
        None,
        set_(hidden_size=32, num_attention_heads=4),
    ),
    Entry(
        "parameters, einsum", "[H, M, D]", R.Einsums, None, set_(d_model=32, n_heads=4, d_head=8)
    ),
    Entry("MLA", "the scale of the whole head", R.MLA, None, set_(dim=32, n_heads=4)),
    Entry("QK-norm", "Qwen 3's", R.QKNorm, None, set_(dim=32, n_heads=4, n_kv_heads=2)),
    Entry("nanoGPT", "[3, H, D]", M.NanoGPT, None, set_(n_embd=32, n_head=4)),
    Entry(
        "Llama, rotary",
        "halves, grouped",
        M.Llama,
        None,
        set_(hidden_size=32, num_heads=4, num_kv_heads=2),
    ),
    Entry("Llama, complex rotary", "neighbours", R.Complex, None, SIZES),
    Entry("Llama, rotary", "neighbours, positions given", R.Interleaved, None, GROUPED),
    Entry("BERT, self and output", "an additive mask", R.bert, None, {}),
    Entry("T5", "a learned bias", R.T5, None, set_(d_model=32, num_heads=4)),
    Entry("BLOOM, baddbmm", "ALiBi", R.ALiBi, None, set_(hidden_size=32, n_head=4)),
    Entry(
        "sinks, as gpt-oss",
        "in the denominator only",
        R.Sinks,
        None,
        set_(hidden_size=32, num_heads=4),
    ),
    Entry(
        "a book's",
        "a buffer for a mask",
        R.Raschka,
        None,
        set_(d_in=32, d_out=32, context_length=512, dropout=0.1, num_heads=4),
    ),
    Entry(
        "to_q, to_kv",
        "to_out in a Sequential",
        R.Lucidrains,
        None,
        set_(dim=32, heads=4, dim_head=8),
    ),
    Entry(
        "a module for each head", "concatenated", R.ManyHeads, None, set_(n_embd=32, num_heads=4)
    ),
    Entry("cache appended", "rotary", R.Appended, None, SIZES),
    Entry("cache by start_pos", "preallocated", C.Preallocated, None, SIZES),
    Entry("cache of a window", "cut to the window", R.Rolling, None, {**SIZES, "window": 6}),
    Entry("additive, one query", "softmax over the keys", R.Bahdanau, None, set_(hidden_size=32)),
    Entry("additive", "softmax over the keys", R.AdditiveSelf, None, {"dim": 16}),
    Entry("causal, padding told", "-inf", R.PaddedCausal, None, SIZES),
    Entry(
        "torch",
        "nn.MultiheadAttention(batch_first=True)",
        nn.MultiheadAttention,
        None,
        {**SIZES, "options": {"batch_first": True}},
    ),
    Entry("transformers", "Bert's module", R.transformers_bert, None, {}),
    Entry("transformers", "GPT-2's module", R.transformers_gpt2, None, {}),
    Entry(
        "transformers",
        "Llama's module",
        R.transformers_llama,
        None,
        {**GROUPED, "adapter": R.feed_llama},
    ),
    Entry("joined heads, a number of heads", "[B, T, H * D]", X.merged, None, {}),
    Entry(
        "the Annotated Transformer",
        "four maps in a list",
        X.MultiHeadedAttention,
        None,
        set_(h=4, d_model=32),
    ),
    Entry(
        "a loop over heads", "slices of one map", X.HeadByHead, None, set_(embed_size=32, heads=4)
    ),
    Entry("a loop over queries", "causal", X.RowByRow, None, SIZES),
    Entry("cosines, a learned temperature", "Swin 2's", X.Cosine, None, SIZES),
    Entry("an output gate", "Qwen 3 Next's", X.Gated, None, set_(hidden_size=32, num_heads=4)),
    Entry("Falcon, multi-query", "[H + 2, D]", X.Falcon, None, set_(hidden_size=32, num_heads=4)),
    Entry("MLA, absorbed", "latents attended to", X.AbsorbedMLA, None, SIZES),
    Entry("module, softcap", "capped before the mask", X.CapBeforeMask, None, SIZES),
    Entry("module, mask", "masked_fill(mask == 0, -1e9)", X.MaskFilled, None, SIZES),
    Entry("module", "the scores are returned beside the output", X.ScoresReturned, None, SIZES),
    Entry("module", "buffers named mask and cache are saved", X.SavedNumbers, None, SIZES),
    Entry("module", "forward(*, query, key, value)", X.ByNameOnly, None, SIZES),
    Entry("function", "attend(k, q, v)", X.key_first, None, {}),
    Entry("cache in buffers ck and cv", "by start_pos", X.ShortNamesRight, None, SIZES),
    Entry("minGPT with rotary", "another base", X.MinGPT, None, set_(n_embd=32, n_head=4)),
    Entry("gpt-fast, input_pos", "a cache module", X.GptFast, None, set_(dim=32, n_head=4)),
    Entry("GPT-2's layer_past", "presents", X.TupleCache, None, set_(n_embd=32, n_head=4)),
    Entry("chunks of queries", "against all keys", X.ChunkedRight, None, SIZES),
    Entry("Luong, one state", "general", X.Luong, None, set_(hidden_dim=32)),
    Entry("Bahdanau, repeated state", "as tutorials write it", X.Pool, None, set_(hidden_dim=32)),
    Entry("products by sums", "exp by hand", X.manual, None, {}),
    Entry("flash_attn's layout", "[B, T, H, D]", X.bshd, None, {"layout": "BTHD"}),
    Entry("split keys", "merged by logsumexp", X.lse_merged, None, {}),
]
