"""The cost of a whole model at a context length. A multiplication and an addition are two FLOPs;
embeddings, norms, biases, activations and the softmax are not counted, and a prompt has the logits
of its last token only.
"""

from __future__ import annotations

import math
from collections import Counter
from dataclasses import dataclass, replace
from fractions import Fraction
from functools import cached_property
from typing import Any

from regard.cost.model import LayerSpec, ModelSpec, StoredSize
from regard.cost.spec import CacheContents, HeadShape, Spec
from regard.errors import ArgumentError
from regard.language import Phrase
from regard.units import plural

BITS = {"fp32": 32, "bf16": 16, "fp16": 16, "fp8": 8, "int8": 8, "int4": 4, "int2": 2}
"""Bits per value, without scales."""
QUANTIZED = ("int8", "int4", "int2")
"""Formats that store a scale and a zero point for each group of values."""
SCALED = (*QUANTIZED, "fp8")
"""Formats of a cache that store scales; layers with a window do not use them."""
STATE_BYTES = 4
"""Bytes per value of a recurrent state, which is fp32 whatever the format of the KV cache."""


def bits_per_value(bits: int, group: int, scale_bits: int = 16) -> Fraction:
    """Return the bits of a quantized value: its code, and its share of the scale and the zero point
    of its group, b + 2 s / g. Source: Liu et al. 2024 (arXiv 2402.02750), section 3.
    """
    return bits + Fraction(2 * scale_bits, group)


@dataclass(frozen=True)
class KVFormat:
    """The number format of a KV cache.

    Integer codes are grouped as in `regard.caches.Quantized`: groups of tokens for the first of
    several parts (keys have a scale per channel), groups of channels for the other parts (values
    have a scale per token), and the most recent tokens are not quantized. 8-bit floats have one
    scale for each token and head, as in `regard.caches.Float8`, and no token stays as it is. Layers
    with a window, whose caches are small, are not quantized in any format.

    Attributes:
        exact: the format of values that are not quantized, and of scales.
        residual: the minimum number of most recent tokens that are not quantized.
        group: the maximum number of values that share a scale.
    """

    name: str = "bf16"
    exact: str = "bf16"
    residual: int = 128
    group: int = 32

    def __post_init__(self) -> None:
        for name in (self.name, self.exact):
            if name not in BITS:
                raise ArgumentError(
                    f"{name!r} is not a number format; it must be one of {', '.join(BITS)}"
                )

    def bytes_per_token(self, cached: CacheContents) -> Fraction:
        """Return the bytes that a token takes once it is quantized."""
        if self.name not in SCALED or cached.bounded:
            return Fraction(cached.values_per_token * self._exact_bits(), 8)
        return self._quantized_bytes(cached)

    def total_bytes(self, cached: CacheContents) -> int:
        """Return the bytes of the whole cache, the recurrent state included."""
        state = STATE_BYTES * cached.state + sum(map(self.total_bytes, cached.others))
        if self.name not in SCALED or cached.bounded:
            return -(-cached.values_per_token * cached.tokens * self._exact_bits() // 8) + state
        coded = cached.tokens
        if self.name in QUANTIZED:
            group = self._group(cached)
            coded = max(0, cached.tokens - self.residual) // group * group
        rest = (cached.tokens - coded) * cached.values_per_token * BITS[self.exact]
        total = self._quantized_bytes(cached) * coded + Fraction(rest, 8)
        return math.ceil(total) + state

    def _exact_bits(self) -> int:
        """Return the bits of a value that is not quantized."""
        return BITS[self.exact if self.name in SCALED else self.name]

    def _group(self, cached: CacheContents) -> int:
        """Return the largest group that divides the width of parts with scales per token."""
        widths = [dims for _, dims in cached.parts]
        per_token_widths = widths[1:] if len(widths) > 1 else widths
        sizes = range(1, self.group + 1)
        return max(g for g in sizes if all(w % min(g, w) == 0 for w in per_token_widths))

    def _quantized_bytes(self, cached: CacheContents) -> Fraction:
        """Return the bytes of one quantized token."""
        if self.name not in QUANTIZED:
            return Fraction(
                sum(n * (d * BITS[self.name] + BITS[self.exact]) for n, d in cached.parts), 8
            )
        group, bits = self._group(cached), Fraction(0)
        for i, (heads, dims) in enumerate(cached.parts):
            by_channel = i == 0 and len(cached.parts) > 1
            each = bits_per_value(
                BITS[self.name], group if by_channel else min(group, dims), BITS[self.exact]
            )
            bits += heads * dims * each
        return bits / 8


@dataclass(frozen=True)
class Setting:
    """The conditions under which a model runs: context length, batch size and number formats.

    Args:
        context: the tokens of a prompt, or those up to and including the decoded one.
        batch: the number of sequences that run together.
        dtype: the number format of weights.
        kv_dtype: that of the KV cache; None is that of weights, but at least bf16.
        shared_prefix: how many first tokens of the context all sequences of the batch share, so
            that one copy is computed, stored and read.

    Raises:
        ArgumentError: context or batch is less than 1, the prefix is longer than the context, or a
            format is not known.
    """

    context: int = 4096
    batch: int = 1
    dtype: str = "bf16"
    kv_dtype: str | None = None
    shared_prefix: int = 0

    def __post_init__(self) -> None:
        for name in ("context", "batch"):
            if getattr(self, name) < 1:
                raise ArgumentError(f"{name} is {getattr(self, name)}; it must be at least 1")
        if not 0 <= self.shared_prefix < self.context:
            raise ArgumentError(
                f"the shared prefix is {plural(self.shared_prefix, 'token')}; it must be shorter "
                f"than the context of {plural(self.context, 'token')}",
                argument="shared_prefix",
                value=self.shared_prefix,
            )
        if self.dtype not in BITS:
            raise ArgumentError(
                f"the dtype is {self.dtype!r}; it must be one of {', '.join(BITS)}",
                argument="dtype",
                value=self.dtype,
            )
        assert self.format

    @property
    def format(self) -> KVFormat:
        """The number format of the KV cache."""
        exact = self.dtype if BITS[self.dtype] >= 16 else "bf16"
        return KVFormat(self.kv_dtype or exact, exact)


@dataclass(frozen=True)
class CostReport:
    """The cost of a model under a setting; `as_json()` returns all figures.

    Args:
        model: the sizes of the model, from `regard.cost.model_of`.
        setting: the conditions.

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
        max_context = self.model.max_context
        if max_context is not None and self.setting.context > max_context:
            raise ArgumentError(
                f"the context is {plural(self.setting.context, 'token')}, but {self.model.name} "
                f"has learned positions for {plural(max_context, 'token')} only; give a context "
                f"of at most {max_context}"
            )
        if self.setting.shared_prefix and (self.model.encoder or not self.model.decodes):
            raise ArgumentError(
                f"{self.model.name} has an encoder; a shared prefix is counted in decoders only",
                argument="shared_prefix",
            )

    @cached_property
    def _mixers(self) -> Counter[Spec]:
        """Each attention spec of the decoder with the number of layers that have it."""
        return Counter(self.model.mixers)

    @cached_property
    def kv_bytes_per_token(self) -> int:
        """Bytes that one token adds to the caches; layers with a window drop it later."""
        caches = [(m.cached(1), n) for m, n in self._mixers.items()]
        added = (
            n * self.setting.format.bytes_per_token(cached)
            for cached, n in caches
            if not cached.from_source
        )
        return math.ceil(sum(added))

    @cached_property
    def kv_growth(self) -> int:
        """Bytes that one token adds to a long text's caches: those that no layer drops later."""
        long, total, grown = 1 << 20, self.setting.format.total_bytes, 0
        for mixer, n in self._mixers.items():
            before, after = mixer.cached(long), mixer.cached(2 * long)
            if not before.from_source:
                grown += n * (total(after) - total(before))
        return math.ceil(Fraction(grown, long))

    @cached_property
    def kv_bytes(self) -> int:
        """Bytes of all caches at this context, for the whole batch."""
        return self._cache_bytes("cached")

    def _cache_bytes(self, method: str, cards: int = 1) -> int:
        """Return the bytes, for the whole batch, of the cache contents that a method of each spec
        returns; `method` is its name, "cached" or "read". Of several cards, those of one.
        """
        kv_format, setting, total = self.setting.format, self.setting, 0
        if not self.model.decodes:
            return 0
        for mixer, n in self._mixers.items():
            own = kv_format.total_bytes(getattr(mixer, method)(setting.context))
            once = 0
            if setting.shared_prefix and _can_share(mixer):
                once = kv_format.total_bytes(mixer.cached(setting.shared_prefix))
            every = setting.batch * own - (setting.batch - 1) * once
            total += n * -(-every // mixer.cache_shares(cards))
        return total

    def held_bytes(self, cards: int = 1, *, by_sequence: bool = False) -> int:
        """Return the bytes of weights and caches on each of several cards.

        Args:
            cards: the number of cards, which divide every matrix and the heads of every cache.
            by_sequence: whether the cards divide the sequences in attention instead of its heads,
                so that each has the whole matrices of attention and no other's caches (data
                parallel attention).

        Returns:
            The number of bytes; matrices that engines keep whole (norms, routers) count as divided.
        """
        if not by_sequence or cards == 1:
            return -(-self.weight_bytes // cards) + self._cache_bytes("cached", cards)
        setting, model = self.setting, self.model
        bits = BITS[setting.dtype] if self.stored is None else self.stored.bits_of("attention")
        attention = int(model.attention_parameters * bits) // 8
        own = CostReport(model, replace(setting, batch=-(-setting.batch // cards)))
        return attention + -(-(self.weight_bytes - attention) // cards) + own.kv_bytes

    def why_not_on(self, cards: int) -> str:
        """Return why several cards cannot divide the heads of the model; "" if they can.

        Args:
            cards: the number of cards that divide the model.

        Returns:
            The reason.
        """
        for mixer in self._mixers:
            H, shape = mixer.query_heads, getattr(mixer, "shape", None)
            groups = shape.states if isinstance(shape, HeadShape) else 1
            for heads in (H, groups):
                if heads and heads % cards and (heads == H or cards % heads):
                    return Phrase("{n} cards cannot divide {heads} heads", n=cards, heads=heads)
        return ""

    def expert_bytes(self, tokens: int | None = None) -> int:
        """Return the bytes of all experts, or of those that some tokens use together.

        Args:
            tokens: the number of tokens; None counts all experts.

        Returns:
            The number of bytes.
        """
        parts = self.model.parts if tokens is None else self.model.parts_for(tokens)
        bits = BITS[self.setting.dtype] if self.stored is None else self.stored.bits_of("experts")
        return sum(
            int((p.parameters if tokens is None else p.active_parameters) * bits) // 8
            for p in parts
            if p.name == "experts"
        )

    @cached_property
    def state_bytes(self) -> int:
        """The part of `kv_bytes` that does not depend on the context, for one sequence."""
        return STATE_BYTES * sum(n * m.state.value for m, n in self._mixers.items())

    @property
    def stored(self) -> StoredSize | None:
        """The form in which the model's files hold the weights, if the setting has the model's own
        dtype; in another one all weights count as plain numbers of it, and this is None.
        """
        return self.model.stored if self.setting.dtype == self.model.dtype else None

    @property
    def weight_format(self) -> str:
        """The name of the format in which the weights count."""
        return self.setting.dtype if self.stored is None else self.stored.form

    @property
    def compute_format(self) -> str:
        """The number format of matrix products: fp8 if the weights are stored so, else the dtype,
        into which integers are dequantized.
        """
        return "fp8" if self.weight_format == "fp8" else self.setting.dtype

    @cached_property
    def weight_bytes(self) -> int:
        """Bytes of all weights as they are stored, or in the format of the setting."""
        if self.stored is not None:
            return self.stored.bytes
        return math.ceil(Fraction(self.model.parameters * BITS[self.setting.dtype], 8))

    def active_bytes(self, tokens: int) -> int:
        """Return the bytes of the parameters that some tokens use together.

        Args:
            tokens: the number of tokens.

        Returns:
            The number of bytes.
        """
        parts = self.model.parts_for(tokens)
        if self.stored is None:
            active = sum(part.active_parameters for part in parts)
            return math.ceil(Fraction(active * BITS[self.setting.dtype], 8))
        tied = "embedding" if self.model.tied else "head"
        bits = sum(
            part.active_parameters * self.stored.bits_of(tied if part.name == "head" else part.name)
            for part in parts
        )
        return math.ceil(Fraction(bits) / 8)

    @cached_property
    def matmul_values(self) -> int:
        """How many matrix values of all layers one token is multiplied by."""
        return _matmul_values(self.model.layers)

    @cached_property
    def prefill_flops(self) -> int:
        """FLOPs of a prompt of `context` tokens, for the whole batch."""
        setting, model = self.setting, self.model
        head = model.vocab * model.dim if model.head and model.decodes else 0
        layers, T = self._prompt_flops(setting.context), setting.context
        if model.encoder:  # the encoder reads the prompt, and the decoder computes its first token
            crossing = [layer.cross for layer in model.layers if layer.cross is not None]
            layers = 2 * T * _matmul_values(model.encoder) + sum(
                x.mixer.prefill_flops(T) for x in model.encoder if x.mixer is not None
            )
            layers += sum(cross.prefill_flops(T) + cross.decode_flops(T) for cross in crossing)
            own = [x.mixer for x in model.layers if x.mixer is not None]
            layers += 2 * self.matmul_values + sum(mixer.decode_flops(1) for mixer in own)
        total = setting.batch * (layers + 2 * head + 2 * model.pooler.matrices)
        return total - (setting.batch - 1) * self._prompt_flops(setting.shared_prefix)

    def _prompt_flops(self, tokens: int) -> int:
        """Return the FLOPs of a prompt of one sequence in the layers of the decoder."""
        attention = sum(n * mixer.prefill_flops(tokens) for mixer, n in self._mixers.items())
        return 2 * tokens * self.matmul_values + attention if tokens else 0

    def prefill_bytes(self, cards: int = 1) -> int:
        """Return the bytes of weights, read once, and of caches, written once, for a prompt.

        Args:
            cards: the number of cards that divide the model; the bytes are those of one.

        Returns:
            The number of bytes.
        """
        return -(-self.active_bytes(self.prompt_tokens) // cards) + self._cache_bytes(
            "cached", cards
        )

    @property
    def prompt_tokens(self) -> int:
        """How many tokens of prompts are computed: a shared prefix once."""
        setting = self.setting
        return setting.context * setting.batch - setting.shared_prefix * (setting.batch - 1)

    @property
    def decode_flops(self) -> int:
        """FLOPs of the batch's token at context - 1; latent attention in its cheaper form."""
        return self._decode(None)

    @property
    def decode_forms(self) -> dict[str, int]:
        """FLOPs of one token in each form of latent attention, by the name of the form; empty if
        the model has no latent attention.
        """
        forms = dict.fromkeys(form for mixer in self._mixers for form in mixer.forms)
        return {form: self._decode(form) for form in forms}

    def _decode(self, form: str | None) -> int:
        """Return the FLOPs of one decoded token for the whole batch; latent attention counts in
        this form, or in the form of its spec if it is None.
        """
        if not self.model.decodes:
            return 0
        S, attention = self.setting.context, 0
        for mixer, n in self._mixers.items():
            attention += n * mixer.decode_flops(S, form if form in mixer.forms else None)
        head = self.model.vocab * self.model.dim if self.model.head else 0
        return self.setting.batch * (2 * (self.matmul_values + head) + attention)

    def decode_bytes(self, cards: int = 1) -> int:
        """Return the bytes moved for a decoded token: active parameters, the cached values that it
        reads, and those that it writes.

        Args:
            cards: the number of cards that divide the model; the bytes are those of one.

        Returns:
            The number of bytes.
        """
        if not self.model.decodes:
            return 0
        batch = self.setting.batch
        written = batch * (self.kv_bytes_per_token + self.state_bytes)
        read = -(-self.active_bytes(batch) // cards) + self._cache_bytes("read", cards)
        return read + -(-written // cards)

    @property
    def notes(self) -> tuple[str, ...]:
        """Remarks on the model, and on a context that its maker does not promise."""
        stated, context = self.model.stated_context, self.setting.context
        if stated is None or context <= stated:
            return self.model.notes
        beyond = Phrase(
            "the context is longer than the {stated:,} tokens that the maker of the model gives: "
            "it costs this, and its quality is not known",
            stated=stated,
        )
        return (*self.model.notes, beyond)

    def as_json(self) -> dict[str, Any]:
        """Return all figures by name, as plain values for JSON.

        Returns:
            Numbers, strings and dictionaries; memory in bytes, work in FLOPs.
        """
        model, setting = self.model, self.setting
        return {
            "model": model.name,
            "context": setting.context,
            "batch": setting.batch,
            "shared_prefix": setting.shared_prefix,
            "dtype": setting.dtype,
            "weights": self.weight_format,
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
            "prefill_bytes": self.prefill_bytes(),
            "decode_flops": self.decode_flops,
            "decode_bytes": self.decode_bytes(),
            "decode_flops_by_form": self.decode_forms,
            "parts": {
                p.name: {
                    "parameters": p.parameters,
                    "active_parameters": p.active_parameters,
                }
                for p in model.parts
            },
            "layers": model.attention_kinds,
            "notes": list(self.notes),
        }


def _can_share(mixer: Spec) -> bool:
    """Return whether sequences can share the cache of a prefix: it keeps every token, and a decoded
    token reads all of it.
    """
    cached = mixer.cached(2)
    plain = not (cached.bounded or cached.from_source or cached.others or cached.state)
    return plain and cached.tokens == 2 and mixer.read(1 << 20) == mixer.cached(1 << 20)


def _matmul_values(layers: tuple[LayerSpec, ...]) -> int:
    """Return how many matrix values of these layers one token is multiplied by."""
    total = 0
    for layer, times in Counter(layers).items():
        feed = {} if layer.feed_forward is None else layer.feed_forward.active_weights(1)
        maps = sum(mixer.weights.multiplied_once for mixer in layer.mixers)
        total += times * (maps + sum(weights.matrices for weights in feed.values()))
    return total
