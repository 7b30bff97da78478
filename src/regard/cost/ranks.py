"""The cost of a model over several ranks, by closed forms for causal attention over zigzag shards,
so that a million tokens take no longer to plan than a thousand.
"""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass, replace
from typing import Any

from regard.cost.latent import LatentSpec
from regard.cost.memory_fit import DOES_NOT_FIT, MemoryFit
from regard.cost.report import BITS, CostReport
from regard.cost.roofline import LINKS, Machine
from regard.cost.softmax import SoftmaxSpec
from regard.cost.spec import HeadShape, Spec
from regard.errors import ArgumentError
from regard.language import Phrase, counted
from regard.units import plural

METHODS = ("exchange", "gather", "heads", "tensor", "tensor x exchange")
"""The methods: three of context parallelism with all weights on every rank, tensor parallelism, and
tensor parallelism inside groups that exchange.
"""


@dataclass(frozen=True)
class MethodEstimate:
    """The cost of one method.

    Attributes:
        tensor_ranks: the number of ranks that share each matrix; 1 if every rank has all weights.
        sent: bytes that the busiest rank sends for the whole prompt.
        token_sent: bytes that a rank sends for one decoded token.
        memory: bytes of weights, caches and buffers on one rank; activations are not counted.
        prefill_seconds: the least time to the first token.
        decode_seconds: the least time of one token; None if the model does not generate tokens.
        why_not: why the method cannot run; "" if it can.
    """

    method: str
    tensor_ranks: int
    sent: int
    token_sent: int
    memory: int
    prefill_seconds: float
    decode_seconds: float | None
    why_not: str = ""


@dataclass(frozen=True)
class RanksReport:
    """The cost of a model over several ranks; `estimates` has one entry for each method.

    Assumptions: shards are zigzag, so that causal work is equal on all ranks; every rank computes
    at the full rate and sends at the full rate of its link, with no latency; "exchange" sends while
    attention of the same layer computes, and the other methods do not overlap.

    Args:
        report: the cost of the model in one process.
        machine: the machine of every rank.
        ranks: the number of ranks W.
        link: bytes per second that a rank sends; None takes that of the machine in `LINKS`.

    Source: Liu et al. 2023 (arXiv 2310.01889), Jacobs et al. 2023 (arXiv 2309.14509), Shoeybi et
    al. 2019 (arXiv 1909.08053), and `regard.parallel`.
    """

    report: CostReport
    machine: Machine
    ranks: int
    link: float | None = None

    def __post_init__(self) -> None:
        if self.ranks < 1:
            raise ArgumentError(f"ranks is {self.ranks}; it must be at least 1", argument="ranks")
        if self.report.setting.context < 2 * self.ranks:
            raise ArgumentError(
                f"{plural(self.report.setting.context, 'token')} cannot be cut into two runs for "
                f"each of {plural(self.ranks, 'rank')}; give a longer context or fewer ranks"
            )
        if self.link is not None and not 0 < self.link < float("inf"):
            raise ArgumentError("the bandwidth of the link must be above 0, in bytes per second")
        if self.link is None and self.machine.name not in LINKS and self.ranks > 1:
            raise ArgumentError(
                f"the bandwidth between ranks of {self.machine.name} is not known; give it with "
                f"--link, in bytes per second. It is known of {', '.join(LINKS)}"
            )
        for spec in self._layers:
            _head_shape(spec)
        if self.report.model.encoder:
            raise ArgumentError(
                f"{self.report.model.name} has an encoder; costs over several ranks are known for "
                "decoders only"
            )

    @property
    def bytes_per_second(self) -> float:
        """The rate at which a rank sends."""
        if self.link is not None:
            return self.link
        return LINKS[self.machine.name][0] if self.ranks > 1 else float("inf")

    @property
    def estimates(self) -> tuple[MethodEstimate, ...]:
        """The cost of every method."""
        return tuple(self.estimate(method) for method in METHODS)

    @property
    def best(self) -> str | None:
        """The method with the least time to the first token, of those that can run and fit in the
        memory; None if there is none.
        """
        able = [x for x in self.estimates if not x.why_not and self.fit(x) != DOES_NOT_FIT]
        fastest = min(able, key=lambda x: x.prefill_seconds, default=None)
        return None if fastest is None else fastest.method

    def fit(self, estimate: MethodEstimate) -> str | None:
        """Return how a method fits in the memory of a rank; None if its size is not known."""
        runtime = self.machine.runtime
        taken = runtime.bytes_for(self.report, estimate.tensor_ranks)
        return MemoryFit(estimate.memory, self.machine.memory, taken, runtime).verdict

    def estimate(self, method: str) -> MethodEstimate:
        """Compute the cost of one method."""
        if method not in METHODS:
            raise ArgumentError(
                f"method is {method!r}; it must be one of {', '.join(METHODS)}", argument="method"
            )
        if method != "tensor x exchange":
            return self._estimate(method, self.ranks if method == "tensor" else 1)
        sizes = [t for t in range(2, self.ranks) if not self.ranks % t]
        if not sizes:
            no_split = Phrase(
                "{ranks} cannot be cut into groups", ranks=counted(self.ranks, "rank")
            )
            return replace(self._estimate(method, 1), why_not=no_split)
        estimates = [self._estimate(method, t) for t in sizes]
        able = [x for x in estimates if not x.why_not] or estimates
        fitting = [x for x in able if self.fit(x) != DOES_NOT_FIT] or able
        return min(fitting, key=lambda x: x.prefill_seconds)

    def _estimate(self, method: str, t: int) -> MethodEstimate:
        """Compute the cost of a method when `t` ranks share each matrix."""
        report, rate = self.report, self.bytes_per_second
        sent = sum(n * self._layer_sent(method, spec, t) for spec, n in self._layers.items())
        token_sent = sum(n * self._token_sent(spec, t) for spec, n in self._layers.items())
        buffers = max((self._buffer(method, spec, t) for spec in self._layers), default=0)
        weights, cache = -(-report.weight_bytes // t), -(-report.kv_bytes // self._cache_shares(t))
        return MethodEstimate(
            method,
            t,
            sent,
            token_sent,
            weights + cache + buffers,
            self._prefill_seconds(method, t),
            self._decode_seconds(t) + token_sent / rate if report.model.decodes else None,
            self._why_not(method, t),
        )

    @property
    def _layers(self) -> Counter[Spec]:
        """Each attention spec with the number of layers that have it."""
        return Counter(self.report.model.mixers)

    def _cache_shares(self, t: int) -> int:
        """Return the number of parts into which the caches are cut: one for each context rank, and
        one for each tensor rank while there are heads. A latent is one head.
        """
        heads = min(
            (1 if isinstance(x, LatentSpec) else _head_shape(x).groups for x in self._layers),
            default=1,
        )
        return self.ranks // t * min(t, heads)

    @property
    def _value_bytes(self) -> int:
        """Bytes of one number of q, k, v and out, which are computed in 16 bits or more."""
        return max(16, int(BITS[self.report.setting.dtype])) // 8

    def _why_not(self, method: str, t: int) -> str:
        """Return why a method cannot run, or ""."""
        W = self.ranks if method == "heads" else t
        for spec in self._layers:
            shape = _head_shape(spec)
            if shape.heads % W:
                return _cannot_share(W, counted(shape.heads, "query head"))
            if shape.groups % W and W % shape.groups:
                return _cannot_share(W, counted(shape.groups, "key/value head"))
        return ""

    def _key_bytes(self, spec: Spec, t: int) -> int:
        """Return the bytes of one key and value of the heads of a rank, for the whole batch."""
        shape = _head_shape(spec)
        groups = -(-shape.groups // t)
        width = shape.head_dim + shape.value_dim
        return self.report.setting.batch * groups * width * self._value_bytes

    def _layer_sent(self, method: str, spec: Spec, t: int) -> int:
        """Return the bytes that the busiest rank sends in one layer for the prompt."""
        contexts = self.ranks // t
        S, B = self.report.setting.context, self.report.setting.batch
        n = -(-S // contexts)
        if method == "gather":
            return (contexts - 1) * n * self._key_bytes(spec, t)
        if method == "heads":
            shape = _head_shape(spec)
            heads = max(shape.groups, contexts) + shape.heads
            width = shape.head_dim + shape.value_dim
            return B * self._value_bytes * (contexts - 1) * n * heads * width // contexts
        window, keys = _window(spec), (contexts - 1) * n
        if window is not None:
            # with zigzag shards a rank has two runs, and the keys before each run are needed
            keys = min(keys, 2 * (window - 1))
        return keys * self._key_bytes(spec, t) + self._all_reduces(B * n, t)

    def _all_reduces(self, tokens: int, t: int) -> int:
        """Return the bytes that a rank of t sends for a layer's two sums, as rings do."""
        return 4 * (t - 1) * tokens * self.report.model.dim * self._value_bytes // t

    def _token_sent(self, spec: Spec, t: int) -> int:
        """Return the bytes that a rank sends in one layer for a decoded token."""
        B, contexts, shape = self.report.setting.batch, self.ranks // t, _head_shape(spec)
        partial_results = B * -(-shape.heads // t) * (shape.value_dim + 1) * 4  # out, lse in fp32
        return (contexts - 1) * partial_results + self._all_reduces(B, t)

    def _buffer(self, method: str, spec: Spec, t: int) -> int:
        """Return the bytes of the blocks that a rank receives in one layer."""
        contexts = self.ranks // t
        n = -(-self.report.setting.context // contexts)
        if contexts == 1:
            return 0
        if method == "gather":
            return (contexts - 1) * n * self._key_bytes(spec, t)
        if method == "heads":
            return self._layer_sent(method, spec, t)
        return 2 * n * self._key_bytes(spec, t)

    def _prefill_seconds(self, method: str, t: int) -> float:
        """Return the least time of the prompt: each layer computes and sends."""
        report, W, T = self.report, self.ranks, self.report.setting.context
        rate, sends = self.machine.rate(report.compute_format), self.bytes_per_second
        B = report.setting.batch
        overlaps = method not in ("gather", "heads")
        seconds = report.prefill_flops / W / rate
        for spec, n in self._layers.items():
            computing = B * spec.prefill_flops(T) / W / rate
            sums = self._all_reduces(B * -(-T // (W // t)), t) if overlaps else 0
            sending = (self._layer_sent(method, spec, t) - sums) / sends
            hidden = min(computing, sending) if overlaps else 0.0
            seconds += n * (sending - hidden + sums / sends)
        weights = report.prefill_bytes() - report.kv_bytes
        moved = weights / t + report.kv_bytes / self._cache_shares(t)
        return max(seconds, moved / self.machine.bandwidth)

    def _decode_seconds(self, t: int) -> float:
        """Return the least time of one token without its messages."""
        report = self.report
        weights = report.active_bytes(report.setting.batch)
        caches = (report.decode_bytes() - weights) / self._cache_shares(t)
        moving = (weights / t + caches) / self.machine.bandwidth
        # every context rank computes the layers of the new token, and attention over its own keys
        attention = report.decode_flops - self._layer_flops()
        flops = self._layer_flops() / t + attention / self.ranks
        return max(moving, flops / self.machine.rate(report.compute_format))

    def _layer_flops(self) -> int:
        """Return the FLOPs of a decoded token outside attention over the cache."""
        model, B = self.report.model, self.report.setting.batch
        head = model.vocab * model.dim if model.head else 0
        return 2 * B * (self.report.matmul_values + head)

    def as_json(self) -> dict[str, Any]:
        """Return the figures of every method."""
        return {
            "ranks": self.ranks,
            "machine": self.machine.name,
            "link bytes per second": self.bytes_per_second if self.ranks > 1 else None,
            "best": self.best,
            "methods": {
                x.method: {
                    "tensor ranks": x.tensor_ranks,
                    "prefill seconds": x.prefill_seconds,
                    "decode seconds": x.decode_seconds,
                    "bytes sent": x.sent,
                    "bytes sent per token": x.token_sent,
                    "bytes held": x.memory,
                    "fit": self.fit(x),
                    "why not": x.why_not,
                }
                for x in self.estimates
            },
        }


def _head_shape(spec: Spec) -> HeadShape:
    """Return the heads whose keys and values a layer exchanges."""
    if isinstance(spec, SoftmaxSpec):
        return spec.shape
    if isinstance(spec, LatentSpec):
        # a prompt expands latents to keys and values of every head
        width = spec.nope_dim + spec.rope_dim
        return HeadShape(spec.heads, spec.heads, width, spec.value_dim)
    raise ArgumentError(
        f"the cost of {spec.name} over several ranks is not known; it is known for softmax and "
        "latent attention"
    )


def _cannot_share(ranks: int, heads: Phrase) -> Phrase:
    """Return the reason why ranks cannot share heads."""
    return Phrase("{ranks} cannot share {heads}", ranks=counted(ranks, "rank"), heads=heads)


def _window(spec: Spec) -> int | None:
    """Return the window of a layer, or None."""
    return spec.visible.max_tokens if isinstance(spec, (SoftmaxSpec, LatentSpec)) else None
