"""A projection that keeps an encoder's states as they are: what attention was before it had keys and values."""

from __future__ import annotations

from torch import Tensor, nn

from regard.caches import Parts
from regard.errors import ArgumentError
from regard.nn.project import ProjectionShape
from regard.span import Positions


class States(nn.Module):
    """Values are the remembered states themselves; keys are too, unless they have a map of their own.

    q = query map(x);  k = key map(h), or h;  v = h; each split into heads.

    Args:
        query: the size of x, or a module [B,T,M] -> [B,T,H*D], such as a linear map.
        states: the size of one state h.
        heads: H; every size is divided among them. The papers have one.
        key: a linear map of h to H*D, or None: keys are the states, and a cache keeps them once.

    Raises:
        ArgumentError: a size is not a multiple of heads, or queries and keys differ in size.

    >>> import torch
    >>> states = States(nn.Linear(6, 8), 8)  # h_t^T W h_s: W may stand on the query's side
    >>> states.query(torch.ones(1, 2, 6), None).shape, states.shape.memory
    (torch.Size([1, 1, 2, 8]), (8,))

    Source: Bahdanau et al. 2015 (arXiv 1409.0473), section 3.1; Luong et al. 2015 (arXiv 1508.04025), equation 8.
    """

    stale: str | None = None

    def __init__(
        self, query: int | nn.Linear, states: int, *, heads: int = 1, key: nn.Linear | None = None
    ) -> None:
        super().__init__()
        made = query if isinstance(query, int) else query.out_features
        keys = states if key is None else key.out_features
        if made != keys:
            raise ArgumentError(
                f"queries have {made} numbers and keys {keys}; give a linear map to {keys} for the query, or a key map"
            )
        if heads < 1 or made < 1 or made % heads or states % heads:
            raise ArgumentError(
                f"{heads} heads for keys of {keys} and states of {states}; both must be multiples of heads, at least 1"
            )
        if key is not None and key.in_features != states:
            raise ArgumentError(
                f"the key map takes {key.in_features} numbers, but states have {states}"
            )
        self.q: nn.Module = nn.Identity() if isinstance(query, int) else query
        self.k, self.heads, self.made, self.states = key, heads, made, states

    def query(self, x: Tensor, positions: Positions | None) -> Tensor:
        """q [B,H,T,D]."""
        _check_last("x", x, self.q.in_features if isinstance(self.q, nn.Linear) else self.made)
        return self._split(self.q(x))

    def remember(self, x: Tensor, positions: Positions | None) -> Parts:
        """The states [B,H,S,E], behind the keys [B,H,S,D] where those are something else."""
        _check_last("memory", x, self.states)
        states = self._split(x)
        return (states,) if self.k is None else (self._split(self.k(x)), states)

    def recall(self, memory: Parts, positions: Positions | None) -> tuple[Tensor, Tensor]:
        """Keys and values."""
        return memory[0], memory[-1]

    def finish(self, z: Tensor, x: Tensor) -> Tensor:
        """Heads as attention gave them."""
        return z

    @property
    def shape(self) -> ProjectionShape:
        """H heads of keys and of states; a token takes one state, and its keys where they have a map."""
        memory = (self.states,) if self.k is None else (self.made, self.states)
        H = self.heads
        return ProjectionShape(H, H, self.made // H, self.states // H, memory)

    def _split(self, x: Tensor) -> Tensor:
        return x.unflatten(-1, (self.heads, -1)).transpose(1, 2)

    def extra_repr(self) -> str:
        """Heads and sizes."""
        return f"{self.heads} heads, keys of {self.made}, states of {self.states}"


def _check_last(name: str, x: Tensor, dim: int) -> None:
    if x.ndim != 3 or x.shape[-1] != dim:
        raise ArgumentError(f"{name} is {tuple(x.shape)}; it must be [batch, length, {dim}]")
