"""Record the operations that a module runs, and find attention among them.

`OperationRecorder` records each operation with its result, so that a graph leads from the tokens
and the parameters to the output. `find_attention` starts at every product with values and goes back
through its softmax to the product of queries and keys, whatever is computed before them (norms,
latents, rotary) and after them.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field
from typing import Any

from torch import Tensor, nn
from torch._ops import OpOverload
from torch.utils._python_dispatch import TorchDispatchMode

from regard.audit.adapters.base import CheckNotPossible
from regard.language import Phrase

MATMUL_OPS = ("bmm", "mm", "baddbmm", "addmm")
LINEAR_OPS = (*MATMUL_OPS, "linear", "convolution", "embedding")
FUSED_ATTENTION_PREFIX = "_scaled_dot_product"
SOFTMAX_OPS = ("_softmax", "_safe_softmax", "exp", "exp2")
LAYOUT_OPS = (
    *("view", "_unsafe_view", "reshape", "_reshape_alias", "transpose", "t", "permute"),
    *("expand", "clone", "_to_copy", "alias", "detach", "unsqueeze", "squeeze", "slice"),
    *("select", "split", "split_with_sizes", "unbind", "copy", "repeat", "view_as_real"),
    *("view_as_complex", "index", "index_select", "roll", "as_strided", "unfold"),
    *("flatten", "contiguous", "squeeze_", "_conj", "resolve_conj", "lift_fresh", "narrow"),
)
MASKING_OPS = (
    *("masked_fill", "where", "clamp", "clamp_min"),
    *("tril", "triu", "index_put", "nan_to_num"),
)
NORM_OPS = ("native_layer_norm", "_fused_rms_norm", "rms_norm", "linalg_vector_norm")
TOLERANCE = 1e-6
"""Numbers that differ by less, relative to 1, count as equal."""


@dataclass(eq=False)
class OperationNode:
    """One operation with one of its results, or a leaf: a parameter, a constant or the tokens."""

    name: str
    value: Tensor
    inputs: list[OperationNode] = field(default_factory=list)
    scalars: list[float] = field(default_factory=list)
    options: dict[str, Any] = field(default_factory=dict)
    tokens: bool = False
    weights: frozenset[str] = frozenset()

    @property
    def token_inputs(self) -> list[OperationNode]:
        """The inputs that depend on the tokens."""
        return [n for n in self.inputs if n.tokens]


class OperationRecorder(TorchDispatchMode):
    """Record the operations below autograd: a few basic ones, however attention is written.

    >>> import torch
    >>> x = torch.ones(1, 2, 3)
    >>> with OperationRecorder(torch.nn.Identity(), x) as recorder:
    ...     y = (x * 2).softmax(-1)
    >>> [node.name for node in recorder.nodes]
    ['mul', '_softmax']
    """

    def __init__(self, module: nn.Module, x: Tensor) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.nodes: list[OperationNode] = []
        self._node_by_id: dict[int, OperationNode] = {
            id(x): OperationNode("tokens", x, tokens=True)
        }
        self._references: list[object] = [x]  # keeps the tensors alive, so that no id is used twice
        for name, p in module.named_parameters():
            self._node_by_id[id(p)] = OperationNode(
                "parameter", p.detach(), weights=frozenset({name})
            )
            self._references.append(p)

    def __torch_dispatch__(
        self,
        func: OpOverload,
        types: object,
        args: tuple[object, ...] = (),
        kwargs: dict[str, object] | None = None,
    ) -> object:
        """Run an operation, and record it."""
        kwargs = kwargs or {}
        tensors = list(_tensors([*args, *kwargs.values()]))
        inputs = [self._node(t) for t in tensors]
        out = func(*args, **kwargs)
        name = func.overloadpacket.__name__
        in_place = name.endswith("_") and not name.startswith("_")
        scalars = [a for a in args if isinstance(a, (int, float)) and not isinstance(a, bool)]
        for result in _tensors([out]):
            node = OperationNode(
                name.rstrip("_") if in_place else name,
                result.detach().clone(),
                inputs,
                scalars,
                {**kwargs, "args": args},
                any(n.tokens for n in inputs),
                frozenset().union(*(n.weights for n in inputs)),
            )
            self.nodes.append(node)
            self._references.append(result)
            self._node_by_id[id(result)] = node
            if in_place and result._base is not None:
                self._references.append(result._base)
                self._node_by_id[id(result._base)] = node
        return out

    def _node(self, x: Tensor) -> OperationNode:
        """Return the node of a tensor; an unknown tensor is a constant."""
        if id(x) not in self._node_by_id:
            self._references.append(x)
            self._node_by_id[id(x)] = OperationNode("constant", x.detach().clone())
        return self._node_by_id[id(x)]


def _tensors(values: Iterable[object]) -> Iterable[Tensor]:
    """Yield the tensors in nested lists and tuples."""
    for value in values:
        if isinstance(value, Tensor):
            yield value
        elif isinstance(value, (list, tuple)):
            yield from _tensors(value)


@dataclass(eq=False)
class AttentionNodes:
    """One attention in the graph: a softmax, what leads to it, and the values that it weights."""

    query: OperationNode
    key: OperationNode
    value: OperationNode
    out: OperationNode
    products: list[tuple[OperationNode, float]] = field(default_factory=list)
    biases: list[tuple[OperationNode, float]] = field(default_factory=list)
    scale_free_reason: str | None = None
    weights: Tensor | None = None
    softmax: OperationNode | None = None
    additive: bool = False


def find_attention(recorder: OperationRecorder) -> list[AttentionNodes]:
    """Return every attention among the recorded operations: one, or one for each head."""
    after_softmax = _nodes_after_softmax(recorder)
    fused = (
        n for n in recorder.nodes if n.name.startswith(FUSED_ATTENTION_PREFIX) and n.value.ndim == 4
    )
    attentions = [_from_fused(node) for node in fused]
    for node in recorder.nodes:
        if node.name not in MATMUL_OPS or len(operands(node)) < 2:
            continue
        a, b = operands(node)
        if not (a.tokens and b.tokens) or (id(a) in after_softmax) == (id(b) in after_softmax):
            continue
        attentions.append(_from_products(node, a, b, weights_first=id(a) in after_softmax))
    unique = {id(attention.out.value): attention for attention in attentions}
    if not unique:
        raise CheckNotPossible("no product of a softmax and of values is found in its operations")
    return list(unique.values())


def _nodes_after_softmax(recorder: OperationRecorder) -> set[int]:
    """Return the ids of nodes that come from a softmax and are not yet multiplied with values."""
    node_ids: set[int] = set()
    for node in recorder.nodes:
        sources = [n for n in node.inputs if id(n) in node_ids]
        if (node.name in SOFTMAX_OPS and node.tokens) or (sources and node.name not in MATMUL_OPS):
            node_ids.add(id(node))
    return node_ids


def operands(node: OperationNode) -> list[OperationNode]:
    """Return the two factors of a product."""
    return node.inputs[1:3] if node.name in ("baddbmm", "addmm") else node.inputs[:2]


def _from_fused(node: OperationNode) -> AttentionNodes:
    """Return the attention of one of PyTorch's fused attention operations."""
    q, k, v = node.inputs[:3]
    options = node.options
    scale = options.get("scale")
    D = q.value.shape[-1]
    attention = AttentionNodes(q, k, v, node)
    gain = (
        (1 / math.sqrt(D) if scale is None else float(scale))
        * scale_and_weights(q)[0]
        * scale_and_weights(k)[0]
    )
    attention.scale_free_reason = _unit_vector_reason(q, k)
    attention.products = []
    attention.biases = [(n, 1.0) for n in node.inputs[3:4] if n.value.is_floating_point()]
    attention.out.options["gain"] = gain
    return attention


def _from_products(
    node: OperationNode, a: OperationNode, b: OperationNode, *, weights_first: bool
) -> AttentionNodes:
    """Return the attention that ends in the product `node` of weights and values."""
    pattern, value = (a, b) if weights_first else (b, a)
    weights = pattern.value if weights_first else pattern.value.transpose(-1, -2)
    softmax = _softmax_of(pattern)
    attention = AttentionNodes(value, value, value, node, weights=weights, softmax=softmax)
    for product, factor in _score_products(softmax.inputs[0], 1.0, attention):
        attention.products.append((product, factor))
    if not attention.products:
        attention.additive = True
        return attention
    attention.query, attention.key = operands(attention.products[0][0])
    attention.scale_free_reason = attention.scale_free_reason or _unit_vector_reason(
        attention.query, attention.key, transposed=True
    )
    return attention


def _softmax_of(node: OperationNode) -> OperationNode:
    """Return the softmax that a node comes from."""
    while node.name not in SOFTMAX_OPS:
        inner = [n for n in node.token_inputs if _comes_from_softmax(n)]
        if not inner:
            raise CheckNotPossible(
                Phrase(
                    "its weights come from {name}, and no softmax is found before it",
                    name=node.name,
                )
            )
        node = inner[0]
    return node


def _comes_from_softmax(node: OperationNode) -> bool:
    """Whether a node comes from a softmax."""
    return node.name in SOFTMAX_OPS or any(_comes_from_softmax(n) for n in node.token_inputs)


def _score_products(
    node: OperationNode, factor: float, attention: AttentionNodes
) -> Iterator[tuple[OperationNode, float]]:
    """Yield the products that a score is made of, each with its factor."""
    name, inner = node.name, node.token_inputs
    if name in MATMUL_OPS and all(n.tokens for n in operands(node)):
        alpha = float(node.options.get("alpha", 1.0))
        if name in ("baddbmm", "addmm"):
            attention.biases.append((node.inputs[0], factor * float(node.options.get("beta", 1.0))))
        yield node, factor * alpha
    elif name in ("mul", "div"):
        yield from _through_product(node, factor, attention)
    elif name in ("add", "sub"):
        yield from _through_sum(node, factor, attention)
    elif name in LINEAR_OPS or not inner:  # a learned map of features: additive attention
        if _contains_token_product(node):
            raise CheckNotPossible("its scores go through a learned map")
        return
    elif name in ("cat", "stack"):
        for n in inner:
            yield from _score_products(n, factor, attention)
    elif name == "neg":
        yield from _score_products(inner[0], -factor, attention)
    elif name in (*LAYOUT_OPS, *MASKING_OPS, "tanh", "relu", "sum"):
        yield from _score_products(inner[0], factor, attention)
    else:
        raise CheckNotPossible(
            Phrase("its scores go through {name}, which is not understood", name=name)
        )


def _contains_token_product(node: OperationNode) -> bool:
    """Whether a node depends on a product of tokens with tokens."""
    if node.name in MATMUL_OPS and all(n.tokens for n in operands(node)):
        return True
    return any(_contains_token_product(n) for n in node.token_inputs)


def _through_product(
    node: OperationNode, factor: float, attention: AttentionNodes
) -> Iterator[tuple[OperationNode, float]]:
    """Continue `_score_products` through a multiplication or division."""
    inner = node.token_inputs
    if len(inner) != 1:
        raise CheckNotPossible("its scores are multiplied by numbers that depend on the tokens")
    number = constant_of(node)
    if number is None:
        attention.scale_free_reason = (
            "its scores are multiplied by numbers that are learned, or "
            "that differ by head or position"
        )
        number = 1.0
    yield from _score_products(inner[0], factor * number, attention)


def _through_sum(
    node: OperationNode, factor: float, attention: AttentionNodes
) -> Iterator[tuple[OperationNode, float]]:
    """Continue `_score_products` through a sum or difference, and record biases."""
    inner = node.token_inputs
    sign = -1.0 if node.name == "sub" else 1.0
    if len(inner) == 1:
        other = next((n for n in node.inputs if not n.tokens), None)
        sign_of_scores, sign_of_bias = (1.0, sign) if node.inputs[0] is inner[0] else (sign, 1.0)
        if other is not None:
            attention.biases.append((other, sign_of_bias * (1.0 if factor > 0 else -1.0)))
        yield from _score_products(inner[0], factor * sign_of_scores, attention)
        return
    yield from _score_products(inner[0], factor, attention)
    if node.name != "sub" or not _is_row_maximum(inner[1]):  # which is subtracted before exp
        yield from _score_products(inner[1], factor * sign, attention)


def _is_row_maximum(node: OperationNode) -> bool:
    """Whether a node is the maximum or logsumexp of a row, which is subtracted before exp."""
    while node.name in LAYOUT_OPS and node.token_inputs:
        node = node.token_inputs[0]
    return node.name in ("amax", "max", "maximum", "logsumexp")


def constant_of(node: OperationNode) -> float | None:
    """Return the number by which a product or quotient scales its tensor, or None."""
    others = [n for n in node.inputs if not n.tokens]
    if others:
        if others[0].weights or others[0].value.numel() != 1 or others[0].value.is_complex():
            return None
        number = float(others[0].value)
    elif node.scalars:
        number = float(node.scalars[0])
    else:
        return None
    if node.name == "div":
        return 1.0 / number if number else None
    return number


def scale_and_weights(node: OperationNode) -> tuple[float, frozenset[str]]:
    """Return the factor between a map or norm and a node, and the names of its weights."""
    name, inner = node.name, node.token_inputs
    if name == "tokens" or not inner:
        return 1.0, node.weights
    if name in NORM_OPS or (name in LINEAR_OPS and any(n.weights for n in node.inputs)):
        return 1.0, node.weights if name in LINEAR_OPS else scale_and_weights(inner[0])[1]
    if name in ("mul", "div") and len(inner) == 2:  # a norm or a gate
        return 1.0, scale_and_weights(inner[0])[1]
    if name in ("mul", "div"):
        factor, names = scale_and_weights(inner[0])
        number = constant_of(node)
        return (factor if number is None else factor * number), names
    if name in ("add", "sub", "cat", "stack"):
        parts = [scale_and_weights(n) for n in inner]
        factors = [abs(factor) for factor, _ in parts]
        if max(factors) - min(factors) > TOLERANCE * max(factors):
            raise CheckNotPossible("parts of its queries or keys have different scales")
        return factors[0], frozenset().union(*(names for _, names in parts))
    if name in ("neg", "addcmul", *LAYOUT_OPS, *MASKING_OPS):
        return scale_and_weights(inner[-1] if name == "copy" else inner[0])
    raise CheckNotPossible(
        Phrase("its queries or keys go through {name}, which is not understood", name=name)
    )


def _unit_vector_reason(
    q: OperationNode, k: OperationNode, *, transposed: bool = False
) -> str | None:
    """Return why unit vectors, whose products are cosines, allow any scale; else None."""
    keys = k.value.transpose(-1, -2) if transposed else k.value
    lengths = [
        x.norm(dim=-1) / abs(scale_and_weights(node)[0]) for x, node in ((q.value, q), (keys, k))
    ]
    unit = all(float((n - 1).abs().max()) < 1e-3 for n in lengths)
    return "its queries and keys are unit vectors, whose scale is a temperature" if unit else None
