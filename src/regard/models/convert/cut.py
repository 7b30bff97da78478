"""The maps of a layer as latent attention has them: a common rotary key, and the rest cut to a rank."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from jaxtyping import Complex, Float
from torch import Tensor, nn

from regard.models.convert.heads import common_pairs
from regard.models.convert.layer import Errors, Layer
from regard.models.convert.roots import both_roots

_AT_ONCE = 1 << 16
"""Distances whose turns are in memory at once."""


@dataclass(frozen=True)
class Split:
    """Keys and values, with what turns set apart.

    Attributes:
        turned: the common rotary key [p, M+1], complex.
        factor: what it is times for each head [G, p], complex.
        k, v: keys without position [G, D, M+1], and values [G, E, M+1].
        lost: the relative error of the score forms so far.
    """

    turned: Tensor
    factor: Tensor
    k: Tensor
    v: Tensor
    lost: float


@dataclass(frozen=True)
class Cut:
    """Keys without position and values at a rank.

    Attributes:
        down: [n, M+1], of spectral norm 1 with the layer's gain: |down x|^2 is at most M + 1.
        up_k, up_v: [G, D, n] and [G, E, n].
        errors: of the layer, the rotary split included.
        spectrum: all singular values; the score forms and the value forms have a norm of 1 each.
    """

    down: Tensor
    up_k: Tensor
    up_v: Tensor
    errors: Errors
    spectrum: Tensor


def mean_turn(inv_freq: Float[Tensor, " p"], length: int) -> Complex[Tensor, " p"]:
    """The mean of exp(-i theta d) over the distances 0 <= d < length, each doubling of the distance counted alike.

    sum_d exp(-i theta d) / (d + 1) / sum_d 1 / (d + 1)

    >>> turn = mean_turn(torch.tensor([1.0, 0.0], dtype=torch.float64), 256).abs()
    >>> [round(x, 3) for x in turn.tolist()]
    [0.175, 1.0]
    """
    found = torch.zeros(len(inv_freq), dtype=torch.complex128)
    for start in range(0, length, _AT_ONCE):
        d = torch.arange(start, min(length, start + _AT_ONCE), dtype=torch.float64)
        for i, theta in enumerate(inv_freq.double().cpu()):
            found[i] += (torch.polar(torch.ones_like(d), -theta * d) / (d + 1)).sum()
    weights = torch.arange(1, length + 1, dtype=torch.float64)
    return found / (1 / weights).sum()


def split_rotary(layer: Layer, turn: Complex[Tensor, " p"]) -> Split:
    """The best common rotary key, and the rest of each key at its mean turn.

    k_j = c_j k + r_j for each rotary pair;  r_j becomes turn * r_j, without position

    The score forms lose sum_j |w_j r_j|^2 (1 - |turn|^2), the mean over the distances of the turn.
    """
    k, rest = layer.split(layer.k)
    common, factor = common_pairs(k, layer.pair_weights(), layer.gain, 1)
    residual = k - factor[..., None] * common
    missed = (1 - turn.abs().square()).clamp(min=0).sqrt()
    lost = layer.key_norm(layer.join(missed[:, None] * residual, torch.zeros_like(rest)))
    keys = layer.join(turn[:, None] * residual, rest)
    return Split(common[0], factor, keys, layer.v, lost / (layer.key_norm(layer.k) or 1))


def cut_to_rank(layer: Layer, split: Split, n: int) -> Cut:
    """The n rows from which keys without position and values are made with the least error.

    [S_k k / |scores|; S_v v / |values|] ~ U_n U_n^T [...], with S_k^2 and S_v^2 the Gram matrices of the queries and of the
    output maps: by Eckart and Young the squared error is the sum of the squared singular values behind the first n.
    """
    G, D, _ = split.k.shape
    gram = query_gram(layer)
    sizes = layer.key_norm(layer.k) or 1.0, layer.value_norm(layer.v) or 1.0
    roots = both_roots(gram), both_roots(layer.value_gram())
    maps = zip(roots, (split.k, split.v), sizes, strict=True)
    stacked = torch.cat([(root @ x / size).flatten(0, 1) for (root, _), x, size in maps])
    u, spectrum, _ = torch.linalg.svd(stacked * layer.gain, full_matrices=False)
    u = nn.functional.pad(u[:, :n], (0, max(0, n - u.shape[1])))
    down = u.mT @ stacked
    # what stands behind a norm, of M numbers with a mean square of 1, becomes numbers with one of 1 at most
    bound = float(torch.linalg.matrix_norm(down * layer.gain, 2)) or 1.0
    up_k = roots[0][1] @ u[: G * D].unflatten(0, (G, D)) * (sizes[0] * bound)
    up_v = roots[1][1] @ u[G * D :].unflatten(0, (G, split.v.shape[1])) * (sizes[1] * bound)
    down = down / bound
    scores = _form_norm(gram, (split.k - up_k @ down) * layer.gain) / sizes[0]
    values = layer.value_norm(split.v - up_v @ down) / sizes[1]
    return Cut(down, up_k, up_v, Errors((scores**2 + split.lost**2) ** 0.5, values), spectrum)


def query_gram(layer: Layer) -> Float[Tensor, "G D D"]:
    """Of the queries that read a key head, in all dims: keys without position meet them unturned."""
    q = layer.q * layer.gain
    return (q @ q.mT).unflatten(0, (-1, layer.share)).sum(1)


def curve(cuts: list[Cut], full: int) -> dict[int, float]:
    """How many rows -> the relative error of what they carry, the root mean square over layers, in sixteen steps up to all."""
    ranks = sorted({max(1, round(full * step / 16)) for step in range(1, 17)})
    squares = [cut.spectrum.square() for cut in cuts]
    left = [[x[rank:].sum() / x.sum().clamp(min=1e-300) for rank in ranks] for x in squares]
    means = torch.tensor(left, dtype=torch.float64).mean(0).sqrt().tolist()
    return dict(zip(ranks, means, strict=True))


def _form_norm(gram: Tensor, x: Tensor) -> float:
    return float((gram * (x @ x.mT)).sum().clamp(min=0).sqrt())
