"""The arguments of attention code: the names that people give them, the keyword arguments that a
question becomes, and how to read what comes back.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field
from inspect import Parameter
from typing import Any

import torch
from torch import Tensor

from regard.audit.subject import NEW, Ask, Reply
from regard.errors import ArgumentTypeError

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


@dataclass(frozen=True)
class Form:
    """How a mask is written.

    Attributes:
        shape: "TS", "BTS", "B1TS", or "BS" for one that speaks of keys alone.
        kind: "keep" (True = may attend), "block" (True = may not), "ones" (1.0 = may attend), or
            "additive" (0 and the lowest number of the dtype, as transformers writes it).

    >>> Form("TS", "block").write(torch.tensor([[[True, False]]]), torch.float32)
    tensor([[False,  True]])
    """

    shape: str
    kind: str

    def write(self, keep: Tensor, dtype: torch.dtype) -> Tensor:
        """A mask bool [B,T,S] (or [B,S]) in this form."""
        if self.kind == "block":
            mask = ~keep
        elif self.kind == "additive":
            mask = torch.zeros(keep.shape, dtype=dtype).masked_fill(~keep, torch.finfo(dtype).min)
        else:
            mask = keep if self.kind == "keep" else keep.to(dtype)
        if self.shape == "TS":
            return mask[0]
        return mask[:, None] if self.shape == "B1TS" else mask

    @property
    def rows(self) -> bool:
        """Whether it may differ between rows of the batch."""
        return self.shape != "TS"

    def __str__(self) -> str:
        means = {"keep": "True = may attend", "block": "True = hidden", "ones": "1 = may attend"}
        shape = {"TS": "T,S", "BTS": "B,T,S", "B1TS": "B,1,T,S", "BS": "B,S"}[self.shape]
        return f"[{shape}], {means.get(self.kind, '0 and finfo.min, added')}"


@dataclass(frozen=True)
class Keywords:
    """The arguments that a callable knows, by role; None where it has none.

    Attributes:
        mask, padding, positions, start, memory, use, weights, causal, bias, sinks: names of
            parameters.
        mask_form, padding_form: how masks are written; None: not found out, so that none can be
            given.
        fixed: arguments that are always given.
    """

    mask: str | None = None
    padding: str | None = None
    positions: str | None = None
    start: str | None = None
    memory: str | None = None
    use: str | None = None
    weights: str | None = None
    causal: str | None = None
    bias: str | None = None
    sinks: str | None = None
    mask_form: Form | None = None
    padding_form: Form | None = None
    fixed: dict[str, Any] = field(default_factory=dict)
    required: frozenset[str] = frozenset()

    @staticmethod
    def of(known: Mapping[str, Parameter]) -> Keywords:
        """Roles by the names of parameters."""
        roles = {
            "mask": MASK,
            "padding": PADDING,
            "positions": POSITIONS,
            "start": START,
            "memory": MEMORY,
            "use": USE,
            "weights": WEIGHTS,
            "causal": CAUSAL,
        }
        required = frozenset(name for name, p in known.items() if p.default is Parameter.empty)
        found: dict[str, Any] = {role: first(names, known) for role, names in roles.items()}
        return Keywords(**found, required=required)

    def arguments(self, ask: Ask, x: Tensor, dtype: torch.dtype) -> dict[str, Any]:
        """The keyword arguments that say what is asked."""
        given = dict(self.fixed)
        if ask.keep is not None and self.mask and self.mask_form:
            given[self.mask] = self.mask_form.write(ask.keep, dtype)
        if ask.tokens is not None and self.padding and self.padding_form:
            given[self.padding] = self.padding_form.write(ask.tokens, dtype)
        if self.weights:
            given[self.weights] = ask.weights
        for name in (self.mask, self.memory):
            if name in self.required and name not in given:
                given[str(name)] = None
        return {**given, **self._places(ask, x), **self._memory(ask)}

    def _places(self, ask: Ask, x: Tensor) -> dict[str, Any]:
        given: dict[str, Any] = {}
        if ask.positions is None:
            if self.start in self.required:
                given[str(self.start)] = 0
            if self.positions in self.required:
                given[str(self.positions)] = torch.arange(x.shape[1]).expand(x.shape[0], -1)
            return given
        if self.positions:  # gpt-fast's input_pos is [T]
            one = self.positions == "input_pos"
            given[self.positions] = ask.positions[0] if one else ask.positions
        if self.start:
            given[self.start] = int(ask.positions[0, 0])
        return given

    def _memory(self, ask: Ask) -> dict[str, Any]:
        given: dict[str, Any] = {}
        if ask.memory is not None:
            if self.use:
                given[self.use] = True
            if self.memory and ask.memory is not NEW:
                given[self.memory] = ask.memory
        elif self.use:
            given[self.use] = False
        return given

    @property
    def takes(self) -> frozenset[str]:
        """What of `Ask` reaches the code."""
        found = {
            "mask": self.mask and self.mask_form,
            "rows": self.mask and self.mask_form and self.mask_form.rows,
            "padding": self.padding and self.padding_form,
            "positions": self.positions,
        }
        return frozenset(name for name, has in found.items() if has)


@dataclass(frozen=True)
class Reading:
    """Where in a reply the weights stand, if anywhere.

    >>> import torch
    >>> x = torch.ones(2, 3, 4)
    >>> Reading(1).read((x, torch.ones(2, 3, 3))).weights.shape
    torch.Size([2, 1, 3, 3])
    """

    weights: int | None = None

    def read(self, given: Any) -> Reply:
        """Out, weights [B,H or 1,T,S], and what is left over: a cache."""
        parts = items(given)
        weights = None
        if self.weights is not None and self.weights < len(parts):
            weights = parts[self.weights]
        rest = [x for n, x in enumerate(parts) if n and n != self.weights and x is not None]
        memory = None if not rest else rest[0] if len(rest) == 1 else rest
        if isinstance(weights, Tensor):
            weights = weights[:, None] if weights.ndim == 3 else weights
        return Reply(parts[0], weights if isinstance(weights, Tensor) else None, memory)

    @staticmethod
    def of(replies: dict[int, Any], B: int) -> Reading:
        """From replies to several lengths: weights are what has the length twice, at each of
        them.
        """
        parts = {T: items(reply) for T, reply in replies.items()}
        for n in range(1, min(len(p) for p in parts.values())):
            if all(_square(p[n], B, T) for T, p in parts.items()):
                return Reading(n)
        return Reading()


def items(given: Any) -> list[Any]:
    """The parts of a reply, the output first.

    Raises:
        ArgumentTypeError: there is no tensor where the output should be.
    """
    if isinstance(given, Reply):
        return list(given)
    if hasattr(given, "to_tuple"):  # a ModelOutput of transformers
        given = given.to_tuple()
    if isinstance(given, dict):
        given = tuple(given.values())
    parts = list(given) if isinstance(given, (tuple, list)) else [given]
    if not parts or not isinstance(parts[0], Tensor):
        what = type(parts[0]).__name__ if parts else "nothing"
        raise ArgumentTypeError(
            f"the code returned {what}; its output must be a tensor, or the first of what it "
            "returns: give an adapter"
        )
    return parts


def _square(x: Any, B: int, T: int) -> bool:
    return isinstance(x, Tensor) and x.ndim in (3, 4) and x.shape[0] == B and x.shape[-2:] == (T, T)
