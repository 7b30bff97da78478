"""Recognize the arguments of attention code by their names, and interpret its results."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field, fields, is_dataclass
from inspect import Parameter
from typing import Any

import torch
from torch import Tensor

from regard.audit.adapters.base import NEW_CACHE, CallInputs, CallOutput
from regard.errors import ArgumentTypeError


def _words(table: dict[str, str]) -> dict[str, tuple[str, ...]]:
    """Return a table whose values are texts with the words of these texts."""
    return {name: tuple(words.split()) for name, words in table.items()}


ARGUMENT_NAMES = _words(
    {
        "query": "q query queries xq Q query_states",
        "key": "k key keys xk K key_states",
        "value": "v value values xv V value_states",
        "mask": "mask attn_mask attention_mask src_mask tgt_mask causal_mask",
        "padding": "key_padding_mask padding_mask pad_mask src_key_padding_mask",
        "positions": "positions position_ids pos input_pos q_positions",
        "start": "start_pos offset start position_offset past_length",
        "memory": "cache kv_cache past past_kv past_key_value past_key_values layer_past",
        "use": "use_cache return_cache use_kv_cache",
        "weights": "need_weights output_attentions return_weights return_attention return_attn",
        "causal": "is_causal causal",
        "bias": "bias attn_bias position_bias attention_bias rel_bias rel_pos_bias "
        "relative_position_bias score_bias",
        "sinks": "sink sinks attention_sinks attn_sink sink_logits s_aux",
        "scale": "scale scaling softmax_scale sm_scale scale_factor",
        "pair_query": "query queries q hidden decoder_hidden dec_hidden decoder_state "
        "hidden_state state s h",
        "pair_keys": "keys key k encoder_outputs encoder_output enc_outputs enc_out memory values "
        "value context annotations encoder_states encoder_hidden_states",
        "new_cache": "new_cache make_cache init_cache empty_cache",
        "reset_cache": "reset_cache clear_cache reset_kv_cache",
        "output_size": "d_out out_dim d_output",
        "length": "context_length max_seq_len block_size max_len max_length context "
        "max_position_embeddings seq_len",
        "dropout": "dropout attn_dropout attn_pdrop dropout_p p_dropout attention_dropout",
    }
)
"""The names that people give to arguments and methods, by their role; "pair_query" and "pair_keys"
are those of additive attention, forward(query, keys).
"""
SIZE_NAMES = _words(
    {
        "dim": "dim d_model embed_dim hidden_size n_embd emb_dim hidden_dim model_dim d_in "
        "embed_size embedding_dim in_dim M",
        "heads": "heads num_heads n_heads n_head nhead num_attention_heads n_heads_q "
        "num_q_heads h H",
        "kv_heads": "kv_heads num_kv_heads n_kv_heads n_kv_head num_key_value_heads num_kv_groups "
        "groups G",
        "head_dim": "head_dim d_head dim_head d_k head_size attention_head_size D",
        "window": "window window_size sliding_window attention_window local_window "
        "sliding_window_size",
        "causal": "causal is_causal",
    }
)
"""The names of sizes in constructors and configs."""
DEFAULT_LENGTH = 512
"""The length that is given to a constructor that requires one."""


def parameters(function: Callable[..., object]) -> dict[str, inspect.Parameter]:
    """Return a callable's parameters without self; torch's built-ins have them in their docs."""
    try:
        signature_parameters = inspect.signature(function).parameters
    except (TypeError, ValueError):
        return _documented(function)
    kinds = (inspect.Parameter.VAR_POSITIONAL, inspect.Parameter.VAR_KEYWORD)
    return {name: p for name, p in signature_parameters.items() if p.kind not in kinds}


def first_known(names: Iterable[str], known: Iterable[str]) -> str | None:
    """Return the first of the names that is known, or None.

    >>> first_known(("mask", "attn_mask"), ["q", "attn_mask"])
    'attn_mask'
    """
    known = list(known)
    return next((name for name in names if name in known), None)


def query_keys_names(known: Iterable[str]) -> tuple[str, str] | None:
    """Return the names of one query and of all keys among the first two parameters, or None.

    Additive attention has such parameters.

    >>> query_keys_names(["decoder_hidden", "encoder_outputs"]), query_keys_names(["x", "mask"])
    (('decoder_hidden', 'encoder_outputs'), None)
    """
    leading = list(known)[:2]
    query, keys = (first_known(ARGUMENT_NAMES[f"pair_{x}"], leading) for x in ("query", "keys"))
    return (query, keys) if query and keys and query != keys else None


def query_key_value_names(known: Iterable[str]) -> tuple[str, str, str] | None:
    """Return the names of queries, keys and values among the first three parameters, or None."""
    leading = list(known)[:3]
    names = tuple(first_known(ARGUMENT_NAMES[x], leading) for x in ("query", "key", "value"))
    return (names[0], names[1], names[2]) if all(names) else None  # type: ignore[return-value]


def token_arguments(
    signature_parameters: Mapping[str, Parameter], tokens: Mapping[str, Tensor]
) -> tuple[list[Tensor], dict[str, Tensor]]:
    """Return the arguments of tokens by position, and by name where the code demands it.

    >>> def forward(key, *, query): ...
    >>> token_arguments(parameters(forward), {"query": torch.ones(1), "key": torch.zeros(1)})
    ([tensor([0.])], {'query': tensor([1.])})
    """
    by_name = {
        name: tokens[name]
        for name, p in signature_parameters.items()
        if name in tokens and p.kind is Parameter.KEYWORD_ONLY
    }
    others = [tokens[n] for n in signature_parameters if n in tokens and n not in by_name]
    return others, by_name


def _documented(function: Callable[..., object]) -> dict[str, inspect.Parameter]:
    """Read the parameters from the first line of a docstring: name(a, b=1, *, c) -> Tensor."""
    text = (getattr(function, "__doc__", None) or "").strip()
    line = text.partition("\n")[0]
    if text.count("(") == 0 or not line:
        return {}
    arguments_text = text[text.index("(") + 1 : text.find(")")]
    parameters_by_name = {}
    for part in arguments_text.replace("\n", " ").split(","):
        name, has_default, default = part.strip().partition("=")
        if name.strip().isidentifier():
            value = default.strip() if has_default else inspect.Parameter.empty
            kind = inspect.Parameter.POSITIONAL_OR_KEYWORD
            parameters_by_name[name.strip()] = inspect.Parameter(name.strip(), kind, default=value)
    return parameters_by_name


@dataclass(frozen=True)
class MaskFormat:
    """The format in which code expects a mask.

    >>> MaskFormat("TS", "block").write(torch.tensor([[[True, False]]]), torch.float32)
    tensor([[False,  True]])
    """

    shape: str
    kind: str

    def write(self, keep: Tensor, dtype: torch.dtype) -> Tensor:
        """Convert a mask, bool [B, T, S] or [B, S] with True = may attend, to this format."""
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
        """Whether each row of the batch can have its own mask."""
        return self.shape != "TS"

    def __str__(self) -> str:
        means = {"keep": "True = may attend", "block": "True = hidden", "ones": "1 = may attend"}
        shape = {"TS": "T,S", "BTS": "B,T,S", "B1TS": "B,1,T,S", "BS": "B,S"}[self.shape]
        return f"[{shape}], {means.get(self.kind, '0 and finfo.min, added')}"


@dataclass(frozen=True)
class CallKeywords:
    """The names of a callable's arguments by their role; None if it has none for that role."""

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
    mask_format: MaskFormat | None = None
    padding_format: MaskFormat | None = None
    fixed: dict[str, object] = field(default_factory=dict)
    required: frozenset[str] = frozenset()
    container: type[dict[Any, Any] | list[Any]] | None = None
    passed: set[str] = field(default_factory=set, compare=False)

    @staticmethod
    def of(signature_parameters: Mapping[str, Parameter]) -> CallKeywords:
        """Assign roles to parameters by their names."""
        required = frozenset(
            name for name, p in signature_parameters.items() if p.default is Parameter.empty
        )
        parameters_by_role: dict[str, Any] = {
            role: first_known(ARGUMENT_NAMES[role], signature_parameters)
            for role in (
                "mask",
                "padding",
                "positions",
                "start",
                "memory",
                "use",
                "weights",
                "causal",
            )
        }
        return CallKeywords(**parameters_by_role, required=required)

    def arguments(self, inputs: CallInputs, x: Tensor, dtype: torch.dtype) -> dict[str, object]:
        """Return the keyword arguments for a call on tokens x, and note them as passed."""
        arguments = self._arguments(inputs, x, dtype)
        self.passed.update(name for name, value in arguments.items() if value is not None)
        return arguments

    def _arguments(self, inputs: CallInputs, x: Tensor, dtype: torch.dtype) -> dict[str, object]:
        """Return the keyword arguments for the inputs of a call on tokens x."""
        arguments = dict(self.fixed)
        if inputs.keep is not None and self.mask and self.mask_format:
            arguments[self.mask] = self.mask_format.write(inputs.keep, dtype)
        if inputs.tokens is not None and self.padding and self.padding_format:
            arguments[self.padding] = self.padding_format.write(inputs.tokens, dtype)
        if self.weights:
            arguments[self.weights] = inputs.weights
        for name in (self.mask, self.memory):
            if name in self.required and name not in arguments:
                arguments[str(name)] = None
        return {**arguments, **self._position_arguments(inputs, x), **self._cache_arguments(inputs)}

    def untried(
        self, signature_parameters: Iterable[str], token_names: Iterable[str]
    ) -> tuple[str, ...]:
        """Return the names of parameters that no call has passed."""
        return tuple(n for n in signature_parameters if n not in {*self.passed, *token_names})

    def may_hold_cache(self, parameters: Mapping[str, Parameter]) -> tuple[str, ...]:
        """Return the parameters that may hold a cache: one with such a name, or all that are None
        by default and have no other role.
        """
        if self.memory:
            return (self.memory,)
        roles = {value for value in vars(self).values() if isinstance(value, str)}
        return tuple(n for n, p in parameters.items() if p.default is None and n not in roles)

    def _position_arguments(self, inputs: CallInputs, x: Tensor) -> dict[str, object]:
        """Return the arguments for the positions of the tokens."""
        arguments: dict[str, object] = {}
        if inputs.positions is None:
            if self.start in self.required:
                arguments[str(self.start)] = 0
            if self.positions in self.required:
                arguments[str(self.positions)] = torch.arange(x.shape[1]).expand(x.shape[0], -1)
            return arguments
        if self.positions:  # gpt-fast's input_pos is [T]
            one_row = self.positions == "input_pos"
            arguments[self.positions] = inputs.positions[0] if one_row else inputs.positions
        if self.start:
            arguments[self.start] = int(inputs.positions[0, 0])
        return arguments

    def _cache_arguments(self, inputs: CallInputs) -> dict[str, object]:
        """Return the arguments for the cache."""
        arguments: dict[str, object] = {}
        if inputs.memory is not None:
            if self.use:
                arguments[self.use] = True
            if self.memory and inputs.memory is not NEW_CACHE:
                arguments[self.memory] = inputs.memory
        elif self.use:
            arguments[self.use] = False
        return arguments

    @property
    def accepts(self) -> frozenset[str]:
        """The names of the inputs that reach the code, as in `TargetAdapter.accepts`."""
        available = {
            "mask": self.mask and self.mask_format,
            "rows": self.mask and self.mask_format and self.mask_format.rows,
            "padding": self.padding and self.padding_format,
            "positions": self.positions,
        }
        return frozenset(name for name, has in available.items() if has)


@dataclass(frozen=True)
class OutputFormat:
    """The format of what a call returns.

    >>> import torch
    >>> x = torch.ones(2, 3, 4)
    >>> OutputFormat(1).read((x, torch.ones(2, 3, 3))).weights.shape
    torch.Size([2, 1, 3, 3])
    """

    weights: int | None = None

    def read(self, result: object) -> CallOutput:
        """Split a result into the output, the weights [B, H or 1, T, S] and the cache."""
        parts = output_parts(result)
        weights = None
        if self.weights is not None and self.weights < len(parts):
            weights = parts[self.weights]
        rest = [x for n, x in enumerate(parts) if n and n != self.weights and x is not None]
        memory = None if not rest else rest[0] if len(rest) == 1 else rest
        if isinstance(weights, Tensor):
            weights = weights[:, None] if weights.ndim == 3 else weights
        return CallOutput(parts[0], weights if isinstance(weights, Tensor) else None, memory)

    @staticmethod
    def of(results: Mapping[int, object], B: int, *, requested: bool) -> OutputFormat:
        """Find the format from the results for several lengths T, by length.

        Weights end in two dimensions T; unless they were `requested`, negative numbers are scores.
        """
        parts = {T: output_parts(result) for T, result in results.items()}
        for n in range(1, min(len(p) for p in parts.values())):
            if all(_square(p[n], B, T) for T, p in parts.items()) and (
                requested or all(bool((p[n] >= 0).all()) for p in parts.values())
            ):
                return OutputFormat(n)
        return OutputFormat()


def output_parts(result: object) -> list[Any]:
    """Return the parts of what a call returned as a list, the output first."""
    if isinstance(result, CallOutput):
        return list(result)
    if hasattr(result, "to_tuple"):  # a ModelOutput of transformers
        result = result.to_tuple()
    if isinstance(result, dict):
        result = tuple(result.values())
    if is_dataclass(result) and not isinstance(result, type):
        result = tuple(getattr(result, f.name) for f in fields(result))
    parts = list(result) if isinstance(result, (tuple, list)) else [result]
    if not parts or not isinstance(parts[0], Tensor):
        type_name = type(parts[0]).__name__ if parts else "nothing"
        raise ArgumentTypeError(
            f"the code returned {type_name}; it must return a tensor, or a sequence or dictionary "
            "that begins with one; give an adapter that returns one"
        )
    return parts


def _square(x: object, B: int, T: int) -> bool:
    """Whether x has the shape of weights: [B, T, T] or [B, H, T, T]."""
    return isinstance(x, Tensor) and x.ndim in (3, 4) and x.shape[0] == B and x.shape[-2:] == (T, T)
