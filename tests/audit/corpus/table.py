"""Every entry of the corpus: how it is audited, and the fault that it has (None: it is right).
What each is stands in the tables of docs/audit.md, in the same order.
"""

from __future__ import annotations

import re
from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import nn

from tests.audit.corpus import more, right, wrong_caches, wrong_functions, wrong_modules

PAGE = Path(__file__).parents[3] / "docs" / "audit.md"


class Entry(NamedTuple):
    target: Callable[..., Any]
    fault: str | None
    given: dict[str, Any]


def entry(
    target: Callable[..., Any],
    fault: str | None = None,
    options: dict[str, Any] | None = None,
    **given: Any,
) -> Entry:
    """An entry; `wrong` is an option of modules that have the fault only where it is asked for."""
    wrong = {"fault": given.pop("wrong")} if "wrong" in given else {}
    options = {**(options or {}), **wrong}
    return Entry(target, fault, {**given, **({"options": options} if options else {})})


def published() -> list[list[str]]:
    """The rows of both tables of the page: form, fault and name of a wrong one, form and what it
    is of a right one.
    """
    text = PAGE.read_text("utf-8").partition("<!-- corpus: begin -->")[2]
    rows = re.findall(r"^\| (.*) \|$", text.partition("<!-- corpus: end -->")[0], re.MULTILINE)
    return [row.split(" | ") for row in rows if not row.startswith("form |")]


F, M, C, R, X = wrong_functions, wrong_modules, wrong_caches, right, more
SIZES = {"dim": 32, "heads": 4}
GROUPED = {**SIZES, "kv_heads": 2}
NANO = {"n_embd": 32, "n_head": 4}
LLAMA = {"hidden_size": 32, "num_heads": 4, "num_kv_heads": 2}
HIDDEN = {"hidden_size": 32, "num_heads": 4}
MODEL = {"d_model": 32, "num_heads": 4}
NEOX = {"hidden_size": 32, "num_attention_heads": 4}
EINSUM = {"d_model": 32, "n_heads": 4, "d_head": 8}
META = {"dim": 32, "n_heads": 4}
BLOOM = {"hidden_size": 32, "n_head": 4}
LOOP = {"n_embd": 32, "num_heads": 4}
STATE = {"hidden_size": 32}
LUONG = {"hidden_dim": 32}
ANNOTATED = {"h": 4, "d_model": 32}
TUTORIAL = {"embed_size": 32, "heads": 4}
FAST = {"dim": 32, "n_head": 4}
"""Sizes as the constructors of public code name them."""

WRONG = [
    entry(F.keys_for_values, "keys-values-exchanged"),
    entry(F.keys_ask, "queries-keys-exchanged"),
    entry(F.over_eight, "scale-wrong"),
    entry(F.sqrt_plus_half, "scale-wrong"),
    entry(F.no_scale, "scale-missing"),
    entry(F.scaled_before_sdpa, "scale-twice"),
    entry(F.sequence_scale, "scale-wrong-dim"),
    entry(F.uniform, "weights-uniform"),
    entry(F.softmax_over_heads, "softmax-axis"),
    entry(F.linear_weights, "softmax-missing"),
    entry(F.alibi_grows, "bias-sign"),
    entry(F.strict_but_first, "own-key-hidden"),
    entry(F.strict_repaired, "own-key-hidden"),
    entry(F.half_of_the_keys, "keys-ignored"),
    entry(F.flash_16_unscaled, "softmax-not-rescaled"),
    entry(F.flash_64_unscaled, "softmax-not-rescaled"),
    entry(F.flash_output_unscaled, "softmax-not-rescaled"),
    entry(F.flash_without_tail, "keys-ignored"),
    entry(F.first_64_keys, "keys-ignored"),
    entry(F.queries_without_tail, "queries-dropped"),
    entry(F.anti_causal, "mask-polarity"),
    entry(F.fills_what_is_kept, "mask-polarity"),
    entry(F.masked_late, "mask-after-softmax"),
    entry(F.multiplied, "mask-zeroed"),
    entry(F.sink_shared_out, "sink-renormalized"),
    entry(F.groups_repeated, "gqa-head-order", heads=4, kv_heads=2),
    entry(F.always_drops, "dropout-in-eval"),
    entry(F.half_softmax, "precision-lost"),
    entry(F.minus_1e9_in_half, "mask-value-overflow", dtype=torch.float16),
    entry(F.bias_subtracted, "bias-sign"),
    entry(F.top_left, "cache-differs"),
    entry(F.capped_after_mask, "future-leak", causal=True),
    entry(F.one_key_too_many, "window-off-by-one", window=4),
    entry(F.first_mask_of_all, "mask-kept"),
    entry(F.base_two, "scale-wrong"),
    entry(F.not_normalized, "softmax-missing"),
    entry(F.queries_for_values, "queries-values-exchanged"),
    entry(F.sinks_forgotten, "sink-renormalized"),
    entry(F.first_row_empty, "output-not-finite"),
    entry(M.SwappedProjections, "keys-values-exchanged", MODEL),
    entry(M.NeoX, "scale-missing", NEOX),
    entry(M.Einsums, "scale-wrong-dim", EINSUM),
    entry(M.MLA, "scale-wrong", META),
    entry(M.QKNorm, "scale-twice", META | {"n_kv_heads": 2}),
    entry(M.NotTransposed, "heads-joined", NANO),
    entry(M.NoOutputProjection, "output-missing", NANO),
    entry(M.DropsInEvaluation, "dropout-in-eval", NANO),
    entry(M.RotatedValues, "rotary-values", LLAMA),
    entry(M.MixedLayouts, "rotary-mixed", LLAMA),
    entry(M.OneLayoutEach, "rotary-mixed", LLAMA),
    entry(M.GroupsByReshape, "gqa-head-order", LLAMA),
    entry(M.RotaryByHead, "rotary-axis", **SIZES),
    entry(M.bert_unscaled, "scale-missing"),
    entry(M.PadsQueries, "padding-on-queries", **SIZES),
    entry(M.KeepsFirstMask, "mask-kept", **SIZES),
    entry(M.KeepsFirstCausal, "mask-kept", **SIZES),
    entry(M.T5, "bias-sign", MODEL),
    entry(M.ALiBi, "bias-sign", BLOOM),
    entry(M.Windowed, "window-off-by-one", {"d_model": 32, "n_heads": 4, "window": 5}),
    entry(M.AddsZerosAndOnes, "mask-added", **SIZES, mask="keep"),
    entry(M.Sinks, "sink-renormalized", HIDDEN),
    entry(M.NormalisesInPlace, "input-changed", **SIZES),
    entry(M.AverageOfAll, "weights-uniform", **SIZES),
    entry(M.BlockedWithoutTail, "keys-ignored", **SIZES),
    entry(M.ManyHeads, "queries-keys-exchanged", LOOP),
    entry(M.Bahdanau, "softmax-axis", STATE),
    entry(M.AdditiveSelf, "softmax-axis", dim=16),
    entry(M.FillsMinus1e9, "mask-value-overflow", **SIZES, dtype=torch.float16),
    entry(C.Appended, "cache-differs", **SIZES),
    entry(C.WritesLate, "cache-differs", **SIZES),
    entry(C.OneShort, "cache-differs", **SIZES),
    entry(C.StaleKeys, "cache-differs", **SIZES),
    entry(C.Rolling, "cache-differs", **SIZES, window=6),
    entry(X.merged_wrong, "scale-wrong-dim"),
    entry(X.MultiHeadedAttention, "scale-missing", ANNOTATED, wrong="scale"),
    entry(X.MultiHeadedAttention, "heads-joined", ANNOTATED, wrong="join"),
    entry(X.HeadByHead, "scale-wrong-dim", TUTORIAL, wrong="scale"),
    entry(X.HeadByHead, "softmax-axis", TUTORIAL, wrong="axis"),
    entry(X.RowByRow, "own-key-hidden", wrong="strict", **SIZES),
    entry(X.Cosine, "softmax-axis", wrong="axis", **SIZES),
    entry(X.Gated, "scale-missing", HIDDEN, wrong="scale"),
    entry(X.Falcon, "scale-twice", HIDDEN, wrong="scale"),
    entry(X.AbsorbedMLA, "scale-missing", wrong="scale", **SIZES),
    entry(X.AbsorbedMLA, "rotary-one-sided", wrong="one-sided", **SIZES),
    entry(X.CapAfterMask, "future-leak", **SIZES),
    entry(X.MaskToZero, "mask-zeroed", **SIZES),
    entry(X.PaddingToZero, "mask-zeroed", **SIZES),
    entry(X.MaskOfQueries, "padding-on-queries", **SIZES),
    entry(X.ShortNames, "cache-differs", **SIZES),
    entry(X.MinGPT, "definition-differs", NANO, wrong="roll"),
    entry(X.MinGPT, "scale-twice", NANO, wrong="double"),
    entry(X.GptFast, "future-leak", FAST, wrong="ahead", causal=True),
    entry(X.TupleCache, "cache-differs", NANO, wrong="behind"),
    entry(X.Chunked, "keys-ignored", **SIZES),
    entry(X.Luong, "softmax-axis", LUONG | {"axis": 0}),
    entry(X.Pool, "softmax-axis", LUONG | {"axis": 2}),
    entry(X.manual_wrong, "scale-twice"),
    entry(X.bshd_late, "future-leak", layout="BTHD", causal=True),
    entry(X.split_softmax, "definition-differs"),
    entry(X.dropped_head, "definition-differs"),
    entry(X.value_scaled, "definition-differs"),
]
RIGHT = [
    entry(R.annotated),
    entry(R.minus_infinity),
    entry(R.torch_s_own),
    entry(R.flash_16),
    entry(R.flash_causal),
    entry(R.alibi),
    entry(R.with_sinks),
    entry(R.with_bias),
    entry(R.grouped_by_reshape, heads=4, kv_heads=2),
    entry(R.softcapped),
    entry(R.windowed, window=4),
    entry(R.NeoX, options=NEOX),
    entry(R.Einsums, options=EINSUM),
    entry(R.MLA, options=META),
    entry(R.QKNorm, options=META | {"n_kv_heads": 2}),
    entry(M.NanoGPT, options=NANO),
    entry(M.Llama, options=LLAMA),
    entry(R.Complex, **SIZES),
    entry(R.Interleaved, **GROUPED),
    entry(R.bert),
    entry(R.T5, options=MODEL),
    entry(R.ALiBi, options=BLOOM),
    entry(R.Sinks, options=HIDDEN),
    entry(
        R.Raschka,
        options={"d_in": 32, "d_out": 32, "context_length": 512, "dropout": 0.1, "num_heads": 4},
    ),
    entry(R.Lucidrains, options={"dim": 32, "heads": 4, "dim_head": 8}),
    entry(R.ManyHeads, options=LOOP),
    entry(R.Appended, **SIZES),
    entry(C.Preallocated, **SIZES),
    entry(R.Rolling, **SIZES, window=6),
    entry(R.Bahdanau, options=STATE),
    entry(R.AdditiveSelf, dim=16),
    entry(R.PaddedCausal, **SIZES),
    entry(nn.MultiheadAttention, options={"batch_first": True}, **SIZES),
    entry(R.transformers_bert),
    entry(R.transformers_gpt2),
    entry(R.transformers_llama, **GROUPED, adapter=R.feed_llama),
    entry(X.merged),
    entry(X.MultiHeadedAttention, options=ANNOTATED),
    entry(X.HeadByHead, options=TUTORIAL),
    entry(X.RowByRow, **SIZES),
    entry(X.Cosine, **SIZES),
    entry(X.Gated, options=HIDDEN),
    entry(X.Falcon, options=HIDDEN),
    entry(X.AbsorbedMLA, **SIZES),
    entry(X.CapBeforeMask, **SIZES),
    entry(X.MaskFilled, **SIZES),
    entry(X.ScoresReturned, **SIZES),
    entry(X.SavedNumbers, **SIZES),
    entry(X.ByNameOnly, **SIZES),
    entry(X.key_first),
    entry(X.ShortNamesRight, **SIZES),
    entry(X.MinGPT, options=NANO),
    entry(X.GptFast, options=FAST),
    entry(X.TupleCache, options=NANO),
    entry(X.Chunked, wrong=False, **SIZES),
    entry(X.Luong, options=LUONG),
    entry(X.Pool, options=LUONG),
    entry(X.manual),
    entry(X.bshd, layout="BTHD"),
    entry(X.lse_merged),
]
