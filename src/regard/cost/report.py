"""The cost of a whole model at a context: bytes, and the FLOPs of a prompt and of a token.

A multiplication and an addition are two FLOPs. Counted are products of matrices, scores and mix of
the pairs that the mask leaves, and the steps of recurrences; embeddings, norms, biases, activations
and the softmax itself are not, as is usual. A prompt is charged for the logits of its last token
only, which is what generation computes.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass
from fractions import Fraction
from functools import cached_property
from typing import Any

from regard.cost.kv_formats import BITS, STATE_BYTES, KVFormat
from regard.cost.model import LayerSpec, ModelSpec
from regard.cost.spec import CacheContents, Spec
from regard.errors import ArgumentError


@dataclass(frozen=True)
class Setting:
    """How a model is run.

    Attributes:
        context: tokens of the prompt, and up to the one that is decoded, its own included.
        batch: texts at once.
        dtype: of weights.
        kv_dtype: of cached values; None is the dtype of weights, or bf16 where that has fewer
            than 16 bits.

    Raises:
        ArgumentError: context or batch is less than 1, or a dtype is not known.
    """

    context: int = 4096
    batch: int = 1
    dtype: str = "bf16"
    kv_dtype: str | None = None

    def __post_init__(self) -> None:
        for name in ("context", "batch"):
            if getattr(self, name) < 1:
                raise ArgumentError(f"{name} is {getattr(self, name)}; it must be at least 1")
        if self.dtype not in BITS:
            raise ArgumentError(f"dtype is {self.dtype!r}; known are {', '.join(BITS)}")
        assert self.format

    @property
    def format(self) -> KVFormat:
        """The format of cached values."""
        exact = self.dtype if BITS[self.dtype] >= 16 else "bf16"
        return KVFormat(self.kv_dtype or exact, exact)


@dataclass(frozen=True)
class CostReport:
    """The cost of a model at a setting: `as_json()` has all figures.

    Raises:
        ArgumentError: the context is longer than the model's learned positions.

    >>> from regard.cost import model_of
    >>> report = CostReport(model_of("llama-3-8b"), Setting(8192))
    >>> report.kv_bytes_per_token, report.kv_bytes == 8192 * 131072
    (131072, True)
    """

    model: ModelSpec
    setting: Setting

    def __post_init__(self) -> None:
        longest = self.model.max_context
        if longest is not None and self.setting.context > longest:
            raise ArgumentError(
                f"context is {self.setting.context:,}, and {self.model.name} has learned "
                f"positions for {longest:,} tokens: ask for at most that"
            )

    @cached_property
    def _mixers(self) -> Counter[Spec]:
        return Counter(self.model.mixers)

    @cached_property
    def kv_bytes_per_token(self) -> int:
        """Bytes that one token adds to the caches of all layers.

        Layers with a window drop it later.
        """
        return self._token_bytes(lambda cached: not cached.from_source)

    @cached_property
    def kv_growth(self) -> int:
        """The part of `kv_bytes_per_token` in layers that keep all tokens."""
        return self._token_bytes(lambda cached: not cached.from_source and not cached.bounded)

    def _token_bytes(self, counts: Callable[[CacheContents], bool]) -> int:
        form, caches = self.setting.format, [(m.cached(1), n) for m, n in self._mixers.items()]
        return _up(sum(n * form.bytes_per_token(cached) for cached, n in caches if counts(cached)))

    @cached_property
    def kv_bytes(self) -> int:
        """Bytes of all caches at this context, over the batch."""
        return self.setting.batch * self._cache_bytes("cached")

    def _cache_bytes(self, what: str) -> int:
        """Bytes for one text of what each spec answers to this method."""
        form, at = self.setting.format, self.setting.context
        if not self.model.decodes:
            return 0
        return sum(n * form.total_bytes(getattr(m, what)(at)) for m, n in self._mixers.items())

    @cached_property
    def state_bytes(self) -> int:
        """The part of `kv_bytes` that does not depend on the context, for one text."""
        return STATE_BYTES * sum(n * m.state.value for m, n in self._mixers.items())

    @cached_property
    def weight_bytes(self) -> int:
        """Bytes of all weights, in one dtype."""
        return _up(Fraction(self.model.parameters * BITS[self.setting.dtype], 8))

    def _active_bytes(self, tokens: int) -> int:
        """Bytes of the active parameters of so many tokens, each read once."""
        active = sum(part.active_parameters for part in self.model.parts_for(tokens))
        return _up(Fraction(active * BITS[self.setting.dtype], 8))

    @cached_property
    def matmul_values(self) -> int:
        """How many matrix values of all layers one token multiplies."""
        return _matmul_values(self.model.layers)

    @cached_property
    def prefill_flops(self) -> int:
        """FLOPs of a prompt of `context` tokens, over the batch."""
        T, model = self.setting.context, self.model
        head = model.vocab * model.dim if model.head and model.decodes else 0
        layers = 2 * T * self.matmul_values + sum(
            n * mixer.prefill_flops(T) for mixer, n in self._mixers.items()
        )
        if model.encoder:  # the prompt is read by the encoder, and one token starts the other text
            crossing = [layer.cross for layer in model.layers if layer.cross is not None]
            layers = 2 * T * _matmul_values(model.encoder) + sum(
                x.mixer.prefill_flops(T) for x in model.encoder
            )
            layers += sum(cross.prefill_flops(T) + cross.decode_flops(T) for cross in crossing)
            layers += 2 * self.matmul_values + sum(x.mixer.decode_flops(1) for x in model.layers)
        return self.setting.batch * (layers + 2 * head + 2 * model.pooler.matrices)

    @cached_property
    def prefill_bytes(self) -> int:
        """Bytes of weights, read once, and of caches, written once."""
        return self._active_bytes(self.setting.context * self.setting.batch) + self.kv_bytes

    @property
    def decode_flops(self) -> int:
        """FLOPs of the token at position context - 1, over the batch.

        Latent attention counts in the form that has fewer.
        """
        return self._decode(None)

    @property
    def decode_forms(self) -> dict[str, int]:
        """The same in each form of latent attention; empty if the model has none."""
        forms = dict.fromkeys(form for mixer in self._mixers for form in mixer.forms)
        return {form: self._decode(form) for form in forms}

    def _decode(self, form: str | None) -> int:
        if not self.model.decodes:
            return 0
        S, attention = self.setting.context, 0
        for mixer, n in self._mixers.items():
            attention += n * mixer.decode_flops(S, form if form in mixer.forms else None)
        head = self.model.vocab * self.model.dim if self.model.head else 0
        return self.setting.batch * (2 * (self.matmul_values + head) + attention)

    @cached_property
    def decode_bytes(self) -> int:
        """Bytes of a decoded token: active parameters, what is read of caches, what is written."""
        if not self.model.decodes:
            return 0
        written = self.kv_bytes_per_token + self.state_bytes
        return self._active_bytes(self.setting.batch) + self.setting.batch * (
            self._cache_bytes("read") + written
        )

    def as_json(self) -> dict[str, Any]:
        """All figures by name."""
        model, setting = self.model, self.setting
        return {
            "model": model.name,
            "context": setting.context,
            "batch": setting.batch,
            "dtype": setting.dtype,
            "kv_dtype": setting.format.name,
            "parameters": model.parameters,
            "active_parameters": model.active_parameters,
            "attention_parameters": model.attention_parameters,
            "weight_bytes": self.weight_bytes,
            "kv_bytes_per_token": self.kv_bytes_per_token,
            "kv_bytes_growth": self.kv_growth,
            "kv_bytes": self.kv_bytes,
            "state_bytes": self.state_bytes,
            "prefill_flops": self.prefill_flops,
            "prefill_bytes": self.prefill_bytes,
            "decode_flops": self.decode_flops,
            "decode_bytes": self.decode_bytes,
            "decode_flops_by_form": self.decode_forms,
            "parts": {
                p.name: {"parameters": p.parameters, "active": p.active_parameters}
                for p in model.parts
            },
            "layers": model.attention_kinds,
            "notes": list(model.notes),
        }


def _matmul_values(layers: tuple[LayerSpec, ...]) -> int:
    """How many matrix values of these layers one token multiplies."""
    total = 0
    for layer, times in Counter(layers).items():
        feed = {} if layer.feed_forward is None else layer.feed_forward.active_weights(1)
        maps = sum(mixer.weights.multiplied_once for mixer in layer.mixers)
        total += times * (maps + sum(weights.matrices for weights in feed.values()))
    return total


def _up(x: Fraction | int) -> int:
    return -(-Fraction(x).numerator // Fraction(x).denominator)
