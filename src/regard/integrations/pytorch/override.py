"""`regard.accelerate`: torch's attention functions, run by this package's kernels where they are
faster.

While it is on, three functions of torch are replaced, in torch's own modules and in every loaded
module that has imported one by name: `F.scaled_dot_product_attention`, and the fused inference
paths of `nn.MultiheadAttention` and `nn.TransformerEncoderLayer`. A replacement looks at the call's
sizes first; what is small goes to torch at once. All other functions of torch cost what they cost
before: a `TorchFunctionMode`, which sees every call of torch, costs 3 microseconds for each of
them, which is more than 3 % of a decoding step of a small model.

A result is torch's within the error rule, with two differences that are torch's faults: NaN in data
that a query sees is never lost, and NaN in what is hidden never shows.
"""

from __future__ import annotations

import sys
import threading
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager
from dataclasses import dataclass, field
from functools import wraps
from typing import Any, TypeVar, overload

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from regard.errors import ArgumentTypeError
from regard.integrations.pytorch.dense_masks import Memory
from regard.masks import Causal, Dense, Mask
from regard.ops.softmax.call import Call, make_call
from regard.ops.softmax.dispatch import choose_kernel, run_on_kernel
from regard.process_state import is_compiling
from regard.span import Span

M = TypeVar("M", bound=nn.Module)

FASTER = ("cpu", "gemm")
"""The kernels for which a call leaves torch."""

LEAST_MEMORY = 1 << 17
"""Keys and values of fewer numbers than this are left to torch when queries are few."""

LEAST_PRODUCTS = 1 << 28
"""Products B H T S (D + E) below this are left to torch when queries are many."""

FEW_QUERIES = 16
"""Up to so many rows for each key/value head a call reads memory; with more it multiplies
matrices.
"""

SMALL = "it is small"
AS_FAST = "torch is as fast for these sizes"
NOT_MASKED = "its arguments do not fit, or its mask averages the values in rows that it hides"

_torch_attention = F.scaled_dot_product_attention
_torch_mha = torch._native_multi_head_attention
_torch_encoder = torch._transformer_encoder_layer_fwd


@dataclass(eq=False)
class Calls:
    """What became of the calls of torch's attention functions; printing it gives the counts.

    Attributes:
        always: whether calls are taken in which torch is as fast.
        taken: how many calls each kernel ran, by its name.
        left: how many calls went to torch, by the reason.
    """

    always: bool = False
    taken: Counter[str] = field(default_factory=Counter)
    left: Counter[str] = field(default_factory=Counter)

    def __str__(self) -> str:
        here, left = sum(self.taken.values()), sum(self.left.values())
        lines = [f"calls that ran here: {here}; in torch: {left}"]
        lines += [f"  {n:>8}  {name}" for name, n in self.taken.most_common()]
        lines += [f"  {n:>8}  torch: {why}" for why, n in self.left.most_common()]
        return "\n".join(lines)


class _Thread(threading.local):
    """The open contexts of this thread."""

    def __init__(self) -> None:
        self.open: list[Calls] = []

    @property
    def always(self) -> bool:
        """Whether the innermost context takes every call that it can."""
        return self.open[-1].always

    def took(self, kernel: str) -> None:
        """A kernel runs a call."""
        for calls in self.open:
            calls.taken[kernel] += 1

    def left(self, why: str) -> None:
        """A call is left to torch."""
        for calls in self.open:
            calls.left[why] += 1


_thread = _Thread()
_memory = Memory()


@overload
def accelerate(*, always: bool = False) -> AbstractContextManager[Calls]: ...
@overload
def accelerate(model: M, *, always: bool = False) -> M: ...
def accelerate(
    model: nn.Module | None = None, *, always: bool = False
) -> nn.Module | AbstractContextManager[Calls]:
    """Run attention of any PyTorch model on a CPU through `attend` where that is faster, exactly.

    Without a model it is a context manager, for this thread, whose value counts the calls
    (`Calls`):

        with regard.accelerate() as calls:
            model.generate(...)
        print(calls)

    With a model, every later `model(...)` runs so, in any thread, and the model is returned.

    Taken are calls of `F.scaled_dot_product_attention`, of `nn.MultiheadAttention` and of
    `nn.TransformerEncoderLayer`, on a CPU, without dropout, outside of compiled graphs. Each
    argument means what torch means by it: `is_causal` is aligned at the first key, a bool mask has
    True = may attend, a float mask is added. A dense mask that is causal, a window or padding is
    recognised. Calls in which torch is as fast are left to torch, and counted with the reason.

    Args:
        model: any module; None gives the context manager.
        always: take every call that `attend` can run, also where torch is as fast.

    Returns:
        The context manager, or the model.

    Raises:
        ArgumentTypeError: the model is no `nn.Module`.

    >>> import torch, regard
    >>> q, k = torch.randn(1, 8, 1, 64), torch.randn(1, 8, 4096, 64)
    >>> with torch.no_grad(), regard.accelerate() as calls:
    ...     z = torch.nn.functional.scaled_dot_product_attention(q, k, k)
    >>> dict(calls.taken)
    {'cpu': 1}
    """
    if model is None:
        return _accelerated(always)
    if not isinstance(model, nn.Module):
        raise ArgumentTypeError(
            f"model is {type(model).__name__}; it must be an nn.Module, or nothing: "
            "`with regard.accelerate():`"
        )
    if not any(isinstance(hook, _Enter) for hook in model._forward_pre_hooks.values()):
        _install()  # for good: models that are accelerated may share their modules' functions
        model.register_forward_pre_hook(_Enter(always))
        model.register_forward_hook(_Leave(), always_call=True)
    return model


@contextmanager
def _accelerated(always: bool) -> Iterator[Calls]:  # noqa: FBT001
    calls = Calls(always)
    _install()
    _thread.open.append(calls)
    try:
        yield calls
    finally:
        _thread.open.remove(calls)
        _uninstall()


class _Enter:
    """Before the forward pass of a model that is accelerated for good."""

    def __init__(self, always: bool) -> None:  # noqa: FBT001
        self.calls = Calls(always)

    def __call__(self, module: nn.Module, args: Any) -> None:
        if not is_compiling():
            if not _users:  # the model was unpickled in a process that has replaced nothing yet
                _install()
            _thread.open.append(self.calls)


class _Leave:
    """After it, also when it failed."""

    def __call__(self, module: nn.Module, args: Any, result: Any) -> None:
        if not is_compiling():
            _thread.open.pop()


_lock = threading.Lock()
_users = 0
_replaced: list[tuple[dict[str, Any], str, Any]] = []
"""Where a function of torch was replaced: a module's names, the name, and the original."""


def _install() -> None:
    """Put the replacements wherever a loaded module holds the original under a name."""
    global _users
    with _lock:
        _users += 1
        if _users > 1:
            return
        new = {id(original): function for original, function in _REPLACEMENTS}
        for module in list(sys.modules.values()):
            names = getattr(module, "__dict__", None)
            if names is None or names.get("__name__") in _OURS:
                continue
            for name, value in list(names.items()):
                function = new.get(id(value))
                if function is not None:
                    _replaced.append((names, name, value))
                    names[name] = function


def _uninstall() -> None:
    global _users
    with _lock:
        _users -= 1
        while _users == 0 and _replaced:
            names, name, original = _replaced.pop()
            names[name] = original


@wraps(_torch_attention)
def _attention(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attn_mask: Tensor | None = None,
    dropout_p: float = 0.0,
    is_causal: bool = False,  # noqa: FBT001, FBT002  (torch's own signature)
    scale: float | None = None,
    enable_gqa: bool = False,  # noqa: FBT001, FBT002
) -> Tensor:
    if not is_compiling() and (contexts := _thread.open):
        # a small call costs torch 3 microseconds: three sizes decide, before anything else is asked
        if (
            not contexts[-1].always
            and query.numel() * key.shape[-2] * 2 < LEAST_PRODUCTS
            and key.numel() * 2 < LEAST_MEMORY
        ):
            _thread.left(SMALL)
            return _torch_attention(
                query,
                key,
                value,
                attn_mask,
                dropout_p,
                is_causal,
                scale=scale,
                enable_gqa=enable_gqa,
            )
        why = _why_torch(query, key, value, attn_mask, dropout_p)
        call = (
            _as_call(
                query, key, value, attn_mask, is_causal=is_causal, scale=scale, grouped=enable_gqa
            )
            if why is None
            else None
        )
        if call is not None:
            kernel, call = choose_kernel(call)
            if kernel.name in FASTER or _thread.always or _skips(call, attn_mask):
                _thread.took(kernel.name)
                return run_on_kernel(kernel, call).out
            why = AS_FAST
        _thread.left(why or NOT_MASKED)
    return _torch_attention(
        query,
        key,
        value,
        attn_mask=attn_mask,
        dropout_p=dropout_p,
        is_causal=is_causal,
        scale=scale,
        enable_gqa=enable_gqa,
    )


def _skips(call: Call, given: Tensor | None) -> bool:
    """Whether a dense mask was recognised: of its rule every kernel leaves out what is hidden."""
    return given is not None and call.bias is None and not isinstance(call.mask, Dense)


def _why_torch(q: Tensor, k: Tensor, v: Tensor, mask: Tensor | None, dropout: float) -> str | None:
    """The reason, seen without looking at numbers, why torch runs this call; None if it need
    not.
    """
    if is_compiling() or torch._C._is_tracing():
        return "the graph is being traced"
    if not all(type(x) in (Tensor, nn.Parameter) for x in (q, k, v)):
        return "its tensors are of another class"
    if dropout > 0:
        return "it has dropout, whose random numbers are torch's"
    if q.device.type != "cpu":
        return "it is not on a CPU"
    if q.ndim != 4 or k.ndim != 4 or v.ndim != 4:
        return "its tensors have not the four dimensions [B, H, T, D]"
    T, S, D, E = q.shape[2], k.shape[2], q.shape[3], v.shape[3]
    G = max(1, k.shape[1])
    if T * (q.shape[1] // G) <= FEW_QUERIES:
        small = k.numel() + v.numel() < LEAST_MEMORY
    else:
        small = q.shape[0] * q.shape[1] * T * S * (D + E) < LEAST_PRODUCTS
    if small and not _thread.always:
        return SMALL
    if mask is not None and mask.requires_grad:
        return "its mask wants a gradient"
    return None


def _as_call(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    mask: Tensor | None,
    *,
    is_causal: bool,
    scale: float | None,
    grouped: bool,
) -> Call | None:
    """The call as `attend` takes it; None where torch's result is no masked attention.

    torch's own errors are better than ours for arguments that do not fit torch: such a call is
    None, too.
    """
    B, H, T, S = q.shape[0], q.shape[1], q.shape[2], k.shape[2]
    fits = k.shape[:3] == v.shape[:3] and q.shape[3] == k.shape[3] and q.dtype == k.dtype == v.dtype
    batch = k.shape[0] == B and (k.shape[1] == H or (grouped and H % k.shape[1] == 0))
    if not fits or not batch or (is_causal and mask is not None) or not T or not S:
        return None
    rule: Mask | None = None
    bias = None
    positions: Span | None = None
    if is_causal:
        rule, positions = Causal(), Span(0, T)
    elif mask is not None:
        if not _broadcasts(mask, (B, H, T, S)):
            return None
        found = _memory.recognise(mask, B, T, S)
        if found.uniform_rows:
            return None
        rule, positions, bias = found.mask, found.q_positions, found.bias
    return make_call(
        q,
        k,
        v,
        mask=rule,
        bias=bias,
        scale=scale,
        q_positions=positions,
        k_positions=Span(0, S),
    )


def _broadcasts(mask: Tensor, shape: tuple[int, ...]) -> bool:
    if mask.ndim > 4 or not (mask.dtype == torch.bool or mask.is_floating_point()):
        return False
    sizes = shape[4 - mask.ndim :]
    return all(n in (1, size) for n, size in zip(mask.shape, sizes, strict=True))


@wraps(_torch_mha)
def _mha(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    embed_dim: int,
    num_head: int,
    qkv_weight: Tensor,
    qkv_bias: Tensor,
    proj_weight: Tensor,
    proj_bias: Tensor,
    mask: Tensor | None = None,
    need_weights: bool = True,  # noqa: FBT001, FBT002  (torch's own signature)
    average_attn_weights: bool = True,  # noqa: FBT001, FBT002
    mask_type: int | None = None,
) -> tuple[Tensor, Tensor | None]:
    if _may_take(query) and not need_weights and query is key is value:
        z = _self_attention(query, num_head, qkv_weight, qkv_bias, mask, mask_type)
        if z is not None:
            return F.linear(z, proj_weight, proj_bias), None
    return _torch_mha(
        query,
        key,
        value,
        embed_dim,
        num_head,
        qkv_weight,
        qkv_bias,
        proj_weight,
        proj_bias,
        mask,
        need_weights,
        average_attn_weights,
        mask_type,
    )


@wraps(_torch_encoder)
def _encoder(
    src: Tensor,
    embed_dim: int,
    num_heads: int,
    qkv_weight: Tensor,
    qkv_bias: Tensor,
    proj_weight: Tensor,
    proj_bias: Tensor,
    use_gelu: bool,  # noqa: FBT001  (torch's own signature)
    norm_first: bool,  # noqa: FBT001
    eps: float,
    norm_weight_1: Tensor,
    norm_bias_1: Tensor,
    norm_weight_2: Tensor,
    norm_bias_2: Tensor,
    ffn_weight_1: Tensor,
    ffn_bias_1: Tensor,
    ffn_weight_2: Tensor,
    ffn_bias_2: Tensor,
    mask: Tensor | None = None,
    mask_type: int | None = None,
) -> Tensor:
    if _may_take(src):

        def norm_1(x: Tensor) -> Tensor:
            return F.layer_norm(x, (embed_dim,), norm_weight_1, norm_bias_1, eps)

        def norm_2(x: Tensor) -> Tensor:
            return F.layer_norm(x, (embed_dim,), norm_weight_2, norm_bias_2, eps)

        def feed_forward(x: Tensor) -> Tensor:
            h = F.linear(x, ffn_weight_1, ffn_bias_1)
            return F.linear(F.gelu(h) if use_gelu else F.relu(h), ffn_weight_2, ffn_bias_2)

        x = norm_1(src) if norm_first else src
        z = _self_attention(x, num_heads, qkv_weight, qkv_bias, mask, mask_type)
        if z is not None:
            x = src + F.linear(z, proj_weight, proj_bias)
            if norm_first:
                return x + feed_forward(norm_2(x))
            x = norm_1(x)
            return norm_2(x + feed_forward(x))
    return _torch_encoder(
        src,
        embed_dim,
        num_heads,
        qkv_weight,
        qkv_bias,
        proj_weight,
        proj_bias,
        use_gelu,
        norm_first,
        eps,
        norm_weight_1,
        norm_bias_1,
        norm_weight_2,
        norm_bias_2,
        ffn_weight_1,
        ffn_bias_1,
        ffn_weight_2,
        ffn_bias_2,
        mask,
        mask_type,
    )


def _may_take(x: Tensor) -> bool:
    return not is_compiling() and bool(_thread.open) and not x.is_nested


def _self_attention(
    x: Tensor,
    heads: int,
    weight: Tensor,
    bias: Tensor,
    mask: Tensor | None,
    mask_type: int | None,
) -> Tensor | None:
    """Attention of x [B,T,M] over itself, before the output map; None where torch's fused path is
    as fast.

    Args:
        mask: True = hidden. mask_type 0 is [T, T], 1 is [B, T] of padding, 2 is [B, heads, T, T].
    """
    B, T, width = x.shape
    small = B * T * T * width * 2 < LEAST_PRODUCTS
    if (small and not _thread.always) or not x.is_cpu:
        _thread.left(SMALL)
        return None
    keep = None
    if mask is not None:
        keep = ~mask.bool()
        if mask_type == 1:
            keep = keep[:, None, None]
    q, k, v = (
        part.unflatten(-1, (heads, -1)).transpose(1, 2)
        for part in F.linear(x, weight, bias).chunk(3, dim=-1)
    )
    return _attention(q, k, v, attn_mask=keep).transpose(1, 2).flatten(2)


_REPLACEMENTS: tuple[tuple[Callable[..., Any], Callable[..., Any]], ...] = (
    (_torch_attention, _attention),
    (_torch_mha, _mha),
    (_torch_encoder, _encoder),
)
_OURS = frozenset(
    {
        __name__,
        "regard.ops.softmax.sdpa",
    }
)
"""Modules that keep torch's functions: what is handed back must not come here again."""
