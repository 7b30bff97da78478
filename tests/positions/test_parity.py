"""Against transformers' tables and rotations (fp32 there: equal to 1e-6)."""

from __future__ import annotations

import pytest
import torch

from regard.positions import (
    DynamicNTK,
    LinearScaling,
    Llama3,
    LongRoPE,
    Rotary,
    YaRN,
    rope_frequencies,
    rotate,
)
from regard.span import Span

pytest.importorskip("transformers", reason="transformers is not installed")
from transformers import LlamaConfig
from transformers.modeling_rope_utils import ROPE_INIT_FUNCTIONS
from transformers.models.gptj.modeling_gptj import apply_rotary_pos_emb as gptj_rotate
from transformers.models.llama.modeling_llama import (
    LlamaRotaryEmbedding,
    apply_rotary_pos_emb,
)

EXT = tuple(1 + 0.1 * i for i in range(32)), tuple(1 + 0.7 * i for i in range(32))
CASES = [
    (LinearScaling(3.0), {"rope_type": "linear", "factor": 3.0}, None),
    (DynamicNTK(2.0, 4096), {"rope_type": "dynamic", "factor": 2.0}, 100),
    (DynamicNTK(2.0, 4096), {"rope_type": "dynamic", "factor": 2.0}, 9000),
    (
        YaRN(16.0, 512),
        {"rope_type": "yarn", "factor": 16.0, "original_max_position_embeddings": 512},
        None,
    ),
    (
        YaRN(16.0, 512, truncate=False, beta_fast=16.0, beta_slow=2.0),
        {
            "rope_type": "yarn",
            "factor": 16.0,
            "original_max_position_embeddings": 512,
            "truncate": False,
            "beta_fast": 16.0,
            "beta_slow": 2.0,
        },
        None,
    ),
    (
        YaRN(40.0, 512, mscale=1.0, mscale_all_dim=0.707),
        {
            "rope_type": "yarn",
            "factor": 40.0,
            "original_max_position_embeddings": 512,
            "mscale": 1.0,
            "mscale_all_dim": 0.707,
        },
        None,
    ),
    (
        YaRN(4.0, 512, attention_factor=1.3),
        {
            "rope_type": "yarn",
            "factor": 4.0,
            "original_max_position_embeddings": 512,
            "attention_factor": 1.3,
        },
        None,
    ),
    (
        Llama3(8.0, 1.0, 4.0, 512),
        {
            "rope_type": "llama3",
            "factor": 8.0,
            "low_freq_factor": 1.0,
            "high_freq_factor": 4.0,
            "original_max_position_embeddings": 512,
        },
        None,
    ),
    *(
        (
            LongRoPE(*EXT, 512, 8.0),
            {
                "rope_type": "longrope",
                "factor": 8.0,
                "short_factor": list(EXT[0]),
                "long_factor": list(EXT[1]),
                "original_max_position_embeddings": 512,
            },
            length,
        )
        for length in (512, 513)
    ),
]


def config(parameters, dim=64, base=10000.0):
    return LlamaConfig(
        hidden_size=4 * dim,
        num_attention_heads=4,
        head_dim=dim,
        max_position_embeddings=4096,
        rope_parameters={"rope_theta": base, **parameters},
    )


@pytest.mark.parametrize("base", [1e4, 5e5])
@pytest.mark.parametrize("scaling, parameters, length", CASES)
def test_the_tables_of_transformers(scaling, parameters, length, base):
    theirs, factor = ROPE_INIT_FUNCTIONS[parameters["rope_type"]](
        config(parameters, base=base), "cpu", seq_len=length
    )
    ours = rope_frequencies(64, base, scaling=scaling, length=length)
    torch.testing.assert_close(ours.inv_freq, theirs.double(), rtol=1e-6, atol=0)
    assert ours.rotary_factor == pytest.approx(factor, rel=1e-12)
    # negative control: it is not the table without its scaling
    if length not in (100, 512):
        plain = rope_frequencies(64, base).inv_freq
        assert (plain / theirs.double() - 1).abs().max() > 0.1


def test_partial_and_proportional_rotary():
    partial, _ = ROPE_INIT_FUNCTIONS["linear"](
        config({"rope_type": "linear", "factor": 2.0, "partial_rotary_factor": 0.25}), "cpu"
    )
    ours = rope_frequencies(64, scaling=LinearScaling(2.0), rotary_dim=16).inv_freq
    torch.testing.assert_close(ours, partial.double(), rtol=1e-6, atol=0)
    proportional, _ = ROPE_INIT_FUNCTIONS["proportional"](
        config({"rope_type": "proportional", "partial_rotary_factor": 0.25}), "cpu"
    )
    ours = rope_frequencies(64, rotary_dim=16, proportional=True).inv_freq
    torch.testing.assert_close(ours, proportional.double(), rtol=1e-6, atol=0)


def test_half_is_the_rotation_of_llama():
    positions = torch.tensor([[0, 1, 2, 900], [7, 8, 9, 10]])
    q, k = torch.randn(2, 4, 4, 64), torch.randn(2, 2, 4, 64)
    for parameters, scaling in (({"rope_type": "default"}, None), (CASES[3][1], CASES[3][0])):
        cos, sin = LlamaRotaryEmbedding(config(parameters))(q, positions)
        theirs = apply_rotary_pos_emb(q, k, cos, sin)
        rotary = Rotary(64, scaling=scaling)
        for x, other in zip((q, k), theirs, strict=True):
            # positions below 1000 in fp32: their angles are off by up to 1000 * 2^-24
            torch.testing.assert_close(rotary(x, positions), other, rtol=0, atol=4 * 1000 * 2**-24)
            wrong = Rotary(64, scaling=scaling, layout="interleaved")(x, positions)
            assert (wrong - other).abs().max() > 1  # negative control


def test_interleaved_is_the_rotation_of_gptj():
    x = torch.randn(2, 4, 5, 16, dtype=torch.float64)
    inv_freq = rope_frequencies(16).inv_freq
    angle = torch.arange(3, 8)[:, None] * inv_freq
    theirs = gptj_rotate(x.transpose(1, 2), angle.sin()[None], angle.cos()[None]).transpose(1, 2)
    ours = rotate(x, Span(3, 5), inv_freq, layout="interleaved")
    torch.testing.assert_close(ours, theirs, rtol=0, atol=1e-13)


def test_permuted_weights_turn_one_layout_into_the_other():
    """What conversion does to a query projection: the rows of each head, from pairs to halves."""
    H, D, M = 3, 8, 24
    weight, x = (
        torch.randn(H * D, M, dtype=torch.float64),
        torch.randn(1, 5, M, dtype=torch.float64),
    )
    permuted = weight.view(H, D // 2, 2, M).transpose(1, 2).reshape(H * D, M)
    inv_freq = rope_frequencies(D).inv_freq

    def turned(weight, layout):
        q = (x @ weight.T).unflatten(-1, (H, D)).transpose(1, 2)
        return rotate(q, Span(0, 5), inv_freq, layout=layout)

    pairs, halves = turned(weight, "interleaved"), turned(permuted, "half")
    torch.testing.assert_close(pairs @ pairs.mT, halves @ halves.mT, rtol=0, atol=1e-11)
    assert (turned(weight, "half") @ turned(weight, "half").mT - pairs @ pairs.mT).abs().max() > 1
