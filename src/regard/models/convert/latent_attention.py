"""Conversion of grouped-query attention into multi-head latent attention (MLA)."""

from __future__ import annotations

from dataclasses import dataclass, replace

import torch
from jaxtyping import Complex, Float, Int
from torch import Tensor, nn

from regard import masks
from regard.configs.deepseek import DeepseekV2Config
from regard.errors import ArgumentError
from regard.language import Phrase, counted
from regard.models.convert.attention_maps import (
    PROJECT,
    AttentionMaps,
    Checkpoint,
    ConversionStep,
    LayerErrors,
    input_roots,
    layers_of,
    matrix_sqrt,
    rebuild,
    separate_attention,
)
from regard.models.convert.grouped_heads import common_pairs
from regard.nn import Attention, InputEmbedding, LatentProjection, PreNorm, RMSNorm, SwiGLU
from regard.positions import Rotary

_DISTANCES_PER_BLOCK = 1 << 16
"""The number of distances whose rotations are in memory at once."""


@dataclass(frozen=True, eq=False)
class RotarySplit:
    """Keys and values of a layer, with the rotary part separated.

    Attributes:
        rotary_key: the map of the rotary key that all heads share [p, M+1], complex.
        factor: the factor of that key for each head [G, p], complex.
        k, v: the maps of keys without position [G, D, M+1], and of values [G, E, M+1].
    """

    rotary_key: Tensor
    factor: Tensor
    k: Tensor
    v: Tensor
    key_error: float


@dataclass(frozen=True, eq=False)
class TruncatedMaps:
    """The maps of keys without position and of values, truncated to rank n.

    Attributes:
        down: the down projection [n, M+1]; times the layer's gain it has spectral norm 1, so that
            |down x|^2 is at most M + 1.
        up_k, up_v: the up projections [G, D, n] and [G, E, n].
        spectrum: all singular values; score forms and value forms are each scaled to norm 1.
    """

    down: Tensor
    up_k: Tensor
    up_v: Tensor
    errors: LayerErrors
    spectrum: Tensor


def mean_rotation(inv_freq: Float[Tensor, " p"], length: int) -> Complex[Tensor, " p"]:
    """Return sum_d exp(-i theta d) / (d + 1) / sum_d 1 / (d + 1) over distances 0 <= d < length."""
    total = torch.zeros(len(inv_freq), dtype=torch.complex128, device="cpu")
    for start in range(0, length, _DISTANCES_PER_BLOCK):
        d = torch.arange(
            start, min(length, start + _DISTANCES_PER_BLOCK), dtype=torch.float64, device="cpu"
        )
        for i, theta in enumerate(inv_freq.double().cpu()):
            total[i] += (torch.polar(torch.ones_like(d), -theta * d) / (d + 1)).sum()
    weights = torch.arange(1, length + 1, dtype=torch.float64, device="cpu")
    return total / (1 / weights).sum()


def split_rotary(layer: AttentionMaps, rotation: Complex[Tensor, " p"]) -> RotarySplit:
    """Compute the best common rotary key k, cached with rotation, k_j = c_j k + r_j, and r_j at the
    mean rotation; the error of the scores is sum_j |w_j r_j|^2 (1 - |rotation|^2).
    """
    k, rest = layer.split(layer.k)
    common, factor = common_pairs(k, layer.pair_weights(), layer.on_inputs, 1)
    residual = k - factor[..., None] * common
    lost_share = (1 - rotation.abs().square()).clamp(min=0).sqrt()
    key_error = layer.key_norm(layer.join(lost_share[:, None] * residual, torch.zeros_like(rest)))
    keys = layer.join(rotation[:, None] * residual, rest)
    return RotarySplit(common[0], factor, keys, layer.v, key_error / (layer.key_norm(layer.k) or 1))


def truncated_svd(layer: AttentionMaps, split: RotarySplit, n: int) -> TruncatedMaps:
    """Compute the rank-n factors of keys without position and values: [S_k k / |scores|; S_v v /
    |values|] ~ U_n U_n^T [...], S_k^2 and S_v^2 the Gram matrices; the squared error sums the
    squared singular values after the first n.
    """
    G, D, _ = split.k.shape
    gram = query_gram(layer)
    sizes = layer.key_norm(layer.k) or 1.0, layer.value_norm(layer.v) or 1.0
    square_roots = matrix_sqrt(gram), matrix_sqrt(layer.value_gram())
    maps = zip(square_roots, (split.k, split.v), sizes, strict=True)
    stacked = torch.cat([(root @ x / size).flatten(0, 1) for (root, _), x, size in maps])
    u, spectrum, _ = torch.linalg.svd(layer.on_inputs(stacked), full_matrices=False)
    u = nn.functional.pad(u[:, :n], (0, max(0, n - u.shape[1])))
    down = u.mT @ stacked
    # divided by `bound`, `down` has spectral norm 1: the latent is not larger than its input
    bound = float(torch.linalg.matrix_norm(down * layer.gain, 2)) or 1.0
    up_k = square_roots[0][1] @ torch.unflatten(u[: G * D], 0, (G, D)) * (sizes[0] * bound)
    up_v = (
        square_roots[1][1]
        @ torch.unflatten(u[G * D :], 0, (G, split.v.shape[1]))
        * (sizes[1] * bound)
    )
    down = down / bound
    scores = _form_norm(gram, layer.on_inputs(split.k - up_k @ down)) / sizes[0]
    values = layer.value_norm(split.v - up_v @ down) / sizes[1]
    return TruncatedMaps(
        down, up_k, up_v, LayerErrors((scores**2 + split.key_error**2) ** 0.5, values), spectrum
    )


def query_gram(layer: AttentionMaps) -> Float[Tensor, "G D D"]:
    """Return the Gram matrix [G, D, D] of the unrotated queries that attend to a key head."""
    q = layer.on_inputs(layer.q)
    gram: Tensor = (q @ q.mT).unflatten(0, (-1, layer.share)).sum(1)
    return gram


def error_by_rank(truncated_layers: list[TruncatedMaps], full: int) -> dict[int, float]:
    """Return rank -> relative error, root mean square over layers, for sixteen ranks."""
    ranks = sorted({max(1, round(full * step / 16)) for step in range(1, 17)})
    squares = [truncated.spectrum.square() for truncated in truncated_layers]
    left = [[x[rank:].sum() / x.sum().clamp(min=1e-300) for rank in ranks] for x in squares]
    means = torch.tensor(left, dtype=torch.float64, device="cpu").mean(0).sqrt().tolist()
    return dict(zip(ranks, means, strict=True))


def _form_norm(gram: Tensor, x: Tensor) -> float:
    return float((gram * (x @ x.mT)).sum().clamp(min=0).sqrt())


MAX_CONSTANT = 2.0**15
"""The largest value of the constant in the latent; the largest float16 number is 65504."""


def to_latent(
    checkpoint: Checkpoint, rank: int | None = None, ids: Int[Tensor, "N T"] | None = None
) -> tuple[Checkpoint, ConversionStep]:
    """Convert to attention that caches one latent of `rank` numbers and one rotary key per token.

    [c; k_r] = W_dkv x;  k_h = [W_uk,h c; R_s k_r], v_h = W_uv,h c;  q_h = [q_h; R_t conj(c_h) q_h]

    DeepSeek's layer applies an RMS norm to c, in which one large constant makes the norm divide
    every token by nearly the same number.

    Args:
        checkpoint: a decoder of pre-norm blocks with causal grouped queries and SwiGLU: llama,
            mistral without a window, regard's gqa.
        rank: kv_lora_rank, at least 2, since one of its numbers is a constant; None is the full
            rank, at which nothing is truncated.
        ids: rows of token ids on which the inputs of each layer are measured, as in `to_groups`.

    Returns:
        The converted checkpoint, and its errors.

    Raises:
        ArgumentError: the rank is out of range, the model has latents already, or DeepSeek's layers
            cannot express it.

    >>> import regard
    >>> tiny = regard.load("tiny")
    >>> after, step = to_latent(Checkpoint(tiny.decoder, tiny.config), 64)
    >>> after.model_type, after.network.layers[0].attention.project.shape.memory
    ('deepseek_v2', (96,))
    """
    for _, block in layers_of(checkpoint.network):
        _check(block, checkpoint.network.embed)
    first = AttentionMaps.of(checkpoint.network.layers[0])
    G, D, columns = first.k.shape
    # the rotary key uses one row of each pair
    full = min(G * (D + first.v.shape[1]) - 2 * first.pairs, columns) + 1
    if rank is None:
        rank = full
    if not 2 <= rank <= full:
        raise ArgumentError(
            f"rank is {rank}; it must be 2 to {full}, at which nothing is truncated (one number "
            "of the latent is a constant)",
            argument="rank",
        )
    config = _config(checkpoint, first, rank)
    # all layers of these families have the same rotary frequencies
    rotation = _mean_rotations(
        checkpoint.network.layers[0], checkpoint.config.max_position_embeddings
    )
    weights, truncated_layers = checkpoint.weights(), []
    factors = input_roots(checkpoint.network, ids)
    for (prefix, block), root in zip(layers_of(checkpoint.network), factors, strict=True):
        layer = AttentionMaps.of(block, root)
        split = split_rotary(layer, rotation)
        truncated = truncated_svd(layer, split, rank - 1)
        truncated_layers.append(truncated)
        for name in [n for n in weights if n.startswith(prefix + "attention.")]:
            del weights[name]
        weights |= _latent_parameters(prefix, block, layer, split, truncated)
    return rebuild(config, weights), ConversionStep(
        Phrase(
            "{heads} of {D} + {E} to a latent of {rank} and a rotary key of {qk_rope_head_dim}: "
            "{cached} values cached per token and layer instead of {before}",
            heads=counted(G, "key/value head"),
            D=D,
            E=first.v.shape[1],
            rank=rank,
            qk_rope_head_dim=config.qk_rope_head_dim,
            cached=rank + config.qk_rope_head_dim,
            before=G * (D + first.v.shape[1]),
        ),
        tuple(truncated.errors for truncated in truncated_layers),
        {n + 1: error for n, error in error_by_rank(truncated_layers, full - 1).items()},
    )


def _mean_rotations(block: nn.Module, length: int) -> Tensor:
    """Return the mean rotation of each rotary pair over the distances up to the trained length."""
    rotary = next((m for m in block.modules() if isinstance(m, Rotary)), None)
    return mean_rotation(
        torch.zeros(0, dtype=torch.float32, device="cpu") if rotary is None else rotary.inv_freq,
        length,
    )


def _latent_parameters(
    prefix: str,
    block: nn.Module,
    layer: AttentionMaps,
    split: RotarySplit,
    truncated: TruncatedMaps,
) -> dict[str, Tensor]:
    """Return the parameters of a latent projection and of the output map after it."""
    attention = separate_attention(block)
    dtype, bias = attention.output.weight.dtype, attention.output.bias
    own = replace(layer, layout="interleaved")
    q, _ = layer.split(layer.q)
    turned_q = split.factor.repeat_interleave(layer.share, 0).conj()[..., None] * q
    H, D, columns = layer.q.shape
    nothing = layer.q.new_zeros(1, 0, columns)
    rotary_k = own.join(split.rotary_key[None], nothing)[0]
    rotary_q = own.join(turned_q, nothing.expand(H, 0, columns))
    if not layer.pairs:  # without rotary positions, the rotary key is 0
        rotary_k, rotary_q = rotary_k.new_zeros(2, columns), rotary_q.new_zeros(H, 2, columns)
    factor = _score_factor(attention, D, rotary_k.shape[0])
    rank = len(truncated.down) + 1
    constant, weight = _constant(rank)
    constant_row = truncated.down.new_zeros(1, columns)
    constant_row[0, -1] = constant
    down = torch.cat((truncated.down, constant_row, rotary_k))
    norm = truncated.down.new_full((rank,), weight)
    norm[-1] = 0
    up = (
        torch.cat((truncated.up_k, truncated.up_v), 1)
        .repeat_interleave(layer.share, 0)
        .flatten(0, 1)
    )
    up = up * (constant / rank**0.5 / weight)
    queries = torch.cat((layer.q * factor[0], rotary_q * factor[1]), 1).flatten(0, 1)
    name = prefix + PROJECT
    parameters = {
        name + "q.linear.weight": queries[:, :-1],
        name + "kv_down.weight": down[:, :-1],
        name + "kv_down.bias": down[:, -1],
        name + "kv_norm.weight": norm,
        name + "kv_up.linear.weight": nn.functional.pad(up, (0, 1)),
        prefix + "attention.output.weight": attention.output.weight.detach(),
        prefix + "attention.output.bias": up.new_zeros(len(attention.output.weight))
        if bias is None
        else bias.detach(),
    }
    return {key: value.to(dtype) for key, value in parameters.items()}


def _score_factor(attention: Attention, D: int, rotary_dim: int) -> tuple[float, float]:
    """Return the factors of queries, without and with position, that keep the scale of scores."""
    rotary = next((m for m in attention.modules() if isinstance(m, Rotary)), None)
    scale = D**-0.5 if attention.scale is None else attention.scale
    latent_scale = (D + rotary_dim) ** -0.5 * (1.0 if rotary is None else rotary.softmax_factor)
    # the factor on cos and sin of queries and keys belongs to the rotation
    square = 1.0 if rotary is None else rotary.rotary_factor**2
    return scale / latent_scale * square, scale / latent_scale


def _constant(rank: int) -> tuple[float, float]:
    """Return the latent's constant C, and its weight near C / sqrt(rank), exact in 16 bits."""
    constants = (
        MAX_CONSTANT * torch.linspace(0.5, 1, 129, dtype=torch.float32, device="cpu")
    ).double()
    wanted = constants / rank**0.5
    weights = wanted.bfloat16().double()
    best = int((weights / wanted - 1).abs().argmin())
    return float(constants[best]), float(weights[best])


def _config(checkpoint: Checkpoint, layer: AttentionMaps, rank: int) -> DeepseekV2Config:
    c = checkpoint.config
    options = getattr(c, "attention_options", {})
    return DeepseekV2Config(
        vocab_size=c.vocab_size,
        hidden_size=c.hidden_size,
        intermediate_size=c.intermediate_size,
        # every layer is dense, so the keys for experts are not used
        moe_intermediate_size=c.intermediate_size,
        n_routed_experts=1,
        num_experts_per_tok=1,
        n_shared_experts=1,
        first_k_dense_replace=c.num_hidden_layers,
        num_hidden_layers=c.num_hidden_layers,
        num_attention_heads=len(layer.q),
        num_key_value_heads=len(layer.q),
        kv_lora_rank=rank,
        q_lora_rank=None,
        qk_nope_head_dim=layer.k.shape[1],
        qk_rope_head_dim=max(2, 2 * layer.pairs),
        v_head_dim=layer.v.shape[1],
        rms_norm_eps=c.rms_norm_eps,
        rope_theta=getattr(c, "rope_theta", options.get("base", 10000.0)),
        rope_scaling=getattr(c, "rope_scaling", None),
        max_position_embeddings=c.max_position_embeddings,
        attention_bias=True,
        tie_word_embeddings=c.tie_word_embeddings,
    )


def _check(block: nn.Module, embed: InputEmbedding) -> None:
    """Check that DeepSeek's block can express this block."""
    attention = getattr(block, "attention", None)
    if isinstance(getattr(attention, "project", None), LatentProjection):
        raise ArgumentError("the model has latent attention already")
    its_attention = separate_attention(block)
    project = its_attention.project
    steps = [step for heads in (project.q, project.k, project.v) for step in heads.steps]
    flat = [heads.flat for heads in (project.q, project.k, project.v)]
    norms = (
        block.get_submodule("attention_residual"),
        block.get_submodule("feed_forward_residual"),
    )
    feed_forward = block.get_submodule("feed_forward")
    rotary = [step for step in steps if isinstance(step, Rotary)]
    reasons = {
        "positions in its embedding": embed.positional is not None,
        "a scaled embedding": embed.scale != 1,
        f"a mask of {its_attention.mask}": its_attention.mask != masks.Causal(),
        "a softcap": its_attention.softcap is not None,
        "a bias on scores": its_attention.bias is not None,
        "a sink": its_attention.sink is not None,
        "norms or other steps on heads": any(not isinstance(s, Rotary) for s in steps)
        or any(not isinstance(f, nn.Identity) for f in flat),
        "a bias on queries": project.q.linear.bias is not None,
        "rotary positions that depend on the length": project.key_transform is not None,
        "a rotary that rotates a part of each head": any(
            2 * len(r.inv_freq) < r.dim for r in rotary
        ),
        "norms of another kind": any(
            not isinstance(p, PreNorm) or type(p.norm) is not RMSNorm for p in norms
        ),
        "another feed-forward layer": not isinstance(feed_forward, SwiGLU)
        or feed_forward.gate.bias is not None,
    }
    if problems := [name for name, present in reasons.items() if present]:
        raise ArgumentError(
            f"this model has {' and '.join(problems)}, which DeepSeek's layers do not have; "
            "only these can be converted: llama, mistral without a window, and regard's gqa"
        )
