"""Multi-head latent attention."""

from __future__ import annotations

from typing import Literal, get_args

from regard.cost.latent import Form
from regard.errors import ArgumentError
from regard.masks import Causal
from regard.nn.attention import Attention
from regard.nn.latent import Latent, Naive
from regard.nn.variants.parts import join
from regard.nn.variants.registry import variant
from regard.positions import Rotary, Scaling


@variant(
    family="latent",
    equation="c = norm(W_dkv x), k_r = R_s W_kr x; z_h = softmax(([W_uk,h^T q_h; q_r,h]^T [c; "
    "k_r]) scale + causal) c W_uv,h^T",
    source="DeepSeek-AI 2024 (arXiv 2405.04434), equations 37 to 47",
    q_rank=24,
    kv_rank=16,
    nope_dim=8,
    rope_dim=4,
    value_dim=8,
)
def mla(
    dim: int,
    heads: int,
    *,
    q_rank: int | None = None,
    kv_rank: int,
    nope_dim: int,
    rope_dim: int,
    value_dim: int,
    base: float = 10000.0,
    scaling: Scaling | None = None,
    form: Form | Literal["naive"] = "auto",
) -> Attention:
    """Multi-head latent attention: all heads recall keys and values from one latent and one rotary
    key per token.

    x [B,T,M] -> [B,T,M]; a cache keeps r + d_rope numbers per token. Laid out as DeepSeek-V2 and
    V3: interleaved rotary pairs, norms on both latents, scale 1/sqrt(d_nope + d_rope) times
    f(mscale_all_dim)^2 of a `YaRN` scaling.

    Args:
        dim, heads: the model dim M and the heads H.
        q_rank: the size of the queries' latent, or None: queries straight from x (V2-Lite).
        kv_rank: the size r of the latent of keys and values.
        nope_dim, rope_dim: dims of a query and key head without and with rotary position.
        value_dim: E.
        base, scaling: of the rotary positions.
        form: "naive" keeps keys and values of each head; "expand", "absorb" and "auto" keep latents
            (`Latent`).

    Raises:
        ArgumentError: a size is less than 1, rope_dim is odd, or form is unknown.

    >>> import torch
    >>> layer = mla(32, 4, q_rank=24, kv_rank=16, nope_dim=8, rope_dim=4, value_dim=8)
    >>> layer(torch.zeros(1, 5, 32)).shape, layer.project.shape.memory
    (torch.Size([1, 5, 32]), (20,))

    Source: DeepSeek-AI 2024 (arXiv 2405.04434), section 2.1; the same in V3 (arXiv 2412.19437).
    """
    forms = ("naive", *get_args(Form))
    if form not in forms:
        raise ArgumentError(f"form is {form!r}; it is one of {', '.join(forms)}")
    if rope_dim < 2 or rope_dim % 2:
        near = max(2, rope_dim + 1)
        raise ArgumentError(
            f"rope_dim is {rope_dim}; it must be even and at least 2, since rotary turns pairs: "
            f"such as {near}"
        )
    rotary = Rotary(rope_dim, base, scaling=scaling, layout="interleaved")
    make = Naive if form == "naive" else Latent
    project = make(
        dim,
        heads,
        rotary,
        kv_rank=kv_rank,
        nope_dim=nope_dim,
        value_dim=value_dim,
        q_rank=q_rank,
        form="expand" if form == "naive" else form,
    )
    return Attention(project, join(dim, heads, value_dim), mask=Causal(), scale=project.scale)
