"""The module `Attention`: softmax attention of a projection, a mask, a bias and an output map."""

from __future__ import annotations

from typing import ClassVar, NamedTuple

from torch import Tensor, nn

from regard.argument_checks import check_number, check_positions
from regard.biases import Bias
from regard.caches import Cache, Parts, for_reach
from regard.caches.cross_layer import split_first_values
from regard.cost import Spec
from regard.errors import ArgumentError
from regard.masks import Mask, reach
from regard.nn.mixer import AcrossRanks, MaskVisibility, Mixer, count_weights
from regard.nn.projections.heads import Projection
from regard.ops.softmax import attend
from regard.scores import ScoreRule
from regard.span import Positions, slot_count
from regard.tracing import is_tracing, tap


class Places(NamedTuple):
    """The positions of the queries and keys of a call, named as the functions name them."""

    q_positions: Positions
    k_positions: Positions


class Attention(Mixer):
    """Softmax attention over the tokens of one sequence and the tokens in a cache.

    q = query(x);  memory = remember(x), which the cache stores with its positions;
    k, v = recall(memory, k_positions);
    z = postprocess(attend(q, k, v), x);  out = output(heads of z concatenated)

    A projection with several equivalent forms is used in the one that it selects for a call.

    Args:
        project: a `Projection`, which defines the heads and every step on a head.
        output: a module [B,T,H*E] -> [B,T,M].
        mask: a mask on positions (`regard.masks`); None lets every query see every key.
        scale: the factor on the scores; None is 1/sqrt(D).
        softcap: the cap c of c tanh(s / c), which keeps scores within (-c, c); None applies no cap.
        bias: an additive bias (`regard.biases`); a tensor that is an `nn.Parameter` is one here.
        score: a rule of `regard.scores`, such as `scores.TalkingHeads(...)`, or None; likewise.
        sink: a parameter [H], one logit per head in the softmax denominator only; or None.
        dropout: the probability of dropping an attention weight, in training only.

    Raises:
        ArgumentError: a number is out of range, or parameters are mixed with other tensors.

    >>> import torch
    >>> from regard import masks
    >>> from regard.nn import HeadProjection, SeparateQKV
    >>> q, k, v = (HeadProjection(8, heads, 2) for heads in (4, 2, 2))
    >>> attention = Attention(SeparateQKV(q, k, v), torch.nn.Linear(8, 8), mask=masks.Causal())
    >>> attention(torch.zeros(1, 5, 8)).shape
    torch.Size([1, 5, 8])

    Source: Vaswani et al. 2017 (arXiv 1706.03762), section 3.2.2; grouped heads: Ainslie et al.
    2023 (arXiv 2305.13245).
    """

    across_ranks: ClassVar[AcrossRanks] = "attention"

    def __init__(
        self,
        project: Projection,
        output: nn.Module,
        *,
        mask: Mask | None = None,
        scale: float | None = None,
        softcap: float | None = None,
        bias: Bias | None = None,
        score: ScoreRule | None = None,
        sink: nn.Parameter | None = None,
        dropout: float = 0.0,
    ) -> None:
        super().__init__()
        check_number("scale", scale, float("-inf"), float("inf"), "finite")
        check_number("softcap", softcap, 0, float("inf"), "greater than 0: None turns it off")
        check_number("dropout", dropout, -1e-300, 1, "at least 0 and less than 1")
        self.project, self.output = project, output
        self.mask, self.bias, self.sink = mask, bias, sink
        self.bias_tensors = _parameters_of(bias)
        self.score = score
        if score is not None:
            self.score_tensors = _parameters_of(score)
        self.scale, self.softcap, self.dropout = scale, softcap, dropout
        self._default_scale = project.shape.D**-0.5

    def mix(self, x: Tensor, positions: Positions, cache: Cache | None, backend: str) -> Tensor:
        """Attend from x [B,T,M] to its own tokens and to the tokens in the cache."""
        project = self.project
        memory, cache = self._remember(x, positions, cache)
        k_positions = positions
        if cache is not None:
            if project.cache_unsafe_reason:
                raise ArgumentError(f"a cache was given, but {project.cache_unsafe_reason}")
            memory, k_positions = cache.update(memory, positions)
        return self._attend_and_project(x, positions, memory, k_positions, backend)

    def _remember(
        self, x: Tensor, positions: Positions, cache: Cache | None
    ) -> tuple[Parts, Cache | None]:
        """Return what a cache stores for x [B,T,M], and the layer's own cache."""
        own, first = split_first_values(cache)
        if first is None:
            return self.project.remember(x, positions), own
        return self.project.remember_carried(x, positions, first), own

    @property
    def static_step_refusal(self) -> str | None:  # type: ignore[override]
        """Why a step cannot be captured: a rule speaks of slots, whose order would change."""
        for rule in (self.mask, self.bias):
            if rule is not None and rule.by_slot:
                return f"has {rule}, which speaks of slots; a static cache orders them otherwise"
        return None

    @property
    def carries_values(self) -> bool:  # type: ignore[override]
        """Whether the projection gives or reads the values of the first layer."""
        return self.project.carries_values

    def _attend_and_project(
        self, x: Tensor, positions: Positions, memory: Parts, k_positions: Positions, backend: str
    ) -> Tensor:
        """Attend from x [B,T,M] to `memory` at `k_positions`, and apply the output map."""
        is_traced = is_tracing()
        project = self.project.select_form(x.shape[1], slot_count(k_positions))
        q = project.adjust_query(project.query(x, positions), positions, k_positions)
        q = tap("q", q) if is_traced else q
        k, v = project.recall(memory, k_positions)
        if is_traced:
            k, v = tap("k", k), tap("v", v)
        bias = self._bias()
        if project.adds_bias:
            check_positions("positions", positions, q.shape[0], q.shape[2])
            check_positions("k_positions", k_positions, q.shape[0], memory[0].shape[2])
            own = project.data_bias(x, q, memory, positions, k_positions)
            bias = own if bias is None or own is None else bias + own
        z = self._attend(q, k, v, bias, Places(positions, k_positions), backend)
        z = project.postprocess_at(z, x, positions)
        z = tap("z", z) if is_traced else z
        out: Tensor = self.output(z.transpose(1, 2).flatten(2))
        return tap("out", out) if is_traced else out

    def _attend(
        self, q: Tensor, k: Tensor, v: Tensor, bias: Bias | None, places: Places, backend: str
    ) -> Tensor:
        """Attend from queries [B,H,T,D] to keys; return heads [B,H,T,E]."""
        # The scale uses the head dim of the definition: the selected form may have a longer one.
        scale = self._default_scale if self.scale is None else self.scale
        return attend(
            q,
            k,
            v,
            mask=self.mask,
            bias=bias,
            score=None if self.score is None else self._score(),
            scale=scale,
            softcap=self.softcap,
            sink=self.sink,
            dropout=self.dropout if self.training else 0.0,
            q_positions=places.q_positions,
            k_positions=places.k_positions,
            backend=backend,
        )

    def new_cache(self) -> Cache:
        """Return an empty cache for the tokens that later queries may see."""
        return for_reach(reach(self.mask))

    @property
    def spec(self) -> Spec:
        """The parameters, cached values and FLOPs of this layer, for the keys that a query sees."""
        return self.project.spec(count_weights(self), MaskVisibility(self.mask))

    def _bias(self) -> Bias | None:
        """Return the bias with the present parameters, which a copy of the module replaces."""
        if self.bias is None or not len(self.bias_tensors):
            return self.bias
        return self.bias.with_tensors(tuple(self.bias_tensors))

    def _score(self) -> ScoreRule | None:
        """Return the score rule with the present parameters of this module."""
        own = getattr(self, "score_tensors", ())  # not there if the rule was set later
        if self.score is None or not len(own):
            return self.score
        return self.score.with_tensors(tuple(own))

    def extra_repr(self) -> str:
        """Return what differs from the defaults of mask, bias, score rule and numbers."""
        names = ("mask", "bias", "score", "scale", "softcap")
        shown = {name: getattr(self, name) for name in names}
        parts = [f"{name}={value}" for name, value in shown.items() if value is not None]
        return ", ".join([*parts, *([f"dropout={self.dropout}"] if self.dropout else [])])


def _parameters_of(rule: Bias | ScoreRule | None) -> nn.ParameterList:
    """Return the parameters among the tensors of a bias or a score rule: all of them, or none."""
    tensors = () if rule is None else rule.tensors()
    parameters = nn.ParameterList(x for x in tensors if isinstance(x, nn.Parameter))
    if 0 < len(parameters) < len(tensors):
        raise ArgumentError(
            f"{rule} mixes parameters with plain tensors ({len(parameters)} of "
            f"{len(tensors)} are parameters); make all of them nn.Parameter "
            "(requires_grad=False freezes one)"
        )
    return parameters
