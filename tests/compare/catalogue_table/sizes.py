"""Every mechanism of the catalogue at two sizes: in a published model, where costs are counted, and
as one small layer, whose speed is measured.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from dataclasses import dataclass, field, replace

import torch
from torch import nn

from regard.configs.published import model_of
from regard.configs.suggested_sizes import MECHANISM_CHOICES, BaseModel, mechanism_costs
from regard.cost import CostReport, Setting
from regard.models.assembly.catalogue_mixer import CAUSAL_OPTIONS, decoder_variants
from regard.nn.mixer import MaskVisibility
from regard.nn.variants import VARIANTS, Variant
from regard.nn.variants.registry import option_names

MODEL, CONTEXT = "llama-3.1-8b", 32768
"""The model whose attention is replaced, and the context at which costs are counted."""

DIM, HEADS, GROUPS, TOKENS = 512, 8, 2, 1024
"""The sizes of the layer whose speed is measured, and the tokens of its prompt."""

SEEN = TOKENS // 4
"""How many tokens a window, a budget or a selection holds where speed is measured."""

LATENT = {"kv_rank": 256, "nope_dim": 64, "rope_dim": 32, "value_dim": 64}
EVICTING = ("h2o", "tova", "snapkv", "key_norm", "keydiff", "adakv", "expected_attention")
"""The mechanisms that drop tokens by a score."""
SMALL: dict[str, dict[str, object]] = {
    "infini": {"groups": GROUPS, "segment": SEEN},
    "infini_delta": {"groups": GROUPS, "segment": SEEN},
    "streaming": {"groups": GROUPS, "recent": SEEN - 4},
    "sliding_window": {"window": SEEN},
    "local_global": {"window": SEEN},
    "chunked": {"chunk": SEEN},
    "prefix_lm": {"prefix": SEEN},
    "packed": {"bounds": (0, 256, 512, 768, 1024)},
    "longformer": {"window": SEEN},
    "dilated": {"window": SEEN, "step": 2},
    "sparse_strided": {"stride": 32},
    "sparse_fixed": {"stride": 32},
    "dynamic_mask": {"keep": SEEN},
    "relative_logits": {"extent": SEEN},
    "top_k": {"top": 32},
    "nsa": {"count": 4, "window": SEEN},
    "moba": {"block": 64, "topk": 4},
    "quest": {"page": 16, "topk": SEEN // 16},
    "msa": {"block": 64, "topk": 4, "index_dim": 64, "rotary_dim": 32},
    "dsa": {"topk": SEEN, "index_heads": 8, "index_dim": 64, "rotary_dim": 32},
    "qsa": {"topk": SEEN // 4, "index_heads": 4, "index_dim": 64, "rotary_dim": 32},
    "dsa_pools": {"topk": SEEN // 4, "index_heads": 8, "index_dim": 64},
    "hca": {"block": 8, "window": SEEN // 2},
    "csa": {
        "block": 4,
        "topk": SEEN // 2,
        "window": SEEN // 2,
        "index_heads": 8,
        "index_dim": 64,
        "rotary_dim": 32,
    },
    "dual_chunk": {"chunk": SEEN, "length": 2 * SEEN},
    "self_extend": {"group": 8, "window": SEEN},
    "rerope": {"window": SEEN},
    "lm_infinite": {"sinks": 4, "window": SEEN},
    "mla": LATENT,
    "grouped_latent": {**LATENT, "kv_rank": 128},
    "mlra": {**LATENT, "kv_rank": 64},
    "mfa": {"q_rank": 256, "head_dim": 128},
    "mamba2": {"head_dim": 64},
    "log_linear": {"head_dim": 64, "levels": 11},
    **{name: {"budget": SEEN - 64, "interval": 64} for name in EVICTING},
    "h2o": {"budget": SEEN - 64, "interval": 64, "newest": 64},
}
"""The options of the small layers, beside `groups`; a mechanism that is not named has its
defaults.
"""

SHARED_HEADS = ("streaming", "differential", *EVICTING)
"""Mechanisms that have as many key heads as query heads unless they are told otherwise, and get
those of the model.
"""


def causal_options(entry: Variant) -> dict[str, object]:
    """The options that make a mechanism causal, where it has a choice."""
    names = option_names(entry)
    return {key: value for key, value in CAUSAL_OPTIONS.items() if key in names}


def decodes(name: str) -> bool:
    """Whether the mechanism decodes token by token: it can be the layer of a decoder, or attends to
    a second sequence.
    """
    return name in decoder_variants() or VARIANTS[name].family in ("cross", "additive")


def small_layer(name: str) -> nn.Module:
    """The layer whose speed is measured, with its initial weights, in evaluation mode."""
    entry = VARIANTS[name]
    options = dict(SMALL.get(name, {}))
    if "groups" in entry.example_options or name in SHARED_HEADS:
        options.setdefault("groups", GROUPS)
    torch.manual_seed(0)
    return entry.build(DIM, HEADS, **options, **causal_options(entry)).eval()


SEEN_KEYS: dict[str, Callable[[int], int]] = {
    "dilated": lambda i: min(i // 2 + 1, 512),
    "sparse_strided": lambda i: min(i + 1, 128) + i // 128,
    "sparse_fixed": lambda i: i % 128 + 1 + i // 128,
}
"""How many keys the query at position i sees, for patterns whose pairs take long to count by the
mask.
"""


@dataclass(frozen=True)
class CountedPairs(MaskVisibility):
    """A mask whose pairs are counted by a formula."""

    seen: Callable[[int], int] = field(kw_only=True)

    def pairs(self, context: int) -> int:
        """The number of visible pairs."""
        return sum(map(self.seen, range(context)))


@functools.cache
def reference_report(name: str) -> CostReport:
    """The cost of the model with this mechanism in every layer.

    A mechanism that `regard cost --mechanisms` knows has the sizes that the command suggests; the
    others have those that `regard describe` suggests.
    """
    base, setting = BaseModel.of(model_of(MODEL)), Setting(CONTEXT)
    if name in MECHANISM_CHOICES:
        return mechanism_costs([name], base, setting)[0].report
    entry = VARIANTS[name]
    groups = {"groups": base.groups} if name in SHARED_HEADS else {}
    options = {**entry.published_options, **groups, **causal_options(entry)}
    with torch.device("meta"):
        module = entry.build(base.model.dim, base.heads, **options)
    spec = module.spec
    if name in SEEN_KEYS:
        spec = replace(spec, visible=CountedPairs(spec.visible.mask, seen=SEEN_KEYS[name]))
    layers = tuple(replace(layer, mixer=spec) for layer in base.model.layers)
    return CostReport(replace(base.model, layers=layers), setting)
