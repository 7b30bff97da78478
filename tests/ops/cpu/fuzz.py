"""Random arguments for every kernel, each result compared with fp64 under the error rule:
`python -m tests.ops.cpu.fuzz --cases 1000 --seed 7`. The sanitizers watch it, too.

Every tensor has memory of its own, so that AddressSanitizer sees each number that is read or
written beside it; `odd` tensors begin where no vector would. A kernel joins by one entry of
`KERNELS`: a function that computes one random case.
"""

from __future__ import annotations

import argparse
import copy
import functools
import random
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, NamedTuple, TypeVar, cast

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from regard.caches.quantization import quantize
from regard.ops.cpu import arguments, threads
from regard.ops.cpu.arguments import MAX_RUNS, PackedStruct, struct_layout
from regard.ops.cpu.attention import PrefillArgs, prefill, prefill_gradient, quantized_numbers
from regard.ops.cpu.instruction_sets import instruction_set
from regard.ops.cpu.library import DTYPES, entry
from regard.ops.stored_weights import (
    FORMS,
    GROUPS,
    NUMBERS_OF_DTYPES,
    HalfWeight,
    Int4Weight,
    Int8Weight,
    StoredWeight,
)
from tests.models.step_models import KINDS, V, counted_steps, llama, plain_logits
from tests.models.step_models import decode as decode_tokens
from tests.oracles.plain import plain_attention, several_plains
from tests.rules import GRADIENT, Plain, assert_close_rule

Result = TypeVar("Result")

FACTOR = 4.0
"""Twice that of the error rule: with so few numbers, plain math rounds the largest one by luck."""


class Draw:
    """Random numbers and tensors of one case."""

    def __init__(self, seed: int) -> None:
        self.random = random.Random(seed)
        self.generator = torch.Generator().manual_seed(seed)
        self.dtype = self.random.choice([*DTYPES])
        self.workers = self.random.choice((1, 1, 2, 3))

    def size(self, largest: int = 70) -> int:
        """A size: mostly a tail of vectors, sometimes several whole ones."""
        if self.random.random() < 0.3:
            return self.random.choice((16, 32, 64, 128, 256, 512))
        return self.random.randint(1, largest)

    def tensor(self, *shape: int) -> Tensor:
        """Numbers of several scales."""
        x = torch.randn(shape, generator=self.generator)
        return self.placed((x * self.random.choice((0.01, 1.0, 1.0, 30.0))).to(self.dtype))

    def placed(self, x: Tensor) -> Tensor:
        """The same numbers in memory of their own, which begins at a random number of a line."""
        start = self.random.choice((0, 0, 1, 3, 8))
        memory = torch.empty(start + x.numel(), dtype=x.dtype)
        memory[start:] = x.reshape(-1)
        return memory[start:].view(x.shape)

    def output(self, *shape: int) -> Tensor:
        """Memory for a result, with NaN in it."""
        return self.placed(torch.full(shape, float("nan"), dtype=self.dtype))

    def strided(self, *shape: int) -> Tensor:
        """Numbers [B,G,S,d] whose heads, or whose slots, may be apart."""
        B, G, S, d = shape
        if self.random.random() < 0.3:
            return self.tensor(B, S, G, d).transpose(1, 2)
        return self.tensor(B, G, S, d + self.random.choice((0, 0, 1, 8)))[..., :d]

    def integers(self, low: int, high: int, *shape: int) -> Tensor:
        """Random int64 numbers from `low` to `high` - 1."""
        return self.placed(torch.randint(low, high, shape, generator=self.generator))

    def some(self, *shape: int) -> tuple[int, ...]:
        """A shape in which dimensions may be shared."""
        return tuple(self.random.choice((1, n)) for n in shape)

    def run(self, name: str, struct: str, *numbers: float | Tensor | None) -> None:
        """Call an entry of the dtype with the fields of its struct in order."""
        given = [
            arguments.address(x, self.dtype) if isinstance(x, Tensor) else x or 0 for x in numbers
        ]
        record = struct_layout(struct).pack_numbers(*given)
        threads.run_entry(entry(name, self.dtype), record, self.workers)

    def run_named(self, name: str, struct: str, fields: Mapping[str, Any]) -> None:
        """Call an entry of the dtype with the fields of its struct by name."""
        record = struct_layout(struct).pack(**fields)
        threads.run_entry(entry(name, self.dtype), record, self.workers)

    def in_threads(self, function: Callable[[], Result]) -> Result:
        """What a function returns that runs in as many threads as torch does."""
        before = torch.get_num_threads()
        torch.set_num_threads(self.workers)
        try:
            return function()
        finally:
            torch.set_num_threads(before)

    def check(
        self, found: Tensor, plain: Plain, exact: Tensor, factor: float = FACTOR, what: str = ""
    ) -> None:
        """Hold a result to the error rule."""
        assert_close_rule(found, plain, exact, factor, what)


def gemv(draw: Draw) -> None:
    R, M, N = draw.random.choice((1, draw.size(9))), draw.size(), draw.size()
    x, w, y = draw.tensor(R, M), draw.tensor(N, M), draw.output(R, N)
    b = draw.tensor(N) if draw.random.random() < 0.5 else None
    draw.run("gemv", "Gemv", R, M, N, x, w, b, y, draw.random.randint(1, MAX_RUNS))
    exact = F.linear(x.double(), w.double(), None if b is None else b.double())
    draw.check(y, lambda: F.linear(x, w, b), exact)


def rms_norm(draw: Draw) -> None:
    R, M = draw.size(), draw.size()
    x, w, y = draw.tensor(R, M), draw.tensor(M), draw.output(R, M)
    eps, offset = draw.random.choice((1e-6, 1e-5, 0.1)), draw.random.choice((0.0, 1.0))
    draw.run("rms_norm", "RmsNorm", R, M, x, w, y, eps, offset)

    def norm(x: Tensor, w: Tensor) -> Tensor:
        return x * torch.rsqrt(x.square().mean(-1, keepdim=True) + eps) * (w + offset)

    exact = norm(x.double(), w.double())
    draw.check(y, lambda: norm(x.float(), w.float()).to(x.dtype), exact)


def gated_product(draw: Draw) -> None:
    n = draw.size(300)
    gate, up, y = draw.tensor(n), draw.tensor(n), draw.output(n)
    draw.run("gated_product", "GatedProduct", n, gate, up, y)
    exact = gate.double() * torch.sigmoid(gate.double()) * up.double()
    draw.check(y, F.silu(gate) * up, exact)


def _stored(draw: Draw) -> StoredWeight:
    """A matrix in a random form, with scales of any dtype, in memory of its own."""
    group = draw.random.choice((None, *GROUPS))
    N, M = draw.size(), draw.size(300)
    w = torch.randn(N, M, generator=draw.generator) * draw.random.choice((0.01, 1.0, 30.0))
    form = draw.random.choice(("int8", "int4", "half"))
    if form == "half":
        half = HalfWeight.round(w, draw.random.choice((torch.float16, torch.bfloat16)))
        return HalfWeight(draw.placed(half.values), draw.dtype)
    make = Int8Weight if form == "int8" else Int4Weight
    record = make.quantize(w, group=group, dtype=draw.dtype)
    scales = record.scales.to(draw.random.choice([*DTYPES]))
    return replace(record, codes=draw.placed(record.codes), scales=draw.placed(scales))


def stored_linear(draw: Draw) -> None:
    weight = _stored(draw)
    (N, M), R = weight.shape, draw.random.choice((1, draw.random.randint(1, 12)))
    x, y = draw.tensor(R, M), draw.output(R, N)
    b = draw.tensor(N) if draw.random.random() < 0.5 else None
    place = cast("PackedStruct", weight.matrix_struct).buffer_info()[0]
    draw.run("stored_linear", "StoredLinear", R, M, N, x, place, b, y, draw.random.randint(1, 14))
    exact = weight.dequantize(torch.float64)
    plain = exact.to(draw.dtype)
    right = F.linear(x.double(), exact, None if b is None else b.double())
    draw.check(y, lambda: F.linear(x, plain, b), right, what=weight.form)


def dequantize(draw: Draw) -> None:
    weight = _stored(draw)
    N, M, _, group, row_bytes, row_scales, codes, scales = cast("tuple[int, ...]", weight.layout)
    y = draw.output(N, M)
    form = FORMS.index(weight.form), NUMBERS_OF_DTYPES[weight.scale_dtype]
    sizes = (N, M, group, row_bytes, row_scales, codes, scales)
    draw.run("dequantize", "Dequantize", *form, *sizes, y)
    draw.check(y, weight.dequantize(), weight.dequantize(torch.float64), what=weight.form)


@dataclass
class Sizes:
    """The sizes of attention."""

    B: int
    H: int
    G: int
    T: int
    S: int
    D: int
    E: int

    @property
    def rows(self) -> int:
        """How many queries share a key/value head."""
        return self.H // self.G * self.T


class Attention(NamedTuple):
    """What a mask and a bias are, as fields of a struct and as math."""

    fields: dict[str, Any]
    visible: Tensor
    bias: Tensor | None


def _ranges(draw: Draw, n: Sizes) -> tuple[Tensor, Tensor]:
    """Starts and stops of ranges that queries see; some are empty."""
    shape = (*draw.some(n.B, n.H, n.T), draw.random.randint(1, 3))
    starts = draw.integers(0, n.S + 4, *shape)
    if draw.random.random() < 0.4:
        starts = draw.placed(torch.zeros_like(starts))
    stops = draw.placed(starts + draw.integers(0, n.S + 9, *shape))
    return starts, stops


def _inside(positions: Tensor, starts: Tensor, stops: Tensor) -> Tensor:
    """Which keys at positions [b,S] each query sees, [b,h,t,S]."""
    p = positions[:, None, None, :, None]
    ranges = (starts[..., None, :] <= p) & (p < stops[..., None, :])
    return ranges.any(-1) & (p[..., 0] >= 0)


def _alibi(draw: Draw, q: Tensor, keys: Tensor, n: Sizes) -> tuple[Tensor, bool, Tensor]:
    """Slopes, whether ALiBi is symmetric, and the bias [b,H,T,S]."""
    slopes, symmetric = draw.placed(torch.rand(n.H, generator=draw.generator)), False
    behind = (q[:, None, :, None] - keys[:, None, None]).double()
    if draw.random.random() < 0.5:
        symmetric, behind = True, behind.abs()
    return slopes, symmetric, -slopes.double()[:, None, None] * behind


def _decode_terms(draw: Draw, n: Sizes) -> Attention:
    """Random positions, visibility, softcap and bias of decoding."""
    origin, k_positions = draw.random.choice((0, 3)), arguments.NO_POSITIONS
    keys = torch.arange(origin, origin + n.S)[None]
    if draw.random.random() < 0.4:
        keys = k_positions = draw.integers(-1, n.S, draw.random.choice((1, n.B)), n.S)
    starts = stops = arguments.NO_RANGES
    visible = arguments.NO_VISIBLE
    if draw.random.random() < 0.2:
        seen = visible = draw.placed(draw.integers(0, 3, *draw.some(n.B, n.H, n.T), n.S) > 0)
    else:
        starts, stops = _ranges(draw, n)
        seen = _inside(keys, starts, stops)
    q_positions = draw.integers(0, n.S, draw.random.choice((1, n.B)), n.T)
    slopes, table, symmetric, bias = arguments.NO_SLOPES, arguments.NO_BIAS, False, None
    kind = draw.random.choice(("none", "none", "alibi", "table"))
    if kind == "alibi":
        slopes, symmetric, bias = _alibi(draw, q_positions, keys, n)
    elif kind == "table":
        shape = (*draw.some(n.B, n.H, n.T), n.S)
        table = draw.placed(torch.randn(shape, generator=draw.generator))
        bias = table.double()
    fields = {
        "T": n.T,
        "S": n.S,
        "origin": origin,
        "k_positions": k_positions,
        "starts": starts,
        "stops": stops,
        "visible": visible,
        "symmetric": symmetric,
        "slopes": slopes,
        "bias": table,
        "q_positions": q_positions,
    }
    return Attention(fields, seen, bias)


def _decode_sizes(draw: Draw) -> Sizes:
    B, G, T = (draw.random.randint(1, 3) for _ in range(3))
    H = G * draw.random.choice((1, 2, 4, 5))
    S = draw.random.choice((draw.size(), draw.size(300)))
    return Sizes(B, H, G, T, S, draw.size(140), draw.size(140))


class Coded(NamedTuple):
    """Numbers [B,G,S,d] = middle + code scale, with codes counted from their middle."""

    code: Tensor
    scale: Tensor
    middle: Tensor

    def sum(self, w: Tensor, dim: int, *, words: bool) -> Tensor:
        """The sum of the numbers times weights w [B,H,T,S,d], in two parts, which may cancel, and
        one term after another, which rounds each time to the size of the sum so far.

        With `words`, w scale is rounded to a multiple of f = max|w scale| / 32767, the maximum over
        the sum, which moves each term by at most |code| f / 2. A kernel takes the maximum over one
        tile of the keys, so that its f is at most the one here.
        """
        n = w.shape[1] // self.code.shape[1]
        code, scale, middle = (x.to(w.dtype).repeat_interleave(n, 1)[:, :, None] for x in self)
        scaled = w * scale
        if words:
            f = scaled.abs().amax(dim, keepdim=True) / 32767
            scaled = torch.where(f == 0, 0, (scaled / f).round() * f)
        parts = (scaled * code, w * middle)
        return sum(functools.reduce(torch.add, x.unbind(dim)) for x in parts)  # type: ignore[return-value]


def _plain_of_codes(
    q: Tensor, k: Coded, v: Coded, *, words: bool, scale: float, **options: Any
) -> tuple[Tensor, Tensor]:
    """(out, lse) by the sums that kernels compute over codes."""
    every = torch.eye(k.code.shape[2], dtype=q.dtype)[None, None]
    scores = k.sum((q * scale)[..., None, :], -1, words=words)
    weights, lse = plain_attention(scores, every, every, scale=1.0, **options)
    return v.sum(weights[..., None], -2, words=words), lse


def _run_decode(
    draw: Draw,
    name: str,
    struct: str,
    n: Sizes,
    k: Tensor,
    v: Tensor,
    memory: Mapping[str, Any],
    coded: Sequence[Coded] = (),
) -> None:
    """Run an entry of decoding with random queries and terms, and hold it to the definition for
    the keys [B,G,S,D] and values [B,G,S,E] in fp64, which may be coded.
    """
    terms, P = _decode_terms(draw, n), draw.random.choice((1, 1, 2, 5))
    q, scale = draw.tensor(n.B, n.H, n.T, n.D), draw.random.choice((1.0, n.D**-0.5, -0.1))
    softcap = draw.random.choice((0.0, 0.0, 3.0))
    wide = draw.placed(q.float().view(n.B, n.G, n.rows, n.D))
    nan = float("nan")
    out = draw.placed(torch.full((n.B * n.G, P, n.rows, n.E), nan))
    lse = draw.placed(torch.full((n.B, n.G, P, n.rows), nan))
    given = {"softcap": softcap, "scale": scale, "q": wide, "out": out, "lse": lse}
    draw.run_named(name, struct, {**terms.fields, **given, **memory})
    options: dict[str, Any] = {"visible": terms.visible, "scale": scale, "bias": terms.bias}
    options["softcap"] = softcap or None
    plains = several_plains(q.float(), k.float(), v.float(), **options)
    if coded:  # with scales of 16 bits, weights may be rounded to 16 bits, too
        words = draw.dtype.itemsize == 2
        plains.append(_plain_of_codes(q.float(), *coded, words=words, **options))
    right = plain_attention(q.double(), k, v, **options)
    results = out[:, 0].reshape(n.B, n.H, n.T, n.E), lse[:, :, 0].reshape(n.B, n.H, n.T)
    for i, what in enumerate(("out", "lse")):
        draw.check(results[i], [x[i].float() for x in plains], right[i], what=what)


def decode(draw: Draw) -> None:
    n = _decode_sizes(draw)
    k, v = draw.strided(n.B, n.G, n.S, n.D), draw.strided(n.B, n.G, n.S, n.E)
    pages, size, seen = arguments.NO_POSITIONS, 1, (k, v)
    if draw.random.random() < 0.3:
        size = draw.random.choice((1, 4, 16))
        columns = -(-n.S // size)
        k, v = (draw.strided(1, n.G, columns * size * 2, d) for d in (n.D, n.E))
        pages = draw.integers(0, 2 * columns, draw.random.choice((1, n.B)), columns)
        places = (pages[..., None] * size + torch.arange(size)).flatten(1)[:, : n.S]
        seen = tuple(x[0][:, places].transpose(0, 1).expand(n.B, -1, -1, -1) for x in (k, v))  # type: ignore[assignment]
    steps = [x.stride()[:3] for x in (k, v)]
    if size > 1 or pages is not arguments.NO_POSITIONS:
        steps = [(0, *x[1:]) for x in steps]
    addresses = [arguments.row_address(x, draw.dtype) for x in (k, v)]
    memory = {"k": (addresses[0], *steps[0]), "v": (addresses[1], *steps[1])}
    memory |= {"pages": pages, "page_size": size}  # type: ignore[dict-item]
    _run_decode(draw, "decode", "DecodePlain", n, seen[0].double(), seen[1].double(), memory)


def decode_quantized(draw: Draw) -> None:
    n, memory, wide = _decode_sizes(draw), {}, []
    bits = draw.random.choice((2, 4, 8))
    group, v_group = (draw.random.choice((4, 8, 16, 32, 64, 128)) for _ in range(2))
    n.S, n.E = -(-n.S // group) * group, -(-n.E // v_group) * v_group
    for name, axis, d, size in (("k", "channel", n.D, group), ("v", "token", n.E, v_group)):
        x, used = draw.tensor(n.B, n.G, n.S, d), torch.ones(1, n.S, dtype=torch.bool)
        made = quantize(x, used, axis, bits=bits, group=size)  # type: ignore[arg-type]
        parts = [draw.placed(y) for y in made[:3]]
        memory[name] = quantized_numbers(parts[0], parts[1], parts[2], bits)
        wide.append((parts, axis, d))
    coded = [_meant(*x, n, bits) for x in wide]
    k, v = (x.middle + x.code * x.scale for x in coded)
    _run_decode(draw, "decode_quantized", "DecodeQuantized", n, k, v, memory, coded)


def _meant(parts: Sequence[Tensor], axis: str, d: int, n: Sizes, bits: int) -> Coded:
    """What codes stand for."""
    codes, scale, zero = parts
    half, shifts = 1 << (bits - 1), torch.arange(0, 8, bits)
    numbers = (codes[..., None] >> shifts & 2**bits - 1).flatten(-2)  # [B,G,R,lines,group]
    of_codes = (numbers.double() - half, scale.double(), zero.double() + half * scale.double())
    same = (x.expand(numbers.shape) for x in of_codes)
    shape = n.B, n.G, n.S, d
    return Coded(*((x.mT if axis == "channel" else x).reshape(shape) for x in same))


def _prefill_args(draw: Draw) -> tuple[PrefillArgs, dict[str, Any]]:
    """Random arguments, and the mask and the terms as math."""
    B, G = draw.random.randint(1, 2), draw.random.randint(1, 2)
    H = G * draw.random.choice((1, 2, 3))
    n = Sizes(B, H, G, draw.size(90), draw.size(300), draw.size(70), draw.size(70))
    shapes = (n.B, n.H, n.T, n.D), (n.B, n.G, n.S, n.D), (n.B, n.G, n.S, n.E)
    q, k, v = (draw.strided(*x) for x in shapes)
    q_positions, k_positions = (
        draw.integers(-1 if draw.random.random() < 0.3 else 0, n.S, *draw.some(n.B), size)
        for size in (n.T, n.S)
    )
    if draw.random.random() < 0.5:
        k_positions = draw.placed(torch.arange(n.S)[None])
    starts, stops = _ranges(draw, n)
    slopes, symmetric, bias = arguments.NO_SLOPES, False, None
    if draw.random.random() < 0.3:
        slopes, symmetric, bias = _alibi(draw, q_positions, k_positions, n)
    scale, softcap = draw.random.choice((1.0, n.D**-0.5, -0.1)), draw.random.choice((0.0, 3.0))
    out_dtype = draw.random.choice((draw.dtype, torch.float32))
    masked = (symmetric, slopes, q_positions, k_positions, starts, stops, out_dtype)
    args = PrefillArgs(q, k, v, scale, softcap, *masked)
    visible = _inside(k_positions, starts, stops)
    return args, {"visible": visible, "scale": scale, "softcap": softcap or None, "bias": bias}


def prefill_forward(draw: Draw) -> None:
    args, options = _prefill_args(draw)
    out, top, total = draw.in_threads(lambda: prefill(args))
    qkv = args.q, args.k, args.v
    plains = several_plains(*qkv, **options)
    right = plain_attention(*(x.double() for x in qkv), **options)
    draw.check(out, [x.to(out.dtype) for x, _ in plains], right[0], what="out")
    draw.check(top + total.log(), [x.float() for _, x in plains], right[1], what="lse")


def prefill_backward(draw: Draw) -> None:
    args, options = _prefill_args(draw)
    out, top, total = draw.in_threads(lambda: prefill(args))
    d_out, d_lse = draw.strided(*out.shape).to(out.dtype), draw.tensor(*top.shape).float()
    blind = ~options["visible"].any(-1).expand(top.shape)
    d_lse = d_lse.masked_fill(blind, 0)
    wide = draw.random.choice((draw.dtype, torch.float32))
    saved = top, total
    found = draw.in_threads(lambda: prefill_gradient(args, out, saved, d_out, d_lse, dtype=wide))

    def gradients(dtype: torch.dtype, run: Callable[..., Any]) -> list[tuple[Tensor, ...]]:
        """Those of each result of plain math."""
        leaves = [x.to(dtype).detach().requires_grad_() for x in (args.q, args.k, args.v)]
        results = []
        for z, lse in run(*leaves, **options):
            whole = (z * d_out.to(dtype)).sum() + (lse.masked_fill(blind, 0) * d_lse).sum()
            results.append(torch.autograd.grad(whole, leaves))
        return results

    (right,) = gradients(torch.float64, lambda *x, **o: [plain_attention(*x, **o)])
    plains = gradients(draw.dtype, several_plains)
    for i, name in enumerate("qkv"):
        usual = [x[i].to(wide) for x in plains]
        draw.check(found[i], usual, right[i], 2 * GRADIENT, f"gradient of {name}")


def step(draw: Draw) -> None:
    """A small model, through the compiled step and through its modules."""
    kind, memory = draw.random.choice([*KINDS]), draw.random.choice(("growing", "fixed", "paged"))
    seed, B, prompt = (draw.random.randint(1, n) for n in (100, 4, 30))
    decoder = llama(seed=seed, **KINDS[kind]).to(draw.dtype)  # type: ignore[arg-type]
    ids = torch.randint(V, (B, prompt + 2), generator=draw.generator)
    with pytest.MonkeyPatch.context() as patch, counted_steps(patch) as steps:
        found, _ = draw.in_threads(lambda: decode_tokens(decoder, ids, prompt, kind=memory))
    if len(steps) != 2:
        raise AssertionError(f"the compiled step ran {len(steps)} times; it must run twice")
    wide = copy.deepcopy(decoder).double()
    right, _ = decode_tokens(wide, ids, prompt, kind=memory, backend="reference")
    draw.check(found, plain_logits(decoder, ids, prompt), right, what=f"{kind}, {memory}")


KERNELS: dict[str, Callable[[Draw], None]] = {
    "gemv": gemv,
    "rms_norm": rms_norm,
    "gated_product": gated_product,
    "stored_linear": stored_linear,
    "dequantize": dequantize,
    "decode": decode,
    "decode_quantized": decode_quantized,
    "prefill": prefill_forward,
    "prefill_gradient": prefill_backward,
    "step": step,
}
"""The kernels that have a case."""


def assert_case(name: str, seed: int) -> None:
    """Compute one case; what it raises names the case."""
    try:
        KERNELS[name](Draw(seed))
    except Exception as error:
        error.add_note(f"python -m tests.ops.cpu.fuzz --kernels {name} --cases 1 --seed {seed}")
        raise


def assert_cases(arguments: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--kernels", nargs="*", default=[*KERNELS], choices=[*KERNELS])
    parser.add_argument("--cases", type=int, default=100, help="of each kernel")
    parser.add_argument("--seed", type=int, default=0, help="of the first case")
    chosen = parser.parse_args(arguments)
    torch.set_num_threads(1)
    for name in chosen.kernels:
        for seed in range(chosen.seed, chosen.seed + chosen.cases):
            assert_case(name, seed)
    print(
        f"{len(chosen.kernels)} kernels, {chosen.cases} cases each: right with {instruction_set()}"
    )


if __name__ == "__main__":
    assert_cases()
