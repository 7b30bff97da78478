"""The attention function that transformers' modules call, with their arguments."""

from __future__ import annotations

from contextlib import AbstractContextManager, nullcontext
from typing import Any, NoReturn, TypedDict
from weakref import WeakKeyDictionary

import torch
from torch import Tensor, nn

from regard import masks
from regard.errors import ArgumentError, ArgumentTypeError
from regard.integrations.transformers.masks import EMPTY_WINDOW, BoolMask, MaskRule
from regard.masks import Causal, Mask, Selected
from regard.ops.softmax import attend, attention_weights
from regard.process_state import is_compiling
from regard.sequence_scope import SequenceScope, current_scope
from regard.span import Positions, Span
from regard.tracing import named_scope, tap
from regard.units import plural

IGNORED_KEYWORDS = frozenset(
    {
        # used already by the mask or by the calling module
        "sliding_window",
        "position_ids",
        "cache_position",
        "seq_idx",
        "token_type_ids",
        "use_cache",
        "labels",
        # what a model returns, or how it computes its loss
        "output_hidden_states",
        "output_router_logits",
        "return_dict",
        "num_items_in_batch",
        "logits_to_keep",
        "input_ids",
        # an option of other kernels, which does not change the mathematical result
        "deterministic",
    }
)
"""Keyword arguments that do not change what softmax attention is, whatever their values."""

PACKED_KEYWORDS = frozenset({"cu_seq_lens_q", "cu_seq_lens_k", "max_length_q", "max_length_k"})
"""Keyword arguments that describe packed rows; the bounds of the rows say all of it."""

USED_KEYWORDS = PACKED_KEYWORDS | {
    "softcap",
    "s_aux",
    "position_bias",
    "indices",
    "block_indices",
    "output_attentions",
}
"""Keyword arguments that `regard_attention` passes on to `attend`, or answers itself."""

REFUSED_KEYWORDS = {
    "sinks": "sinks that differ from query to query",
    "cache": "a paged cache of continuous batching",
}
"""Keyword arguments that are refused because they would change the result, with their meanings.
Unknown arguments are refused, too.
"""

_tap_prefixes: WeakKeyDictionary[nn.Module, str] = WeakKeyDictionary()
"""The prefixes of taps by module, as `name_taps` sets them."""


class _MaskArguments(TypedDict, total=False):
    """The arguments of `attend` for what a query sees, and what is added to its scores."""

    mask: Mask | None
    bias: Tensor | None
    q_positions: Positions
    k_positions: Positions


def regard_attention(
    module: nn.Module,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: Tensor | None,
    dropout: float = 0.0,
    scaling: float | None = None,
    is_causal: bool | None = None,  # noqa: FBT001  (transformers' own signature)
    **kwargs: Any,
) -> tuple[Tensor, Tensor | None]:
    """Compute `regard.attend` as transformers' `AttentionInterface` calls it.

    Args:
        module: the calling module. Its `layer_idx` names its taps, and its `is_causal` applies in a
            traced graph, where transformers leaves causal masks out.
        query: [B, H, T, D].
        key: [B, G, S, D].
        value: [B, G, S, E].
        attention_mask: a `MaskRule`; or a dense bool mask, True = may attend; or a float mask that
            is added to the scores, in which numbers <= finfo.min / 2 hide the key; or None, which
            hides nothing, as in transformers' eager attention, unless `is_causal` and T > 1.
        dropout: the dropout probability of the weights.
        scaling: the factor on the scores; None means 1/sqrt(D).
        is_causal: whether a query sees no later key if there is no mask, aligned at the first key.
        kwargs: `softcap`, `s_aux` (sinks [H]), `position_bias` (added to the scores), `indices`
            (int [B,T,n]: the slots of the keys that a query may see), `block_indices` (int
            [B,J,T,n]: the same in blocks of the module's `indexer.block_size` slots, for J groups
            of heads, -1 = none), `cu_seq_lens_q` and `cu_seq_lens_k` (int [rows+1]: the bounds of
            rows that are packed into one) and `output_attentions` (also return the weights) are
            applied.
            Arguments in `IGNORED_KEYWORDS` do not change the result.

    Returns:
        The output [B, T, H, E], and the weights [B, H, T, S] if `output_attentions`, else None.

    Raises:
        ArgumentTypeError: the module passes any other keyword argument that is not None, or a mask
            that is not a tensor.
        ArgumentError: the mask or the selection does not fit the keys, or the mask is a window that
            hides every key; or there is no mask, and only the module's attribute `is_causal` says
            that later keys are hidden, which eager attention does not read.

    >>> q = torch.randn(1, 4, 3, 8)
    >>> z, weights = regard_attention(nn.Module(), q, q[:, :2], q[:, :2], None)
    >>> z.shape, weights
    (torch.Size([1, 3, 4, 8]), None)
    """
    for name in kwargs.keys() - IGNORED_KEYWORDS - USED_KEYWORDS:
        if kwargs[name] is not None:
            _refuse(module, name)
    if query.shape[0] == 1 < key.shape[0]:  # one set of learned queries for all rows
        query = query.expand(key.shape[0], -1, -1, -1)
    T, S = query.shape[2], key.shape[2]
    if attention_mask is None:
        mask_arguments = _without_mask(module, is_causal, T, S)
    else:
        mask_arguments = _mask_arguments(attention_mask, T, S)
    mask_arguments = _within_packed_rows(mask_arguments, module, query, key, kwargs)
    if (scope := current_scope()) is not None:
        mask_arguments = _over_ranks(scope, mask_arguments, key, kwargs.get("position_ids"))
    options: dict[str, Any] = {
        **_restrict_to_selection(
            mask_arguments, module, query, key, kwargs.get("indices"), kwargs.get("block_indices")
        ),
        "scale": scaling,
        "softcap": kwargs.get("softcap"),
        "sink": kwargs.get("s_aux"),
    }
    bias = kwargs.get("position_bias")
    if bias is not None:
        options["bias"] = bias if options.get("bias") is None else bias + options["bias"]
    with _tap_prefix(module):
        query, key, value = tap("q", query), tap("k", key), tap("v", value)
        z = tap("z", attend(query, key, value, dropout=dropout, **options))
        weights = None
        if kwargs.get("output_attentions"):
            weights = attention_weights(query, key, **options).to(query.dtype)
    return z.transpose(1, 2).contiguous(), weights


def _without_mask(module: nn.Module, is_causal: bool | None, T: int, S: int) -> _MaskArguments:  # noqa: FBT001
    """Return the arguments of `attend` for a call without a mask."""
    causal = getattr(module, "is_causal", False) if is_causal is None else is_causal
    if not causal or T == 1:
        return {"mask": None}
    if is_causal is None and not is_compiling():
        # regard_mask leaves no mask out here, so that the model intends none
        name = type(module).__name__
        raise ArgumentError(
            f"{name} passes no mask, and its attribute is_causal is True: eager attention then "
            "shows every key to every query, and sdpa hides later keys; give the model its "
            f"attention mask, or set is_causal of the {name} to False"
        )
    # aligned at the first key, as torch does
    return {"mask": Causal(), "q_positions": Span(0, T), "k_positions": Span(0, S)}


def _mask_arguments(mask: Tensor, T: int, S: int) -> _MaskArguments:
    """Translate a mask of transformers into the arguments of `attend`."""
    if not isinstance(mask, Tensor):
        raise ArgumentTypeError(
            f"attention_mask is {type(mask).__name__}; it must be a tensor: make masks with "
            'attn_implementation="regard", or give a dense one'
        )
    if mask.ndim != 4 or mask.shape[-1] != S or mask.shape[-2] not in (1, T):
        raise ArgumentError(
            f"attention_mask is {tuple(mask.shape)} for {plural(T, 'query', 'queries')} and "
            f"{plural(S, 'key')}; it must be [batch or 1, heads or 1, {T} or 1, {S}]: all layers "
            "of one kind must hold the same tokens"
        )
    if isinstance(mask, MaskRule):
        if mask.rule == EMPTY_WINDOW:
            raise ArgumentError(
                "the model attends through a window or chunk of less than one key, which hides "
                "every key from every query; if no window is intended, set sliding_window or "
                "attention_chunk_size in the configuration to None, or use the layer type "
                "full_attention"
            )
        q, k = mask.q_positions, mask.k_positions
        return {"mask": mask.rule, "q_positions": q, "k_positions": k}
    if isinstance(mask, BoolMask):
        return {"mask": masks.Dense(mask.dense())}
    if not mask.is_floating_point():
        return {"mask": masks.Dense(mask.bool())}
    hidden = mask <= torch.finfo(mask.dtype).min / 2
    return {"mask": masks.Dense(~hidden), "bias": mask.masked_fill(hidden, 0)}


def _within_packed_rows(
    arguments: _MaskArguments,
    module: nn.Module,
    query: Tensor,
    key: Tensor,
    named: dict[str, Any],
) -> _MaskArguments:
    """Restrict visible keys to a query's packed row, as models do that fill no cache."""
    (B, _, T, _), S = query.shape, key.shape[2]
    q_bounds, k_bounds = named.get("cu_seq_lens_q"), named.get("cu_seq_lens_k")
    if q_bounds is None and k_bounds is None:
        return arguments
    name = type(module).__name__
    if is_compiling():
        raise ArgumentError(
            f"{name} passes cu_seq_lens_q, which cannot be read in a traced graph; leave it out, "
            "and give position_ids that begin anew in each row, with use_cache=False"
        )
    bounds, of_keys = ([] if x is None else x.tolist() for x in (q_bounds, k_bounds))
    if B != 1 or bounds != of_keys or bounds[:1] != [0] or not bounds[-1] == T == S:
        raise ArgumentError(
            f"{name} passes cu_seq_lens_q {bounds} and cu_seq_lens_k {of_keys} for "
            f"{plural(T, 'query', 'queries')} and {plural(S, 'key')} in a batch of {B}; both must "
            f"be the same, from 0 to {T}, for one batch row without earlier tokens in a cache"
        )
    mask, rows = arguments["mask"], masks.Document((tuple(bounds),))
    terms = () if mask is None else mask.terms()
    if rows in terms:
        return arguments
    if any(isinstance(term, masks.Chunk) for term in terms):
        raise ArgumentError(
            f"{name} has chunks that begin at the first token of the batch row instead of that of "
            "each packed row; give position_ids that begin anew in each row, with use_cache=False"
        )
    return {**arguments, "mask": rows if mask is None else mask & rows}


def _over_ranks(
    scope: SequenceScope, arguments: _MaskArguments, key: Tensor, position_ids: Tensor | None
) -> _MaskArguments:
    """Give a rank's tokens, which transformers' masks count from 0, their positions."""
    own = scope.own_positions()
    positions = own if position_ids is None else position_ids
    S = key.shape[2]
    if own.shape[1] != S:
        raise ArgumentError(
            f"the model has {plural(S, 'key')} in its cache, and this rank holds "
            f"{plural(own.shape[1], 'token')}; a model of transformers runs a prompt over ranks "
            "only: call it once, with use_cache=False"
        )
    return {**arguments, "q_positions": positions, "k_positions": positions}


def _restrict_to_selection(
    mask_arguments: _MaskArguments,
    module: nn.Module,
    query: Tensor,
    key: Tensor,
    indices: Tensor | None,
    blocks: Tensor | None,
) -> _MaskArguments:
    """Restrict the visible keys to those that `indices` or `block_indices` select."""
    (B, H, T, _), S = query.shape, key.shape[2]
    if indices is None and blocks is None:
        return mask_arguments
    if indices is not None:
        name, selected, size = "indices", indices[:, None], 1
    else:
        assert blocks is not None
        name, selected, size = "block_indices", blocks, _block_size(module)
    groups = selected.shape[1]
    if (
        selected.ndim != 4
        or selected.shape[0] not in (1, B)
        or selected.shape[2] != T
        or H % groups
    ):
        shape = (
            f"[{B}, {T}, n]"
            if size == 1
            else f"[{B}, groups that divide {plural(H, 'head')}, {T}, n]"
        )
        got = tuple((blocks if indices is None else indices).shape)  # type: ignore[union-attr]
        raise ArgumentError(f"{type(module).__name__} passes {name} {got}; it must be {shape}")
    count = -(-S // size)
    # slots below 0 or after the last key select nothing: they are written into an extra column,
    # which is removed
    columns = torch.where((selected >= 0) & (selected < count), selected.long(), count)
    table = torch.zeros(*selected.shape[:3], count + 1, dtype=torch.bool, device=query.device)
    table = table.scatter(-1, columns, value=True)[..., :count]
    if groups > 1:
        table = table.repeat_interleave(H // groups, dim=1)
    k_positions = mask_arguments.get("k_positions", Span(0, S))
    mask: Mask = Selected(table, size)
    if (
        not isinstance(k_positions, Span) or k_positions.start
    ):  # here blocks begin at the first slot, while Selected counts them from position 0
        mask = masks.Dense(table.repeat_interleave(size, dim=-1)[..., :S])
    other_mask = mask_arguments["mask"]
    return {**mask_arguments, "mask": mask if other_mask is None else other_mask & mask}


def _block_size(module: nn.Module) -> int:
    """Return the number of keys in a block of the module's indexer."""
    size = getattr(getattr(module, "indexer", None), "block_size", None)
    if not isinstance(size, int):
        raise ArgumentTypeError(
            f"{type(module).__name__} passes block_indices, but has no indexer.block_size: the "
            "number of keys in a block is "
            'not known; use model.set_attn_implementation("eager")'
        )
    return size


def _refuse(module: nn.Module, name: str) -> NoReturn:
    """Raise the error for a keyword argument that cannot be applied."""
    meaning = REFUSED_KEYWORDS.get(name, "which is unknown to regard and may change the result")
    raise ArgumentTypeError(
        f"{type(module).__name__} passes {name}, {meaning}: regard.attend has no such option; "
        "leave it out if you pass it yourself, "
        'or use model.set_attn_implementation("eager")'
    )


def name_taps(model: nn.Module) -> None:
    """Name the taps of a model's modules by their full names, as in `model.named_modules()`.

    Without this a tap is named `layers.<layer_idx>`, or has no prefix in a module without a layer
    number. A model with an encoder and a decoder needs it, because their layers have the same
    numbers.

    Args:
        model: a model of transformers.

    >>> from collections import OrderedDict
    >>> model = nn.Sequential(OrderedDict(encoder=nn.Linear(2, 2)))
    >>> name_taps(model)
    >>> q = torch.zeros(1, 1, 2, 4)
    >>> from regard import Trace
    >>> with Trace("pattern") as trace:
    ...     _ = regard_attention(model.encoder, q, q, q, None)
    >>> list(trace)
    ['encoder.pattern']
    """
    for name, module in model.named_modules():
        if name:
            _tap_prefixes[module] = name


def _tap_prefix(module: nn.Module) -> AbstractContextManager[None]:
    """Return the context in which the taps of a module have its name as prefix."""
    name = _tap_prefixes.get(module)
    if name is None:
        layer = getattr(module, "layer_idx", None)
        name = "" if layer is None else f"layers.{layer}"
    return named_scope(name) if name else nullcontext()
