"""Make the attention calls of any PyTorch model pass the taps of the open traces (`watch`), and
taps of its other layers: `embed`, `norm`, `mlp`, `residual` and `logits`, by forward hooks on
modules.

A block is an entry of the outermost `nn.ModuleList` or `nn.Sequential` whose entries contain
attention.
"""

from __future__ import annotations

import importlib
import sys
import threading
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager, nullcontext
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils.hooks import RemovableHandle

from regard.errors import ArgumentTypeError
from regard.integrations.pytorch import override
from regard.integrations.pytorch.flex_calls import observe_flex_operator
from regard.integrations.pytorch.module_places import COMPILED_PREFIX, ModulePlaces, opened
from regard.integrations.pytorch.observed_call import leave_to_torch, observe_attention
from regard.integrations.pytorch.torch_functions import FLEX_MODULE
from regard.tracing import is_running_kernel, is_tracing, named_scope, requested_taps, tap

FEED_FORWARD_NAMES = (
    "mlp",
    "feed_forward",
    "ffn",
    "ff",
    "moe",
    "block_sparse_moe",
    "feedforward",
    "ff_layer",
)
"""Names that models give to the feed-forward layer of a block."""


class Stack(NamedTuple):
    """The blocks by name of a model, or of one side of it; empty and repeated ones are left out."""

    path: str
    blocks: dict[str, nn.Module]

    @property
    def first(self) -> nn.Module:
        """The block that runs first."""
        return next(iter(self.blocks.values()))


def find_stacks(model: nn.Module) -> list[Stack]:
    """Find the blocks of a model.

    >>> layer = nn.TransformerEncoderLayer(8, 2, batch_first=True)
    >>> [(s.path, len(s.blocks)) for s in find_stacks(nn.TransformerEncoder(layer, 3))]
    [('layers', 3)]
    """
    stacks: list[Stack] = []
    for path, module in model.named_modules():
        path = path.replace(COMPILED_PREFIX, "")
        inside = any(path.startswith(f"{stack.path}.") or path == stack.path for stack in stacks)
        if inside or not isinstance(module, (nn.ModuleList, nn.Sequential)):
            continue
        blocks = dict(module.named_children())
        if blocks and all(map(_contains_attention, blocks.values())):
            stacks.append(Stack(path, blocks))
    return stacks


def _contains_attention(block: nn.Module) -> bool:
    """Return whether a module has a submodule that is attention by its name or class."""
    return any(
        path and ("attn" in text or "attention" in text)
        for path, module in block.named_modules()
        for text in (f"{path} {type(module).__name__}".lower(),)
    )


def find_feed_forward(block: nn.Module) -> nn.Module | None:
    """Return the module that gives a block's feed-forward output, by name or place; or None."""
    for name, child in block.named_children():
        if name.lower() in FEED_FORWARD_NAMES:
            return child
    maps = [
        module
        for path, module in linear_maps(block).items()
        if not any("attn" in part or "attention" in part for part in path.lower().split("."))
    ]
    return maps[-1] if maps else None


def linear_maps(model: nn.Module) -> dict[str, nn.Module]:
    """Return the linear maps of a model by path. An adapter of PEFT, which adds terms to the map
    that it holds as `base_layer`, is one map.

    >>> layer = nn.TransformerEncoderLayer(8, 2, batch_first=True)
    >>> list(linear_maps(layer))
    ['self_attn.out_proj', 'linear1', 'linear2']
    """
    maps: dict[str, nn.Module] = {}
    for path, module in model.named_modules():
        is_map = isinstance(module, nn.Linear) or type(module).__name__ == "Conv1D"
        is_map = is_map or isinstance(getattr(module, "base_layer", None), nn.Module)
        if is_map and not any(path.startswith(f"{outer}.") for outer in maps):
            maps[path] = module
    return maps


def is_norm(module: nn.Module) -> bool:
    """Return whether a module is a norm by the name of its class.

    >>> is_norm(nn.LayerNorm(4)), is_norm(nn.Linear(4, 4))
    (True, False)
    """
    return "norm" in type(module).__name__.lower() and not list(module.children())


def stack_prefix(stack: Stack) -> str:
    """Return the path of a stack's taps; `layers` where transformers' attention has it."""
    names = sys.modules.get("regard.integrations.transformers.attention")
    for module in stack.first.modules():
        index = getattr(module, "layer_idx", None)
        config = getattr(module, "config", None)
        used = getattr(config, "_attn_implementation", None)
        if names is not None and index == 0 and used == "regard":
            return stack.path if module in names._tap_prefixes else "layers"
    return stack.path


@contextmanager
def module_taps(model: nn.Module) -> Iterator[None]:
    """Let the modules of a model pass their results through the open traces of this thread.

    The names are those of the models of this package, with the paths of the model's own modules:
    `embed` is what enters the first block, `<block>.residual` leaves a block, `<block>.mlp` is the
    output of its feed-forward layer, `<path>.norm` the output of a norm, and `logits` the tensor
    `logits` of the model's output. With several stacks of blocks, `embed` has the path of its
    stack.
    """
    hooks = _TapHooks(threading.get_ident())
    stacks = find_stacks(model)
    renamed = {stack.path: stack_prefix(stack) for stack in stacks}

    def here(path: str) -> str:
        path = path.replace(COMPILED_PREFIX, "")
        for old, new in renamed.items():
            if path.startswith(f"{old}."):
                return new + path[len(old) :]
        return path

    with ExitStack() as exits:
        for path, module in model.named_modules():
            if is_norm(module):
                exits.callback(hooks.after(module, here(path), "norm").remove)
        for stack in stacks:
            prefix = renamed[stack.path] if len(stacks) > 1 else ""
            exits.callback(hooks.entering(stack.first, prefix).remove)
            for name, block in stack.blocks.items():
                place = f"{renamed[stack.path]}.{name}"
                inner = find_feed_forward(block)
                if inner is not None:
                    exits.callback(hooks.after(inner, place, "mlp").remove)
                exits.callback(hooks.after(block, place, "residual").remove)
        exits.callback(hooks.logits(model).remove)
        yield


class _TapHooks:
    """Forward hooks that pass tensors through taps, in one thread and while a trace is open."""

    def __init__(self, thread: int) -> None:
        self._thread = thread

    def _is_open(self) -> bool:
        return threading.get_ident() == self._thread and is_tracing()

    def after(self, module: nn.Module, prefix: str, name: str) -> RemovableHandle:
        """Tap the result of a module."""

        def hook(_module: nn.Module, _inputs: Any, result: Any) -> Any:
            return _tapped(prefix, name, result) if self._is_open() else None

        return module.register_forward_hook(hook)

    def entering(self, block: nn.Module, prefix: str) -> RemovableHandle:
        """Tap the hidden states that enter the first block, under the name `embed`."""

        def hook(_module: nn.Module, inputs: tuple[Any, ...], named: dict[str, Any]) -> Any:
            if not self._is_open():
                return None
            if inputs and isinstance(inputs[0], Tensor):
                return (_tapped(prefix, "embed", inputs[0]), *inputs[1:]), named
            if isinstance(named.get("hidden_states"), Tensor):
                x = _tapped(prefix, "embed", named["hidden_states"])
                return inputs, {**named, "hidden_states": x}
            return None

        return block.register_forward_pre_hook(hook, with_kwargs=True)

    def logits(self, model: nn.Module) -> RemovableHandle:
        """Tap the `logits` of a model's output."""

        def hook(_model: nn.Module, _inputs: Any, result: Any) -> Any:
            logits = getattr(result, "logits", None)
            if not self._is_open() or not isinstance(logits, Tensor):
                return None
            result.logits = tap("logits", logits)
            return result

        return model.register_forward_hook(hook)


def _tapped(prefix: str, name: str, result: Any) -> Any:
    """Pass the first tensor of a module's result through a tap."""
    if isinstance(result, Tensor):
        with named_scope(prefix) if prefix else nullcontext():
            tapped = tap(name, result)
            # what was captured stays as it is if the model adds to the result in place
            return tapped.clone() if name in requested_taps() else tapped
    if isinstance(result, tuple) and result and isinstance(result[0], Tensor):
        return (_tapped(prefix, name, result[0]), *result[1:])
    return result


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
                self._places.written_out[self._places.here, tuple(args[0].shape)] += 1
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
