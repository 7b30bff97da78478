"""Import this module to register the attention implementation `"regard"` in transformers.

Every model of transformers that takes its attention from `AttentionInterface` can then run through
`regard.attend`: with grouped heads, windows, sinks, softcaps, position biases, padding and packed
sequences, in training and in `generate`. If transformers' mask is causal, a window, chunks,
documents or padding, it is passed as a rule, so that hidden keys are skipped; any other mask is
passed as a dense tensor. Taps work as in regard's own models.

    model = AutoModelForCausalLM.from_pretrained(folder, attn_implementation="regard")
    model.set_attn_implementation("regard")  # or later
    handle = accelerate(model)  # or: the linear layers, too; handle.remove() puts all back
    # a step of this cache copies no old keys
    model.generate(**prompt, past_key_values=PreallocatedCache(model.config))

>>> import torch, transformers, regard
>>> import regard.integrations.transformers as integration
>>> config = transformers.LlamaConfig(
...     vocab_size=16, hidden_size=16, intermediate_size=16, num_hidden_layers=2,
...     num_attention_heads=4, num_key_value_heads=2, pad_token_id=0,
... )
>>> model = transformers.LlamaForCausalLM(config).eval()
>>> model.set_attn_implementation("regard")
>>> ids = torch.tensor([[1, 2, 3, 4]])
>>> with torch.no_grad(), regard.Trace("pattern") as trace:
...     _ = model(ids)
>>> trace["layers.1.pattern"].shape
torch.Size([1, 4, 4, 4])
>>> cache = integration.PreallocatedCache(config)
>>> model.generate(ids, past_key_values=cache, max_new_tokens=3, do_sample=False).shape
torch.Size([1, 7])

A query whose keys are all hidden (a padded one) gives 0. A model class that computes its attention
itself is refused when it is built or switched, because it would add the boolean mask to its scores.
`architectures()` lists the model types that can run through regard, and docs/transformers.md shows
the test results of each. Install with: pip install 'regard[transformers]'.
"""

from __future__ import annotations

import inspect
from operator import attrgetter

try:
    import transformers
except ModuleNotFoundError as error:
    raise ImportError(
        "regard.integrations.transformers needs transformers: pip install 'regard[transformers]'"
    ) from error

for _function, _parameter in (
    ("masking_utils.sdpa_mask", "q_offset"),
    ("cache_utils.DynamicLayer.crop", "tokens_to_remove"),
):
    if _parameter not in inspect.signature(attrgetter(_function)(transformers)).parameters:
        raise ImportError(
            f"transformers {transformers.__version__} is too old for "
            f"regard.integrations.transformers: its {_function} "
            f"has no {_parameter}; pip install -U transformers"
        )

from regard.integrations.transformers.attention import name_taps, regard_attention  # noqa: E402
from regard.integrations.transformers.cache import PreallocatedCache, PreallocatedLayer  # noqa: E402
from regard.integrations.transformers.masks import (  # noqa: E402
    BoolMask,
    MaskRule,
    regard_mask,
)
from regard.integrations.transformers.supported_models import (  # noqa: E402
    IMPLEMENTATION,
    AcceleratedModel,
    accelerate,
    architectures,
    wrap_model_methods,
)

__all__ = [
    "AcceleratedModel",
    "BoolMask",
    "MaskRule",
    "PreallocatedCache",
    "PreallocatedLayer",
    "accelerate",
    "architectures",
    "name_taps",
    "regard_attention",
    "regard_mask",
]


transformers.AttentionInterface.register(IMPLEMENTATION, regard_attention)
transformers.AttentionMaskInterface.register(IMPLEMENTATION, regard_mask)
wrap_model_methods()
