"""Constructors of the Mesa layer and the linear memory of Titans, which fit a map from keys to
values while they read, and of the short convolution alone.
"""

from __future__ import annotations

from regard.argument_checks import resolve_head_dim
from regard.errors import ArgumentError
from regard.nn.delta_rules import MesaRule, TitansRule
from regard.nn.norms import L2Norm, RMSNorm
from regard.nn.recurrent import GatedConvolution, Recurrent
from regard.nn.variants.linear_recurrence import convolved_qkv
from regard.nn.variants.projections import output_projection
from regard.nn.variants.registry import variant


@variant(
    family="linear",
    equation="A <- exp(g) A + beta k k^T; C <- exp(g) C + beta k v^T; z = norm(C^T y), (A + "
    "diag(r)) y = q; q, k, v after a convolution",
    source="von Oswald et al. 2025 (arXiv 2506.05233), section 3",
)
def mesa(
    dim: int,
    heads: int,
    *,
    head_dim: int | None = None,
    value_dim: int | None = None,
    kernel: int = 4,
) -> Recurrent:
    """Mesa layer: each token solves the regression from all past keys to their values, and applies
    the solution to its query.

    x [B,T,M] -> [B,T,M]; a cache stores H D (D + E) values at any length, and the last inputs of
    the convolution. The systems are solved exactly, by Cholesky factors. The convolution runs over
    queries, keys and values, where the authors' code leaves out the values.

    Args:
        dim: the model dim M.
        heads: the heads H.
        head_dim: the head dim D; None is M / H.
        value_dim: the value dim E; None is D.
        kernel: the tokens of the short causal convolution over queries, keys and values.

    Returns:
        The module.

    Raises:
        ArgumentError: a size is less than 1, or head_dim is None and M / H is not whole.

    >>> import torch
    >>> mesa(32, 4)(torch.zeros(1, 5, 32)).shape
    torch.Size([1, 5, 32])

    Source: von Oswald et al. 2025 (arXiv 2506.05233), section 3.
    """
    D = resolve_head_dim(dim, heads, head_dim)
    E = D if value_dim is None else value_dim
    project = convolved_qkv(dim, heads, heads, None, D, E, kernel, L2Norm())
    output = output_projection(dim, heads, E)
    return Recurrent(project, MesaRule(dim, heads, D), output, norm=RMSNorm(E))


@variant(
    family="linear",
    equation="N <- exp(e) N + beta k (v - S^T k)^T; S <- exp(g) S + N; z = norm(S^T q / sqrt(D)); "
    "q, k, v after a convolution",
    source="Behrouz et al. 2024 (arXiv 2501.00663), section 3.1",
)
def titans_linear(
    dim: int,
    heads: int,
    *,
    head_dim: int | None = None,
    value_dim: int | None = None,
    kernel: int = 4,
) -> Recurrent:
    """Linear memory of Titans: each token moves the memory by a step of gradient descent with
    momentum, and the memory forgets.

    x [B,T,M] -> [B,T,M]; a cache stores 2 H D E values at any length, and the last inputs of the
    convolution. The memory of the paper's larger models is a network of several layers, which has
    no form as a recurrence of matrices.

    Args:
        dim, heads, head_dim, value_dim, kernel: as for `mesa`.

    Returns:
        The module.

    Raises:
        ArgumentError: as for `mesa`.

    >>> import torch
    >>> titans_linear(32, 4)(torch.zeros(1, 5, 32)).shape
    torch.Size([1, 5, 32])

    Source: Behrouz et al. 2024 (arXiv 2501.00663), section 3.1.
    """
    D = resolve_head_dim(dim, heads, head_dim)
    E = D if value_dim is None else value_dim
    project = convolved_qkv(dim, heads, heads, None, D, E, kernel, L2Norm())
    output = output_projection(dim, heads, E)
    return Recurrent(project, TitansRule(dim, heads), output, norm=RMSNorm(E))


@variant(
    family="linear",
    equation="out = W_o (c * y); y_t = sum_l f_l * (e * u)_(t-l); e, c, u = W x",
    source="Liquid AI 2025, LFM2 (arXiv 2511.23404), section 2",
)
def short_convolution(dim: int, heads: int, *, kernel: int = 3) -> GatedConvolution:
    """Short convolution between two gates: every channel is a weighted sum over the last few tokens
    only.

    x [B,T,M] -> [B,T,M]; a cache stores the last kernel - 1 inputs of M channels.

    Args:
        dim: the model dim M.
        heads: the heads H of the attention layers beside it; a convolution has none, because each
            channel has a filter of its own.
        kernel: the tokens that a filter reaches, the present one included.

    Returns:
        The module.

    Raises:
        ArgumentError: a size is less than 1.

    >>> short_convolution(32, 4).describe().state.formula
    'c (k - 1) = 32 x 2'

    Source: Liquid AI 2025, LFM2 (arXiv 2511.23404), section 2; the published code of LFM2.
    """
    if heads < 1:
        raise ArgumentError(f"heads is {heads}; it must be at least 1", argument="heads")
    return GatedConvolution(dim, kernel)
