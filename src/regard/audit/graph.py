"""Record the operations that a module runs, and find attention among them.

`Tape` records each operation with its result, so that a graph leads from the tokens and the
parameters to the output. `find_attention` walks back through this graph from every product with
values, through its softmax, to the product of queries and keys, whatever was computed before it
(norms, latents, rotary) and behind it.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field
from typing import Any

from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode

from regard.audit.subject import CannotTry

PRODUCTS = ("bmm", "mm", "baddbmm", "addmm")
MAPS = (*PRODUCTS, "linear", "convolution", "embedding")
FUSED = "_scaled_dot_product"
SOFTMAX = ("_softmax", "_safe_softmax", "exp", "exp2")
MOVES = (
    "view",
    "_unsafe_view",
    "reshape",
    "_reshape_alias",
    "transpose",
    "t",
    "permute",
    "expand",
    "clone",
    "_to_copy",
    "alias",
    "detach",
    "unsqueeze",
    "squeeze",
    "slice",
    "select",
    "split",
    "split_with_sizes",
    "unbind",
    "copy",
    "repeat",
    "view_as_real",
    "view_as_complex",
    "index",
    "index_select",
    "roll",
    "as_strided",
    "unfold",
    "flatten",
    "contiguous",
    "squeeze_",
    "_conj",
    "resolve_conj",
    "lift_fresh",
    "narrow",
)
HIDES = ("masked_fill", "where", "clamp", "clamp_min", "tril", "triu", "index_put", "nan_to_num")
NORMS = ("native_layer_norm", "_fused_rms_norm", "rms_norm", "linalg_vector_norm")
CLOSE = 1e-6
"""Two numbers are the same if they differ by less, relative to 1."""


@dataclass(eq=False)
class Node:
    """One operation and one tensor that it gave, or a leaf.

    Attributes:
        name: the operation, such as "bmm", without the underscore of the form that works in place.
        value: a copy of the result, as it was then.
        inputs: the nodes of the tensors among the arguments, in their order.
        scalars: the numbers among the positional arguments, in their order.
        options: the arguments with names.
        tokens: whether it depends on the tokens.
        weights: the names of the parameters that it depends on.
    """

    name: str
    value: Tensor
    inputs: list[Node] = field(default_factory=list)
    scalars: list[float] = field(default_factory=list)
    options: dict[str, Any] = field(default_factory=dict)
    tokens: bool = False
    weights: frozenset[str] = frozenset()

    @property
    def mixed(self) -> list[Node]:
        """The inputs that depend on the tokens."""
        return [n for n in self.inputs if n.tokens]


class Tape(TorchDispatchMode):
    """Records operations below autograd, where every way to write attention comes down to few of
    them.

    >>> import torch
    >>> x = torch.ones(1, 2, 3)
    >>> with Tape(torch.nn.Identity(), x) as tape:
    ...     y = (x * 2).softmax(-1)
    >>> [node.name for node in tape.nodes]
    ['mul', '_softmax']
    """

    def __init__(self, module: nn.Module, x: Tensor) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.nodes: list[Node] = []
        self._made: dict[int, Node] = {id(x): Node("tokens", x, tokens=True)}
        self._alive: list[Any] = [x]  # an id stays with its tensor
        for name, p in module.named_parameters():
            self._made[id(p)] = Node("parameter", p.detach(), weights=frozenset({name}))
            self._alive.append(p)

    def __torch_dispatch__(
        self,
        func: Any,
        types: Any,
        args: tuple[Any, ...] = (),
        kwargs: dict[str, Any] | None = None,
    ) -> Any:
        """Run the operation, and record it."""
        kwargs = kwargs or {}
        given = list(_tensors([*args, *kwargs.values()]))
        inputs = [self._node(t) for t in given]
        out = func(*args, **kwargs)
        name = func.overloadpacket.__name__
        changes = name.endswith("_") and not name.startswith("_")
        scalars = [a for a in args if isinstance(a, (int, float)) and not isinstance(a, bool)]
        for result in _tensors([out]):
            node = Node(
                name.rstrip("_") if changes else name,
                result.detach().clone(),
                inputs,
                scalars,
                {**kwargs, "args": args},
                any(n.tokens for n in inputs),
                frozenset().union(*(n.weights for n in inputs)),
            )
            self.nodes.append(node)
            self._alive.append(result)
            self._made[id(result)] = node
            if changes and result._base is not None:
                self._alive.append(result._base)
                self._made[id(result._base)] = node
        return out

    def _node(self, x: Tensor) -> Node:
        if id(x) not in self._made:
            self._alive.append(x)
            self._made[id(x)] = Node("constant", x.detach().clone())
        return self._made[id(x)]


def _tensors(values: Iterable[Any]) -> Iterable[Tensor]:
    for value in values:
        if isinstance(value, Tensor):
            yield value
        elif isinstance(value, (list, tuple)):
            yield from _tensors(value)


@dataclass
class Core:
    """One softmax with what leads to it and what it weighs.

    Attributes:
        products: (node, factor behind it) of q k^T; more than one where a head is cut in parts.
        biases: (node, sign) of what is added to the scores and depends on no token.
        free: why the scale is not judged, or None.
        query, key, value: the operands, [N,T,D].
        weights: what values are multiplied by, [N,T,S], or None where it is inside of a fused
            operation.
        softmax: the node of the softmax, or None.
        out: the product with the values.
    """

    query: Node
    key: Node
    value: Node
    out: Node
    products: list[tuple[Node, float]] = field(default_factory=list)
    biases: list[tuple[Node, float]] = field(default_factory=list)
    free: str | None = None
    weights: Tensor | None = None
    softmax: Node | None = None
    additive: bool = False


def find_attention(tape: Tape) -> list[Core]:
    """Every attention among the operations: one, or one for each head."""
    behind = _behind_softmax(tape)
    fused = (n for n in tape.nodes if n.name.startswith(FUSED) and n.value.ndim == 4)
    found = [_fused(node) for node in fused]
    for node in tape.nodes:
        if node.name not in PRODUCTS or len(operands(node)) < 2:
            continue
        a, b = operands(node)
        if not (a.tokens and b.tokens) or (id(a) in behind) == (id(b) in behind):
            continue
        found.append(_core(node, a, b, first=id(a) in behind))
    unique = {id(core.out.value): core for core in found}
    if not unique:
        raise CannotTry("no product of a softmax and of values is found in its operations")
    return list(unique.values())


def _behind_softmax(tape: Tape) -> set[int]:
    """Nodes that come from a softmax and not yet from a product with values."""
    found: set[int] = set()
    for node in tape.nodes:
        inner = [n for n in node.inputs if id(n) in found]
        if (node.name in SOFTMAX and node.tokens) or (inner and node.name not in PRODUCTS):
            found.add(id(node))
    return found


def operands(node: Node) -> list[Node]:
    """The two factors of a product."""
    return node.inputs[1:3] if node.name in ("baddbmm", "addmm") else node.inputs[:2]


def _fused(node: Node) -> Core:
    """PyTorch's own attention."""
    q, k, v = node.inputs[:3]
    options = node.options
    scale = options.get("scale")
    D = q.value.shape[-1]
    core = Core(q, k, v, node)
    gain = (1 / math.sqrt(D) if scale is None else float(scale)) * gain_of(q)[0] * gain_of(k)[0]
    core.free = _unit(q, k)
    core.products = []
    core.biases = [(n, 1.0) for n in node.inputs[3:4] if n.value.is_floating_point()]
    core.out.options["gain"] = gain
    return core


def _core(node: Node, a: Node, b: Node, *, first: bool) -> Core:
    pattern, value = (a, b) if first else (b, a)
    weights = pattern.value if first else pattern.value.transpose(-1, -2)
    softmax = _source(pattern)
    core = Core(value, value, value, node, weights=weights, softmax=softmax)
    for product, factor in _scores(softmax.inputs[0], 1.0, core):
        core.products.append((product, factor))
    if not core.products:
        core.additive = True
        return core
    core.query, core.key = operands(core.products[0][0])
    core.free = core.free or _unit(core.query, core.key, transposed=True)
    return core


def _source(node: Node) -> Node:
    """The softmax that a pattern comes from."""
    while node.name not in SOFTMAX:
        inner = [n for n in node.mixed if _leads(n)]
        if not inner:
            raise CannotTry(f"its weights come from {node.name}, and no softmax is found behind it")
        node = inner[0]
    return node


def _leads(node: Node) -> bool:
    return node.name in SOFTMAX or any(_leads(n) for n in node.mixed)


def _scores(node: Node, factor: float, core: Core) -> Iterator[tuple[Node, float]]:
    """The products under a score, each with what it is multiplied by."""
    name, inner = node.name, node.mixed
    if name in PRODUCTS and all(n.tokens for n in operands(node)):
        alpha = float(node.options.get("alpha", 1.0))
        if name in ("baddbmm", "addmm"):
            core.biases.append((node.inputs[0], factor * float(node.options.get("beta", 1.0))))
        yield node, factor * alpha
    elif name in ("mul", "div"):
        yield from _multiplied(node, factor, core)
    elif name in ("add", "sub"):
        yield from _added(node, factor, core)
    elif name in MAPS or not inner:  # a learned map of features: additive attention
        if _of_products(node):
            raise CannotTry("its scores go through a learned map")
        return
    elif name in ("cat", "stack"):
        for n in inner:
            yield from _scores(n, factor, core)
    elif name == "neg":
        yield from _scores(inner[0], -factor, core)
    elif name in (*MOVES, *HIDES, "tanh", "relu", "sum"):
        yield from _scores(inner[0], factor, core)
    else:
        raise CannotTry(f"its scores go through {name}, which is not understood")


def _of_products(node: Node) -> bool:
    """Whether products of tokens with tokens are behind a node."""
    if node.name in PRODUCTS and all(n.tokens for n in operands(node)):
        return True
    return any(_of_products(n) for n in node.mixed)


def _multiplied(node: Node, factor: float, core: Core) -> Iterator[tuple[Node, float]]:
    inner = node.mixed
    if len(inner) != 1:
        raise CannotTry("its scores are multiplied by what depends on the tokens")
    number = constant_of(node)
    if number is None:
        core.free = (
            "its scores are multiplied by numbers that are learned, or that differ by head or place"
        )
        number = 1.0
    yield from _scores(inner[0], factor * number, core)


def _added(node: Node, factor: float, core: Core) -> Iterator[tuple[Node, float]]:
    inner = node.mixed
    sign = -1.0 if node.name == "sub" else 1.0
    if len(inner) == 1:
        other = next((n for n in node.inputs if not n.tokens), None)
        if other is not None:
            first = node.inputs[0] is inner[0]
            core.biases.append((other, (sign if first else 1.0) * (1.0 if factor > 0 else -1.0)))
        yield from _scores(inner[0], factor if node.inputs[0] is inner[0] else factor * sign, core)
        return
    if node.name == "sub" and _largest(inner[1]):  # the largest of a row, taken away before exp
        yield from _scores(inner[0], factor, core)
        return
    yield from _scores(inner[0], factor, core)
    yield from _scores(inner[1], factor * sign, core)


def _largest(node: Node) -> bool:
    while node.name in MOVES and node.mixed:
        node = node.mixed[0]
    return node.name in ("amax", "max", "maximum", "logsumexp")


def constant_of(node: Node) -> float | None:
    """The one number that a product or quotient has besides its tensor, or None."""
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


def gain_of(node: Node) -> tuple[float, frozenset[str]]:
    """What the output of a linear map or a norm was multiplied by on its way to a product, and the
    names of its weights.
    """
    name, inner = node.name, node.mixed
    if name == "tokens" or not inner:
        return 1.0, node.weights
    if name in NORMS or (name in MAPS and any(n.weights for n in node.inputs)):
        return 1.0, node.weights if name in MAPS else gain_of(inner[0])[1]
    if name in ("mul", "div") and len(inner) == 2:  # a norm or a gate
        return 1.0, gain_of(inner[0])[1]
    if name in ("mul", "div"):
        factor, names = gain_of(inner[0])
        number = constant_of(node)
        return (factor if number is None else factor * number), names
    if name in ("add", "sub", "cat", "stack"):
        parts = [gain_of(n) for n in inner]
        factors = [abs(factor) for factor, _ in parts]
        if max(factors) - min(factors) > CLOSE * max(factors):
            raise CannotTry("parts of its queries or keys are scaled apart")
        return factors[0], frozenset().union(*(names for _, names in parts))
    if name in ("neg", "addcmul", *MOVES, *HIDES):
        return gain_of(inner[-1] if name == "copy" else inner[0])
    raise CannotTry(f"its queries or keys go through {name}, which is not understood")


def _unit(q: Node, k: Node, *, transposed: bool = False) -> str | None:
    """Why the scale is free: queries and keys are unit vectors, so that scores are cosines."""
    keys = k.value.transpose(-1, -2) if transposed else k.value
    lengths = [x.norm(dim=-1) / abs(gain_of(node)[0]) for x, node in ((q.value, q), (keys, k))]
    unit = all(float((n - 1).abs().max()) < 1e-3 for n in lengths)
    return "its queries and keys are unit vectors, whose scale is a temperature" if unit else None


# -- judging it
