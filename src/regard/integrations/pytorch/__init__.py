"""`regard.accelerate`: run the attention of any PyTorch model through `regard.attend`.

`override.py` replaces torch's attention functions and decides which calls it runs; `dense_masks.py`
recognizes the rule (causal, window, padding) behind a mask that a model builds as a tensor.
"""

from regard.deprecation import renamed
from regard.integrations.pytorch.override import CallCounts, accelerate

__all__ = ["CallCounts", "accelerate"]

__getattr__ = renamed(__name__, {"Calls": "CallCounts"})
