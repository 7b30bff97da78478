"""Every public operation under default dtypes and devices of torch that a user chose, in a process
of its own: `python -m tests.surface.global_state FILE [DTYPE:DEVICE|settings]`.

The operations are used for the first time in the context. FILE gets their results there, and at
last outside of it, to be compared with those of a process that changed nothing.
"""

from __future__ import annotations

import dataclasses
import importlib
import locale
import os
import random
import sys
import warnings
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any

import numpy as np
import torch
import torch.nn.functional as F

import regard
from regard.nn.variants import VARIANTS

Operation = Callable[[], Any]


@contextmanager
def defaults(dtype: torch.dtype, device: str) -> Iterator[None]:
    """Make these the default dtype and device of torch."""
    before = torch.get_default_dtype()
    with ExitStack() as stack:
        stack.callback(torch.set_default_dtype, before)
        torch.set_default_dtype(dtype)
        if device != "cpu":
            stack.enter_context(torch.device(device))
        yield


def operations() -> dict[str, Operation]:
    """All operations by name, with arguments that are given in full."""
    from tests.surface import test_wrong_sizes as cases

    calls = {f"op {op.__name__}": call for op, call in cases.OPS.items()}
    calls |= {f"module {name}": call for name, call in cases.MODULES.items()}
    calls |= {f"cache {name}": call for name, call in cases.CACHES.items()}
    found: dict[str, Operation] = {
        name: lambda call=call: call.run(**call.given) for name, call in calls.items()
    }
    return found | _mechanisms() | _kernels() | _rules() | _models()


def _mechanisms() -> dict[str, Operation]:
    from tests.nn import catalogue

    def run(module: Any, x: torch.Tensor) -> object:
        whole = module(x)
        if not module_caches(module):
            return whole
        cache = module.new_cache()
        return whole, module(x[:, :-1], cache=cache), module(x[:, -1:], cache=cache)

    def module_caches(module: Any) -> bool:
        return any(module is made[name] for name in catalogue.CAUSAL)

    made = {n: catalogue.example(v, dtype=torch.float32) for n, v in catalogue.MIXERS.items()}
    x = catalogue.tokens(40, dtype=torch.float32)
    return {f"mechanism {n}": lambda m=m: run(m, x) for n, m in made.items()}


def _kernels() -> dict[str, Operation]:
    """Each kernel, for decoding and for a prompt, with the gradient; and every linear map."""
    from regard.nn.weights import linear
    from regard.ops.stored_linear import stored_linear
    from regard.ops.stored_weights import Int4Weight, Int8Weight
    from regard.ops.tokenwise import silu_product

    draw = torch.Generator().manual_seed(0)

    def randn(*sizes: int, dtype: torch.dtype = torch.float32) -> torch.Tensor:
        return torch.randn(*sizes, generator=draw, dtype=torch.float64).to(dtype)

    found: dict[str, Operation] = {}
    for dtype in (torch.float32, torch.bfloat16, torch.float16):
        for T, S in ((1, 2048), (96, 96)):
            q, k, v = randn(1, 4, T, 32), randn(1, 2, S, 32), randn(1, 2, S, 32)
            q, k, v = (x.to(dtype) for x in (q, k, v))
            sink, bias = randn(4), randn(T, S)
            for backend in ("cpu", "gemm", "sdpa", "tiled", "reference", "auto"):
                for name, more in {
                    "causal": {"mask": regard.masks.Causal()},
                    "full": {},
                    "window": {
                        "mask": regard.masks.Causal() & regard.masks.Window(9),
                        "bias": regard.biases.ALiBi(4),
                        "sink": sink,
                    },
                    "bias": {"bias": bias},
                    "blocks": {"mask": regard.masks.Causal() | regard.masks.Sinks(2)},
                }.items():
                    call = (backend, more, q, k, v)
                    found[f"kernel {backend} {name} {T} {dtype}"] = lambda c=call: _attend(*c)
            learning = [x.clone().requires_grad_() for x in (q, k, v)]
            found[f"gradient {T} {dtype}"] = lambda x=learning: _gradient(*x)
            parts = (q, k[:, :, :64], v[:, :, :64]), (q, k[:, :, 64:], v[:, :, 64:])
            found[f"merge {T} {dtype}"] = lambda x=parts: regard.merge(
                [regard.attend_partial(*y) for y in x]
            )
            found[f"accelerate {T} {dtype}"] = lambda x=(q, k, v): _accelerated(*x)
        for rows in (1, 40):
            x, w = randn(rows, 256).to(dtype), randn(128, 256).to(dtype)
            b = randn(128).to(dtype)
            found[f"linear {rows} {dtype}"] = lambda x=(x, w, b): linear(*x)
            for form in (Int8Weight, Int4Weight):
                stored = form.quantize(w)
                name = f"stored {stored.form} {rows} {dtype}"
                found[name] = lambda x=x, w=stored, b=b: stored_linear(x, w, b)
        gate, up = randn(64, 256).to(dtype), randn(64, 256).to(dtype)
        found[f"silu_product {dtype}"] = lambda x=(gate, up): silu_product(*x)
    return found


def _attend(backend: str, more: dict[str, Any], *qkv: torch.Tensor) -> object:
    try:
        with torch.no_grad():
            return regard.attend(*qkv, backend=backend, **more)
    except regard.KernelRefusal as refusal:
        return str(refusal).splitlines()[0]


def _gradient(*qkv: torch.Tensor) -> object:
    y = regard.attend(*qkv, mask=regard.masks.Causal())
    return y, *torch.autograd.grad(y.square().sum(), qkv)


def _accelerated(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> torch.Tensor:
    with regard.accelerate(), torch.no_grad():
        return F.scaled_dot_product_attention(q, k, v, enable_gqa=True)


def _rules() -> dict[str, Operation]:
    """Masks, biases and positions by themselves."""
    from regard.positions import Rotary
    from regard.span import Span
    from tests.biases.test_biases import every
    from tests.masks.brute import CASES

    q, k = Span(3, 4), Span(0, 7)
    found: dict[str, Operation] = {}
    for name, case in CASES.items():
        mask = case.mask
        found[f"mask {name}"] = lambda m=mask: (m.block(q, k), m.intervals(q))
        found[f"tiles {name}"] = lambda m=mask: m.tile_row(q, k, slice(0, 4), 2)
    for i, bias in enumerate(every()):
        found[f"bias {i} {bias.kind}"] = lambda b=bias: b.block(q, k)
    rotary, x = Rotary(8), torch.ones(1, 1, 4, 8)
    found["rotary"] = lambda: (rotary(x, q), rotary.tables(x, q))
    found["span"] = lambda: (q.tensor(), q.tensor("cpu"))
    return found


def _models() -> dict[str, Operation]:
    """Generation by every cache, and one decoded token by the compiled step and by the modules."""
    found: dict[str, Operation] = {}
    for dtype in (torch.float32, torch.bfloat16):
        model = regard.load("tiny", dtype=dtype)
        for name, options in {
            "greedy": {},
            "drawn": {"temperature": 1.0, "seed": 3},
            "drawn twice": {"top_p": 0.9, "temperature": 0.7},
            "quantized": {"cache": "quantized"},
            "paged": {"cache": "paged"},
        }.items():
            call = (model, options)
            found[f"generate {name} {dtype}"] = lambda c=call: list(
                c[0].generate(["3+4=", "12+5=7"], max_tokens=8, **c[1])
            )
        found[f"step {dtype}"] = lambda m=model: _steps(
            m.decoder, torch.tensor([[1, 2, 3, 4]], device="cpu")
        )
    return found


def _steps(decoder: Any, ids: torch.Tensor) -> object:
    caches = decoder.new_caches()
    with torch.inference_mode():
        return [decoder(ids[:, i : i + 1], caches=caches) for i in range(ids.shape[1])]


def process_state() -> dict[str, Any]:
    """What belongs to the user, and no operation may change."""
    return {
        "dtype": torch.get_default_dtype(),
        "device": torch.get_default_device(),
        "gradient mode": (torch.is_grad_enabled(), torch.is_inference_mode_enabled()),
        "deterministic mode": torch.are_deterministic_algorithms_enabled(),
        "threads": (torch.get_num_threads(), torch.get_num_interop_threads()),
        "precision": torch.get_float32_matmul_precision(),
        "torch's random numbers": torch.get_rng_state().numpy().tobytes(),
        "numpy's random numbers": str(np.random.get_state()),  # noqa: NPY002
        "Python's random numbers": random.getstate(),
        "warnings": list(warnings.filters),
        "locale": locale.setlocale(locale.LC_ALL),
        "environment": dict(os.environ),
        "folder": str(Path.cwd()),
        "recursion": sys.getrecursionlimit(),
    }


@contextmanager
def other_setting(name: str) -> Iterator[None]:
    """Set what is named otherwise in the process."""
    with ExitStack() as stack:
        if "deterministic mode" in name:
            stack.callback(torch.use_deterministic_algorithms, False)
            torch.use_deterministic_algorithms(True)
        if "threads" in name:
            stack.callback(torch.set_num_threads, torch.get_num_threads())
            torch.set_num_threads(3)
        if "random numbers" in name:
            random.seed(7)
            np.random.seed(7)  # noqa: NPY002
        if "warnings" in name:
            stack.enter_context(warnings.catch_warnings())
            warnings.simplefilter("error")
        if "locale" in name:
            stack.callback(locale.setlocale, locale.LC_ALL, locale.setlocale(locale.LC_ALL))
            for known in ("tr_TR.UTF-8", "de_DE.UTF-8", "C"):  # decimal commas, where there are any
                try:
                    locale.setlocale(locale.LC_ALL, known)
                    break
                except locale.Error:
                    continue
        yield


SETTINGS = ("", "threads", "deterministic mode, random numbers, warnings or locale")
"""None of them, one, and the others at once: nothing may depend on any."""


def under_settings(path: str) -> None:
    """Write what each operation gives under each setting, and what of the process it changed."""
    # torch's compiler changes warnings filters and the environment when it is imported
    importlib.import_module("torch._inductor.codecache")
    torch.set_num_threads(1)
    found = operations()
    found |= {"changes": lambda: os.environ.update(REGARD_SEEN="yes"), "draws": random.random}
    results: dict[str, dict[str, Any]] = {}
    changed: list[tuple[str, str, str]] = []
    for setting in SETTINGS:
        with other_setting(setting):
            results[setting] = {}
            for name, operation in found.items():
                os.environ.pop("REGARD_SEEN", None)
                torch.manual_seed(7 * ("random numbers" in setting))
                before = process_state()
                results[setting][name] = result(operation)
                after = process_state()
                changed += [(setting, name, x) for x in before if before[x] != after[x]]
    torch.save((results, changed), path)


def plain(x: Any) -> Any:
    """The tensors in a result, with everything else as text."""
    if isinstance(x, torch.Tensor):
        return x.detach().clone()
    if dataclasses.is_dataclass(x) and not isinstance(x, type):
        x = [getattr(x, field.name) for field in dataclasses.fields(x)]
    if isinstance(x, dict):
        x = list(x.items())
    if isinstance(x, tuple | list):
        return [plain(y) for y in x]
    return x if isinstance(x, str | int | float | None) else type(x).__name__


def result(operation: Operation) -> Any:
    """What an operation returns, or the error that it raises."""
    try:
        return plain(operation())
    except Exception as error:
        return f"{type(error).__name__}: {error}"


def seeded_result(operation: Operation) -> Any:
    """The result from a seed."""
    torch.manual_seed(0)
    return result(operation)


def main(path: str, context: str = "") -> None:
    """Run everything in the context and outside of it, and write the results."""
    torch.set_num_threads(1)
    dtype, _, device = context.partition(":")
    if context:
        with defaults(getattr(torch, dtype), device):
            for variant in VARIANTS.values():
                variant.example()
    torch.manual_seed(0)
    found, results = operations(), {}
    if context:
        with defaults(getattr(torch, dtype), device):
            results[context] = {x: seeded_result(operation) for x, operation in found.items()}
    with torch.inference_mode():  # what a context left behind must serve here, too
        results["inference"] = {x: seeded_result(operation) for x, operation in found.items()}
    results["outside"] = {x: seeded_result(operation) for x, operation in found.items()}
    torch.save(results, path)


def different(x: Any, y: Any) -> bool:
    """Whether two results differ."""
    if isinstance(x, torch.Tensor) and isinstance(y, torch.Tensor):
        same = x.dtype == y.dtype and x.device == y.device and x.shape == y.shape
        return not (same and torch.equal(x.nan_to_num(nan=7e4), y.nan_to_num(nan=7e4)))
    if isinstance(x, list) and isinstance(y, list):
        return len(x) != len(y) or any(map(different, x, y))
    return bool(x != y)


if __name__ == "__main__":
    if sys.argv[2:] == ["settings"]:
        under_settings(sys.argv[1])
    else:
        main(*sys.argv[1:])
