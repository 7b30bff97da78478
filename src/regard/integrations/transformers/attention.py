"""The attention function that transformers' modules call: their arguments said in regard's
words.
"""

from __future__ import annotations

from contextlib import AbstractContextManager, nullcontext
from typing import Any, NoReturn, TypedDict
from weakref import WeakKeyDictionary

import torch
from torch import Tensor, nn

from regard import masks
from regard.errors import ArgumentError, ArgumentTypeError
from regard.integrations.transformers.rule import NOTHING, BoolMask, MaskRule
from regard.masks import Causal, Mask, Selected
from regard.ops.softmax import attend, attention_weights
from regard.span import Span
from regard.tracing import named_scope, tap

NEUTRAL = frozenset(
    {
        # said to the mask already, or to the module around
        "sliding_window",
        "position_ids",
        "cache_position",
        "seq_idx",
        "token_type_ids",
        "use_cache",
        "labels",
        # what a model is to return, or how its loss is counted
        "output_hidden_states",
        "output_router_logits",
        "return_dict",
        "num_items_in_batch",
        "logits_to_keep",
        "input_ids",
        # how another kernel does the same sums
        "deterministic",
    }
)
"""Keyword arguments that do not change what softmax attention is, whatever their values."""

READ = frozenset(
    {"softcap", "s_aux", "position_bias", "indices", "block_indices", "output_attentions"}
)
"""Keyword arguments that are obeyed."""

REFUSED = {
    "sinks": "sinks that differ from query to query",
    "cache": "a paged cache of continuous batching",
    **dict.fromkeys(
        ("cu_seq_lens_q", "cu_seq_lens_k", "max_length_q", "max_length_k"),
        "the lengths of packed rows, which only flash attention reads: give position_ids that "
        "begin anew with each row",
    ),
}
"""Keyword arguments that transformers is known to pass and that would change the result. So would
any other name, as far as is known: it is refused, too."""

_places: WeakKeyDictionary[nn.Module, str] = WeakKeyDictionary()


class _Seen(TypedDict, total=False):
    """Which keys a query sees, and what is added to its scores."""

    mask: Mask | None
    bias: Tensor | None
    q_positions: Span
    k_positions: Span


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
    """`regard.attend`, for transformers' `AttentionInterface`: query [B,H,T,D], key [B,G,S,D] ->
    [B,T,H,E], weights or None.

    Args:
        module: who calls: `is_causal` where no mask comes, `layer_idx` names its taps.
        attention_mask: a `MaskRule`; a dense bool mask, True = may attend; a float mask that is
            added to the scores, where numbers <= finfo.min / 2 hide the key; None: causal if
            `is_causal` and T > 1, as transformers' sdpa has it.
        dropout: on the weights.
        scaling: None is 1/sqrt(D).
        kwargs: `softcap`, `s_aux` (sinks [H]), `position_bias` (added to the scores), `indices`
            (int [B,T,n]: the slots of the keys that a query may see), `block_indices` (int
            [B,J,T,n]: the same by blocks of the module's `indexer.block_size` slots, for J groups
            of heads, -1 = none) and `output_attentions` (return the weights [B,H,T,S]) are obeyed;
            those of `NEUTRAL` do not change the result.

    Raises:
        ArgumentTypeError: the module passes any other keyword argument that is not None, or a mask
            that is no tensor.
        ArgumentError: the mask or the selection does not fit the keys, or the mask is a window that
            hides every key.

    >>> q = torch.randn(1, 4, 3, 8)
    >>> z, weights = regard_attention(nn.Module(), q, q[:, :2], q[:, :2], None)
    >>> z.shape, weights
    (torch.Size([1, 3, 4, 8]), None)
    """
    for name in kwargs.keys() - NEUTRAL - READ:
        if kwargs[name] is not None:
            _refuse(module, name)
    if query.shape[0] == 1 < key.shape[0]:  # one set of learned queries for all rows
        query = query.expand(key.shape[0], -1, -1, -1)
    causal = getattr(module, "is_causal", True) if is_causal is None else is_causal
    seen = _seen(attention_mask, query.shape[2], key.shape[2], causal=causal)
    options: dict[str, Any] = {
        **_selected(seen, module, query, key, kwargs.get("indices"), kwargs.get("block_indices")),
        "scale": scaling,
        "softcap": kwargs.get("softcap"),
        "sink": kwargs.get("s_aux"),
    }
    bias = kwargs.get("position_bias")
    if bias is not None:
        options["bias"] = bias if options.get("bias") is None else bias + options["bias"]
    with _place(module):
        query, key, value = tap("q", query), tap("k", key), tap("v", value)
        z = tap("z", attend(query, key, value, dropout=dropout, **options))
        weights = None
        if kwargs.get("output_attentions"):
            weights = attention_weights(query, key, **options).to(query.dtype)
    return z.transpose(1, 2).contiguous(), weights


def _seen(mask: Tensor | None, T: int, S: int, *, causal: bool) -> _Seen:
    """The mask as regard says it, and what a float mask adds."""
    if mask is None:
        if not causal or T == 1:
            return {"mask": None}
        # aligned at the first key, as torch does
        return {"mask": Causal(), "q_positions": Span(0, T), "k_positions": Span(0, S)}
    if not isinstance(mask, Tensor):
        raise ArgumentTypeError(
            f"attention_mask is {type(mask).__name__}; it must be a tensor: make masks under "
            'attn_implementation="regard", or give a dense one'
        )
    if mask.ndim != 4 or mask.shape[-1] != S or mask.shape[-2] not in (1, T):
        raise ArgumentError(
            f"attention_mask is {tuple(mask.shape)} for {T} queries and {S} keys; it must be "
            "[batch or 1, heads or 1, "
            f"{T} or 1, {S}]: all layers of one kind must hold the same tokens"
        )
    if isinstance(mask, MaskRule):
        if mask.rule == NOTHING:
            raise ArgumentError(
                "the model attends through a window or chunk of less than one key, which hides "
                "every key from every query; "
                "where no window is meant, sliding_window or attention_chunk_size in the "
                "configuration must be None, or the "
                "layer_types must say full_attention"
            )
        q, k = mask.q_positions, mask.k_positions
        return {"mask": mask.rule, "q_positions": q, "k_positions": k}
    if isinstance(mask, BoolMask):
        return {"mask": masks.Dense(mask.dense())}
    if not mask.is_floating_point():
        return {"mask": masks.Dense(mask.bool())}
    hidden = mask <= torch.finfo(mask.dtype).min / 2
    return {"mask": masks.Dense(~hidden), "bias": mask.masked_fill(hidden, 0)}


def _selected(
    seen: _Seen,
    module: nn.Module,
    query: Tensor,
    key: Tensor,
    indices: Tensor | None,
    blocks: Tensor | None,
) -> _Seen:
    """What is seen, of the selected keys only."""
    (B, H, T, _), S = query.shape, key.shape[2]
    if indices is None and blocks is None:
        return seen
    if indices is not None:
        name, chosen, size = "indices", indices[:, None], 1
    else:
        assert blocks is not None
        name, chosen, size = "block_indices", blocks, _block_size(module)
    groups = chosen.shape[1]
    if chosen.ndim != 4 or chosen.shape[0] not in (1, B) or chosen.shape[2] != T or H % groups:
        shape = f"[{B}, {T}, n]" if size == 1 else f"[{B}, groups that divide {H} heads, {T}, n]"
        got = tuple((blocks if indices is None else indices).shape)  # type: ignore[union-attr]
        raise ArgumentError(f"{type(module).__name__} passes {name} {got}; it must be {shape}")
    count = -(-S // size)
    # slots below 0 or behind the last key choose nothing: they are written into a column that is
    # cut off
    at = torch.where((chosen >= 0) & (chosen < count), chosen.long(), count)
    table = torch.zeros(*chosen.shape[:3], count + 1, dtype=torch.bool, device=query.device)
    table = table.scatter(-1, at, value=True)[..., :count]
    if groups > 1:
        table = table.repeat_interleave(H // groups, dim=1)
    first = seen.get("k_positions", Span(0, S)).start
    mask: Mask = Selected(table, size)
    if first:  # blocks are counted from the first slot, and Selected counts them from position 0
        mask = masks.Dense(table.repeat_interleave(size, dim=-1)[..., :S])
    rest = seen["mask"]
    return {**seen, "mask": mask if rest is None else rest & mask}


def _block_size(module: nn.Module) -> int:
    size = getattr(getattr(module, "indexer", None), "block_size", None)
    if not isinstance(size, int):
        raise ArgumentTypeError(
            f"{type(module).__name__} passes block_indices, but has no indexer.block_size: how "
            "many keys a block holds is "
            'not known; use model.set_attn_implementation("eager")'
        )
    return size


def _refuse(module: nn.Module, name: str) -> NoReturn:
    meaning = REFUSED.get(name, "which regard does not know, and which may change the result")
    raise ArgumentTypeError(
        f"{type(module).__name__} passes {name}, {meaning}: regard.attend has no word for it; "
        "leave it out if it is yours, "
        'or use model.set_attn_implementation("eager")'
    )


def name_places(model: nn.Module) -> None:
    """Name the taps of a model's modules by their full names, as `model.named_modules()` has them.

    Without it a tap is at `layers.<layer_idx>`, and bare in a module that does not know its layer.
    A model with an encoder and a decoder needs it, because their layers have the same numbers.

    >>> from collections import OrderedDict
    >>> model = nn.Sequential(OrderedDict(encoder=nn.Linear(2, 2)))
    >>> name_places(model)
    >>> q = torch.zeros(1, 1, 2, 4)
    >>> from regard import Trace
    >>> with Trace("pattern") as trace:
    ...     _ = regard_attention(model.encoder, q, q, q, None)
    >>> list(trace)
    ['encoder.pattern']
    """
    for name, module in model.named_modules():
        if name:
            _places[module] = name


def _place(module: nn.Module) -> AbstractContextManager[None]:
    name = _places.get(module)
    if name is None:
        layer = getattr(module, "layer_idx", None)
        name = "" if layer is None else f"layers.{layer}"
    return named_scope(name) if name else nullcontext()
