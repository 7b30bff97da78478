"""regard in transformers: importing this module registers the attention implementation `"regard"`
and its masks.

Every model of transformers that takes its attention from `AttentionInterface` can then run through
`regard.attend`: with grouped heads, windows, sinks, softcaps, position biases, padding and packed
sequences, in training and in `generate`. Masks travel as rules where transformers' mask has one
(causal, window, chunk, documents, padding), so that what is masked is skipped; else as the dense
mask. Taps are heard as in a model of regard's own.

    model = AutoModelForCausalLM.from_pretrained(folder, attn_implementation="regard")
    model.set_attn_implementation("regard")  # or later
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

A query that sees nothing (a padded one) gives 0. A model class that computes its attention itself
is refused when it is built or switched, for it would add the mask to its scores; `architectures()`
lists those that can be served, and docs/transformers.md says what was tried with each. It needs the
extra: pip install 'regard[transformers]'.
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

from regard.integrations.transformers.attention import name_places, regard_attention  # noqa: E402
from regard.integrations.transformers.cache import PreallocatedCache, PreallocatedLayer  # noqa: E402
from regard.integrations.transformers.mask import regard_mask  # noqa: E402
from regard.integrations.transformers.rule import BoolMask, MaskRule  # noqa: E402
from regard.integrations.transformers.support import NAME, architectures, guard  # noqa: E402

__all__ = [
    "BoolMask",
    "MaskRule",
    "PreallocatedCache",
    "PreallocatedLayer",
    "architectures",
    "name_places",
    "regard_attention",
    "regard_mask",
]

transformers.AttentionInterface.register(NAME, regard_attention)
transformers.AttentionMaskInterface.register(NAME, regard_mask)
guard()
