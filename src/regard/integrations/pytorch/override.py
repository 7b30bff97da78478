"""`regard.accelerate`: run torch's attention functions through this package where it is faster.

While it is active, three functions of torch are replaced, in torch's own modules and in every
loaded module that has imported one of them by name: `F.scaled_dot_product_attention`, and the fused
inference paths of `nn.MultiheadAttention` and `nn.TransformerEncoderLayer`. A replacement checks
the sizes of the call first, and passes small calls to torch at once. All other functions of torch
are untouched. A `TorchFunctionMode` would see every call of torch and cost 3 microseconds for each,
which is more than 3 % of a decoding step of a small model.

A result equals torch's within the error rule, except where torch has a fault:

- NaN in data that a query sees always appears in the output, and NaN in hidden data never does;
- a float mask of `nn.TransformerEncoderLayer` is added to the scores, as torch documents it,
  whereas torch's fused path hides every key where it is not 0;
- `is_causal` with a negative scale hides later keys, whereas torch's kernel gives NaN;
- a mask of float32 is added to scores of float64, whereas torch's kernel reads other numbers.
"""

from __future__ import annotations

import importlib
import sys
import threading
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager
from dataclasses import replace
from functools import cache, wraps
from inspect import unwrap
from typing import Any, NamedTuple, TypeVar, overload

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from regard.errors import ArgumentError, ArgumentTypeError
from regard.integrations.pytorch.flex_calls import run_or_leave
from regard.integrations.pytorch.observed_call import (
    observe_attention,
    observe_fused_multi_head,
    observe_multi_head,
)
from regard.integrations.pytorch.torch_calls import (
    FAST_KERNELS,
    MIN_PRODUCTS,
    NOT_MASKED_ATTENTION,
    NOT_ON_CPU,
    SMALL,
    TORCH_AS_FAST,
    adds_to_scores,
    as_attn_mask,
    as_call,
    is_small,
    reason_for_torch,
    skips_more_than_torch,
)
from regard.integrations.pytorch.torch_functions import (
    FLEX_MODULE,
    LIBRARY,
    TORCH,
    CallCounts,
    contexts,
    is_observed,
    suits_graph,
    torch_attention,
)
from regard.masks import Causal, Full, Window
from regard.ops.softmax.dispatch import choose_kernel, run_on_kernel
from regard.ops.softmax.operators import run_call
from regard.process_state import is_compiling
from regard.sequence_scope import SequenceScope, current_scope
from regard.tracing import is_tracing
from regard.units import plural

M = TypeVar("M", bound=nn.Module)

RANK_MASKS = (Causal, Full, Window)
"""The masks of torch's calls that mean the same for positions of the whole sequence."""

HALF_TYPES = (torch.bfloat16, torch.float16)
MIN_FUSED_QUERIES = 8192
"""The smallest number of queries for which half-precision calls of torch's fused inference paths
without a mask run here: those paths hold all scores in memory, and multiply fast up to this length.
"""

NESTED = "its input is a nested tensor, as nn.TransformerEncoder makes it of a padded batch"


@overload
def accelerate(*, always: bool = False) -> AbstractContextManager[CallCounts]: ...
@overload
def accelerate(model: M, *, always: bool = False) -> M: ...
def accelerate(
    model: nn.Module | None = None, *, always: bool = False
) -> nn.Module | AbstractContextManager[CallCounts]:
    """Run attention of any PyTorch model on a CPU through `attend` where that is faster, exactly.

    Without a model it is a context manager for this thread, which yields the counts of calls
    (`CallCounts`):

        with regard.accelerate() as calls:
            model.generate(...)
        print(calls)

    With a model, every later call `model(...)` in any thread runs accelerated, and the model is
    returned.

    It applies to calls of `F.scaled_dot_product_attention`, `nn.MultiheadAttention` and
    `nn.TransformerEncoderLayer` on a CPU, without dropout. Of a function that `torch.compile`
    compiled, it takes the calls of `F.scaled_dot_product_attention` without gradients. Each
    argument has torch's meaning: `is_causal` is aligned at the first key, a bool mask has True =
    may attend, and a float mask is added to the scores. A dense mask that is causal, a window or
    padding is recognized. Calls for which torch is as fast run in torch and are counted with the
    reason.

    Args:
        model: any module; None returns the context manager.
        always: also run the calls for which torch is as fast.

    Returns:
        The context manager, or the model.

    Raises:
        ArgumentTypeError: the model is not an `nn.Module`.

    >>> import torch, regard
    >>> q, k = torch.randn(1, 8, 1, 64), torch.randn(1, 2, 4096, 64)
    >>> with torch.no_grad(), regard.accelerate() as calls:
    ...     z = torch.nn.functional.scaled_dot_product_attention(q, k, k, enable_gqa=True)
    >>> dict(calls.taken)
    {'cpu': 1}
    """
    if model is None:
        return _accelerated(always)
    if not isinstance(model, nn.Module):
        raise ArgumentTypeError(
            f"model is {type(model).__name__}; it must be an nn.Module; without a model, write "
            "`with regard.accelerate():`"
        )
    if not any(isinstance(hook, _BeforeForward) for hook in model._forward_pre_hooks.values()):
        # never removed: accelerated models may share the functions of their modules
        install_replacements()
        model.register_forward_pre_hook(_BeforeForward(always))
        model.register_forward_hook(_AfterForward(), always_call=True)
    return model


@contextmanager
def _accelerated(always: bool) -> Iterator[CallCounts]:  # noqa: FBT001
    calls = CallCounts(always)
    install_replacements()
    contexts.open.append(calls)
    try:
        yield calls
    finally:
        contexts.open.remove(calls)
        remove_replacements()


class _BeforeForward:
    """A hook that opens the context before the forward pass of an accelerated model."""

    def __init__(self, always: bool) -> None:  # noqa: FBT001
        self.calls = CallCounts(always)

    def __call__(self, module: nn.Module, args: object) -> None:
        if torch.compiler.is_dynamo_compiling():
            contexts.open.append(self.calls)
        elif not is_compiling():
            if not _users:  # the model was unpickled in a process without replacements
                install_replacements()
            contexts.open.append(self.calls)


class _AfterForward:
    """A hook that closes the context after the forward pass, even if it failed."""

    def __call__(self, module: nn.Module, args: object, result: object) -> None:
        if torch.compiler.is_dynamo_compiling() or not is_compiling():
            contexts.open.pop()


_lock = threading.Lock()
_users = 0
"""The number of open contexts and accelerated models that need the replacements."""
_installed: set[int] = set()
"""The ids of the functions of torch that are replaced now."""
_replaced: list[tuple[dict[str, object], str, object]] = []
"""The replaced functions of torch: the namespace of a module, the name, and the original."""


def install_replacements() -> None:
    """Replace torch's functions in every loaded module that holds one of them under a name."""
    global _users
    # dynamo keeps tables of torch's functions; were it loaded later, they would hold replacements
    importlib.import_module(_GRAPH_RULES)
    with _lock:
        _look_up_graph_rules()
        _users += 1
        new = {
            id(original): function
            for original, function in _replacements()
            if id(original) not in _installed
        }
        if not new:
            return
        _installed.update(new)
        for module in list(sys.modules.values()):
            names = getattr(module, "__dict__", None)
            if names is None or names.get("__name__") in _EXEMPT_MODULES:
                continue
            for name, value in list(names.items()):
                function = new.get(id(value))
                if function is not None:
                    _replaced.append((names, name, value))
                    names[name] = function


def remove_replacements() -> None:
    """Count one user less; without users put torch's own functions back."""
    global _users
    with _lock:
        _users -= 1
        while _users == 0 and _replaced:
            names, name, original = _replaced.pop()
            names[name] = original
        if _users == 0:
            _installed.clear()
            _look_up_graph_rules()


_GRAPH_RULES = "torch._dynamo.trace_rules"


def _look_up_graph_rules() -> None:
    """Let `torch.compile` find its rules while torch's functions have their names.

    It looks each up once by its name, and cannot trace one that was replaced then.
    """
    rules = sys.modules.get(_GRAPH_RULES)
    if rules is None:
        return
    look_up = rules.get_torch_obj_rule_map
    if look_up.cache_info().currsize and TORCH.attention in look_up():
        return
    look_up.cache_clear()
    functions = [names[name] for names, name, _ in _replaced]
    for names, name, original in _replaced:
        names[name] = original
    look_up()
    for (names, name, _), function in zip(_replaced, functions, strict=True):
        names[name] = function


def _with_graph_rules(function: Callable[..., object]) -> Callable[..., object]:
    """Return a function of torch that traces graphs, with its rules looked up before it runs."""

    @wraps(function)
    def run(*args: object, **options: object) -> object:
        importlib.import_module(_GRAPH_RULES)
        with _lock:
            _look_up_graph_rules()
        return function(*args, **options)

    return run


@wraps(TORCH.attention)
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
    if is_observed() and not is_compiling():
        return observe_attention(
            query,
            key,
            value,
            attn_mask,
            dropout_p,
            is_causal,
            scale=scale,
            enable_gqa=enable_gqa,
        )
    if contexts.open:
        z = _run_here(
            query,
            key,
            value,
            attn_mask,
            dropout_p,
            is_causal=is_causal,
            scale=scale,
            grouped=enable_gqa,
        )
        if z is not None:
            return z
    return TORCH.attention(
        query,
        key,
        value,
        attn_mask,
        dropout_p,
        is_causal,
        scale=scale,
        enable_gqa=enable_gqa,
    )


def _run_here(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    mask: Tensor | None,
    dropout: float,
    *,
    is_causal: bool,
    scale: float | None,
    grouped: bool,
) -> Tensor | None:
    """Run a call on our kernels and count it, or count why torch runs it, and return None."""
    if (scope := current_scope()) is not None:
        return _attention_over_ranks(
            scope, (q, k, v), mask, dropout, is_causal=is_causal, scale=scale, grouped=grouped
        )
    always = contexts.always
    if is_compiling():
        if not _graph_takes(q, k, v, mask, dropout, grouped):
            return None
        return torch_attention(
            q, k, v, mask, is_causal=is_causal, scale=scale, grouped=grouped, always=always
        )
    # a small call takes torch 3 microseconds: three sizes are compared before anything else
    if not always and is_small(q, k):
        contexts.count_torch(SMALL)
        return None
    why = reason_for_torch(q, k, v, mask, dropout, always=always)
    call = (
        as_call(q, k, v, mask, is_causal=is_causal, scale=scale, grouped=grouped)
        if why is None
        else None
    )
    if call is None:
        contexts.count_torch(why or NOT_MASKED_ATTENTION)
        return None
    kernel, call = choose_kernel(call)
    fast = kernel.name in FAST_KERNELS or (mask is not None and skips_more_than_torch(call))
    if not (fast or always):
        contexts.count_torch(TORCH_AS_FAST)
        return None
    contexts.count_kernel(kernel.name)
    return run_on_kernel(kernel, call).out


def _attention_over_ranks(
    scope: SequenceScope,
    tensors: tuple[Tensor, Tensor, Tensor],
    mask: Tensor | None,
    dropout: float,
    *,
    is_causal: bool,
    scale: float | None,
    grouped: bool,
) -> Tensor:
    """Run self-attention within `regard.parallel.sequence`, with positions in the whole."""
    q, k, v = tensors
    own, call = scope.own_positions(), None
    if all(x.ndim == 4 for x in tensors) and not dropout:
        call = as_call(q, k, v, mask, is_causal=is_causal, scale=scale, grouped=grouped)
    if call is None or not q.shape[2] == k.shape[2] == own.shape[1]:
        raise ArgumentError(
            f"attention of {list(q.shape)} over {list(k.shape)} cannot run over several ranks: "
            f"this rank holds {plural(own.shape[1], 'token')}, and only self-attention of exactly "
            "these, in four dimensions and without dropout, is supported"
        )
    if call.bias is not None or not all(isinstance(x, RANK_MASKS) for x in call.mask.terms()):
        raise ArgumentError(
            f"the mask {call.mask} cannot run over several ranks: a mask that torch's function "
            "gets must be causal, a window, or absent"
        )
    result = run_call(replace(call, q_positions=own, k_positions=own))
    contexts.count_kernel("over ranks")
    return result.out


def _refuse_fused_over_ranks(name: str) -> None:
    """Raise if a fused path of torch would compute attention within `regard.parallel.sequence`."""
    if contexts.open and current_scope() is not None:
        raise ArgumentError(
            f"the fused inference path of {name} cannot run over several ranks; switch it off: "
            "torch.backends.mha.set_fastpath_enabled(False)"
        )


def _graph_takes(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    mask: Tensor | None,
    dropout: float,
    grouped: bool,  # noqa: FBT001
) -> bool:
    """Whether a compiled graph runs this call here, by an operator; its sizes decide."""
    if not (torch.compiler.is_dynamo_compiling() and contexts.open):
        return False
    if not suits_graph(query, key, value, mask, dropout, grouped=grouped):
        return False
    return contexts.always or not is_small(query, key)


def _attention_of_graph(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attn_mask: Tensor | None,
    is_causal: bool,  # noqa: FBT001  (the order of the schema)
    scale: float | None,
    enable_gqa: bool,  # noqa: FBT001
    always: bool,  # noqa: FBT001
) -> Tensor:
    """Run a call of a compiled graph, and count it in the open contexts."""
    calls = [] if contexts.open else [CallCounts(always)]
    contexts.open += calls
    try:
        return _attention(
            query,
            key,
            value,
            attn_mask,
            is_causal=is_causal,
            scale=scale,
            enable_gqa=enable_gqa,
        ).contiguous()
    finally:
        if calls:
            contexts.open.pop()


LIBRARY.impl("torch_attention", _attention_of_graph, "CompositeExplicitAutograd")


class _MultiHeadArguments(NamedTuple):
    """The arguments of torch's fused inference path of `nn.MultiheadAttention`."""

    query: Tensor
    key: Tensor
    value: Tensor
    embed_dim: int
    num_head: int
    qkv_weight: Tensor
    qkv_bias: Tensor
    proj_weight: Tensor
    proj_bias: Tensor
    mask: Tensor | None = None
    need_weights: bool = True
    average_attn_weights: bool = True
    mask_type: int | None = None


@wraps(TORCH.multi_head)
def _mha(*args: Any, **kwargs: Any) -> tuple[Tensor, Tensor | None]:
    _refuse_fused_over_ranks("nn.MultiheadAttention")
    x = _MultiHeadArguments(*args, **kwargs)
    weights = x.num_head, x.qkv_weight, x.qkv_bias
    if is_observed() and not is_compiling():
        observed = observe_fused_multi_head(
            x.query,
            x.key,
            x.value,
            *weights,
            (x.proj_weight, x.proj_bias),
            x.mask,
            x.mask_type,
            need_weights=x.need_weights,
            average=x.average_attn_weights,
        )
        if observed is not None:
            return observed
    elif _is_active(x.query) and not x.need_weights and x.query is x.key is x.value:
        z = _self_attention(x.query, *weights, x.mask, x.mask_type)
        if z is not None:
            return F.linear(z, x.proj_weight, x.proj_bias), None
    return TORCH.multi_head(*args, **kwargs)


@wraps(TORCH.multi_head_forward)
def _mha_forward(*args: Any, **kwargs: Any) -> tuple[Tensor, Tensor | None]:
    if is_observed() and not is_compiling():
        return observe_multi_head(*args, **kwargs)
    return TORCH.multi_head_forward(*args, **kwargs)


class _EncoderArguments(NamedTuple):
    """The arguments of torch's fused inference path of `nn.TransformerEncoderLayer`."""

    src: Tensor
    embed_dim: int
    num_heads: int
    qkv_weight: Tensor
    qkv_bias: Tensor
    proj_weight: Tensor
    proj_bias: Tensor
    use_gelu: bool
    norm_first: bool
    eps: float
    norm_weight_1: Tensor
    norm_bias_1: Tensor
    norm_weight_2: Tensor
    norm_bias_2: Tensor
    ffn_weight_1: Tensor
    ffn_bias_1: Tensor
    ffn_weight_2: Tensor
    ffn_bias_2: Tensor
    mask: Tensor | None = None
    mask_type: int | None = None

    def norm_1(self, x: Tensor) -> Tensor:
        return F.layer_norm(x, (self.embed_dim,), self.norm_weight_1, self.norm_bias_1, self.eps)

    def norm_2(self, x: Tensor) -> Tensor:
        return F.layer_norm(x, (self.embed_dim,), self.norm_weight_2, self.norm_bias_2, self.eps)

    def feed_forward(self, x: Tensor) -> Tensor:
        h = F.linear(x, self.ffn_weight_1, self.ffn_bias_1)
        h = F.gelu(h) if self.use_gelu else F.relu_(h)
        return F.linear(h, self.ffn_weight_2, self.ffn_bias_2)


@wraps(TORCH.encoder_layer)
def _encoder(*args: Any, **kwargs: Any) -> Tensor:
    _refuse_fused_over_ranks("nn.TransformerEncoderLayer")
    layer = _EncoderArguments(*args, **kwargs)
    if _is_active(layer.src):
        x = layer.norm_1(layer.src) if layer.norm_first else layer.src
        z = _self_attention(
            x, layer.num_heads, layer.qkv_weight, layer.qkv_bias, layer.mask, layer.mask_type
        )
        if z is not None:
            # in place, because torch calls this function without gradients only
            x = F.linear(z, layer.proj_weight, layer.proj_bias).add_(layer.src)
            if layer.norm_first:
                return layer.feed_forward(layer.norm_2(x)).add_(x)
            x = layer.norm_1(x)
            return layer.norm_2(layer.feed_forward(x).add_(x))
    return TORCH.encoder_layer(*args, **kwargs)


def _is_active(x: Tensor) -> bool:
    """Whether calls are accelerated in this thread, and x is not a nested tensor."""
    if is_compiling() or not contexts.open:
        return False
    if x.is_nested:
        contexts.count_torch(NESTED)
    return not x.is_nested


def _self_attention(
    x: Tensor,
    heads: int,
    weight: Tensor,
    bias: Tensor,
    mask: Tensor | None,
    mask_type: int | None,
) -> Tensor | None:
    """Return self-attention of x before the output projection; None if torch must run it."""
    if not x.is_cpu:
        contexts.count_torch(NOT_ON_CPU)
        return None
    B, T, width = x.shape
    mask = as_attn_mask(mask, mask_type)
    if not (contexts.always or is_tracing() or adds_to_scores(mask)):
        if B * T * T * width * 2 < MIN_PRODUCTS:
            contexts.count_torch(SMALL)
            return None
        if mask is None and x.dtype in HALF_TYPES and T < MIN_FUSED_QUERIES:
            contexts.count_torch(TORCH_AS_FAST)
            return None
    q, k, v = (
        part.unflatten(-1, (heads, -1)).transpose(1, 2)
        for part in F.linear(x, weight, bias).chunk(3, dim=-1)
    )
    return _attention(q, k, v, attn_mask=mask).transpose(1, 2).flatten(2)


def _replacements() -> list[tuple[Callable[..., object], Callable[..., object]]]:
    """Return the functions of torch that are replaced, each with its replacement."""
    flex = sys.modules.get(FLEX_MODULE)
    if flex is None:
        return list(_REPLACEMENTS)
    original = unwrap(flex.flex_attention)
    return [*_REPLACEMENTS, (original, _flex_replacement(original))]


@cache
def _flex_replacement(original: Callable[..., object]) -> Callable[..., object]:
    """Return the replacement of `flex_attention`."""

    @wraps(original)
    def replacement(*args: object, **kwargs: object) -> object:
        if is_compiling() or not (contexts.open or is_observed()):
            return original(*args, **kwargs)

        return run_or_leave(original, *args, **kwargs)

    return replacement


_REPLACEMENTS: tuple[tuple[Callable[..., object], Callable[..., object]], ...] = (
    *((x, _with_graph_rules(x)) for x in (torch.compile, torch.export.export)),
    (TORCH.attention, _attention),
    (TORCH.multi_head, _mha),
    (TORCH.multi_head_forward, _mha_forward),
    (TORCH.encoder_layer, _encoder),
)
_EXEMPT_MODULES = frozenset({"regard.ops.softmax.sdpa"})
"""Modules that keep torch's own functions, so that calls left to torch do not come back here."""
