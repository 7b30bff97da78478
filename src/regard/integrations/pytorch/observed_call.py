"""Attention calls of torch, passed through the taps of the open traces and through our kernels.

This is the one place where a call of torch becomes a call of this package. One that cannot be
expressed exactly runs in torch, and is listed with the reason.
"""

from __future__ import annotations

import inspect
import threading
from collections.abc import Callable
from contextlib import nullcontext
from dataclasses import replace
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

from regard.integrations.pytorch.module_places import ModulePlaces, open_places
from regard.integrations.pytorch.torch_calls import NOT_MASKED_ATTENTION, as_attn_mask, as_call
from regard.integrations.pytorch.torch_functions import TORCH, contexts
from regard.masks import Dense, Full, Padding
from regard.ops.softmax.call import Call, make_call
from regard.ops.softmax.definition import scores
from regard.ops.softmax.dispatch import choose_kernel, run_on_kernel
from regard.ops.softmax.kernel import KernelResult
from regard.span import Span
from regard.tracing import call_observers, is_edited, named_scope, tap

EDITED_WITH_DROPOUT = (
    "it has dropout, so that its scores and weights cannot be captured or edited; call model.eval()"
)
WEIGHTS_WITH_DROPOUT = "it returns weights after dropout; call model.eval()"
OTHER_CLASS = "its tensors are nested, sparse or of a class other than Tensor"
NOT_READABLE = "the values of its tensors cannot be read (a graph, a transform, or the meta device)"


class ObservedCall(NamedTuple):
    """A call that ran in this package; z `[B, H, T, E]` is its output after the tap."""

    call: Call
    result: KernelResult
    z: Tensor


class _Requests(threading.local):
    """What a caller needs beyond the output: a list for the observed call, or None."""

    def __init__(self) -> None:
        self.box: list[ObservedCall] | None = None


_requests = _Requests()


def observe_attention(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attn_mask: Tensor | None = None,
    dropout_p: float = 0.0,
    is_causal: bool = False,  # noqa: FBT001, FBT002  (torch's own signature)
    scale: float | None = None,
    enable_gqa: bool = False,  # noqa: FBT001, FBT002
) -> Tensor:
    """Compute `F.scaled_dot_product_attention` on our kernels, observed by the open traces."""
    options: dict[str, Any] = {"is_causal": is_causal, "scale": scale, "enable_gqa": enable_gqa}

    def in_torch(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        return TORCH.attention(q, k, v, attn_mask, dropout_p, **options)

    z: Tensor
    places = open_places()
    place = "" if places is None else places.next_place()
    why = _why_unreadable(query, key, value)
    shaped = None if why else _in_four_dims(query, key, value, attn_mask)
    if shaped is None:
        z = leave_to_torch(place, why or NOT_MASKED_ATTENTION, in_torch, query, key, value)
        return z
    needs_box = _requests.box is not None

    def make(q: Tensor, k: Tensor, v: Tensor) -> Call | None:
        call = as_call(
            q,
            k,
            v,
            None if shaped.mask is None else shaped.mask.detach(),
            is_causal=is_causal,
            scale=scale,
            grouped=enable_gqa or k.shape[1] == 1,
        )
        if call is None:
            return None
        return _with_mask_gradient(call, shaped.mask)

    observed = _observe(place, shaped, make, dropout_p)
    if isinstance(observed, str):
        z = leave_to_torch(place, observed, in_torch, query, key, value)
        return z
    if needs_box and _requests.box is not None:
        _requests.box.append(observed)
    return observed.z.reshape(shaped.output_shape)


def leave_to_torch(place: str, why: str, function: Callable[..., Any], *tensors: Tensor) -> Any:
    """List a call that cannot be observed, and run it in torch."""
    places = open_places()
    if places is not None:
        places.unrecorded[place, why] += 1
    contexts.count_torch(why)
    with nullcontext() if places is None else places.inside_call():
        return function(*tensors)


class _FourDims(NamedTuple):
    """The tensors of a call as `[B, H, T, D]`, and the shape of the output that torch returns."""

    q: Tensor
    k: Tensor
    v: Tensor
    mask: Tensor | None
    output_shape: tuple[int, ...]


def _in_four_dims(q: Tensor, k: Tensor, v: Tensor, mask: Tensor | None) -> _FourDims | None:
    """Give tensors four dimensions, heads third from the right, broadcast as torch does."""
    if not q.ndim == k.ndim == v.ndim >= 2 or (mask is not None and mask.ndim > q.ndim):
        return None
    heads = () if q.ndim == 2 else (max(q.shape[-3], 1),)
    try:
        batch = torch.broadcast_shapes(q.shape[:-3], k.shape[:-3], v.shape[:-3])
        if q.ndim > 2 and q.shape[-3] == 1 < k.shape[-3]:
            q, heads = q.expand(*q.shape[:-3], k.shape[-3], -1, -1), (k.shape[-3],)
        if q.ndim > 2 and k.shape[-3] != v.shape[-3]:
            both = torch.broadcast_shapes(k.shape[-3:-2], v.shape[-3:-2])
            k, v = (x.expand(*x.shape[:-3], *both, -1, -1) for x in (k, v))
        output_shape = (*batch, *heads, q.shape[-2], v.shape[-1])
        q, k, v = (_batched(x, batch) for x in (q, k, v))
        if mask is not None and mask.ndim > 2:
            mask = _batched(mask, batch) if mask.ndim > 3 else mask[None]
    except RuntimeError:
        return None
    return _FourDims(q, k, v, mask, output_shape)


def _batched(x: Tensor, batch: tuple[int, ...]) -> Tensor:
    """Return a tensor as `[B, h, n, d]`, its batch dimensions expanded and joined."""
    x = x[(None,) * max(0, 3 - x.ndim)]
    B = 1
    for size in batch:
        B *= size
    return x.expand(*batch, *x.shape[-3:]).reshape(B, *x.shape[-3:])


def _why_unreadable(*tensors: Tensor) -> str | None:
    """Return why Python cannot look at the tensors of a call, or None if it can."""
    if any(x.is_nested or x.layout != torch.strided for x in tensors):
        return OTHER_CLASS
    if torch._C._functorch.peek_interpreter_stack() is not None or any(x.is_meta for x in tensors):
        return NOT_READABLE
    return None


def _with_mask_gradient(call: Call, mask: Tensor | None) -> Call:
    """Give a call the float mask itself as bias where autograd needs its gradient."""
    if mask is None or not (mask.requires_grad and torch.is_grad_enabled()):
        return call
    mask = mask[(None,) * (4 - mask.ndim)]
    mask = mask.expand(*mask.shape[:2], call.T, call.S)
    bias = mask.masked_fill(mask <= torch.finfo(mask.dtype).min / 2, 0)
    return make_call(
        call.q,
        call.k,
        call.v,
        mask=call.mask,
        bias=bias,
        scale=call.scale,
        q_positions=call.q_positions,
        k_positions=call.k_positions,
    )


def _with_query_positions(call: Call, places: ModulePlaces, place: str) -> Call:
    """Let queries continue those of the call before, if the mask ignores their positions.

    A rule of positions below 0, of more queries than keys, becomes a table.
    """
    mask, aligned = call.mask, call.q_positions
    if isinstance(aligned, Span) and aligned.start < 0 and not isinstance(mask, (Full, Padding)):
        mask = Dense(mask.block(aligned, call.k_positions, device=call.q.device))
    if not isinstance(mask, (Full, Padding, Dense)) or not call.T:
        return call
    start = places.first_position(place, call.k, call.T)
    return replace(call, mask=mask, q_positions=Span(start, call.T))


def _observe(
    place: str,
    tensors: _FourDims,
    as_call: Callable[[Tensor, Tensor, Tensor], Call | None],
    dropout: float = 0.0,
) -> ObservedCall | str:
    """Pass a call through the taps and a kernel, or return why that is not possible."""
    places = open_places()
    with named_scope(place), nullcontext() if places is None else places.inside_call():
        inner = is_edited("scores") or is_edited("pattern")
        q, k, v = tensors.q, tensors.k, tensors.v
        call = as_call(q, k, v)
        if call is None:
            return NOT_MASKED_ATTENTION
        if dropout and (inner or call.needs):
            return EDITED_WITH_DROPOUT
        call = _with_query_positions(call, places or ModulePlaces(torch.nn.Identity()), place)
        edited = tap("q", call.q), tap("k", call.k), tap("v", call.v)
        # the edits keep shapes and dtypes, so that the checked call remains valid
        call = replace(call, q=edited[0], k=edited[1], v=edited[2])
        if dropout:
            result, kernel = _with_torch_dropout(call, dropout)
        else:
            # the weights that a module returns need the lse; else the choice does not change
            wants_lse = call.wants_lse or _requests.box is not None
            chosen, call = choose_kernel(replace(call, wants_lse=wants_lse))
            result, kernel = run_on_kernel(chosen, call), chosen.name
        contexts.count_kernel(kernel)
        if places is not None:
            places.observed += 1
        return ObservedCall(call, result, tap("z", result.out))


def _with_torch_dropout(call: Call, dropout: float) -> tuple[KernelResult, str]:
    """Run a call with torch's own dropout for the output, and a kernel here for the lse."""
    chosen, call = choose_kernel(replace(call, wants_lse=True))
    name = f"torch, lse by {chosen.name}"
    mask = call.mask.block(call.q_positions, call.k_positions, device=call.q.device)
    if call.bias is None:
        added = mask
    else:
        bias = call.bias.block(call.q_positions, call.k_positions, dtype=call.q.dtype)
        added = bias.masked_fill(~mask, -torch.inf)
    out = TORCH.attention(
        call.q, call.k, call.v, added, dropout, scale=call.scale, enable_gqa=call.G != call.H
    )
    result = KernelResult(out, chosen.run(call).lse)
    for watcher in call_observers():
        watcher.on_attention_call(replace(call, dropout=dropout), result, name)
    return result, name


def weights_of(observed: ObservedCall) -> Tensor:
    """Return the weights `[B, H, T, S]` of a call in the dtype of q, NaN without a key."""
    call, result = observed.call, observed.result
    if result.pattern is not None:
        weights = result.pattern
    else:
        s = scores(call)[0] if result.scores is None else result.scores
        weights = s.softmax(-1)
    return weights.to(call.q.dtype)


def with_nan_rows(observed: ObservedCall) -> Tensor:
    """Return the output of a call, NaN without a key, as torch's softmax over -inf gives."""
    lse = observed.result.lse
    assert lse is not None, "an observed call asks for its lse"
    hidden = lse.isneginf()
    return (
        observed.z.masked_fill(hidden[..., None], torch.nan) if bool(hidden.any()) else observed.z
    )


_MHA_SIGNATURE = inspect.signature(F.multi_head_attention_forward)


def observe_multi_head(*args: Any, **kwargs: Any) -> tuple[Tensor, Tensor | None]:
    """Compute `F.multi_head_attention_forward`, its attention observed by the open traces.

    It runs without weights, which are computed from the observed call.
    """
    bound = _MHA_SIGNATURE.bind(*args, **kwargs)
    bound.apply_defaults()
    arguments = bound.arguments
    result: tuple[Tensor, Tensor | None]
    if not arguments["need_weights"]:
        return TORCH.multi_head_forward(*args, **kwargs)
    if arguments["training"] and arguments["dropout_p"] > 0:
        places = open_places()
        place = "" if places is None else places.next_place()
        result = leave_to_torch(
            place, WEIGHTS_WITH_DROPOUT, lambda: TORCH.multi_head_forward(*args, **kwargs)
        )
        return result
    outer, box = _requests.box, list[ObservedCall]()
    _requests.box = box
    try:
        # with weights torch applies the mask itself, whatever the hint `is_causal` says
        out, _ = TORCH.multi_head_forward(
            **{**arguments, "need_weights": False, "is_causal": False}
        )
    finally:
        _requests.box = outer
    if not box:  # the attention was left to torch, and is listed
        places = open_places()
        with nullcontext() if places is None else places.inside_call():
            return TORCH.multi_head_forward(*args, **kwargs)
    weights, hidden = weights_of(box[0]), box[0].result.lse
    assert hidden is not None, "an observed call asks for its lse"
    is_batched = arguments["query"].ndim == 3
    # [B,H,T] -> [T,B], or [T] without a batch: a row of one head that sees no key spoils the output
    nan = hidden.isneginf().any(1).T
    nan = nan if is_batched else nan[:, 0]
    out = out.masked_fill(nan[..., None], torch.nan) if bool(nan.any()) else out
    if arguments["average_attn_weights"]:
        weights = weights.mean(1)
    return out, weights if is_batched else weights[0]


def observe_fused_multi_head(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    num_head: int,
    weight: Tensor,
    bias: Tensor,
    output: tuple[Tensor, Tensor],
    mask: Tensor | None,
    mask_type: int | None,
    *,
    need_weights: bool,
    average: bool,
) -> tuple[Tensor, Tensor | None] | None:
    """Compute the fused inference path of `nn.MultiheadAttention`, observed by the open traces."""
    mask, tokens = as_attn_mask(mask, mask_type), None
    if query.is_nested:
        sizes = query._nested_tensor_size()[:, 0]
        query = key = value = query.to_padded_tensor(0.0)
        tokens = torch.arange(query.shape[1], device="cpu") < sizes[:, None]
        mask = tokens[:, None, None]
    heads = (
        F.linear(x, w, b).unflatten(-1, (num_head, -1)).transpose(1, 2)
        for x, w, b in zip((query, key, value), weight.chunk(3), bias.chunk(3), strict=True)
    )
    outer, box = _requests.box, list[ObservedCall]()
    _requests.box = box
    try:
        q, k, v = heads
        observe_attention(q, k, v, mask)
    finally:
        _requests.box = outer
    if not box:
        return None
    z = with_nan_rows(box[0]).transpose(1, 2).flatten(2)
    out = F.linear(z, *output)
    if tokens is not None:
        out = torch._nested_tensor_from_mask(out, tokens, mask_check=False)
    weights = weights_of(box[0]) if need_weights else None
    return out, weights.mean(1) if weights is not None and average else weights


def observe_call(
    tensors: tuple[Tensor, Tensor, Tensor],
    as_call: Callable[[Tensor, Tensor, Tensor], Call | None],
    *,
    place: str,
) -> ObservedCall | str:
    """Pass a call `[B, H, T, D]` through taps and a kernel, or return why it cannot be."""
    q, k, v = tensors
    why = _why_unreadable(q, k, v)
    if why is not None:
        return why
    return _observe(place, _FourDims(q, k, v, None, (*q.shape[:3], v.shape[3])), as_call)
