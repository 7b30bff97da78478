"""`watch`: make the attention calls of any PyTorch model pass the taps of the open traces."""

from __future__ import annotations

import importlib
import sys
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode

from regard.errors import ArgumentTypeError
from regard.integrations.pytorch import override
from regard.integrations.pytorch.flex_calls import observe_flex_operator
from regard.integrations.pytorch.module_places import ModulePlaces, opened
from regard.integrations.pytorch.module_taps import module_taps
from regard.integrations.pytorch.observed_call import leave_to_torch, observe_attention
from regard.integrations.pytorch.torch_functions import FLEX_MODULE
from regard.tracing import is_running_kernel, is_tracing

BY_REFERENCE = (
    "it reached torch's kernel {} past torch.nn.functional, with autograd or in a form that has no "
    "lse; call F.scaled_dot_product_attention, or run it under torch.no_grad()"
)

_FUSED = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu.default
_WHOLE = torch.ops.aten.scaled_dot_product_attention.default
_SOFTMAX = torch.ops.aten._softmax.default
_OTHER_KERNELS = {
    getattr(torch.ops.aten, name).default
    for name in (
        "_safe_softmax",
        "_scaled_dot_product_flash_attention",
        "_scaled_dot_product_efficient_attention",
        "_scaled_dot_product_cudnn_attention",
        "_native_multi_head_attention",
        "_transformer_encoder_layer_fwd",
    )
}


class _PastTheFunctions(TorchDispatchMode):
    """Find attention that reaches torch's kernels past the functions which are replaced.

    The CPU's fused kernel is observed without autograd; everything else is listed.
    """

    supports_higher_order_operators = True

    def __init__(self, places: ModulePlaces) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self._places = places

    def __torch_dispatch__(
        self,
        func: Any,
        types: object,
        args: tuple[Any, ...] = (),
        kwargs: dict[str, Any] | None = None,
    ) -> object:
        kwargs = kwargs or {}
        known = self._places.is_inside_call or is_running_kernel()
        if not known and is_tracing():
            if func is _WHOLE:
                return observe_attention(*args, **kwargs)
            if func is _FUSED and not torch.is_grad_enabled():
                return self._fused(*args, **kwargs)
            if str(func) == "flex_attention":
                return self._flex(func, *args, **kwargs)
            if func in _OTHER_KERNELS or func is _FUSED:
                why = BY_REFERENCE.format(str(func).removeprefix("aten.").removesuffix(".default"))
                self._places.unrecorded[self._places.next_place(), why] += 1
            elif func is _SOFTMAX and args[0].ndim > 2:
                self._places.written_out[self._places.here] = tuple(args[0].shape)
        return func(*args, **kwargs)

    def _flex(self, function: Any, *args: Any, **kwargs: Any) -> object:
        """Observe the operator of `flex_attention`."""
        place = self._places.next_place()
        result = observe_flex_operator(*args, **kwargs, place=place)
        if not isinstance(result, str):
            return result
        return leave_to_torch(place, result, lambda: function(*args, **kwargs))

    def _fused(
        self,
        q: Tensor,
        k: Tensor,
        v: Tensor,
        dropout: float = 0.0,
        is_causal: bool = False,  # noqa: FBT001, FBT002  (torch's own signature)
        *,
        attn_mask: Tensor | None = None,
        scale: float | None = None,
    ) -> tuple[Tensor, Tensor]:
        """Observe the fused kernel of the CPU; its second result is read by autograd only."""
        grouped = q.shape[1] != k.shape[1]
        z = observe_attention(q, k, v, attn_mask, dropout, is_causal, scale, grouped)
        return z, z.new_zeros(q.shape[:3])


@contextmanager
def watch(model: nn.Module) -> Iterator[ModulePlaces]:
    """Let the open traces and recorders of this thread see the attention of any PyTorch model.

    Within the block, each call of `F.scaled_dot_product_attention`, `nn.MultiheadAttention`,
    `nn.TransformerEncoderLayer` or `flex_attention` in the model passes the taps `q`, `k`, `v`,
    `scores`, `pattern` and `z`, and runs on the kernels of this package. The names of the taps
    begin with the path of the module that makes the call, as in `model.named_modules()`; the
    second call within one forward pass of a module has the name `<path>.call2`. The modules pass
    the taps `embed`, `norm`, `mlp`, `residual` and `logits` too (see `module_taps`). Without an
    open trace nothing changes. Compiled modules and functions run uncompiled.

    Args:
        model: any module.

    Yields:
        What was seen: `observed`, the number of calls, and `unrecorded`, the calls that ran in
        torch, with their places and reasons.

    Raises:
        ArgumentTypeError: the model is not an `nn.Module`.

    >>> import torch, regard
    >>> layer = torch.nn.MultiheadAttention(16, 4, batch_first=True).eval()
    >>> model, x = torch.nn.Sequential(torch.nn.Identity(), layer), torch.randn(1, 5, 16)
    >>> with regard.inspect.watch(model), regard.Trace("1.pattern") as trace:
    ...     _ = layer(x, x, x)
    >>> trace["1.pattern"].shape
    torch.Size([1, 4, 5, 5])
    """
    if not isinstance(model, nn.Module):
        raise ArgumentTypeError(f"model is {type(model).__name__}; it must be an nn.Module")
    places = ModulePlaces(getattr(model, "_orig_mod", model))
    importlib.import_module(FLEX_MODULE)  # a model may import it within the block
    with ExitStack() as stack:
        override.install_replacements()
        stack.callback(override.remove_replacements)
        if "torch._dynamo.eval_frame" in sys.modules:  # else nothing can be compiled
            stack.enter_context(torch.compiler.set_stance("force_eager"))
        stack.enter_context(places.hooks())
        stack.enter_context(module_taps(places.model))
        stack.enter_context(opened(places))
        stack.enter_context(_PastTheFunctions(places))
        yield places
