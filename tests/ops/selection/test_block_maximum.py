"""MSA's choice against plain loops, and against the published indexer of MiniMax-M3."""

from __future__ import annotations

import pytest
import torch
from transformers.models.minimax_m3_vl.configuration_minimax_m3_vl import MiniMaxM3VLTextConfig
from transformers.models.minimax_m3_vl.modeling_minimax_m3_vl import MiniMaxM3VLIndexer

import regard
from regard.nn import HeadProjection
from regard.nn.attention.selected import BlockMaximum, Places
from regard.nn.blocks.norms import RMSNorm
from regard.ops.selection import block_maximum_mask
from regard.positions import Rotary, rope_frequencies
from regard.span import Span
from tests.ops.selection.test_best_blocks import CALLS, B, H, dense, inputs, rows
from tests.oracles import selected as oracle


@pytest.mark.full(keep="each")
@pytest.mark.parametrize(("topk", "local"), [(1, 1), (2, 1), (3, 2), (1, 3), (50, 1)])
@pytest.mark.parametrize("call", CALLS)
def test_the_choice_equals_the_definition(call: str, topk: int, local: int) -> None:
    for J in (1, 2, 4):
        q, _, _, q_at, k_at = inputs(call, 3.0)
        k = inputs(call)[1][:, :1]
        mask = block_maximum_mask(
            q[:, :J], k, heads=H, size=3, topk=topk, local=local, q_positions=q_at, k_positions=k_at
        )
        chosen = oracle.block_maximum(q[:, :J], k, H, (3, topk, local), rows(q_at), rows(k_at))
        assert mask.block(q_at, k_at).expand(B, H, -1, -1).equal(dense(chosen, k_at))


@torch.no_grad()
def test_the_choice_is_that_of_the_published_indexer() -> None:
    n, M, d = 29, 32, 8
    config = MiniMaxM3VLTextConfig(
        hidden_size=M,
        num_attention_heads=H,
        num_key_value_heads=2,
        index_n_heads=2,
        index_head_dim=d,
        index_block_size=4,
        index_topk_blocks=3,
        index_local_blocks=1,
    )
    theirs = MiniMaxM3VLIndexer(config, 0).double()
    for norm in (theirs.q_norm, theirs.k_norm):
        norm.weight.add_(0.3 * torch.randn(d))
    rotary = Rotary(d, rotary_dim=4)
    ours = BlockMaximum(
        HeadProjection(M, 2, d, RMSNorm(d), rotary),
        HeadProjection(M, 1, d, RMSNorm(d), rotary),
        heads=H,
        size=4,
        topk=3,
    ).double()
    for mine, linear, norm in (
        (ours.q, theirs.q_proj, theirs.q_norm),
        (ours.k, theirs.k_proj, theirs.k_norm),
    ):
        mine.linear.weight.copy_(linear.weight)
        mine.steps[0].weight.copy_(1 + norm.weight)  # theirs is stored as the distance from 1
    x, at = torch.randn(B, n, M, dtype=torch.float64), Span(0, n)
    angle = torch.arange(n)[:, None] * rope_frequencies(4).inv_freq
    table = torch.cat((angle, angle), -1)[None].expand(B, -1, -1)
    indices = theirs(x, (table.cos(), table.sin()), None, torch.arange(n)[None].expand(B, -1))
    blocks = torch.zeros(B, 2, n, 9, dtype=torch.bool)
    blocks = blocks.scatter(3, torch.where(indices < 0, 8, indices), True)[..., :8]
    right = blocks.repeat_interleave(4, 3)[..., :n].repeat_interleave(2, 1)
    right &= torch.ones(n, n, dtype=torch.bool).tril()
    q = torch.zeros(B, H, n, 1, dtype=torch.float64)

    def choose(selector: BlockMaximum) -> torch.Tensor:
        mask = selector.choose(q, q, x, selector.remember(x, at), Places(at, at))
        return mask.block(at, at)

    assert choose(ours).equal(right)
    ours.local = 2
    assert not choose(ours).equal(right), "negative control"
    ours.local = 1
    ours.q.steps = ours.k.steps = torch.nn.ModuleList([rotary])
    assert not choose(ours).equal(right), "negative control: without the norms"


def test_rows_in_turns_choose_the_same() -> None:
    q, k, *_ = inputs("square")
    whole = block_maximum_mask(q, k[:, :1], heads=H, size=3, topk=2)
    parts = block_maximum_mask(q, k[:, :1], heads=H, size=3, topk=2, max_bytes=1)
    assert parts.block(Span(0, 14), Span(0, 14)).equal(whole.block(Span(0, 14), Span(0, 14)))


def test_errors() -> None:
    q, k, *_ = inputs("square")
    for size, topk, local in ((0, 1, 1), (3, 0, 1), (3, 1, 0)):
        with pytest.raises(
            regard.ArgumentError,
            match=rf"^MSA with blocks of {size}, topk {topk} and {local} local blocks: each must",
        ):
            block_maximum_mask(q, k[:, :1], heads=H, size=size, topk=topk, local=local)
    for heads, keys in ((6, k[:, :1]), (H, k)):
        with pytest.raises(
            regard.ArgumentError, match=r"index heads and q has 4 for . query heads"
        ):
            block_maximum_mask(q, keys, heads=heads, size=3, topk=2)
    heads = HeadProjection(8, 2, 4)
    with pytest.raises(regard.ArgumentError, match=r"index q is 2 heads of 4, k is 2 heads of 4"):
        BlockMaximum(heads, heads, heads=4, size=3, topk=2)
