"""QK and OV circuits of heads as products of two small matrices: what a head looks for and what it
writes, whether it copies, and how heads of later layers read it.

Row vectors stand on the left: x W. Every d_model x d_model matrix stays a product of two factors,
and eigenvalues, singular values and norms are computed in the dims of a head.
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, Literal, NamedTuple, get_args

import numpy as np
import torch
from jaxtyping import Complex, Float
from torch import Tensor, nn

from regard.errors import ArgumentError, ArgumentTypeError
from regard.inspect.interventions.effect_table import EffectTable, head_table
from regard.inspect.interventions.residual_terms import FrozenNorm, OutputMap, freeze
from regard.inspect.model_run import check_index
from regard.language import Phrase
from regard.models.model import Model
from regard.models.text_encoder import TextEncoder
from regard.nn.attention.attention import Attention
from regard.nn.blocks.blocks import OutputNorm, PreNorm, SandwichNorm, ScaledPreNorm
from regard.untrusted_text import tuple_repr

ReadBy = Literal["q", "k", "v"]
"""The input of a later head through which it reads an earlier one."""

_LINEAR = 1e-9
"""The largest relative error of a map that counts as linear, in fp64."""


class FactoredMatrix(NamedTuple):
    """A matrix left @ right of rank r, far below its size.

    Args:
        left: `[N, r]`, in fp64.
        right: `[r, M]`.

    >>> product = FactoredMatrix(torch.ones(3, 1).double(), torch.ones(1, 3).double())
    >>> round(product.norm(), 6), product.eigenvalues().real.tolist()
    (3.0, [3.0])
    """

    left: Float[Tensor, "N r"]
    right: Float[Tensor, "r M"]

    def __repr__(self) -> str:
        return tuple_repr(self)

    def matrix(self) -> Float[Tensor, "N M"]:
        """Return the matrix itself.

        Returns:
            left @ right, `[N, M]`.
        """
        product: Tensor = self.left @ self.right
        return product

    def singular_values(self) -> Float[Tensor, " r"]:
        """Return the singular values that need not be 0, from the largest.

        Returns:
            The values, `[min(r, N, M)]`.
        """
        values: Tensor = torch.linalg.svdvals(_triangle(self.left) @ _triangle(self.right.T).T)
        return values

    def norm(self) -> float:
        """Return the Frobenius norm.

        Returns:
            The root of the sum of all squared entries.
        """
        return float((_triangle(self.left) @ self.right).norm())

    def eigenvalues(self) -> Complex[Tensor, " r"]:
        """Return the eigenvalues that need not be 0, those of right @ left.

        Returns:
            The values, `[r]`, from the largest by absolute value.

        Raises:
            ArgumentError: the matrix is not square.
        """
        if self.left.shape[0] != self.right.shape[1]:
            size = f"{self.left.shape[0]} x {self.right.shape[1]}"
            raise ArgumentError(f"the matrix is {size}; only a square one has eigenvalues")
        values: Tensor = torch.linalg.eigvals(self.right @ self.left)
        return values[values.abs().argsort(descending=True)]


def _triangle(x: Tensor) -> Tensor:
    """Return R of x = Q R, which has the singular values of x `[N, r]`."""
    triangle: Tensor = torch.linalg.qr(x, mode="r").R
    return triangle


@dataclass(frozen=True, eq=False)
class HeadCircuits:
    """The two circuits of a head, for states before the norm of its block.

    The scores between tokens x and y are norm(x) W_Q W_K^T norm(y)^T, and what y adds to the stream
    is its weight times norm(y) W_V W_O. Gain and centring of the norm are part of the factors; its
    scale, which depends on the state, and biases are not.

    Args:
        qk: W_Q W_K^T with the scale of the scores, `[M, M]`; None where the steps on queries or
            keys are not linear, as a norm on them.
        ov: W_V W_O, `[M, M]`.
        why_no_qk: why `qk` is None.
    """

    qk: FactoredMatrix | None
    ov: FactoredMatrix
    why_no_qk: str = ""

    def __repr__(self) -> str:
        (M, E), qk = self.ov.left.shape, self.qk
        D = None if qk is None else qk.left.shape[1]
        return f"HeadCircuits(M={M}, qk={D}, ov={E})"


def head_circuits(
    model: Model | TextEncoder, layer: int, head: int, *, distance: int = 0
) -> HeadCircuits:
    """Return the QK and OV circuits of one head.

        QK = W_Q R(distance) W_K^T * scale;  OV = W_V W_O

    A query head reads the key and value head of its group. With rotary positions, QK is that of a
    key so many tokens before the query.

    Args:
        model: a `Model` or a `TextEncoder`.
        layer: index of the layer; negative counts from the end.
        head: query head.
        distance: how many tokens the key stands before the query, at least 0.

    Returns:
        Both circuits, as products of factors in fp64.

    Raises:
        ArgumentError: there is no such head, or its layer has no such matrices: latent attention
            with a norm, a gate on the heads, a recurrence.
        ArgumentTypeError: the model is another one.

    >>> import regard
    >>> circuits = head_circuits(regard.load("tiny"), 1, 6, distance=1)
    >>> circuits.ov.matrix().shape, len(circuits.ov.eigenvalues())
    (torch.Size([256, 256]), 32)

    Source: Elhage et al. 2021, "A Mathematical Framework for Transformer Circuits".
    """
    blocks = _blocks_of(model)
    layer = check_index("layer", layer, len(blocks), "layer", "layers")
    maps = _layer_maps(blocks[layer], f"layers.{layer}", distance)
    return maps.head(check_index("head", head, len(maps.output), "head", "heads"))


class _LayerMaps(NamedTuple):
    """The maps of the heads of a layer from normed states `[.., M, d]`, and back `[H, E, M]`."""

    query: Tensor
    key: Tensor
    value: Tensor
    output: Tensor
    why_no_qk: str

    def head(self, h: int) -> HeadCircuits:
        """Return the circuits of one query head."""
        H = len(self.output)
        qk, v = None, self.value[h * len(self.value) // H]
        if not self.why_no_qk:
            qk = FactoredMatrix(self.query[h], self.key[h * len(self.key) // H].T)
        return HeadCircuits(qk, FactoredMatrix(v, self.output[h]), self.why_no_qk)


def _blocks_of(model: Model | TextEncoder) -> Sequence[Any]:
    """Return the blocks of a model of this package with one stack."""
    if isinstance(model, Model):
        return list(model.decoder.layers)
    if isinstance(model, TextEncoder):
        network: Any = model.network
        return list(getattr(network, "encoder", network).layers)
    raise ArgumentTypeError(
        f"model is {type(model).__name__}; circuits are matrices of a Model or a TextEncoder: "
        "regard.load reads checkpoints as these",
        argument="model",
    )


@torch.no_grad()
def _layer_maps(block: nn.Module, place: str, distance: int) -> _LayerMaps:
    """Measure the maps of one layer on unit vectors, so that any projection that is linear works.

    Each map is compared with the module itself on a random state.
    """
    if distance < 0:
        raise ArgumentError(f"distance is {distance}; it must be at least 0", argument="distance")
    if not isinstance(getattr(block, "attention", None), Attention):
        raise ArgumentError(f"{place} has no softmax attention, and so no QK and OV circuits")
    attention: Any = copy.deepcopy(block.attention).double().cpu()
    project, path = attention.project, getattr(block, "attention_residual", None)
    scale = attention.scale if attention.scale is not None else project.shape.D**-0.5
    output = output_map(attention, place)
    H, _, M = output.shape

    def query(x: Tensor) -> Tensor:
        positions = torch.full(x.shape[:2], distance)
        first = torch.zeros_like(positions)
        q = project.adjust_query(project.query(x, positions), positions, first)
        scaled: Tensor = q * scale
        return scaled

    def memory(x: Tensor) -> tuple[Tensor, Tensor]:
        positions = torch.zeros(x.shape[:2], dtype=torch.int64)
        remembered = project.remember(x, positions)
        recalled: tuple[Tensor, Tensor] = project.recall(remembered, positions)
        return recalled

    q, k, v = (_matrix_of(f, M) for f in (query, lambda x: memory(x)[0], lambda x: memory(x)[1]))
    if v is None:
        raise ArgumentError(
            f"the values of {type(project).__name__} at {place} are not linear in the state, so "
            "that no OV matrix exists"
        )
    reasons = []
    if q is None or k is None:
        reasons = [f"the queries or keys of {place} are not linear in the state: they have a norm"]
    elif attention.score is not None:
        reasons = [f"{attention.score} changes the scores of {place}"]
    fold, nothing = _reading_map(path, M), torch.zeros(0, M, 0, dtype=torch.float64)
    q_map, k_map, v_map = (nothing if w is None else fold(w) for w in (q, k, v))
    # [H, E, M] -> [H E, M] and back
    written = _writing_map(path, output.flatten(0, 1)).unflatten(0, (H, -1))
    return _LayerMaps(q_map, k_map, v_map, written, "".join(reasons))


@torch.no_grad()
def output_map(attention: Any, place: str) -> Tensor:
    """Return what a layer adds for each dim of each head, `[H, E, M]`, in fp64.

    A step that changes the heads behind attention, such as a gate, is refused.
    """
    attention = copy.deepcopy(attention).double().cpu()
    out, shape = attention.output, attention.project.shape
    M, draw = getattr(out, "out_features", 0), torch.Generator().manual_seed(0)
    z = torch.randn(1, shape.H, 2, shape.E, dtype=torch.float64, generator=draw)
    x = torch.randn(1, 2, M, dtype=torch.float64, generator=draw)
    after = attention.project.postprocess_at(z, x, torch.arange(2)[None]) if M else x
    matrix = None
    if torch.equal(after, z):
        matrix = _matrix_of(lambda y: out(y)[:, None], shape.H * shape.E)
    if matrix is None:
        raise ArgumentError(
            f"a step behind the attention of {place} changes its heads (a norm or a gate), or its "
            "output map is not linear, so that what a head adds is no matrix of its output"
        )
    # [1, H E, M] -> [H, E, M]
    maps: Tensor = matrix[0].unflatten(0, (shape.H, shape.E))
    return maps


def _matrix_of(function: Callable[[Tensor], Tensor], size: int) -> Tensor | None:
    """Return the linear part `[n, size, d]` of a map from `[1, L, size]` to `[1, n, L, d]`; None
    if the map is not affine.
    """
    zero = function(torch.zeros(1, 1, size, dtype=torch.float64))
    matrix: Tensor = (function(torch.eye(size, dtype=torch.float64)[None]) - zero)[0]
    x = torch.randn(1, 3, size, dtype=torch.float64, generator=torch.Generator().manual_seed(0))
    wanted = (function(x) - zero)[0]
    error = float((x[0] @ matrix - wanted).abs().max())
    return matrix if error <= _LINEAR * float(wanted.abs().max() + zero.abs().max()) else None


def _frozen_gain(norm: nn.Module, size: int) -> FrozenNorm:
    """Return a norm as a linear map; its gain and centring do not depend on the state."""
    x = torch.randn(1, 1, size, generator=torch.Generator().manual_seed(0))
    parameter = next(norm.parameters(), None)
    return freeze(norm, x if parameter is None else x.to(parameter))


def _reading_map(path: nn.Module | None, size: int) -> Callable[[Tensor], Tensor]:
    """Return the function that puts gain and centring of a norm before maps `[n, M, d]`."""
    if not isinstance(path, (PreNorm, SandwichNorm)) or isinstance(path.norm, nn.Identity):
        return lambda w: w
    norm = _frozen_gain(path.norm, size)

    def fold(w: Tensor) -> Tensor:
        w = w * norm.gain[:, None]
        return w - w.mean(1, keepdim=True) if norm.is_centred else w

    return fold


def _writing_map(path: nn.Module | None, out: Tensor) -> Tensor:
    """Return the output map `[H E, M]` with what the residual connection does to its result."""
    if isinstance(path, ScaledPreNorm):
        return out * path.scale
    after = getattr(path, "after", path.norm if isinstance(path, OutputNorm) else None)
    if after is None:
        return out
    norm = _frozen_gain(after, out.shape[-1])
    return (out - out.mean(-1, keepdim=True) if norm.is_centred else out) * norm.gain


@torch.no_grad()
def vocabulary_product(model: Model) -> Float[Tensor, "M M"]:
    """Return the product of unembedding and embedding, through which OV acts on tokens.

        G = W_U W_E,  and eig(W_E W_V W_O W_U) = eig(W_O G W_V), besides zeros

    So `FactoredMatrix(G @ ov.left, ov.right).eigenvalues()` are those of the map from tokens to
    logits, without a matrix of the size of the vocabulary. The gain of the last norm is part of it.

    Args:
        model: a `Model` with a head.

    Returns:
        The product, `[M, M]`, in fp64.

    Raises:
        ArgumentError: the model has no head.
        ArgumentTypeError: the model is another one.

    >>> import regard
    >>> vocabulary_product(regard.load("tiny")).shape
    torch.Size([256, 256])

    Source: Elhage et al. 2021, section "summarizing OV/QK matrices".
    """
    if not isinstance(model, Model):
        raise ArgumentTypeError(f"model is {type(model).__name__}; it must be a Model")
    decoder: Any = model.decoder
    head = copy.deepcopy(decoder.require_head()).double().cpu()
    output = OutputMap(decoder.norm, head, torch.zeros(0))
    embedding = decoder.embed.embedding
    V, M = embedding.num_embeddings, embedding.embedding_dim
    zero = output.before_cap(torch.zeros(1, M, dtype=torch.float64))
    unembed = torch.zeros(M, M, dtype=torch.float64)
    tokens = torch.arange(V, device=model.device)
    rows = torch.eye(M, dtype=torch.float64).split(_ROWS)
    for i, unit in enumerate(rows):
        logits = output.before_cap(unit) - zero
        part = unembed[i * _ROWS : i * _ROWS + len(unit)]
        for ids in tokens.split(_TOKENS):
            part += logits[:, ids.cpu()] @ embedding(ids).double().cpu()
    if isinstance(decoder.norm, nn.Identity):
        return unembed
    norm = _frozen_gain(decoder.norm, M)
    unembed = norm.gain[:, None] * unembed
    return unembed - unembed.mean(0) if norm.is_centred else unembed


_ROWS, _TOKENS = 256, 8192
"""How many dims and tokens one product of `vocabulary_product` takes."""


def copying_scores(model: Model) -> EffectTable:
    """Compute how much each head raises the logits of the tokens that it reads.

        score = sum of the eigenvalues / sum of their absolute values, of W_E W_V W_O W_U

    1 is a head whose eigenvalues are all positive: it copies. -1 suppresses what it reads.

    Args:
        model: a `Model` with a head.

    Returns:
        A table of layers and heads.

    Raises:
        ArgumentError, ArgumentTypeError: as for `head_circuits` and `vocabulary_product`.

    >>> import regard
    >>> table = copying_scores(regard.load("tiny"))
    >>> table.values.shape, bool(abs(table.values).max() <= 1)
    ((4, 8), True)

    Source: Elhage et al. 2021, section "copying / primacy of eigenvalues".
    """
    product = vocabulary_product(model)
    scores: dict[str, list[float]] = {}
    for i, block in enumerate(model.decoder.layers):
        maps = _layer_maps(block, f"layers.{i}", 0)
        ovs = [maps.head(h).ov for h in range(len(maps.output))]
        spectra = [FactoredMatrix(product @ ov.left, ov.right).eigenvalues() for ov in ovs]
        scores[f"layers.{i}"] = [float(x.real.sum() / x.abs().sum()) for x in spectra]
    return head_table(
        "copying scores of the OV circuits",
        "sum of the eigenvalues by that of their absolute values",
        scores,
        notes=("from weights alone: whether the head attends to a token is not counted",),
    )


@torch.no_grad()
def composition_scores(
    model: Model | TextEncoder, through: ReadBy = "k", *, distance: int = 0
) -> EffectTable:
    """Compute how much of what each head writes each head of a later layer reads.

        score = |OV_1 X_2| / (|OV_1| |X_2|),  X = QK ("q"), QK^T ("k") or OV ("v")

    with Frobenius norms, which need matrices of the size of a head only.

    Args:
        model: a `Model` or a `TextEncoder` whose states are sums (pre-norm).
        through: whether the later head reads by its query, key or value.
        distance: how many tokens its key stands before its query, for rotary positions.

    Returns:
        A table of earlier heads (rows) and later heads (columns).

    Raises:
        ArgumentError, ArgumentTypeError: as for `head_circuits`; or the model normalizes the sums
            themselves, so that later heads do not read what was written.

    >>> import regard
    >>> table = composition_scores(regard.load("tiny"), "k", distance=1)
    >>> table.values.shape, table.top(1)[0]["writing head"]
    ((32, 32), 'layers.1.head.6')

    Source: Elhage et al. 2021, section "composition".
    """
    if through not in get_args(ReadBy):
        raise ArgumentError(argument="through", value=through, allowed="q, k or v")
    names: list[str] = []
    written = torch.zeros(0)
    columns: list[np.ndarray] = []
    for i, block in enumerate(_blocks_of(model)):
        place, path = f"layers.{i}", getattr(block, "attention_residual", None)
        if not isinstance(path, (PreNorm, SandwichNorm, OutputNorm)):
            raise ArgumentError(
                f"{place} adds by {type(path).__name__}, which normalizes the sum itself, so that "
                "later heads do not read what a head wrote; head_circuits takes this model"
            )
        maps = _layer_maps(block, place, distance)
        if maps.why_no_qk and through != "v":
            raise ArgumentError(f"{maps.why_no_qk}, so that no QK matrix exists; use through='v'")
        heads = [maps.head(h) for h in range(len(maps.output))]
        factors = [_read_factors(through, each) for each in heads]
        readers = [each.left @ _triangle(each.right.T).T for each in factors]  # [M, r]
        read = torch.cat([_unit(each) for each in readers], 1)
        shares = (written @ read if len(names) else torch.zeros(0, read.shape[1])).double()
        # [n E, H r] -> [n, E, H, r] -> [n, H]
        E = heads[0].ov.left.shape[1]
        blocks = shares.unflatten(1, (len(heads), -1)).unflatten(0, (len(names), E))
        columns.append(blocks.square().sum((1, 3)).sqrt().numpy())
        writers = [_triangle(each.ov.left) @ each.ov.right for each in heads]  # [E, M]
        new = torch.cat([_unit(each) for each in writers])
        written = torch.cat([written, new]) if len(names) else new
        names += [f"{place}.head.{h}" for h in range(len(heads))]
    values = np.full((len(names), len(names)), np.nan)
    column = 0
    for part in columns:
        values[: part.shape[0], column : column + part.shape[1]] = part
        column += part.shape[1]
    by_chance = written.shape[1] ** -0.5
    return EffectTable(
        Phrase("composition of heads through {tap}", tap=through),
        "share of the Frobenius norms",
        values,
        "writing head",
        "reading head",
        tuple(names),
        tuple(names),
        notes=(
            Phrase("matrices at random have {value}", value=f"{by_chance:.3f}"),
            "from weights alone: the scale of norms and the attention are not counted",
        ),
    )


def _unit(x: Tensor) -> Tensor:
    """Return a matrix with the norm 1; a head that reads or writes nothing keeps its zeros."""
    unit: Tensor = x / x.norm().clamp(min=torch.finfo(x.dtype).tiny)
    return unit


def _read_factors(through: ReadBy, head: HeadCircuits) -> FactoredMatrix:
    """Return the matrix by which a head reads a state on the left."""
    if through == "v" or head.qk is None:
        return head.ov
    return head.qk if through == "q" else FactoredMatrix(head.qk.right.T, head.qk.left.T)
