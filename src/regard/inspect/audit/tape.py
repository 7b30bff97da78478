"""The operations that a module runs, recorded with their values: a graph from tokens and parameters
to the output.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, field
from typing import Any

from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode


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


class Tape(TorchDispatchMode):  # type: ignore[no-untyped-call]
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
