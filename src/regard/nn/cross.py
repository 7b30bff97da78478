"""Cross-attention: queries from one sequence, keys and values from another."""

from __future__ import annotations

from jaxtyping import Float
from torch import Tensor, nn

from regard.caches import Cache, Cross, Parts, kept
from regard.cost.softmax import CrossSpec
from regard.cost.spec import Weights
from regard.errors import ArgumentError
from regard.nn.attention import Attention
from regard.nn.mixer import count_weights
from regard.nn.project import Projection
from regard.process import is_compiling
from regard.span import Positions, Span


class CrossAttention(Attention):
    """Attention of one sequence to another: a decoder's words to an encoder's, a text to an image.

    q = query(x);  k, v = recall(remember(memory));  out = output(attend(q, k, v))

    The arguments are those of `Attention`; positions of x and of memory are two different counts,
    so a mask is rarely wanted. A cache is written once, by the call that gives memory, and read by
    every later one.

    Raises:
        ArgumentError: there is no memory, neither given nor in the cache; or there are two.

    >>> import torch
    >>> from regard.nn import Heads, Separate
    >>> project = Separate(Heads(8, 4, 2), Heads(6, 2, 2), Heads(6, 2, 2))
    >>> cross = CrossAttention(project, torch.nn.Linear(8, 8))
    >>> cross(torch.zeros(1, 5, 8), memory=torch.zeros(1, 7, 6)).shape
    torch.Size([1, 5, 8])

    Source: Vaswani et al. 2017 (arXiv 1706.03762), section 3.2.3.
    """

    def forward(
        self,
        x: Float[Tensor, "B T M"],
        positions: Positions | None = None,
        cache: Cache | None = None,
        *,
        memory: Float[Tensor, "B S M3"] | None = None,
        memory_positions: Positions | None = None,
        backend: str = "auto",
    ) -> Float[Tensor, "B T M2"]:
        """Attend from x [B,T,M] to memory [B,S,M3], or to the memory that the cache holds.

        Positions of x default to 0..T-1, those of memory to 0..S-1; a slot of memory at -1 is
        padding.
        """
        positions = Span(0, x.shape[1]) if positions is None else positions
        if cache is None or is_compiling():
            held, seen = recollect(self.project, memory, memory_positions, cache)
            return self._answer(x, positions, held, seen, backend)
        with kept(cache):
            held, seen = recollect(self.project, memory, memory_positions, cache)
            return self._answer(x, positions, held, seen, backend)

    def new_cache(self) -> Cross:
        """An empty cache for one encoder's memory."""
        return Cross()

    @property
    def spec(self) -> CrossSpec:
        """The cost of this layer for one token that asks; the memory's keys and values are made
        once.
        """
        return CrossSpec(
            cross_weights(self, self.project), self.project.shape.parts, self.project.shape.heads
        )


def recollect(
    project: Projection,
    memory: Tensor | None,
    positions: Positions | None,
    cache: Cache | None,
) -> tuple[Parts, Positions]:
    """What a projection remembers of memory [B,S,M], and where: made now, and written to the cache,
    or read from it.
    """
    if cache is not None and not isinstance(cache, Cross):
        raise ArgumentError(
            f"cross-attention was given a {type(cache).__name__} cache, which belongs to "
            "self-attention; "
            "give a Cross cache, which new_cache() makes"
        )
    if memory is None:
        if positions is not None:
            raise ArgumentError("memory_positions were given without memory; a cache has its own")
        if cache is None or not cache.written:
            raise ArgumentError(
                "there is no memory to attend to: give memory [batch, length, dim], or a cache "
                "that holds one"
            )
        return cache.read()
    positions = Span(0, memory.shape[1]) if positions is None else positions
    made = project.remember(memory, positions)
    return (made, positions) if cache is None else cache.store(made, positions)


def cross_weights(module: nn.Module, project: Projection) -> Weights:
    """The parameters of a layer that reads another text, with the maps that the query does not use
    set apart.
    """
    inner: object = project
    while isinstance(wrapped := getattr(inner, "project", None), Projection):
        inner = wrapped
    parts = [getattr(inner, name, None) for name in ("k", "v")]
    return count_weights(module, *(part for part in parts if isinstance(part, nn.Module)))
