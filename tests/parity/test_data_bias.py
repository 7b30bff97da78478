"""Biases from data as transformers computes them: DeBERTa-v2, XLNet, Inkling and Doge."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor, nn

import regard
from regard.masks import Causal
from regard.nn.variants import deberta, dynamic_mask, relative_logits, transformer_xl
from regard.span import Span
from tests.models.small import randomize
from tests.parity.layers import assert_far, assert_near

M, H, D, T = 24, 3, 8, 21


def states(seed: int = 1) -> Tensor:
    return torch.randn(2, T, M, generator=torch.Generator().manual_seed(seed))


def copied(ours: Any, tensors: dict[str, Tensor]) -> Any:
    ours.load_state_dict(tensors)
    return ours.eval().requires_grad_(False)


@pytest.mark.full
def test_deberta() -> None:
    from transformers import DebertaV2Config
    from transformers.models.deberta_v2.modeling_deberta_v2 import DisentangledSelfAttention

    config = DebertaV2Config(
        hidden_size=M,
        num_attention_heads=H,
        relative_attention=True,
        position_buckets=4,
        max_relative_positions=16,
        pos_att_type=["c2p", "p2c"],
        share_att_key=False,
    )
    theirs = DisentangledSelfAttention(config).eval().requires_grad_(False)
    randomize(theirs, 3)
    table = torch.randn(8, M, generator=torch.Generator().manual_seed(2))
    names = {
        "query_proj": "project.q.linear",
        "key_proj": "project.k.linear",
        "value_proj": "project.v.linear",
        "pos_key_proj": "project.relative_k.linear",
        "pos_query_proj": "project.relative_q.linear",
    }
    own = {
        names[name.rpartition(".")[0]] + "." + name.rpartition(".")[2]: x
        for name, x in theirs.state_dict().items()
    }
    own |= {
        "project.embedding": table,
        "output.weight": torch.eye(M),
        "output.bias": torch.zeros(M),
    }
    x = states()
    expected, _ = theirs(x, torch.ones(2, 1, T, T), rel_embeddings=table)

    def mine(**sizes: int) -> Tensor:
        made: Tensor = copied(deberta(M, H, **sizes), own)(x)
        return made

    assert_near(mine(buckets=4, max_distance=16), expected)
    assert_far(mine(buckets=4, max_distance=9), expected)


@pytest.mark.full
def test_xlnet() -> None:
    """The content stream, both ways; its rel_shift is a gather at i - j."""
    from transformers import XLNetConfig
    from transformers.models.xlnet.modeling_xlnet import XLNetModel, XLNetRelativeAttention

    config = XLNetConfig(d_model=M, n_head=H, d_inner=8, n_layer=1, vocab_size=5)
    theirs = XLNetRelativeAttention(config).eval().requires_grad_(False)
    randomize(theirs, 3)
    whole = XLNetModel(config)
    r = whole.relative_positional_encoding(T, T, bsz=2)
    x = states()
    q, k, v = (torch.einsum("bih,hnd->ibnd", x, w) for w in (theirs.q, theirs.k, theirs.v))
    k_r = torch.einsum("ibh,hnd->ibnd", r, theirs.r)
    expected = theirs.rel_attn_core(q, k, v, k_r).permute(1, 2, 0, 3)
    own = {
        "project.q.linear.weight": theirs.q.reshape(M, M).T,
        "project.k.linear.weight": theirs.k.reshape(M, M).T,
        "project.v.linear.weight": theirs.v.reshape(M, M).T,
        "project.u": theirs.r_w_bias,
        "project.w": theirs.r_r_bias,
        "project.relative": theirs.r.permute(1, 2, 0),
        "output.weight": torch.eye(M),
    }

    def mine(**changed: Tensor) -> Tensor:
        m = copied(transformer_xl(M, H, groups=H), own | changed)
        m.mask = None
        with regard.Trace("z") as trace:
            m(x)
        return trace["z"]

    assert_near(mine(), expected)
    assert_far(mine(**{"project.w": own["project.u"]}), expected)


def test_relative_logits_of_inkling() -> None:
    modeling = pytest.importorskip("transformers.models.inkling.modeling_inkling")
    theirs = modeling.InklingRelativeLogits(5, 6).requires_grad_(False)
    randomize(theirs, 3)
    m = relative_logits(M, H, groups=1, profiles=5, extent=6).requires_grad_(False)
    m.project.profiles.copy_(theirs.proj)
    x, at = states(), torch.arange(T)
    r = m.project.r(x, Span(0, T))  # [B,H,T,R]
    expected = theirs(r.transpose(1, 2), at, at)
    q = m.project.query(x, Span(0, T))
    memory = m.project.remember(x, Span(0, T))
    bias = m.project.data_bias(x, q, memory, Span(0, T), Span(0, T))
    mine = bias.block(Span(0, T), Span(0, T))
    assert_near(mine, expected)
    assert_far(bias.block(Span(1, T), Span(0, T)), expected)


@pytest.mark.full
@pytest.mark.parametrize("keep", [64, 5])
def test_doge(keep: int) -> None:
    modeling = pytest.importorskip("transformers.models.doge.modeling_doge")
    from transformers import DogeConfig

    config = DogeConfig(
        hidden_size=M,
        num_attention_heads=4,
        num_key_value_heads=2,
        head_dim=6,
        num_hidden_layers=1,
        intermediate_size=8,
        vocab_size=8,
        keep_window_size=keep,
    )
    config._attn_implementation = "eager"
    theirs: nn.Module = modeling.DogeAttention(config, 0).eval().requires_grad_(False)
    randomize(theirs, 3)
    names = {
        "A": "project.a",
        "dt_proj.weight": "project.delta.weight",
        "q_proj.weight": "project.q.linear.weight",
        "k_proj.weight": "project.k.linear.weight",
        "v_proj.weight": "project.v.linear.weight",
        "q_norm.weight": "project.q.steps.0.weight",
        "k_norm.weight": "project.k.steps.0.weight",
        "o_proj.weight": "output.weight",
    }
    own = {names[name]: x for name, x in theirs.state_dict().items()}
    x = states()
    rotary = modeling.DogeRotaryEmbedding(config)(x, torch.arange(T)[None])
    causal = Causal().block(Span(0, T), Span(0, T))
    expected = theirs(x, rotary, causal.expand(2, 1, T, T))[0]
    build = dynamic_mask(
        M, 4, groups=2, head_dim=6, keep=keep, base=config.rope_parameters["rope_theta"]
    )
    for norm in (build.project.q.steps[0], build.project.k.steps[0]):
        norm.eps = config.rms_norm_eps
    assert_near(copied(build, own)(x), expected)
    assert_far(copied(build, own | {"project.a": 0 * own["project.a"]})(x), expected)
    if keep == 5:
        build.project.keep = 6
        assert_far(copied(build, own)(x), expected)
