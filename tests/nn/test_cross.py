"""Cross-attention, and Bahdanau's and Luong's, against their formulas; memory, caches, padding;
what a module owes.
"""

from __future__ import annotations

import copy
import math
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.utils.flop_counter import FlopCounterMode

import regard
from regard import Trace
from regard.caches import Cross, Growing
from regard.nn.attention.cross import AdditiveAttention, CrossAttention
from regard.nn.projections.fused import EncoderStateProjection
from regard.nn.projections.heads import HeadProjection
from regard.nn.projections.steps import GatedProjection
from regard.nn.variants import VARIANTS, bahdanau, cross_attention, luong
from regard.span import Span
from tests.nn import catalogue
from tests.oracles.additive import additive
from tests.oracles.oracle import softmax_attention
from tests.rules import assert_close_rule, assert_refused

pytestmark = pytest.mark.usefixtures("no_gradients")

M, M3, H = 12, 8, 4
PADDED = torch.tensor([[-1, -1, 0, 1, 2, 3, -1], [0, 1, 2, 3, 4, 5, 6]])
KINDS = {
    "cross": lambda: cross_attention(M, H, groups=2, memory_dim=M3, bias=True),
    "luong": lambda: luong(M, memory_dim=M3),
    "bahdanau": lambda: bahdanau(M, memory_dim=M3, hidden=10),
    "bahdanau 2 heads": lambda: bahdanau(M, 2, memory_dim=M3, hidden=10),
}


def random(module: nn.Module, dtype: torch.dtype = torch.float64) -> Any:
    return catalogue.random(module).to(dtype).eval()


def inputs(
    dtype: torch.dtype = torch.float64, T: int = 3, scale: float = 1.0
) -> tuple[Tensor, Tensor]:
    return (torch.randn(2, T, M) * scale).to(dtype), (torch.randn(2, 7, M3) * scale).to(dtype)


def seen(b: int, h: int, i: int, j: int) -> bool:
    return bool(PADDED[b, j] >= 0)


def heads(x: Tensor, n: int) -> Tensor:
    return x.unflatten(-1, (n, -1)).transpose(1, 2)


def written_out(module: Any, x: Tensor, memory: Tensor, oracle: bool) -> Tensor:
    """From the weights alone, in fp64 by the oracle, or as plain math in the dtype of x."""
    if isinstance(module.project, EncoderStateProjection):
        n, key = module.project.heads, module.project.k
        q = heads(
            x if isinstance(module.project.q, nn.Identity) else x @ module.project.q.weight.T, n
        )
        k, v = heads(memory if key is None else memory @ key.weight.T, n), heads(memory, n)
    else:
        q, k, v = (
            heads(y @ part.linear.weight.T + part.linear.bias, part.heads)
            for y, part in (
                (x, module.project.q),
                (memory, module.project.k),
                (memory, module.project.v),
            )
        )
    scale = 1.0 if module.project.__class__ is EncoderStateProjection else q.shape[-1] ** -0.5
    if not oracle:
        n = q.shape[1] // k.shape[1]
        k, v = k.repeat_interleave(n, 1), v.repeat_interleave(n, 1)
        if isinstance(module, AdditiveAttention):
            s = (torch.tanh(q[:, :, :, None] + k[:, :, None]) * module.weight[:, None, None]).sum(
                -1
            )
        else:
            s = q @ k.mT * scale
        z = s.masked_fill((PADDED < 0)[:, None, None], -math.inf).softmax(-1) @ v
    elif isinstance(module, AdditiveAttention):
        z = additive(q, k, v, module.weight, seen)[0]
    else:
        z = softmax_attention(q, k, v, visible=seen, scale=scale).out
    z = z.transpose(1, 2).flatten(2)
    return (
        z
        if isinstance(module.output, nn.Identity)
        else z @ module.output.weight.T + module.output.bias
    )


@pytest.mark.parametrize("name", [*KINDS, "luong dot", "luong concat"])
@pytest.mark.parametrize("scale", [0.1, 1.0, 10.0])
def test_is_the_formula(name: str, scale: float) -> None:
    kinds = {
        **KINDS,
        "luong dot": lambda: luong(M3, score="dot"),
        "luong concat": lambda: luong(M, memory_dim=M3, score="concat"),
    }
    module = random(kinds[name](), torch.float32)
    x, memory = inputs(torch.float32, scale=scale)
    x = x[..., :M3] if name == "luong dot" else x
    ours = module(x, memory=memory, memory_positions=PADDED)
    usual = written_out(module, x, memory, oracle=False)
    wide = copy.deepcopy(module).double()
    exact = written_out(wide, x.double(), memory.double(), oracle=True)
    assert_close_rule(ours, usual, exact)
    precise = wide(x.double(), memory=memory.double(), memory_positions=PADDED)
    assert float((precise - exact).abs().max()) <= 1e-12 * max(1, float(exact.abs().max()))
    with pytest.raises(AssertionError, match="error"):  # negative control: padding that takes part
        assert_close_rule(module(x, memory=memory), usual, exact)


def torch_mha(module: CrossAttention, swapped: bool = False) -> nn.MultiheadAttention:
    """torch's own module with the same weights."""
    other = nn.MultiheadAttention(
        M, H, kdim=M3, vdim=M3, batch_first=True, dtype=torch.float64
    ).eval()
    project: Any = module.project
    parts = (project.q, project.v, project.k) if swapped else (project.q, project.k, project.v)
    for name, part in zip(("q", "k", "v"), parts, strict=True):
        getattr(other, f"{name}_proj_weight").copy_(part.linear.weight)
    other.in_proj_bias.copy_(torch.cat([part.linear.bias for part in parts]))
    other.out_proj.weight.copy_(module.output.weight)
    other.out_proj.bias.copy_(module.output.bias)
    return other


def test_parity_with_torch() -> None:
    module = random(cross_attention(M, H, memory_dim=M3, bias=True))
    x, memory = inputs()
    with Trace("pattern") as trace:
        out = module(x, memory=memory, memory_positions=PADDED)
    theirs, weights = torch_mha(module)(
        x, memory, memory, key_padding_mask=PADDED < 0, average_attn_weights=False
    )
    assert float((out - theirs).abs().max()) < 1e-12 * float(theirs.abs().max())
    assert float((trace["pattern"] - weights).abs().max()) < 1e-12
    assert trace["pattern"].shape == (2, H, 3, 7), (
        "several heads, and two lengths: it need not be self-attention"
    )
    for wrong in (
        torch_mha(module, swapped=True)(x, memory, memory, key_padding_mask=PADDED < 0)[0],
        torch_mha(module)(x, memory, memory)[0],
    ):
        assert float((out - wrong).abs().max()) > 1e-2


@pytest.mark.parametrize("name", KINDS)
def test_a_cache_is_written_once_and_any_chunks_are_one_pass(name: str) -> None:
    module = random(KINDS[name]())
    x, memory = inputs(T=12)
    whole = module(x, memory=memory, memory_positions=PADDED)
    for sizes in ([12], [1] * 12, [3, 0, 7, 2]):
        cache, parts = module.new_cache(), []
        for part in x.split(sizes, 1):
            first = {} if parts else {"memory": memory, "memory_positions": PADDED}
            parts.append(module(part, None, cache, **first))
        assert len(cache) == 7, "the source's length, whatever the target's"
        assert float((torch.cat(parts, 1) - whole).abs().max()) < 1e-12 * float(whole.abs().max())


@pytest.mark.parametrize("name", KINDS)
def test_memory_is_projected_once(name: str) -> None:
    """After the first call nothing of the source is computed again: garbage in its maps changes
    nothing.
    """
    module = random(KINDS[name]())
    x, memory = inputs()
    usual = module(x, memory=memory)
    cache = module.new_cache()
    module(x, None, cache, memory=memory)
    for part in ("k", "v"):
        for parameter in getattr(getattr(module.project, part, None), "parameters", list)():
            parameter.fill_(math.nan)
    assert float((module(x, None, cache) - usual).abs().max()) < 1e-12 * float(usual.abs().max())


@pytest.mark.parametrize("name", KINDS)
def test_a_refused_call_leaves_the_cache(name: str) -> None:
    module = random(KINDS[name]())
    x, memory = inputs()
    cache = module.new_cache()
    with pytest.raises(regard.ArgumentError, match="there is no memory to attend to; pass memory"):
        module(x, None, cache)
    with pytest.raises(regard.ArgumentError, match="there is no memory to attend to"):
        module(x)
    with pytest.raises(regard.ArgumentError, match="key batch 1 != query batch 2"):
        module(x, None, cache, memory=memory[:1])
    assert len(cache) == 0, "what was stored before the refusal is taken back"
    usual = module(x, None, cache, memory=memory)
    with pytest.raises(regard.ArgumentError, match="written once, and holds 7 slots"):
        module(x, None, cache, memory=memory + 1)
    with pytest.raises(regard.ArgumentError, match="memory_positions is given without memory"):
        module(x, None, cache, memory_positions=PADDED)
    assert torch.equal(module(x, None, cache), usual)
    growing = Growing()
    with pytest.raises(regard.ArgumentError, match="is Growing, which stores the tokens of a"):
        module(x, None, growing, memory=memory)
    assert len(growing) == 0
    assert isinstance(cache, Cross)


@pytest.mark.parametrize("name", KINDS)
@pytest.mark.parametrize("garbage", [math.nan, math.inf, 1e300])
def test_padding_on_either_side_changes_nothing(name: str, garbage: float) -> None:
    module = random(KINDS[name]())
    x, memory = inputs()
    usual = module(x, memory=memory)
    bound = 1e-12 * float(usual.abs().max())
    for left, right in ((3, 0), (0, 2), (1, 4)):
        wide = torch.full((2, left + 7 + right, M3), garbage, dtype=torch.float64)
        wide[:, left : left + 7] = memory
        positions = torch.full((1, left + 7 + right), -1)
        positions[:, left : left + 7] = torch.arange(7)
        found = module(x, memory=wide, memory_positions=positions)
        assert float((found - usual).abs().max()) <= bound
        cache = module.new_cache()
        module(x, None, cache, memory=wide, memory_positions=positions)
        assert float((module(x, None, cache) - usual).abs().max()) <= bound


@pytest.mark.parametrize("name", KINDS)
def test_a_source_of_padding_alone_gives_nothing(name: str) -> None:
    module = random(KINDS[name]())
    x, memory = inputs()
    memory[0] = math.nan
    positions = torch.arange(7).repeat(2, 1)
    positions[0] = -1
    out = module(x, memory=memory, memory_positions=positions)
    bias = getattr(module.output, "bias", None)
    assert torch.equal(
        out[0], (torch.zeros_like(out[0]) if bias is None else bias.expand_as(out[0]))
    )
    alone = module(x[1:], memory=memory[1:])
    assert float((out[1:] - alone).abs().max()) < 1e-12 * float(alone.abs().max())


@pytest.mark.parametrize("name", KINDS)
def test_beams_share_a_source(name: str) -> None:
    module = random(KINDS[name]())
    x, memory = inputs()
    cache, rows = module.new_cache(), torch.tensor([1, 1, 0])
    module(x, None, cache, memory=memory, memory_positions=PADDED)
    cache.select(rows)
    usual = module(x[rows], memory=memory[rows], memory_positions=PADDED[rows])
    assert float((module(x[rows], None, cache) - usual).abs().max()) < 1e-12 * float(
        usual.abs().max()
    )


@pytest.mark.parametrize("name", KINDS)
def test_gradients_reach_both_sequences(name: str) -> None:
    module, (x, memory) = random(KINDS[name]()), inputs(T=2)
    with torch.enable_grad():
        given = [y[:, :2].clone().requires_grad_() for y in (x, memory)]
        positions = PADDED[:, 1:3]
        assert torch.autograd.gradcheck(
            lambda x, memory: module(x, memory=memory, memory_positions=positions),
            given,
            fast_mode=True,
        )
        module(given[0], memory=given[1], memory_positions=positions).sum().backward()
    assert given[1].grad is not None
    assert given[1].grad[0, 0].eq(0).all()
    assert given[1].grad[1].ne(0).all()


@pytest.mark.parametrize("name", KINDS)
def test_what_a_module_owes(name: str) -> None:
    module, (x, memory) = random(KINDS[name](), torch.float32), inputs(torch.float32)
    usual = module(x, memory=memory)
    other = copy.deepcopy(module)
    assert torch.equal(other(x, memory=memory), usual)
    again = KINDS[name]()
    again.load_state_dict(module.state_dict())
    assert torch.equal(again(x, memory=memory), usual)
    assert set(module.state_dict()) == {n for n, _ in module.named_parameters()}
    assert module.bfloat16()(x.bfloat16(), memory=memory.bfloat16()).dtype == torch.bfloat16


@pytest.mark.full
@pytest.mark.parametrize("name", ["cross", "bahdanau"])
def test_compiles_without_a_break(name: str) -> None:
    torch._dynamo.reset()
    module, (x, memory) = random(KINDS[name](), torch.float32), inputs(torch.float32)
    usual = module(x, memory=memory, memory_positions=PADDED)
    cache = module.new_cache()
    module(x, None, cache, memory=memory, memory_positions=PADDED)
    run = torch.compile(module, fullgraph=True, backend="aot_eager")
    memory.masked_fill_((PADDED < 0)[..., None], math.nan)
    for found in (run(x, memory=memory, memory_positions=PADDED), run(x, None, cache)):
        assert float((found - usual).abs().max()) < 1e-5 * float(usual.abs().max())


def test_describe() -> None:
    """The cache's numbers are those of a real one, the FLOPs those of the matrix products that
    torch counts.
    """
    module, (x, memory) = random(cross_attention(M, H, groups=2, memory_dim=M3)), inputs()
    told = module.describe(7)
    cache = module.new_cache()
    module(x[:1, :1], None, cache, memory=memory[:1])
    assert told.cached_values * 8 == cache.bytes == 2 * 2 * 3 * 7 * 8
    with FlopCounterMode(display=False) as counter:
        module(x[:1, :1], None, cache, backend="reference")
    assert told.flops_per_token.value == counter.get_total_flops() == 2 * 2 * M * M + 2 * H * 7 * 6
    assert (
        told.flops_per_token.formula
        == "2 x 288 (matrices of the query) + 2 H S (D + E) = 2 x 4 x 7 x (3 + 3)"
    )
    assert told.parameters.value == 2 * M * M + 2 * 6 * M3
    gated = CrossAttention(GatedProjection(module.project, HeadProjection(M, H, 3)), module.output)
    assert gated.describe(7).flops_per_token.value == told.flops_per_token.value + 2 * M * M

    told = random(luong(M, memory_dim=M3)).describe(7)
    assert (told.kv_per_token.value, told.flops_per_token.value) == (M3, 2 * M * M3 + 2 * 7 * 16)
    module = random(bahdanau(M, memory_dim=M3, hidden=10))
    told, cache = module.describe(7), module.new_cache()
    module(x[:1, :1], None, cache, memory=memory[:1])
    assert told.cached_values * 8 == cache.bytes
    assert told.flops_per_token.value == 2 * M * 10 + 7 * (3 * 10 + 2 * M3)
    assert told.kv_tokens.formula == "S, the length of the source"
    with pytest.raises(regard.ArgumentError, match="context is 0; it must be at least 1"):
        module.describe(0)


def test_catalogue() -> None:
    families = {"cross_attention": "cross", "bahdanau": "additive", "luong": "additive"}
    for name, family in families.items():
        entry = VARIANTS[name]
        assert entry.family == family
        x = torch.randn(2, 3, 32)
        assert entry.example()(x, memory=torch.randn(2, 5, 32)).shape == (2, 3, 32)
    assert "1409.0473" in VARIANTS["bahdanau"].source
    assert "1508.04025" in VARIANTS["luong"].source
    assert isinstance(luong(8, score="concat"), AdditiveAttention)


def test_positions_of_queries_matter_to_masks_only() -> None:
    module, (x, memory) = random(cross_attention(M, H, memory_dim=M3)), inputs()
    far = module(x, Span(100, 3), memory=memory)
    assert torch.equal(far, module(x, memory=memory))
    module.mask = regard.masks.Causal()
    out = module(x, Span(2, 3), memory=memory)
    assert (
        float((out[:, :1] - module(x[:, :1], Span(9, 1), memory=memory[:, :3])).abs().max()) < 1e-12
    )


def test_errors() -> None:
    cases = [
        (lambda: luong(8, score="cosine"), "score is 'cosine'; it must be one of dot, general"),
        (lambda: luong(8, hidden=3), 'hidden is 3, but only score="concat" has a hidden layer'),
        (lambda: luong(8, memory_dim=6, score="dot"), "queries have size 8 and keys have size 6"),
        (lambda: luong(8, 3), "heads is 3; it must be at least 1 and divide the key size 8 and"),
        (lambda: bahdanau(8, 2, hidden=7), "heads is 2; it must be at least 1 and divide the key"),
        (lambda: bahdanau(0), "dim is 0; it must be at least 1"),
        (lambda: bahdanau(8, memory_dim=0), "memory_dim is 0; it must be at least 1"),
        (lambda: bahdanau(8, hidden=-1), "hidden is -1; it must be at least 1"),
        (lambda: EncoderStateProjection(8, 6, key=nn.Linear(5, 8)), "the key map has"),
        (lambda: cross_attention(8, 4, groups=3), "4 query heads are not divisible by 3 key/value"),
        (lambda: cross_attention(9, 4), "dim 9 is not divisible by 4 heads; give head_dim, or"),
        (lambda: cross_attention(8, 4, memory_dim=-2), "HeadProjection"),
    ]
    assert_refused(cases)
