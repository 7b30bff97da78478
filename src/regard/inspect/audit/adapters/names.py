"""What people call the arguments of attention code."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterable
from typing import Any

QUERY = ("q", "query", "queries", "xq", "Q", "query_states")
KEY = ("k", "key", "keys", "xk", "K", "key_states")
VALUE = ("v", "value", "values", "xv", "V", "value_states")
MASK = ("mask", "attn_mask", "attention_mask", "src_mask", "tgt_mask", "causal_mask")
PADDING = ("key_padding_mask", "padding_mask", "pad_mask", "src_key_padding_mask")
POSITIONS = ("positions", "position_ids", "pos", "input_pos", "q_positions")
START = ("start_pos", "offset", "start", "position_offset", "past_length")
MEMORY = ("cache", "kv_cache", "past", "past_kv", "past_key_value", "past_key_values", "layer_past")
USE = ("use_cache", "return_cache", "use_kv_cache")
WEIGHTS = ("need_weights", "output_attentions", "return_weights", "return_attention", "return_attn")
CAUSAL = ("is_causal", "causal")
BIAS = (
    "bias",
    "attn_bias",
    "position_bias",
    "attention_bias",
    "rel_bias",
    "rel_pos_bias",
    "relative_position_bias",
    "score_bias",
)
SINKS = ("sink", "sinks", "attention_sinks", "attn_sink", "sink_logits", "s_aux")
SCALE = ("scale", "scaling", "softmax_scale", "sm_scale", "scale_factor")
KEYS_OF_TWO = (
    "keys",
    "key",
    "k",
    "encoder_outputs",
    "encoder_output",
    "enc_outputs",
    "enc_out",
    "memory",
    "values",
    "value",
    "context",
    "annotations",
    "encoder_states",
    "encoder_hidden_states",
)
QUERY_OF_TWO = (
    "query",
    "queries",
    "q",
    "hidden",
    "decoder_hidden",
    "dec_hidden",
    "decoder_state",
    "hidden_state",
    "state",
    "s",
    "h",
)
NEW_CACHE = ("new_cache", "make_cache", "init_cache", "empty_cache")
RESET = ("reset_cache", "clear_cache", "reset_kv_cache")

SIZES: dict[str, tuple[str, ...]] = {
    "dim": (
        "dim",
        "d_model",
        "embed_dim",
        "hidden_size",
        "n_embd",
        "emb_dim",
        "hidden_dim",
        "model_dim",
        "d_in",
        "embed_size",
        "embedding_dim",
        "in_dim",
        "M",
    ),
    "heads": (
        "heads",
        "num_heads",
        "n_heads",
        "n_head",
        "nhead",
        "num_attention_heads",
        "n_heads_q",
        "num_q_heads",
        "h",
        "H",
    ),
    "kv_heads": (
        "kv_heads",
        "num_kv_heads",
        "n_kv_heads",
        "n_kv_head",
        "num_key_value_heads",
        "num_kv_groups",
        "groups",
        "G",
    ),
    "head_dim": ("head_dim", "d_head", "dim_head", "d_k", "head_size", "attention_head_size", "D"),
    "window": (
        "window",
        "window_size",
        "sliding_window",
        "attention_window",
        "local_window",
        "sliding_window_size",
    ),
    "causal": ("causal", "is_causal"),
}
OUTPUT_SIZE = ("d_out", "out_dim", "d_output")
LENGTH = (
    "context_length",
    "max_seq_len",
    "block_size",
    "max_len",
    "max_length",
    "context",
    "max_position_embeddings",
    "seq_len",
)
DROPOUT = ("dropout", "attn_dropout", "attn_pdrop", "dropout_p", "p_dropout", "attention_dropout")
CONTEXT = 512
"""What is given where the constructor wants a length."""


def parameters(function: Callable[..., Any]) -> dict[str, inspect.Parameter]:
    """The named parameters of a callable, without self; built-in functions of torch are read from
    their documentation.
    """
    try:
        found = inspect.signature(function).parameters
    except (TypeError, ValueError):
        return _documented(function)
    kinds = (inspect.Parameter.VAR_POSITIONAL, inspect.Parameter.VAR_KEYWORD)
    return {name: p for name, p in found.items() if p.kind not in kinds}


def first(names: Iterable[str], known: Iterable[str]) -> str | None:
    """The first of the names that is known.

    >>> first(("mask", "attn_mask"), ["q", "attn_mask"])
    'attn_mask'
    """
    known = list(known)
    return next((name for name in names if name in known), None)


def pair(known: Iterable[str]) -> tuple[str, str] | None:
    """The names of one query and of the keys among the first two parameters, as additive attention
    has them, or None.

    >>> pair(["decoder_hidden", "encoder_outputs"]), pair(["x", "mask"])
    (('decoder_hidden', 'encoder_outputs'), None)
    """
    leading = list(known)[:2]
    query, keys = first(QUERY_OF_TWO, leading), first(KEYS_OF_TWO, leading)
    return (query, keys) if query and keys and query != keys else None


def triple(known: Iterable[str]) -> tuple[str, str, str] | None:
    """The names of queries, keys and values among the first parameters, or None."""
    leading = list(known)[:3]
    found = tuple(first(names, leading) for names in (QUERY, KEY, VALUE))
    return (found[0], found[1], found[2]) if all(found) else None  # type: ignore[return-value]


def _documented(function: Callable[..., Any]) -> dict[str, inspect.Parameter]:
    """From the first line of the docstring: name(a, b=1, *, c) -> Tensor."""
    text = (getattr(function, "__doc__", None) or "").strip()
    line = text.partition("\n")[0]
    if text.count("(") == 0 or not line:
        return {}
    inner = text[text.index("(") + 1 : text.find(")")]
    found = {}
    for part in inner.replace("\n", " ").split(","):
        name, has_default, default = part.strip().partition("=")
        if name.strip().isidentifier():
            value = default.strip() if has_default else inspect.Parameter.empty
            kind = inspect.Parameter.POSITIONAL_OR_KEYWORD
            found[name.strip()] = inspect.Parameter(name.strip(), kind, default=value)
    return found
