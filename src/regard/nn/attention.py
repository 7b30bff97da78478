"""Softmax attention as a module: one small class, assembled from parts."""

from __future__ import annotations

from torch import Tensor, nn

from regard.arguments import check_number
from regard.biases import Bias
from regard.caches import Cache, Parts, for_reach
from regard.cost import Spec
from regard.errors import ArgumentError
from regard.masks import Mask, reach
from regard.nn.mixer import MaskVisibility, Mixer, count_weights
from regard.nn.projections import Projection, adjust_query, attention_spec, select_form
from regard.ops.softmax import attend
from regard.span import Positions, count
from regard.tap import listening, tap


class Attention(Mixer):
    """project -> remember -> recall -> attend -> output.

    q = query(x);  memory = remember(x), kept by the cache with its positions;
    k, v = recall(memory, positions);
    z = postprocess(attend(q, k, v), x);  out = output(z, heads joined)
    a projection with several forms does this in the one for these lengths
    (`regard.nn.projections.HasForms`)

    Args:
        project: a `Projection`: query heads H, key/value heads G and every step on a head are its
            matter.
        output: a module [B,T,H*E] -> [B,T,M].
        mask: a rule on positions, or None: every key.
        scale: None is 1/sqrt(D).
        softcap: None, or the cap c of c tanh(s / c).
        bias: an additive bias on scores; its tensors are parameters of the module if they are
            `nn.Parameter`.
        sink: None, or a parameter [H]: one logit per head that takes part in the denominator only.
        dropout: on the weights, in training only.

    Raises:
        ArgumentError: scale, softcap or dropout is out of range, or a bias mixes parameters with
            other tensors.

    >>> import torch
    >>> from regard import masks
    >>> from regard.nn import HeadProjection, SeparateQKV
    >>> project = SeparateQKV(HeadProjection(8, 4, 2), HeadProjection(8, 2, 2), HeadProjection(8, 2, 2))
    >>> attention = Attention(project, torch.nn.Linear(8, 8), mask=masks.Causal())
    >>> attention(torch.zeros(1, 5, 8)).shape
    torch.Size([1, 5, 8])

    Source: Vaswani et al. 2017 (arXiv 1706.03762), section 3.2.2; grouped heads: Ainslie et al.
    2023 (arXiv 2305.13245).
    """

    def __init__(
        self,
        project: Projection,
        output: nn.Module,
        *,
        mask: Mask | None = None,
        scale: float | None = None,
        softcap: float | None = None,
        bias: Bias | None = None,
        sink: nn.Parameter | None = None,
        dropout: float = 0.0,
    ) -> None:
        super().__init__()
        check_number("scale", scale, float("-inf"), float("inf"), "finite")
        check_number("softcap", softcap, 0, float("inf"), "greater than 0: None turns it off")
        check_number("dropout", dropout, -1e-300, 1, "at least 0 and less than 1")
        self.project, self.output = project, output
        self.mask, self.bias, self.sink = mask, bias, sink
        learned = () if bias is None else bias.tensors()
        self.bias_tensors = nn.ParameterList(x for x in learned if isinstance(x, nn.Parameter))
        if 0 < len(self.bias_tensors) < len(learned):
            raise ArgumentError(
                f"{bias} holds {len(self.bias_tensors)} parameters among {len(learned)} tensors; "
                "make all of them nn.Parameter (requires_grad=False freezes one)"
            )
        self.scale, self.softcap, self.dropout = scale, softcap, dropout
        self._usual = project.shape.D**-0.5

    def mix(self, x: Tensor, positions: Positions, cache: Cache | None, backend: str) -> Tensor:
        """Attend from x [B,T,M] at its positions to itself and to what the cache holds."""
        project = self.project
        memory, seen = project.remember(x, positions), positions
        if cache is not None:
            if project.cache_unsafe_reason:
                raise ArgumentError(f"a cache was given, but {project.cache_unsafe_reason}")
            memory, seen = cache.update(memory, positions)
        return self._answer(x, positions, memory, seen, backend)

    def _answer(
        self, x: Tensor, positions: Positions, memory: Parts, seen: Positions, backend: str
    ) -> Tensor:
        """What x finds in memory, wherever that came from."""
        project, heard = self.project, listening()
        if hasattr(type(project), "select_form"):
            project = select_form(project, x.shape[1], count(seen))
        q = project.query(x, positions)
        if hasattr(type(project), "adjust_query"):
            q = adjust_query(project, q, positions, seen)
        q = tap("q", q) if heard else q
        k, v = project.recall(memory, seen)
        if heard:
            k, v = tap("k", k), tap("v", v)
        z = project.postprocess(self._attend(q, k, v, positions, seen, backend), x)
        z = tap("z", z) if heard else z
        out: Tensor = self.output(z.transpose(1, 2).flatten(2))
        return tap("out", out) if heard else out

    def _attend(
        self, q: Tensor, k: Tensor, v: Tensor, positions: Positions, seen: Positions, backend: str
    ) -> Tensor:
        """q [B,H,T,D] at positions, k and v at those seen -> [B,H,T,E]."""
        # by the dims of a head as defined: a form may have longer ones
        scale = self._usual if self.scale is None else self.scale
        return attend(
            q,
            k,
            v,
            mask=self.mask,
            bias=None if self.bias is None else self._bias(),
            scale=scale,
            softcap=self.softcap,
            sink=self.sink,
            dropout=self.dropout if self.training else 0.0,
            q_positions=positions,
            k_positions=seen,
            backend=backend,
        )

    def new_cache(self) -> Cache:
        """An empty cache that keeps what the mask may still show: everything, or the last
        tokens.
        """
        return for_reach(reach(self.mask))

    @property
    def spec(self) -> Spec:
        """The cost of this layer: what the projection remembers, for the tokens that the mask still
        shows.
        """
        return attention_spec(self.project, count_weights(self), MaskVisibility(self.mask))

    def _bias(self) -> Bias | None:
        """The bias over the parameters of this module, which a copy or a move of it has
        replaced.
        """
        if self.bias is None or not len(self.bias_tensors):
            return self.bias
        return self.bias.with_tensors(tuple(self.bias_tensors))

    def extra_repr(self) -> str:
        """What is not a module: mask, bias, scale, softcap, dropout."""
        shown = {"mask": self.mask, "bias": self.bias, "scale": self.scale, "softcap": self.softcap}
        parts = [f"{name}={value}" for name, value in shown.items() if value is not None]
        return ", ".join([*parts, *([f"dropout={self.dropout}"] if self.dropout else [])])
