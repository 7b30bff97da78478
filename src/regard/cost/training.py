"""The memory and the least time of a training step: weights, gradients, states of the optimizer and
activations on each of several cards.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Literal, get_args

from regard.cost.latent import LatentSpec
from regard.cost.memory_fit import LIBRARIES, MemoryFit
from regard.cost.model import DenseSpec, LayerSpec, ModelSpec, MoESpec
from regard.cost.report import CostReport, Setting
from regard.cost.roofline import Machine, ring_bytes
from regard.cost.softmax import SoftmaxSpec
from regard.cost.spec import Spec
from regard.errors import ArgumentError

Optimizer = Literal["adamw", "adamw8bit", "sgd", "adafactor"]
Precision = Literal["bf16", "fp32", "pure-bf16"]
Checkpointing = Literal["none", "selective", "full"]

BYTES: dict[Precision, tuple[int, int, int, int]] = {
    "bf16": (2, 2, 4, 4),
    "fp32": (4, 4, 0, 4),
    "pure-bf16": (2, 2, 0, 2),
}
"""Precision -> bytes of a weight, of its gradient, of its fp32 copy in the optimizer, and of a
state. Source: Rajbhandari et al. 2020 (arXiv 1910.02054), section 3.1, for mixed precision.
"""
QUANTIZED_STATE = 1 + 4 / 256
"""Bytes of a state in 8 bits, with one fp32 scale for 256 of them, as bitsandbytes stores it."""


@dataclass(frozen=True)
class TrainingRun:
    """How a model is trained, each card with sequences of its own (data parallel).

    Attributes:
        batch: the sequences of a card in one pass.
        zero: which of these the cards divide: nothing (0), the states of the optimizer (1), the
            gradients, too (2), and the weights (3, which FSDP calls full sharding).
        checkpointing: what a backward pass computes again: nothing; the attention weights
            ("selective", what flash attention always does); or whole layers ("full").
        lora: the rank of adapters on every matrix of attention and feed-forward layers, beside
            which the weights are frozen; None trains all weights.
        dropout: whether masks of dropout are stored, as in Megatron's formulas.
    """

    batch: int = 1
    seq: int = 4096
    optimizer: Optimizer = "adamw"
    precision: Precision = "bf16"
    zero: int = 0
    checkpointing: Checkpointing = "selective"
    lora: int | None = None
    cards: int = 1
    dropout: bool = False

    def __post_init__(self) -> None:
        for name, kind in (
            ("optimizer", Optimizer),
            ("precision", Precision),
            ("checkpointing", Checkpointing),
        ):
            if getattr(self, name) not in get_args(kind):
                raise ArgumentError(
                    f"{name} is {getattr(self, name)!r}; it must be one of "
                    f"{', '.join(get_args(kind))}",
                    argument=name,
                    value=getattr(self, name),
                )
        if self.zero not in (0, 1, 2, 3):
            raise ArgumentError(f"zero is {self.zero}; it must be 0, 1, 2 or 3", argument="zero")
        for name in ("batch", "seq", "cards", "lora"):
            value = getattr(self, name)
            if value is not None and value < 1:
                raise ArgumentError(f"{name} is {value}; it must be at least 1", argument=name)


@dataclass(frozen=True)
class TrainingReport:
    """The cost of one training step of a model on each card.

    Args:
        model: the sizes of the model; with adapters its weights count as they are stored.
        run: how it is trained.

    Source: Rajbhandari et al. 2020 (arXiv 1910.02054), section 3; Korthikanti et al. 2022 (arXiv
    2205.05198), equations 1 to 6.

    >>> from regard.cost import model_of
    >>> report = TrainingReport(model_of("llama-3-8b"), TrainingRun(zero=3, cards=8))
    >>> round(sum(report.state_bytes.values()) / report.model.parameters, 2)
    2.0
    """

    model: ModelSpec
    run: TrainingRun

    def __post_init__(self) -> None:
        if self.model.encoder or not self.model.decodes:
            raise ArgumentError(
                f"{self.model.name} is not a decoder; training is counted for those"
            )
        # a mechanism that is not counted is refused here
        assert self.trained
        assert self._layers

    @property
    def trained(self) -> int:
        """How many parameters are trained: all, or r (in + out) for each matrix with an adapter."""
        if self.run.lora is None:
            return self.model.parameters
        widths = sum(a + b for x in self.model.layers for a, b in _matrices(x))
        return self.run.lora * widths

    @property
    def state_bytes(self) -> dict[str, int]:
        """Bytes of weights, gradients and states of the optimizer on one card."""
        run, n = self.run, self.trained
        weight, gradient, copy, state = BYTES[run.precision]
        states = {
            "adamw": 2.0 * state * n,
            "adamw8bit": 2 * QUANTIZED_STATE * n,
            "sgd": 0.0,
            # a row and a column of each matrix, whose rows are about as wide as the model
            "adafactor": 2.0 * state * n / self.model.dim,
        }[run.optimizer]
        weights = weight * n
        if run.lora is not None:
            frozen = CostReport(self.model, Setting(1, dtype=self.model.dtype))
            weights += frozen.weight_bytes
        shares = [run.cards if run.zero >= stage else 1 for stage in (3, 2, 1)]
        sizes = (weights, gradient * n, copy * n + states)
        names = ("weights", "gradients", "optimizer")
        return {
            name: -(-int(x) // share) for name, x, share in zip(names, sizes, shares, strict=True)
        }

    @property
    def _layers(self) -> list[dict[str, float]]:
        """Bytes for one token that each layer stores, by kind."""
        return [self._layer(layer) for layer in self.model.layers]

    def _layer(self, layer: LayerSpec) -> dict[str, float]:
        """Return the bytes for one token of a layer's activations: inputs of norms and of matrices,
        queries, keys, values and results of attention, and what lies inside the feed-forward layer.
        """
        run, M = self.run, self.model.dim
        size = BYTES[run.precision][0]
        sublayers = len(layer.mixers) + (layer.feed_forward is not None)
        stored = {
            "norms": 2.0 * M * sublayers * size + (M * sublayers if run.dropout else 0),
            "attention": float(sum(_attention(x) for x in layer.mixers) * size),
            "feed-forward": float(_feed_forward(layer) * size),
        }
        if run.checkpointing == "none":
            weights = 2 * size + 1 if run.dropout else size
            heads = sum(x.query_heads or 0 for x in layer.mixers)
            stored["attention weights"] = float(heads * run.seq * weights)
        if run.lora is not None:
            stored["adapters"] = float(run.lora * len(_matrices(layer)) * size)
        return stored

    @property
    def activation_bytes(self) -> dict[str, int]:
        """Bytes of activations on one card, by kind, when the backward pass begins."""
        run, tokens = self.run, self.run.batch * self.run.seq
        size, kinds = BYTES[run.precision][0], {}
        if run.checkpointing == "full":
            kinds["inputs of layers"] = len(self._layers) * self.model.dim * size * tokens
            largest = max(sum(x.values()) for x in self._layers)
            kinds["the layer that is computed again"] = int(largest * tokens)
        else:
            for layer in self._layers:
                for kind, n in layer.items():
                    kinds[kind] = kinds.get(kind, 0) + int(n * tokens)
        # logits, and in fp32 their logarithms, the gradient of these and that of logits
        kinds["logits"] = tokens * (2 * self.model.dim * size + self.model.vocab * (size + 12))
        return kinds

    @property
    def peak_bytes(self) -> int:
        """The bytes of all these and of libraries: a bound from above where gradients are made
        while activations are freed.
        """
        return sum(self.state_bytes.values()) + sum(self.activation_bytes.values()) + LIBRARIES

    @property
    def step_flops(self) -> int:
        """FLOPs of one pass forward and back on a card: three times the forward pass, or twice
        where weights are frozen, and what is computed again.
        """
        run = self.run
        forward = CostReport(self.model, Setting(run.seq))
        layers = forward.prefill_flops - 2 * self._head
        attention = sum(mixer.prefill_flops(run.seq) for mixer in self.model.mixers)
        again = {"none": 0, "selective": attention, "full": layers}[run.checkpointing]
        times = 3 if run.lora is None else 2
        return run.batch * (times * (layers + 2 * self._head * run.seq) + again)

    @property
    def _head(self) -> int:
        return self.model.vocab * self.model.dim if self.model.head else 0

    @property
    def sent_bytes(self) -> float:
        """Bytes that a card sends in a step: gradients are summed over a ring; with `zero` 3 the
        weights are gathered forward and back, half as much again.
        """
        gradients = BYTES[self.run.precision][1] * self.trained
        return ring_bytes(gradients, self.run.cards) * (1.5 if self.run.zero == 3 else 1)

    def seconds(self, machine: Machine) -> float:
        """Return the least time of a step: of its FLOPs, or of its messages, which overlap."""
        rate = machine.rate("fp32" if self.run.precision == "fp32" else "bf16")
        link = machine.link_rate
        messages = self.sent_bytes / link if link is not None and self.run.cards > 1 else 0.0
        return max(self.step_flops / rate, messages)

    def tokens_per_second(self, machine: Machine) -> float:
        """Return the most tokens a second of all cards together."""
        return self.run.cards * self.run.batch * self.run.seq / self.seconds(machine)

    def fit(self, machine: Machine) -> MemoryFit:
        """Return whether a step runs in the memory of a card."""
        needed = self.peak_bytes - LIBRARIES
        return MemoryFit(needed, machine.memory, LIBRARIES, machine.runtime)

    def as_json(self, machine: Machine | None = None) -> dict[str, Any]:
        """Return all figures as plain values."""
        figures: dict[str, Any] = {
            "model": self.model.name,
            **vars(self.run),
            "trained_parameters": self.trained,
            "state_bytes": self.state_bytes,
            "activation_bytes": self.activation_bytes,
            "peak_bytes": self.peak_bytes,
            "step_flops": self.step_flops,
            "sent_bytes": self.sent_bytes,
        }
        if machine is not None:
            figures |= {
                "machine": machine.name,
                "seconds": self.seconds(machine),
                "tokens_per_second": self.tokens_per_second(machine),
                "fit": self.fit(machine).verdict,
            }
        return figures


def _attention(spec: Spec) -> int:
    """Return how many numbers attention stores for a token: queries, keys, values and results."""
    if isinstance(spec, SoftmaxSpec):
        x = spec.shape
        return x.heads * (x.head_dim + x.value_dim) + x.groups * (x.head_dim + x.value_dim)
    if isinstance(spec, LatentSpec):
        width = spec.nope_dim + spec.rope_dim
        # the latent of queries, which is small, is not known here
        return 2 * spec.heads * (width + spec.value_dim) + spec.kv_rank + spec.rope_dim
    raise _not_counted(spec)


def _feed_forward(layer: LayerSpec) -> int:
    """Return how many numbers a feed-forward layer stores for a token: with a gate four times F,
    without one twice F; of a mixture those of each expert that the token uses, and its input.
    """
    feed = layer.feed_forward
    if isinstance(feed, MoESpec):
        shared = 0 if feed.shared is None else _dense(feed.shared)
        return feed.active * (_dense(feed.expert) + 2 * feed.expert.dim) + shared + feed.count
    return _dense(feed) if isinstance(feed, DenseSpec) else 0


def _dense(feed: DenseSpec) -> int:
    return (4 if feed.gated else 2) * feed.hidden


def _matrices(layer: LayerSpec) -> list[tuple[int, int]]:
    """Return the inputs and outputs of the matrices of a layer, to which adapters are added."""
    pairs: list[tuple[int, int]] = []
    feed = layer.feed_forward
    dense = [feed] if isinstance(feed, DenseSpec) else []
    if isinstance(feed, MoESpec):
        dense = [feed.expert] * feed.count + ([feed.shared] if feed.shared is not None else [])
    for one in dense:
        pairs += [(one.dim, one.hidden)] * (3 if one.gated else 2)
    dim = dense[0].dim if dense else 0
    for mixer in layer.mixers:
        if not isinstance(mixer, SoftmaxSpec):
            raise _not_counted(mixer)
        x = mixer.shape
        widths = (x.heads * x.head_dim, x.groups * x.head_dim, x.groups * x.value_dim)
        pairs += [(dim, width) for width in (*widths, x.heads * x.value_dim)]
    return pairs


def _not_counted(spec: Spec) -> ArgumentError:
    return ArgumentError(
        f"what training stores of {spec.name} is not counted; it is counted for softmax and latent "
        "attention, and adapters for softmax attention"
    )
