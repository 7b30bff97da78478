"""NSA, MoBA and DSA as modules: their equations written out, caches, padding, leaks, copies,
compiled graphs, costs.
"""

from __future__ import annotations

import copy
import itertools
import math
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from transformers.models.deepseek_v32.configuration_deepseek_v32 import DeepseekV32Config
from transformers.models.deepseek_v32.modeling_deepseek_v32 import DeepseekV32Indexer
from transformers.models.glm5_next.configuration_glm5_next import Glm5NextTextConfig
from transformers.models.glm5_next.modeling_glm5_next import Glm5NextTextIndexer
from transformers.models.qwen4_exp.configuration_qwen4_exp import Qwen4ExpTextConfig
from transformers.models.qwen4_exp.modeling_qwen4_exp import Qwen4ExpTextQSAIndexer

import regard
from regard.cost.selected import block_tokens, compressed_tokens, nsa_tokens
from regard.nn import HeadProjection, LatentProjection, SeparateQKV
from regard.nn.attention.nsa import NSA, BlockCompressor
from regard.nn.attention.selected import (
    BlockMaximum,
    Indexer,
    KeySelector,
    MoBA,
    Places,
    PooledIndexer,
    Quest,
    SelectedAttention,
    indexer_losses,
)
from regard.nn.variants import VARIANTS, dsa, moba, nsa
from regard.ops.selection import NSABlocks
from regard.positions import Rotary, rope_frequencies
from regard.span import Positions, Span, as_tensor
from tests.oracles import selected as oracle
from tests.oracles.heads import turned
from tests.rules import assert_refused

NAMES = ("nsa", "moba", "dsa", "quest", "msa", "qsa", "dsa_pools")
M, B, T, E = 32, 2, 29, -1
PADDED = torch.tensor([[E] * 6 + list(range(T - 6)), list(range(T))])


def make(name: str, dtype: torch.dtype = torch.float64, **options: Any) -> Any:
    module = VARIANTS[name].example(**options)
    with torch.no_grad():
        for p in module.parameters():  # gates and norms too: nothing stays at its first value
            p.add_(torch.randn(p.shape) * 0.3)
    return module.to(dtype).eval()


def oracle_heads(module: Any, x: Tensor, positions: Positions) -> Tensor:
    """[B,H,T,E] from the module's projections, by the oracle's loops behind them."""
    at = as_tensor(positions).expand(len(x), -1).tolist()
    if isinstance(module, NSA):
        return oracle_nsa(module, x, positions, at)
    q = module.project.query(x, positions)
    k, v = module.project.remember(x, positions)
    select = module.selector
    if isinstance(select, MoBA):
        chosen = oracle.moba(q, k, select.size, select.topk, at, at)
    elif isinstance(select, Quest):
        chosen = oracle.quest(q, k, select.size, select.topk, at, at)
    elif isinstance(select, BlockMaximum):
        (key,) = select.remember(x, positions)
        sizes = (select.size, select.topk, select.local)
        index_q = select.q(x, positions)
        chosen = oracle.block_maximum(index_q, key, q.shape[1], sizes, at, at)
    elif isinstance(select, PooledIndexer):
        chosen = oracle_pools(select, x, positions, at, q.shape[1])
    else:
        (key,) = select.remember(x, positions)
        _, chosen = oracle.indexer(
            select.q(x, positions), key, x @ select.weight.weight.T, select.topk, at, at, q.shape[1]
        )
    return oracle.attend_chosen(q, k, v, chosen, at)


def oracle_pools(
    select: PooledIndexer, x: Tensor, positions: Positions, at: list[list[int]], heads: int
) -> oracle.Chosen:
    pooling, m = select.pooling, select.pooling.block
    y = x[:, None] @ pooling.content.weight.T
    w = torch.ones(*x.shape[:2], select.q.heads)
    if pooling.gated:
        assert pooling.norm is not None
        assert select.weight is not None
        w = x @ select.weight.weight.T
        z = x[:, None] @ pooling.gate.weight.T
        entries = oracle.pooled(pooling.norm(y), z, pooling.places.tolist(), m, at)
    else:
        entries = oracle.pooled(y, None, [], m, at)
        weight = pooling.steps[0].weight.tolist()  # type: ignore[operator]
        for row in entries:
            for i, e in row.items():
                scale = (math.fsum(a * a for a in e) / len(e) + 1e-6) ** -0.5
                normed = [a * scale * g for a, g in zip(e, weight, strict=True)]
                row[i] = turned(normed[:4], i * m) + normed[4:]
    return oracle.closed_blocks(select.q(x, positions), entries, w, (m, select.topk, heads), at, at)


def oracle_nsa(module: NSA, x: Tensor, positions: Positions, at: list[list[int]]) -> Tensor:
    s, H = module.sizes, module.q.heads
    q = module.q(x, positions)
    keys = [heads(x, positions) for heads in module.keys]
    values = [heads(x, positions) for heads in module.values]
    short = []
    for raw, m in ((keys[0], module.compress_key), (values[0], module.compress_value)):
        parts = (m.places, m.up.weight, m.up.bias, m.down.weight, m.down.bias)
        phi = oracle.network(*(p.tolist() for p in parts))
        short.append(oracle.compressed(raw, s.compress, s.stride, at, phi))
    rotated = [
        [{i: turned(k, i * s.stride + s.compress - 1) for i, k in head.items()} for head in row]
        for row in short[0]
    ]
    first, p = oracle.nsa_compressed_attention(q, rotated, short[1], s.compress, s.stride, at)
    sizes = (s.compress, s.stride, s.select, s.count, s.initial, s.local)
    chosen = oracle.nsa_chosen(p, keys[0].shape[1], sizes, at, at)
    second = oracle.attend_chosen(q, keys[1], values[1], chosen, at)
    third = oracle.attend_chosen(q, keys[2], values[2], oracle.past(at, at, H, s.window), at)
    out = torch.zeros_like(first)
    logits = (x @ module.gate.weight.T + module.gate.bias).tolist()
    for b, t, h in itertools.product(range(len(x)), range(x.shape[1]), range(H)):
        for n, z in enumerate((first, second, third)):
            out[b, h, t] += z[b, h, t] / (1 + math.exp(-logits[b][t][n * H + h]))
    return out


@pytest.mark.parametrize("length", [1, 3, 19])
@pytest.mark.parametrize("name", NAMES)
@torch.no_grad()
def test_the_module_is_its_equations(name: str, length: int) -> None:
    module = make(name)
    x = torch.randn(B, length, M, dtype=torch.float64)
    for positions in (Span(0, length), PADDED[:, 5 : 5 + length]):
        exact = (
            oracle_heads(module, x, positions).transpose(1, 2).flatten(2) @ module.output.weight.T
        )
        held = (as_tensor(positions).expand(B, -1) >= 0)[..., None]
        error = ((module(x, positions) - exact) * held).abs().max()
        assert float(error) < 1e-13 * max(1.0, float(exact.abs().max()))


@torch.no_grad()
def test_a_nan_in_visible_data_shows() -> None:
    for name in NAMES:
        module, x = make(name), torch.randn(1, T, M, dtype=torch.float64)
        x[0, 9] = math.nan
        found = module(x)
        assert found[0, :9].isfinite().all()
        assert found[0, 9].isnan().all()


@torch.no_grad()
def test_enough_capacity_is_dense_causal_attention() -> None:
    x = torch.randn(B, T, M, dtype=torch.float64)
    enough = [make(name, topk=8) for name in ("moba", "quest", "msa")]
    enough += [make(name, topk=14) for name in ("qsa", "dsa_pools")]
    for module in (*enough, make("dsa", topk=T), make("dsa", topk=10 * T)):
        dense = regard.nn.Attention(module.project, module.output, mask=regard.masks.Causal())
        assert float((module(x) - dense(x)).abs().max()) < 1e-12
    less = make("moba", topk=7)  # 8 blocks of 4: one is missing at the end
    dense = regard.nn.Attention(less.project, less.output, mask=regard.masks.Causal())
    assert float((less(x) - dense(x)).abs().max()) > 1e-6
    for branch, options in ((1, {"count": 8, "window": 3}), (2, {"count": 3, "window": T})):
        module = make("nsa", **options)
        module.gate.weight.zero_()  # one gate open, the others shut
        module.gate.bias.fill_(-math.inf)
        module.gate.bias[4 * branch : 4 * branch + 4] = math.inf
        project = SeparateQKV(module.q, module.keys[branch], module.values[branch])
        dense = regard.nn.Attention(project, module.output, mask=regard.masks.Causal())
        assert float((module(x) - dense(x)).abs().max()) < 1e-12


def test_the_indexer_learns_from_its_loss_alone() -> None:
    module = make("dsa", dtype=torch.float32)
    x = torch.randn(4, T, M, requires_grad=True)
    for chosen in (False, True):
        before = indexer_losses(module, x, chosen=chosen)
        assert before.shape == (4, T)
        assert float(before.detach().min()) > -1e-6
        assert before[:, 0].eq(0).all(), "one key leaves nothing to learn"
        before.mean().backward()
        assert x.grad is None
        assert all(
            p.grad is None for n, p in module.named_parameters() if not n.startswith("selector.")
        )
        assert all(p.grad.ne(0).any() for p in module.selector.parameters())
        module.zero_grad()
    optimizer = torch.optim.Adam(module.selector.parameters(), lr=0.01)
    first = float(indexer_losses(module, x, chosen=False).detach().mean())
    for _ in range(30):
        optimizer.zero_grad()
        loss = indexer_losses(module, x, chosen=False).mean()
        loss.backward()
        optimizer.step()
    assert float(loss.detach()) < 0.7 * first
    with pytest.raises(regard.ArgumentError, match="the layer's selector is MoBA; only an Indexer"):
        indexer_losses(make("moba"), x.double())


def cos_and_sin() -> tuple[Tensor, Tensor]:
    """The tables of transformers for 8 rotary dims, [B,T,8]."""
    angle = torch.arange(T)[:, None] * rope_frequencies(8).inv_freq.repeat(2)
    return angle.cos().expand(B, -1, -1), angle.sin().expand(B, -1, -1)


@torch.no_grad()
def test_the_indexer_is_the_published_one() -> None:
    config = DeepseekV32Config(
        hidden_size=M,
        q_lora_rank=M,
        index_n_heads=16,
        index_head_dim=16,
        qk_rope_head_dim=8,
        index_topk=5,
    )
    theirs = DeepseekV32Indexer(config, 0).double()
    ours = make("dsa", topk=5, index_heads=16, index_dim=16, rotary_dim=8).selector
    ours.q.linear.weight.copy_(theirs.wq_b.weight)
    ours.k.linear.weight.copy_(theirs.wk.weight)
    ours.k.flat.load_state_dict(theirs.k_norm.state_dict())
    ours.weight.weight.copy_(theirs.weights_proj.weight)
    # 16 heads: a score of exactly 0, all of them negative, is rare, and with it a tie, which theirs
    # breaks anyhow
    x, at = torch.randn(B, T, M, dtype=torch.float64), Span(0, T)
    causal = torch.ones(B, T, T, dtype=torch.bool).tril()
    indices = theirs(x, x, cos_and_sin(), causal, torch.arange(T)[None]).long()
    chosen = torch.zeros(B, T, T, dtype=torch.bool).scatter(2, indices, value=True) & causal

    def choose(indexer: Indexer) -> Tensor:
        q = torch.zeros(B, 1, T, 1)
        return indexer.choose(q, q, x, indexer.remember(x, at), Places(at, at)).block(at, at)[:, 0]

    assert choose(ours).equal(chosen)
    wrong = copy.deepcopy(ours)  # the layout of the main attention is a bug here
    wrong.q.steps = wrong.k.steps = nn.ModuleList([Rotary(16, rotary_dim=8, layout="interleaved")])
    assert not choose(wrong).equal(chosen)


@torch.no_grad()
def test_the_pooled_indexers_are_those_of_transformers() -> None:
    """With one key head whose values are the tokens' numbers, what a query reads is seen."""
    q_only = torch.zeros(B, 1, T, 1)
    x, at = torch.randn(B, T, M, dtype=torch.float64), Span(0, T)
    causal = torch.ones(B, 1, T, T, dtype=torch.bool).tril()

    def choose(indexer: PooledIndexer) -> Tensor:
        memory = indexer.remember(x, at)
        return indexer.choose(q_only, q_only, x, memory, Places(at, at)).block(at, at)[:, 0]

    sizes = {"index_heads": 16, "index_dim": 16, "topk": 3, "block": 4}
    ours = make("qsa", rotary_dim=8, **sizes).selector
    config = Qwen4ExpTextConfig(
        hidden_size=M,
        indexer_n_heads=16,
        indexer_kv_heads=1,
        indexer_head_dim=16,
        indexer_budget=12,
        indexer_compress_ratio=4,
        head_dim=8,
    )
    theirs: Any = Qwen4ExpTextQSAIndexer(config, 0).double()
    maps = (ours.q.linear.weight, ours.pooling.content.weight)
    theirs.index_qk_proj.weight.copy_(torch.cat(maps))
    theirs.q_layernorm.weight.copy_(ours.q.steps[0].weight - 1)
    theirs.k_layernorm.weight.copy_(ours.pooling.steps[0].weight - 1)
    exact = theirs(x, cos_and_sin(), causal, None)[:, 0]
    assert choose(ours).equal(exact & causal[:, 0])
    wrong = copy.deepcopy(ours)
    wrong.pooling.steps = ours.pooling.steps[:1]  # the rotation to the first token of a block
    assert not choose(wrong).equal(exact)

    ours = make("dsa_pools", **sizes).selector
    config = Glm5NextTextConfig(
        hidden_size=M,
        q_lora_rank=M,
        index_n_heads=16,
        index_head_dim=16,
        index_topk=12,
        index_kpool=4,
    )
    theirs = Glm5NextTextIndexer(config, 0).double()
    theirs.wq_b.weight.copy_(ours.q.linear.weight)
    theirs.wk.weight.copy_(ours.pooling.content.weight)
    theirs.k_norm.load_state_dict(ours.pooling.norm.state_dict())
    theirs.weights_proj.weight.copy_(ours.weight.weight)
    theirs.index_kpool_compress_ape.copy_(ours.pooling.places)
    theirs.index_kpool_compress_gate.copy_(ours.pooling.gate.weight)
    found = theirs(x, x, torch.ones(B, T, dtype=torch.bool), None).long()
    exact = torch.zeros(B, T, T + 1, dtype=torch.bool)
    exact = exact.scatter(2, torch.where(found < 0, T, found), value=True)[..., :T]
    assert choose(ours).equal(exact)
    wrong = copy.deepcopy(ours)
    wrong.pooling.places.zero_()
    assert not choose(wrong).equal(exact)


@torch.no_grad()
def test_an_indexer_beside_a_latent() -> None:
    latent = make("mla").project
    assert isinstance(latent, LatentProjection)
    select, output = (
        make("dsa", topk=T).selector,
        nn.Linear(latent.shape.H * latent.shape.E, M).double(),
    )
    module = SelectedAttention(latent, select, output)
    x = torch.randn(B, T, M, dtype=torch.float64)
    dense = regard.nn.Attention(latent, output, mask=regard.masks.Causal())
    assert float((module(x) - dense(x)).abs().max()) < 1e-12
    select.topk = 4
    cache = module.new_cache()
    parts = [module(part, None, cache) for part in x.split((9, 1, 1, 18), 1)]
    assert float((torch.cat(parts, 1) - module(x)).abs().max()) < 1e-12
    assert module.describe(9).kv_per_token.value == sum(latent.shape.memory) + 8
    assert cache.bytes == 8 * B * T * module.describe(9).kv_per_token.value


def test_taps_stand_at_each_branch() -> None:
    module, x = make("nsa"), torch.randn(1, T, M, dtype=torch.float64)
    with regard.Trace("pattern", "z", "out") as trace:
        module(x)
    assert trace["window.pattern"].shape == trace["selected.pattern"].shape == (1, 4, T, T)
    assert trace["compressed.pattern"].shape[3] >= (T - 4) // 2 + 1
    assert trace["selected.pattern"].count_nonzero(-1).max() <= 16
    assert trace["z"].shape == (1, 4, T, 8)
    module = make("dsa")
    with regard.Trace("pattern", "q", "k", "v") as trace:
        module(x)
    assert trace["pattern"].count_nonzero(-1).max() == 4


def test_published_numbers_of_tokens_read() -> None:
    table = {8192: 2048, 16384: 2560, 32768: 3584, 65536: 5632}
    for context, read in table.items():
        assert nsa_tokens(context, 16, 64, 16, 512) == read
        # floor((s - l) / d), which the text names, is 2 fewer than s / d; with block 0 the count is
        # 1 fewer
        assert compressed_tokens(context, 32, 16) + block_tokens(context, 64, 16) + 512 == read - 1
    assert [round(s / r, 1) for s, r in table.items()] == [4.0, 6.4, 9.1, 11.6]
    module = nsa(64, 4, groups=2, head_dim=8)
    assert module.tokens(8192).value == 2048
    assert str(module.tokens(8192)) == "2,048 = S / 16 + min(S, 16 x 64) + min(S, 512)"


@torch.no_grad()
def test_counts_equal_what_is_seen() -> None:
    for context in (1, 3, 4, 5, 17, 28):
        x, at = torch.randn(1, context, M, dtype=torch.float64), Span(context - 1, 1)
        for name in ("moba", "dsa", "quest", "msa", "qsa", "dsa_pools"):
            module = make(name)
            memory = module.selector.remember(x, Span(0, context))
            q = module.project.query(x[:, -1:], at)
            k, _ = module.project.remember(x, Span(0, context))
            mask = module.selector.choose(q, k, x[:, -1:], memory, Places(at, Span(0, context)))
            seen = mask.visible(at, Span(0, context))
            assert seen.eq(module.selector.spec.tokens(context).value).all()
        with regard.Trace("pattern") as trace:
            make("nsa")(x)
        found = [
            trace[f"{n}.pattern"][0, 0, -1].count_nonzero()
            for n in ("compressed", "selected", "window")
        ]
        assert found == [
            compressed_tokens(context, 4, 2),
            block_tokens(context, 4, 4),
            min(context, 6),
        ]


def test_descriptions() -> None:
    found = dsa(64, 8, groups=2, head_dim=16, topk=32, index_heads=4, index_dim=8, rotary_dim=4)
    told = found.describe(100)
    maps = 64 * (8 * 16 * 2 + 2 * 16 * 2 + 4 * 8 + 8 + 4)
    assert (told.name, told.kv_per_token.value, told.cached_values) == ("Indexer", 2 * 32 + 8, 7200)
    assert told.flops_per_token.value == 2 * maps + 2 * 8 * 32 * 32 + 2 * 4 * 100 * 9
    assert told.parameters.value == maps + 16
    told = moba(64, 8, groups=2, head_dim=16, block=10, topk=3).describe(95)
    maps = 64 * (8 * 16 * 2 + 2 * 16 * 2)
    assert (told.name, told.kv_per_token.value) == ("MoBA", 64)
    assert told.flops_per_token.value == 2 * maps + 2 * 8 * 25 * 32 + 2 * 8 * 9 * 16
    told = nsa(64, 8, groups=2, head_dim=16).describe(8192)
    maps = 64 * (8 * 16 * 2 + 6 * 32 + 24)
    attended = 2 * 8 * 2047 * 32 + 2 * 8 * 511 * 16
    compression = 2 * 2 * 2 * 511 * (32 * 16 * 16 + 16 * 16)
    assert (told.name, told.kv_per_token.value) == ("NSA", 192)
    assert told.flops_per_token.value == 2 * maps + attended + compression
    with pytest.raises(regard.ArgumentError, match="context is 0"):
        found.describe(0)
    with pytest.raises(regard.ArgumentError, match="context is 0"):
        nsa(64, 8, groups=2).describe(0)


def test_parts_are_selectors() -> None:
    assert isinstance(MoBA(4, 2), KeySelector)
    assert isinstance(make("dsa").selector, KeySelector)
    assert repr(MoBA(4, 2)) == "MoBA(blocks of 4, topk=2)"
    assert "topk=4" in repr(make("dsa").selector)
    assert "4 tokens" in repr(make("nsa").compress_key)


def test_errors() -> None:
    heads = HeadProjection(8, 2, 4)
    kv = [HeadProjection(8, 1, 4) for _ in range(6)]

    def built(
        keys: list[HeadProjection], values: list[HeadProjection], q: HeadProjection = heads
    ) -> NSA:
        return NSA(
            q,
            keys,
            values,
            compress_key=BlockCompressor(4, 4),
            compress_value=BlockCompressor(4, 4),
            gate=nn.Linear(8, 6),
            output=nn.Linear(8, 8),
            sizes=NSABlocks(4, 2, 4, 3, 4),
        )

    same = "all branches must have the same heads and dims, and keys the dim of q"
    cases = [
        (lambda: MoBA(0, 2), "MoBA with blocks of 0 and topk 2: both must be 1 or more"),
        (lambda: moba(32, 4, groups=2, topk=0), "MoBA with blocks of 512 and topk 0"),
        (lambda: dsa(32, 4, groups=2, topk=0), "topk is 0; it must be 1 or more"),
        (
            lambda: Indexer(heads, HeadProjection(8, 2, 4), nn.Linear(8, 2), topk=3),
            "index q is 2 heads of 4, k is 2 heads of 4, weight has",
        ),
        (lambda: Indexer(heads, kv[0], nn.Linear(8, 3), topk=3), "weight has out_features=3"),
        (lambda: nsa(32, 4, groups=2, stride=12), "compress 32, stride 12, select 64: stride must"),
        (lambda: nsa(32, 4, groups=2, count=2), "count is 2, fewer than the forced blocks"),
        (lambda: nsa(32, 4, groups=3), "4 query heads are not divisible by 3 key/value heads"),
        (lambda: BlockCompressor(0, 4), "BlockCompressor(length=0, dim=4, hidden=4): each must be"),
        (lambda: built(kv[:2], kv[3:]), "keys has length 2 and values has length 3; each must"),
        (lambda: built([*kv[:2], HeadProjection(8, 2, 4)], kv[3:]), same),
        (lambda: built(kv[:3], kv[3:], HeadProjection(8, 2, 3)), same),
    ]
    assert_refused(cases)
    follows = Rotary(
        4, length="current", scaling=regard.positions.DynamicNTK(2.0, original_length=8)
    )
    project = SeparateQKV(
        HeadProjection(8, 2, 4, follows), HeadProjection(8, 1, 4, follows), HeadProjection(8, 1, 4)
    )
    stale = SelectedAttention(project, MoBA(2, 2), nn.Linear(8, 8))
    with pytest.raises(regard.ArgumentError, match="a cache was given, but the frequencies of"):
        stale(torch.zeros(1, 3, 8), None, stale.new_cache())
